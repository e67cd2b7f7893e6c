"""ops/schedule.py: every tile of a persistent grid is taken exactly once, by blocks that get about the same amount of work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numba import cuda
from numba.cuda import types

from ops import divmod, full, line_up, persistent_tile, rasterize, store, warp_index, zeros
from ops.schedule import persistent_tile as op_function
from tiles import Hazard, fp32, launch, rt
from tiles.compiling.compiler import compile_kernel
from tiles.emulator import emulate
from tiles.interpreter import interpret
from tiles.op import OPS
from tiles.testing import blank, meaning, ptx

V = rt(16, 16, fp32).row_vec


@cuda.jit
def persistent(tiles, log, count):
    """log[tile]: how often it was taken, by which block, in which round; count[block]: how many it took."""
    r = 0
    while persistent_tile(r) < tiles:
        log[persistent_tile(r), 0] += 1
        log[persistent_tile(r), 1] = cuda.blockIdx.x
        log[persistent_tile(r), 2] = r
        r += 1
    count[cuda.blockIdx.x] = r


def by_meaning(blocks, tiles, log, count):
    interpret(persistent, (blocks, 1, 1), 32, [tiles, log, count])


def by_ptx(blocks, tiles, log, count):
    emulate(persistent, (blocks, 1, 1), 32, [tiles, log, count])


def check(blocks, tiles, log, count):
    """Each tile is taken once; a block's tiles are ascending; the blocks' counts differ by one at most, and rounds alternate
    their direction."""
    assert (log[:, 0] == 1).all()
    assert count.sum() == tiles and count.max() - count.min() <= 1
    for tile, (_, block, r) in enumerate(log):
        there, k = divmod(tile, blocks)
        assert (r, block) == (there, k if r % 2 == 0 else blocks - 1 - k)


@pytest.mark.parametrize("backend", [by_meaning, by_ptx])
@settings(deadline=None, max_examples=30)
@given(blocks=some.integers(1, 40), tiles=some.integers(0, 300))
def test_every_tile_exactly_once(backend, blocks, tiles):
    log, count = np.zeros((tiles, 3), np.int64), np.zeros(blocks, np.int64)
    backend(blocks, tiles, log, count)
    check(blocks, tiles, log, count)


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "tiles"), [(1, 0), (1, 5), (4, 3), (7, 100), (132, 1000), (132, 132), (500, 499)])
def test_on_the_card(blocks, tiles):
    log, count = cuda.to_device(np.zeros((tiles, 3), np.int64)), cuda.to_device(np.zeros(blocks, np.int64))
    launch(persistent, blocks, 1)(tiles, log, count)
    check(blocks, tiles, log.copy_to_host(), count.copy_to_host())


@cuda.jit
def indices(out):
    out[cuda.blockIdx.x, cuda.threadIdx.x // 32] = warp_index() + 1


@pytest.mark.parametrize("warps", [1, 3, 8])
@pytest.mark.parametrize("backend", [emulate, interpret])
def test_each_warp_knows_its_index(backend, warps):
    out = np.zeros((2, warps), np.int64)
    backend(indices, (2, 1, 1), 32 * warps, [out])
    assert (out == np.arange(1, warps + 1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 3, 32])
def test_each_warp_knows_its_index_on_the_card(warps):
    out = cuda.to_device(np.zeros((3, warps), np.int64))
    launch(indices, 3, 32 * warps)(out)
    assert (out.copy_to_host() == np.arange(1, warps + 1)).all()


@cuda.jit
def one_tile(r, out):
    out[cuda.blockIdx.x] = persistent_tile(r)


@settings(deadline=None)
@given(blocks=some.integers(1, 40), data=some.data())
def test_up_to_the_last_tile(blocks, data):
    """The last tile has number 2**31 - 1."""
    last = 2**31 // blocks - 1
    r = data.draw(some.one_of(some.integers(0, last), some.integers(max(0, last - 1), last)))
    out, said, block = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64), np.arange(blocks)
    emulate(one_tile, (blocks, 1, 1), 32, [r, said])
    interpret(one_tile, (blocks, 1, 1), 32, [r, out])
    want = r * blocks + (blocks - 1 - block if r % 2 else block)
    assert (said == want).all() and (out == want).all() and want.max() < 2**31


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", [emulate, interpret])
def test_the_blocks_of_a_cluster_take_a_tile_together(backend, size):
    """The blocks of a cluster take the same tile, as one block would."""

    def kernel(of_cluster):
        @cuda.jit
        def body(out):
            for r in range(6):
                out[cuda.blockIdx.x, r] = persistent_tile(r, of_cluster)

        return body

    by_cluster, by_block = np.zeros((8 // size, 6), np.int64), np.zeros((8, 6), np.int64)
    backend(kernel(1), (8 // size, 1, 1), 32, [by_cluster])
    backend(kernel(size), (8, 1, 1), 32, [by_block], cluster=(size, 1, 1))
    assert (by_block == by_cluster.repeat(size, axis=0)).all()


def test_longest_first_shares_the_work():
    """Causal tiles get shorter from first to last; round robin would give block 0 more work."""
    blocks, tiles = 8, 64
    log, count = np.zeros((tiles, 3), np.int64), np.zeros(blocks, np.int64)
    by_meaning(blocks, tiles, log, count)
    work = np.bincount(log[:, 1], weights=np.arange(tiles, 0, -1))
    assert work.min() == work.max()


def test_compiles_to_32_bits():
    """The code is one multiplication and a selection, in 32-bit registers."""

    @cuda.jit
    def kernel(r, out):
        store(out, full(V, persistent_tile(r)), (0,))

    actual = compile_kernel(kernel, [types.int32, types.Array(types.float32, 1, "A")], "sm_90a")
    assert not actual.local_bytes and not actual.warnings
    assert OPS[op_function].type(types.int32, 1)[0] == types.int32


@pytest.mark.parametrize("given", [1.5, np.zeros(3, np.float32)], ids=["number", "array"])
def test_mistakes(given):
    def kernel(x):
        persistent_tile(x)

    for backend in (meaning, ptx):
        with pytest.raises(
            TypeError, match="persistent_tile: takes an integer, and how many blocks a cluster has, got (float|array)"
        ):
            backend(cuda.jit(kernel), given)


@pytest.mark.parametrize("rows, cols, height", [(5, 3, 2), (4, 4, 4), (3, 2, 8), (1, 5, 1), (7, 1, 3)])
def test_grouped(run, rows, cols, height):
    """Every tile is taken once; raster group after group, each column by column, the last group lower."""

    @cuda.jit
    def body(rows, cols, height, order):
        for index in range(rows * cols):
            row, col = rasterize(index, rows, cols, height)
            store(order, full(V, index), (row, 16 * col))

    order = blank((rows, 16 * cols))
    run(body, rows, cols, height, order)
    expected = sorted(np.ndindex(rows, cols), key=lambda at: (at[0] // height, at[1], at[0]))
    np.testing.assert_array_equal(order.reshape(rows, cols, 16)[tuple(zip(*expected))].T, [range(rows * cols)] * 16)


def test_divmod(run):
    cases = [(0, 1), (7, 3), (6, 3), (2, 5), (2**31 - 1, 2**16), (2**31 - 1, 2**31 - 1), (123456789, 1000)]
    n, T = len(cases), rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(index, extent, quotients, remainders):
        for i in range(n):
            quotient, remainder = divmod(index[i], extent[i])
            store(remainders, full(T, remainder % 65536), (i, 0))
            store(quotients, full(T, quotient % 65536), (i, 0))

    index, extent = (np.array(c, np.int32) for c in zip(*cases, strict=True))
    quotients, remainders = blank((n, 16)), blank((n, 16))
    run(body, index, extent, quotients, remainders)
    assert (remainders == (index % extent % 65536)[:, None]).all()
    assert (quotients == (index // extent % 65536)[:, None]).all()


@pytest.mark.parametrize(("index", "extent"), [(-7, 3), (2**31, 3), (7, 0), (7, -3), (7, 2**31)])
def test_divmod_of_what_32_bits_without_a_sign_do_not_hold(index, extent):
    """Compiled code is silently wrong beyond unsigned 32 bits; the interpreter is not."""

    @cuda.jit
    def body(y, index, extent):
        y[0], y[1] = divmod(index, extent)

    given = f"index={index}, extent={extent}"
    with pytest.raises(Hazard, match=f"bounds: divmod: takes 0 <= index < 2.* and 1 <= extent < 2.*: {given}"):
        meaning(body, np.zeros(2, np.int64), np.int64(index), np.int64(extent))


@pytest.mark.parametrize(("index", "extent"), [(zeros(V), 2), (7, 2.0)], ids=["tile", "float"])
def test_divmod_takes_integers(index, extent):
    with pytest.raises(TypeError, match="divmod: takes two integers, got "):
        divmod(index, extent)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("sequences", "most"), [(1, 1000), (31, 50), (70, 2**31 - 1)])
def test_sequences_one_behind_the_other(sequences, most, padded):
    """Every tile of packed sequences is found in its sequence, by the interpreter and as compiled."""
    rng = np.random.default_rng(sequences)
    lengths = rng.integers(0, 200, sequences).astype(np.int64 if padded else np.int32)
    begins = rng.integers(0, 3, sequences).astype(np.int32)

    @cuda.jit
    def body(lengths, begins, actual):
        for tile in range(actual.shape[0]):
            sequence, before, end = 0, 0, 0
            for first in range(0, lengths.shape[0], 32):
                if padded:
                    passed, last, end = line_up(lengths, begins, most, 16, first, lengths.shape[0], end, tile, 5)
                else:
                    passed, last, end = line_up(lengths, None, most, 16, first, lengths.shape[0], end, tile)
                sequence, before = sequence + passed, last
                if end > tile:
                    break
            actual[tile, 0], actual[tile, 1] = sequence, before

    elements = np.minimum(lengths + 5 - begins if padded else lengths, most)
    ends = np.cumsum(np.maximum(-(-elements // 16), 1))
    tiles = np.arange(ends[-1])
    owner = np.searchsorted(ends, tiles, side="right")
    reference_values = np.stack([owner, np.concatenate([[0], ends])[owner]], 1)
    for run in (interpret, emulate):
        actual = np.full((len(tiles), 2), -1, np.int32)
        run(body, (1, 1, 1), 32, [lengths, begins, actual])
        np.testing.assert_array_equal(actual, reference_values)
