"""attention/softmax/tiling.py: every tile is somebody's, the longest come first, and nobody gets much more than others."""

from types import SimpleNamespace

import pytest

from attention.softmax import hopper
from attention.softmax.tiling import band_of, walk
from tiles import bf16

L2 = 50 * 2**20


def walked(config, pairs, blocks, band):
    place, _ = walk(config)
    return [place(tile, blocks, pairs, band) for tile in range(pairs * blocks)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("pairs", "blocks", "band"), [(1, 1, 1), (7, 3, 2), (8, 5, 8), (12, 1, 5), (5, 4, 99)])
def test_every_tile_once(causal, pairs, blocks, band):
    config = SimpleNamespace(kv=128, rows=128, causal=causal)
    places = walked(config, pairs, blocks, band)
    assert sorted(places) == [(block, pair) for block in range(blocks) for pair in range(pairs)]
    if causal:
        for start in range(0, pairs, band):  # one band after the other, and its longest blocks first
            part = places[start * blocks : (start + band) * blocks]
            assert {pair for _, pair in part} == set(range(start, min(start + band, pairs)))
            assert [block for block, _ in part] == sorted((block for block, _ in part), reverse=True)


@pytest.mark.parametrize("grid", [132, 114, 78])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_bands_fit_the_cache_and_share_the_work(grid, head_dim, length):
    """16384 tokens and 2048 columns: no block of the grid has much more to do than the average."""
    config = hopper.config_for(head_dim, bf16, True, length)
    pairs, blocks, nbytes = 16384 // length * 2048 // head_dim, -(-length // config.rows), 4 * length * head_dim
    band = band_of(grid, grid, nbytes, L2)
    assert band * nbytes <= L2 / 2 and band * 2 * nbytes > L2 / 8
    _, key_blocks = walk(config)
    work = [0.0] * grid
    for tile, (block, _) in enumerate(walked(config, pairs, blocks, band)):
        turn, place = divmod(tile, grid)
        work[grid - 1 - place if turn % 2 else place] += key_blocks(config.rows * block, length)[0] + 1.2  # begin and end
    assert max(work) < 1.12 * sum(work) / grid


def test_a_band_has_a_pair_at_least():
    assert band_of(132, 132, 2**40, L2) == 1 and band_of(1, 1, 1, L2) == 1 and band_of(9, 2, 1, L2) == 1


def test_more_blocks_than_processors_share_what_they_read():
    assert band_of(2048, 132, 2**21, L2) == 22


@pytest.mark.parametrize("kv_len", [1, 127, 128, 256, 300])
@pytest.mark.parametrize("q_len", [1, 128, 129, 300])
def test_the_last_key_block_is_always_masked(q_len, kv_len):
    """Also for a tile of one row that sees all keys: kernels begin with that block, and mask it."""
    _, key_blocks = walk(SimpleNamespace(kv=128, rows=128, causal=True))
    for first in range(0, q_len, 128):
        n, cut = key_blocks(first + kv_len - q_len, kv_len)
        assert 1 <= cut <= n
