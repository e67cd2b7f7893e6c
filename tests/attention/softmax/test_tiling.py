"""attention/parts/tiling.py: every tile is somebody's, the longest come first, and nobody gets much more than others."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from attention.kernels.softmax import backward_folded_hopper, backward_narrow_hopper, forward_hopper
from attention.parts.scores import TmaBias
from attention.parts.sequences import PackedLayout
from attention.parts.tiling import Tiling, balance_raster_groups, choose_raster_group
from attention.parts.variant import CombinedVariant, ScoreContext
from attention.parts.visibility import CAUSAL, FULL, MaskMod, WindowLeft, WindowRight
from tiles import bf16
from tiles.targets import parse_target

L2 = 50 * 2**20


def at(queries, keys, **inputs):
    return ScoreContext(0, 0, 0, keys - queries, queries, keys, SimpleNamespace(**inputs), (), 0)


def walked(sees, pairs, blocks, band):
    return [sees.locate_block(tile, blocks, pairs, band) for tile in range(pairs * blocks)]


@pytest.mark.parametrize("variant", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(("pairs", "blocks", "band"), [(1, 1, 1), (7, 3, 2), (8, 5, 8), (12, 1, 5), (5, 4, 99), (5, 4, 1)])
def test_every_tile_once(variant, pairs, blocks, band):
    """One band after the other, query block by query block; causal: its longest blocks first."""
    places = walked(Tiling(128, 128, variant), pairs, blocks, band)
    assert sorted(places) == [(block, pair) for block in range(blocks) for pair in range(pairs)]
    for start in range(0, pairs, band):
        part = places[start * blocks : (start + band) * blocks]
        assert {pair for _, pair in part} == set(range(start, min(start + band, pairs)))
        assert [block for block, _ in part] == sorted((block for block, _ in part), reverse=variant is CAUSAL)


def shares(config, length, grid, band=None, **inputs):
    """What each block of a persistent grid has to do for 16384 tokens and 2048 columns: its tiles' key blocks, and 1.2 for the
    the beginning and end of one, as far as there are rows. given: what the variant reads."""
    pairs, blocks, nbytes = 16384 // length * 2048 // config.head_dim, -(-length // config.rows), 4 * length * config.head_dim
    band = band or choose_raster_group(grid, grid, nbytes, L2, config.variant.monotonic or length % config.rows > 0)
    assert band * nbytes <= L2 / 2
    work = [0.0] * grid
    for tile, (block, _) in enumerate(walked(config.tiling, pairs, blocks, band)):
        turn, place = divmod(tile, grid)
        rows = min(config.rows, length - config.rows * block) / config.rows
        work[grid - 1 - place if turn % 2 else place] += rows * (
            config.tiling.key_blocks(config.rows * block, at(length, length, **inputs)).n + 1.2
        )
    return work


@pytest.mark.parametrize("grid", [132, 114, 78])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("causal", [False, True])
def test_bands_fit_the_cache_and_share_the_work(grid, head_dim, length, causal):
    """No block of the grid has much more to do than the average."""
    config = forward_hopper.config_for(head_dim, bf16, CAUSAL if causal else FULL, length)
    if not config.persistent:
        pytest.skip("a block a tile: the hardware shares the work")
    work = shares(config, length, grid)
    assert max(work) < 1.15 * sum(work) / grid


@pytest.mark.parametrize("grid", [132, 114, 78])
@pytest.mark.parametrize("length", [2048, 4096, 8192])
def test_a_window_is_shared_pair_by_pair(grid, length):
    """Its tiles take as long as each other, but for a pair's first ones."""
    config = forward_hopper.config_for(128, bf16, CombinedVariant(CAUSAL, WindowLeft()), 1025)
    assert config.persistent
    work = shares(config, length, grid, band=1, left=1024)
    assert max(work) < 1.15 * sum(work) / grid


def test_pair_by_pair_the_same_blocks_would_get_all_short_tiles():
    """Why full attention is gone through in bands, too, where the last query block has few rows."""
    config = forward_hopper.config_for(64, bf16, FULL, 512)
    assert 512 % config.rows and 132 % -(-512 // config.rows) == 0
    short = [tile % 132 for tile in range(1024 * 3) if tile % 3 == 2]
    assert len(set(short)) < 132 / 2


def test_a_band_has_a_pair_at_least():
    assert (
        choose_raster_group(132, 132, 2**40, L2, True) == 1
        and choose_raster_group(1, 1, 1, L2, True) == 1
        and choose_raster_group(9, 2, 1, L2, True) == 1
    )


def test_query_blocks_that_take_as_long_as_each_other_need_no_bands():
    assert choose_raster_group(132, 132, 1, L2, False) == 1 and choose_raster_group(2048, 132, 1, L2, False) == 1


def test_more_blocks_than_processors_share_what_they_read():
    assert choose_raster_group(2048, 132, 2**21, L2, True) == 22


SEEN = {  # variant: (what it is given, does query i see key j where they stand `shift` apart)
    FULL: ({}, lambda i, j, shift: j >= 0),
    CAUSAL: ({}, lambda i, j, shift: j <= i + shift),
    WindowRight(): ({"right": 9}, lambda i, j, shift: j <= i + shift + 9),
    WindowLeft(): ({"left": 40}, lambda i, j, shift: j >= i + shift - 40),
    CombinedVariant(CAUSAL, WindowLeft()): ({"left": 70}, lambda i, j, shift: (j <= i + shift) & (j >= i + shift - 70)),
    CombinedVariant(WindowRight(), WindowLeft()): ({"left": 0, "right": 0}, lambda i, j, shift: j == i + shift),
}


@pytest.mark.parametrize("variant", SEEN, ids=str)
@pytest.mark.parametrize("kv_len", [1, 63, 64, 94, 200])
@pytest.mark.parametrize("q_len", [1, 64, 65, 200])
def test_key_blocks_are_those_that_some_row_sees(variant, q_len, kv_len):
    """Each once, and none but those, if there are any; those that the mask cuts from the last one on, then the others, which
    every row of the tile sees whole, from the last one on."""
    tiling, (inputs, sees) = Tiling(64, 32, variant), SEEN[variant]
    place = at(q_len, kv_len, **inputs)
    for row in range(0, q_len, 64):
        seen = sees(np.arange(row, row + 64)[:, None], np.arange(kv_len)[None], kv_len - q_len)
        some = {block for block in range(-(-kv_len // 32)) if seen[:, 32 * block : 32 * block + 32].any()}
        actual = tiling.key_blocks(row, place)
        blocks = [tiling.key(actual, i, place) // 32 for i in range(actual.n)]
        assert 0 <= actual.masked <= actual.n == len(set(blocks))
        assert blocks == sorted(blocks[: actual.masked])[::-1] + sorted(blocks[actual.masked :])[::-1]
        assert set(blocks) == some or (not some and len(blocks) == 1)
        assert all(
            32 * block + 32 <= kv_len and seen[:, 32 * block : 32 * block + 32].all() for block in blocks[actual.masked :]
        )


@pytest.mark.parametrize("variant", SEEN, ids=str)
def test_key_blocks_where_edges_of_a_mask_meet_those_of_blocks(variant):
    """The mask's edges move past every key of a block."""
    for kv_len in range(190, 190 + 32):
        test_key_blocks_are_those_that_some_row_sees(variant, 65, kv_len)


def test_blocks_of_a_mask_in_python_are_all_masked():
    actual = Tiling(64, 32, MaskMod(lambda b, h, i, j: j < 100)).key_blocks(0, at(64, 320))
    assert actual.n == actual.masked == 10


@pytest.mark.parametrize("tile", range(4))
def test_tiles_of_packed_sequences(tile):
    """Every block of queries of every sequence has a number of its own, and a search by halves finds it."""
    rng = np.random.default_rng(tile)
    ends = np.concatenate([[0], np.cumsum(rng.integers(0, 300, 37))]).astype(np.int32)
    packed, inputs = PackedLayout(64), SimpleNamespace(ends=ends, ends_k=ends)
    actual = [packed.find_tile(block, 0, 1, inputs)[:2] for block in range(int(ends[-1]) // 64 + 37)]
    expected = {(block, n) for n in range(37) for block in range(-(-int(ends[n + 1] - ends[n]) // 64))}
    assert expected == {(int(block), int(n)) for block, n in actual if packed.has_tile(block, n, inputs)} and len(
        set(actual)
    ) == len(actual)


def test_bands_of_which_none_is_short():
    """Of 24 pairs two would come last by themselves. Ten behind 22 stay as they are, but where there are parts of sequences."""
    assert [balance_raster_groups(22, pairs, False) for pairs in (8, 22, 24, 32, 44, 48, 128)] == [22, 22, 12, 22, 22, 16, 22]
    assert [balance_raster_groups(22, pairs, True) for pairs in (1, 24, 28, 32, 128)] == [1, 12, 14, 16, 22]
    assert balance_raster_groups(1, 9, True) == balance_raster_groups(1, 9, False) == 1


@pytest.mark.parametrize(
    "variant",
    [
        FULL,
        CAUSAL,
        WindowRight(),
        WindowLeft(),
        CombinedVariant(WindowRight(), WindowLeft()),
        CombinedVariant(CAUSAL, WindowLeft()),
    ],
    ids=str,
)
def test_blocks_of_keys_at_every_edge(variant):
    """Every key that a query of the tile sees lies in a block; blocks that are not masked are seen whole; and what no query
    sees, ahead of all windows or behind them, is counted where it must be cleared."""
    rows = kv = 4
    tiling = Tiling(rows, kv, variant)
    lengths = [(4, keys) for keys in range(1, 14)] + [(7, 7), (5, 12), (8, 3), (12, 5), (1, 8), (9, 20)]
    for (queries, keys), left, right in itertools.product(lengths, (0, 1, 2, 3, 6), (-4, -3, 0, 1, 2)):
        ctx = at(queries, keys, left=left, right=right)
        sees = np.zeros((queries, keys), bool)
        for i in range(queries):
            one = variant.key_range(i, i, ctx)
            sees[i, max(0, one.first) : max(0, one.end)] = True
        seen = np.flatnonzero(sees.any(0))
        for row in range(0, queries, rows):
            blocks, its = tiling.key_blocks(row, ctx), sees[row : row + rows]
            order = [int(tiling.key(blocks, i, ctx)) for i in range(blocks.n)]
            assert {int(j) // kv * kv for j in np.flatnonzero(its.any(0))} <= set(order)
            assert all(key + kv <= keys and its[:, key : key + kv].all() for key in order[max(1, blocks.masked) :])
            cleared = {order[max(1, blocks.masked) - 1] + n for n in range(min(kv, max(0, blocks.unseen_at_start)))}
            cleared |= {order[0] + kv - 1 - n for n in range(min(kv, max(0, blocks.unseen_at_end)))}
            if seen.size:
                unseen = {j for key in order for j in range(key, min(key + kv, keys)) if not seen[0] <= j <= seen[-1]}
                assert unseen <= cleared and not cleared & set(seen.tolist())


def test_kernels_of_a_bias_loaded_by_tma():
    """Gradients at head dims up to 64 take the narrow kernel. Forward's tiles leave shared memory for the bias's."""
    variant = TmaBias(True, False, bf16)
    assert backward_narrow_hopper.serves(64, variant) and not backward_folded_hopper.serves(128, variant)
    for value_dim in (128, 192):
        _, smem = forward_hopper.make(forward_hopper.config_for(192, bf16, variant, 4096, value_dim))
        assert smem.nbytes <= parse_target("sm_90a").shared_bytes
