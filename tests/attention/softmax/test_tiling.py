"""attention/softmax/tiling.py: every tile is somebody's, the longest come first, and nobody gets much more than others."""

import pytest

from attention.softmax import hopper
from attention.softmax.tiling import Causal, Full, band_of
from ops import warpgroup
from tiles import bf16

L2 = 50 * 2**20


def walked(sees, pairs, blocks, band):
    return [sees.place(tile, blocks, pairs, band) for tile in range(pairs * blocks)]


@pytest.mark.parametrize("variant", [Full, Causal])
@pytest.mark.parametrize(("pairs", "blocks", "band"), [(1, 1, 1), (7, 3, 2), (8, 5, 8), (12, 1, 5), (5, 4, 99), (5, 4, 1)])
def test_every_tile_once(variant, pairs, blocks, band):
    """One band after the other, query block by query block; causal: its longest blocks first."""
    places = walked(variant(128, 128, warpgroup.causal), pairs, blocks, band)
    assert sorted(places) == [(block, pair) for block in range(blocks) for pair in range(pairs)]
    for start in range(0, pairs, band):
        part = places[start * blocks : (start + band) * blocks]
        assert {pair for _, pair in part} == set(range(start, min(start + band, pairs)))
        assert [block for block, _ in part] == sorted((block for block, _ in part), reverse=variant is Causal)


def shares(config, length, grid):
    """What each block of a persistent grid has to do for 16384 tokens and 2048 columns: its tiles' key blocks, and 1.2 for the
    the beginning and end of one, as far as there are rows."""
    pairs, blocks, nbytes = 16384 // length * 2048 // config.head_dim, -(-length // config.rows), 4 * length * config.head_dim
    band = band_of(grid, grid, nbytes, L2, config.causal or length % config.rows > 0)
    assert band * nbytes <= L2 / 2
    work = [0.0] * grid
    for tile, (block, _) in enumerate(walked(config.sees, pairs, blocks, band)):
        turn, place = divmod(tile, grid)
        rows = min(config.rows, length - config.rows * block) / config.rows
        work[grid - 1 - place if turn % 2 else place] += rows * (config.sees.key_blocks(config.rows * block, length)[0] + 1.2)
    return work


@pytest.mark.parametrize("grid", [132, 114, 78])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("causal", [False, True])
def test_bands_fit_the_cache_and_share_the_work(grid, head_dim, length, causal):
    """No block of the grid has much more to do than the average."""
    config = hopper.config_for(head_dim, bf16, causal, length)
    if not config.persistent:
        pytest.skip("a block a tile: the hardware shares the work")
    work = shares(config, length, grid)
    assert max(work) < 1.15 * sum(work) / grid


def test_pair_by_pair_the_same_blocks_would_get_all_short_tiles():
    """Why full attention is gone through in bands, too, where the last query block has few rows."""
    config = hopper.config_for(64, bf16, False, 512)
    assert 512 % config.rows and 132 % -(-512 // config.rows) == 0
    short = [tile % 132 for tile in range(1024 * 3) if tile % 3 == 2]
    assert len(set(short)) < 132 / 2


def test_a_band_has_a_pair_at_least():
    assert band_of(132, 132, 2**40, L2, True) == 1 and band_of(1, 1, 1, L2, True) == 1 and band_of(9, 2, 1, L2, True) == 1


def test_query_blocks_that_take_as_long_as_each_other_need_no_bands():
    assert band_of(132, 132, 1, L2, False) == 1 and band_of(2048, 132, 1, L2, False) == 1


def test_more_blocks_than_processors_share_what_they_read():
    assert band_of(2048, 132, 2**21, L2, True) == 22


@pytest.mark.parametrize("kv_len", [1, 127, 128, 256, 300])
@pytest.mark.parametrize("q_len", [1, 128, 129, 300])
def test_the_last_key_block_is_always_masked(q_len, kv_len):
    """Also for a tile of one row that sees all keys: kernels begin with that block, and mask it."""
    sees = Causal(128, 128, warpgroup.causal)
    for first in range(0, q_len, 128):
        n, cut = sees.key_blocks(first + kv_len - q_len, kv_len)
        assert 1 <= cut <= n


@pytest.mark.parametrize("kv_len", [1, 63, 64, 200])
@pytest.mark.parametrize("q_len", [1, 64, 65, 200])
def test_key_blocks_are_those_that_some_row_sees(q_len, kv_len):
    """Beside the mask itself; and all but the last `cut` are seen whole by every row."""
    sees = Causal(64, 32, warpgroup.causal)
    for first in range(0, q_len, 64):
        diagonal = first + kv_len - q_len
        n, cut = sees.key_blocks(diagonal, kv_len)
        last = min(kv_len - 1, diagonal + 63)  # the last key that some row of the tile sees
        assert n == max(1, last // 32 + 1)
        assert all(32 * block + 31 <= min(diagonal, kv_len - 1) for block in range(n - cut))
