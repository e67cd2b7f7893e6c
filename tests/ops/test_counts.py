"""ops/memory/counts.py: blocks that take turns."""

import numpy as np
import pytest
from numba import cuda
from numpy import int32

from ops import (
    block,
    count_around,
    count_stored,
    count_up,
    load,
    store,
    store_wait,
    stores_done,
    tma_add,
    tma_store,
    wait_count,
)
from tiles import Hazard, fp32, rt, shared, st, tensor
from tiles.testing import meaning

T, TILE = rt(16, 16, fp32), st(16, 32, fp32)
SMEM = shared(x=TILE)


def in_turn(first, step):
    """A kernel whose blocks each make 2 x + 1 of x, by two warps that do so one after the other: block b behind
    `first + step b` others."""

    @cuda.jit
    def kernel(turns, x):
        turn = int32(2 * (first + step * cuda.blockIdx.x) + cuda.threadIdx.x // 32)
        wait_count(turns, (1, 0), turn)
        store(x, load(x, T, (0, 0)) * 2.0 + 1.0, (0, 0))
        count_up(turns, (1, 0))

    return kernel


def test_blocks_take_turns(run):
    turns, x = np.zeros((2, 3), np.int32), np.zeros((16, 16), np.float32)
    run(in_turn(0, 1), turns, x, warps=2, grid=3)
    assert (x == 2**6 - 1).all() and turns[1, 0] == 6 and turns.sum() == 6


@pytest.mark.parametrize(
    ("turns", "first", "step", "why"),
    [
        (np.zeros((2, 1)), 1, -1, "blocks that come later in the grid may not be waited for|written to global memory"),
        (np.zeros((1, 1)), 0, 1, "out of range"),
    ],
)
def test_what_cannot_come(turns, first, step, why):
    """A block that waits for a later one; a place that there is not."""
    with pytest.raises(Hazard, match=why):
        meaning(in_turn(first, step), turns.astype(np.int32), np.zeros((16, 16), np.float32), warps=2, grid=2)


def test_waiting_for_a_later_block_does_not_hang_as_compiled():
    from tiles.testing import ptx

    with pytest.raises(Hazard, match="something to be written to global memory"):
        ptx(in_turn(1, -1), np.zeros((2, 1), np.int32), np.zeros((16, 16), np.float32), warps=2, grid=2)


@pytest.mark.parametrize("count", [count_up, count_stored])
def test_bulk_stores_are_done_first(run, count):
    """It is not enough that they have read."""

    def kernel(wait):
        @cuda.jit
        def kernel(turns, x, y):
            (tile,) = SMEM.open()
            store(tile, load(x, rt(16, 32, fp32), (0, 0)))
            wait_count(turns, (0, 0), int32(cuda.blockIdx.x))
            tma_add(y, (0, 0), tile)
            wait()
            count(turns, (0, 0))

        return kernel

    x, y, turns = np.ones((16, 32), np.float32), np.zeros((16, 32), np.float32), np.zeros((1, 1), np.int32)
    run(kernel(stores_done), turns, x, tensor(y, TILE), warps=1, grid=2, shared=SMEM)
    assert (y == 2).all() and turns[0, 0] == 2
    with pytest.raises(Hazard, match="nobody has waited until the TMA store .* was done: stores_done"):
        meaning(kernel(store_wait), turns * 0, x, tensor(y, TILE), warps=1, shared=SMEM)


@pytest.mark.parametrize("count", [count_up, count_stored])
def test_what_is_stored_comes_before_what_is_added(run, count):
    """The first block stores, over what is there, and then counts so that nothing overtakes it."""

    @cuda.jit
    def kernel(turns, x, y):
        (tile,) = SMEM.open()
        store(tile, load(x, rt(16, 32, fp32), (0, 0)))
        if cuda.blockIdx.x == 0:
            tma_store(y, (0, 0), tile)
            stores_done()
            count(turns, (0, 0))
        else:
            wait_count(turns, (0, 0), int32(cuda.blockIdx.x))
            tma_add(y, (0, 0), tile)
            stores_done()
            count_stored(turns, (0, 0))

    x, y, turns = np.ones((16, 32), np.float32), np.full((16, 32), np.nan, np.float32), np.zeros((1, 1), np.int32)
    if count is count_up:
        run(kernel, turns, x, tensor(y, TILE), warps=1, grid=3, shared=SMEM)
        assert (y == 3).all() and turns[0, 0] == 3
    else:
        with pytest.raises(Hazard, match="counts the TMA store of .* as if it had added: count_up"):
            meaning(kernel, turns, x, tensor(y, TILE), warps=1, grid=3, shared=SMEM)


@pytest.mark.parametrize("n", [3, 2])
def test_who_comes_last_adds_up(run, n):
    """Of three blocks of two warps; twice, for the number is 0 again. Two are not three."""

    @cuda.jit
    def kernel(counts, parts, out):
        me, warp = cuda.blockIdx.x, int32(cuda.threadIdx.x // 32)
        store(parts, load(parts, T, (me, 0, 16 * warp)) + 1.0, (me, 0, 16 * warp))
        block.sync()
        if block.reduce_any(warp == 0 and count_around(counts, (1, 0), int32(n))):
            for other in range(3):
                x = load(out, T, (0, 16 * warp)) + load(parts, T, (other, 0, 16 * warp))
                store(out, x, (0, 16 * warp))

    counts, parts, out = np.zeros((2, 1), np.int32), np.ones((3, 16, 32), np.float32), np.zeros((16, 32), np.float32)
    for total in (6, 6 + 9):
        run(kernel, counts, parts, out, warps=2, grid=3)
        assert (out == total).all() == (n == 3)
    assert counts.sum() == 0 if n == 3 else counts.sum() < 2


def test_a_count_that_was_not_0():
    @cuda.jit
    def kernel(counts, x):
        store(x, load(x, T, (0, 0)) * float(count_around(counts, (0,), int32(2))), (0, 0))

    with pytest.raises(Hazard, match="the count at .* is 2, where 2 are to count"):
        meaning(kernel, np.full(1, 2, np.int32), np.zeros((16, 16), np.float32), warps=1)


def test_what_is_refused():
    @cuda.jit
    def floats(turns, x):
        wait_count(x, (1, 0), int32(0))

    with pytest.raises(TypeError, match="wait_count: takes a global array of int32"):
        from tiles.testing import ptx

        ptx(floats, np.zeros((1, 1), np.int32), np.zeros((16, 16), np.float32), warps=1)
