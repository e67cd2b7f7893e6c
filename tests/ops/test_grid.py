"""ops/grid.py: a grid that follows what the grid before it counts. (Those that wait for its end: test_cluster_sum.py.)"""

import numpy as np
import pytest
from numba import cuda
from numpy import int32

from ops import block, count_up, grid, load, reset_count, store
from tiles import Hazard, fp32, launch, rt
from tiles.testing import meaning

T = rt(16, 16, fp32)


@cuda.jit
def double(x, y, counts):
    """y = 2 x, a block for 16 rows."""
    if cuda.threadIdx.x // 32 == 0:
        reset_count(counts, (cuda.blockIdx.x,))
    block.sync()
    grid.release()
    if cuda.threadIdx.x // 32 == 0:
        at = int32(16 * cuda.blockIdx.x), 0
        store(y, load(x, T, at) * 2.0, at)
        count_up(counts, (cuda.blockIdx.x,))


def increment(n, waits):
    """The kernel z = y + 1, which waits for n counts of each block."""

    @cuda.jit
    def kernel(y, z, counts):
        at = int32(16 * cuda.blockIdx.x), 0
        grid.wait_count(counts, (cuda.blockIdx.x,), n)
        store(z, load(y, T, at) + 1.0, at)
        if waits:
            grid.wait()

    return kernel


def both(n=1, waits=True, blocks=3):
    """(x, z) of both grids; the counts begin with what others have left there."""
    x = np.arange(16 * blocks * 16, dtype=np.float32).reshape(-1, 16)
    y, z, counts = np.zeros_like(x), np.zeros_like(x), np.full(blocks, 7, np.int32)
    launch(double, blocks, 64)(x, y, counts)
    assert (counts == 1).all()
    launch(increment(int32(n), waits), blocks, 32, overlaps_previous=True)(y, z, counts)
    return x, z


def test_a_grid_follows_the_counts_of_the_one_before(run):
    x, z = run(both)
    assert (z == 2 * x + 1).all()


@pytest.mark.parametrize(
    ("n", "waits", "why"), [(2, True, "the count at .*, which is to be 2"), (1, False, "not for that grid's end: grid.wait")]
)
def test_a_count_that_never_comes_and_an_end_that_is_not_awaited(n, waits, why):
    with pytest.raises(Hazard, match=why):
        both(n, waits)


def test_a_count_outside_is_not_reset():
    @cuda.jit
    def body(counts):
        reset_count(counts, (3,))

    with pytest.raises(Hazard, match="out of range"):
        meaning(body, np.zeros(3, np.int32))


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no sync", "releases the next grid, and nothing orders this after a count was set to 0: block.sync.. is missing"),
        ("late", "sets a count to 0 that the next grid may have read"),
        ("no release", "does not let that begin: grid.release.. is missing"),
    ],
)
def test_counts_are_0_before_the_next_grid_may_begin(fault, why):
    @cuda.jit
    def body(counts):
        if fault == "late":
            grid.release()
        if cuda.threadIdx.x // 32 == 0:
            reset_count(counts, (0,))
        if fault != "no sync":
            block.sync()
        if fault != "no release":
            grid.release()

    with pytest.raises(Hazard, match=why):
        meaning(body, np.zeros(1, np.int32), warps=2)
