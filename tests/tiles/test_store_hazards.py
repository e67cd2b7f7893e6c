"""tiles/interpreter/stores.py: stores of other values to an element of global memory, in no order; and those that are fine."""

import numpy as np
import pytest
from broken import Cases, G, R, check, run
from numba import cuda

import tiles
from ops import block, count_up, full, load, raw, store, wait_count, warpgroup
from tiles import Hazard, barrier, inlined, shared

broken = Cases()
BAR = shared(done=barrier(1))
TILES = shared(x=G, y=G)


@inlined
def warp():
    return cuda.threadIdx.x // 32


@broken("race", r"stores [01] where another warp stored [01], and nothing orders the two; so it is with 512", (0, 1), None, 64)
def tiles_overlap(array):
    """The second warp's tile begins 8 rows below the first one's."""
    store(array, full(R, 1.0 * warp()), (0, 8 * warp(), 0))  # guilty


@broken(
    "race",
    r"stores [0-3] where another warp stored [0-3], and nothing orders the two",
    range(4),
    None,
    128,
)
def all_warps_store_an_element(array):
    array[0, 0, 0] = warp()  # guilty


@broken("race", "nothing orders the two", (0, 1), BAR, 64)
def the_wrong_one_waits(array):
    (done,) = BAR.open()
    if warp() == 0:
        raw.wait(done, 1)
        store(array, full(R, 1.0), (0, 0, 0))
        store(array, full(R, 4.0), (1, 0, 0))  # guilty
    else:
        raw.arrive(done)
        store(array, full(R, 2.0), (1, 0, 0))  # guilty


@broken("race", "nothing orders the two; so it is with 4096 of", range(8), TILES)
def two_bulk_stores_to_a_tile(target):
    x, y = TILES.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, full(R, 1.0))
        warpgroup.tma_store(target, (0, 0), x)  # guilty
    else:
        warpgroup.store(y, full(R, 2.0))
        warpgroup.tma_store(target, (0, 0), y)  # guilty
    warpgroup.store_wait()


@broken.sweep
def test_stops(case, seed):
    check(case, seed)


def by_block(array):
    store(array, full(R, 1.0 + cuda.blockIdx.x), (0, 8 * cuda.blockIdx.x, 0))


def test_blocks_overlap():
    """Both lines and both blocks are named."""
    with pytest.raises(Hazard, match="stores 2 where another warp stored 1") as caught:
        run(cuda.jit(by_block), threads=32, grid=(2, 1, 1))
    assert [place.block for place in caught.value.places] == [(1, 0, 0), (0, 0, 0)]
    assert all("by_block" not in place.line and "store(array, full(R, 1.0 + " in place.line for place in caught.value.places)


def in_turn(array, counts):
    wait_count(counts, (0,), cuda.blockIdx.x)
    store(array, full(R, 1.0 + cuda.blockIdx.x), (0, 0, 0))
    count_up(counts, (0,))


def equal_values(array):
    store(array, full(R, 3.0), (0, 0, 0))


def after_a_barrier(array):
    if warp() == 0:
        store(array, full(R, 1.0), (0, 0, 0))
    block.sync()
    if warp() == 1:
        store(array, full(R, 2.0), (0, 0, 0))


def anew(array):
    store(array, full(R, 1.0), (0, warp() * 16, 0))
    store(array, load(array, R, (0, warp() * 16, 0)) * 2.0, (0, warp() * 16, 0))


@pytest.mark.parametrize("body", [equal_values, after_a_barrier, anew], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_is_fine(body, seed):
    array = np.zeros((1, 64, 64), np.float32)
    run(cuda.jit(body), threads=64, seed=seed, args=[array])
    assert array[0, :16].min() == array[0, :16].max() > 0


def test_who_waits_for_a_count_comes_after():
    array, counts = np.zeros((1, 16, 64), np.float32), np.zeros(1, np.int32)
    run(cuda.jit(in_turn), threads=32, grid=(3, 1, 1), args=[array, counts])
    assert (array == 3).all() and counts[0] == 3


def test_a_read_only_array():
    array = np.zeros((1, 16, 64), np.float32)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only is stored to: launch with x.copy.*\n  at warp 0 .*`store\(array, full"):
        run(cuda.jit(equal_values), threads=32, args=[array])


def reversed_view(array):
    store(array, full(R, 1.0 * warp()), (0, 0))


def test_views_of_any_strides():
    """What is an element's last store goes by where it lies: rows that run backwards, every second column, transposed."""
    memory = np.zeros((64, 128), np.float32)
    for view in (memory[::-1], memory[:, ::2], memory.T):
        with pytest.raises(Hazard, match="with 1024 of"):
            tiles.launch(cuda.jit(reversed_view), 1, 64)(view)


def both(x, y):
    if warp() == 0:
        store(x, full(R, 1.0), (0, 0))
    else:
        store(y, full(R, 2.0), (0, 0))


def test_arrays_that_overlap_are_one():
    memory = np.zeros((32, 64), np.float32)
    tiles.launch(cuda.jit(both), 1, 64)(memory[:16], memory[16:])
    with pytest.raises(Hazard, match="with 512 of"):
        tiles.launch(cuda.jit(both), 1, 64)(memory[:16], memory[8:24])
