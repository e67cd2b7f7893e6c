"""ops/memory/counts.py: counters in global memory by which blocks take turns."""

import numpy as np
import pytest
from numba import cuda
from numpy import int32

from ops import count_stored, count_up, load, store, store_wait, stores_done, tma_add, tma_store, wait_count
from tiles import Hazard, fp32, rt, shared, st, tensor
from tiles.testing import meaning

T, TILE = rt(16, 16, fp32), st(16, 32, fp32)
SMEM = shared(x=TILE)


def in_turn(first, step):
    """A kernel whose blocks compute 2 x + 1 of x, by two warps one after the other: block b waits for `first + step b`
    others."""

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
    """A block waits for a later one, or for a count that does not exist."""
    with pytest.raises(Hazard, match=why):
        meaning(in_turn(first, step), turns.astype(np.int32), np.zeros((16, 16), np.float32), warps=2, grid=2)


def test_waiting_for_a_later_block_does_not_hang_as_compiled():
    from tiles.testing import ptx

    with pytest.raises(Hazard, match="something to be written to global memory"):
        ptx(in_turn(1, -1), np.zeros((2, 1), np.int32), np.zeros((16, 16), np.float32), warps=2, grid=2)


@pytest.mark.parametrize("count", [count_up, count_stored])
def test_bulk_stores_are_done_first(run, count):
    """A count waits for the stores' writes, not only for their reads of shared memory."""

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
    """The first block's store is ordered before its count."""

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


def test_what_is_refused():
    @cuda.jit
    def floats(turns, x):
        wait_count(x, (1, 0), int32(0))

    with pytest.raises(TypeError, match="wait_count: takes a global array of int32"):
        from tiles.testing import ptx

        ptx(floats, np.zeros((1, 1), np.int32), np.zeros((16, 16), np.float32), warps=1)
