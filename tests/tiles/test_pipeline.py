"""Broken kernels: copies by cp.async and pipelines. See test_hazards.py."""

import numpy as np
import pytest
from broken import Cases, check
from numba import cuda

from ops import commit_group, copy_async, copy_pages, load, look_up, mma_ABt, store, wait_group, warpgroup, zeros
from tiles import Hazard, bf16, fp32, pipeline, ring, rt, shared, st, sv
from tiles.testing import meaning

S, P, R = st(16, 64, fp32), st(32, 64, fp32), rt(16, 64, fp32)
X = shared(x=S)
K = shared(k=pipeline(P, 2, warps=4))
WHOLE = rt(32, 64, fp32)

broken = Cases()


@broken("in flight", r"reads shared tile 'x', .* the end of the copy into shared tile 'x' .*: wait_group is missing", 0, X, 32)
def read_before_the_wait(array):
    (x,) = X.open()
    copy_async(x, array, (0, 0, 0))
    commit_group()
    load(x, R)  # guilty
    wait_group()


@broken("in flight", r"the end of the copy into shared tile 'x' .*: commit_group is missing", 0, X, 32)
def not_committed(array):
    (x,) = X.open()
    copy_async(x, array, (0, 0, 0))
    wait_group()
    load(x, R)  # guilty


@broken(("in flight", "race"), "shared tile 'x', and nothing orders this after the", (0, 1), X, 64)
def missing_barrier(array):
    (x,) = X.open()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))
    cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 0:
        copy_async(x, array, (0, 0, 0))  # guilty
        commit_group()
        wait_group()
    load(x, R)  # guilty


@broken(("race", "in flight"), "(copies into|reads) shared tile 'x', and nothing orders this after the", (0, 1), X, 64)
def overwritten_while_read(array):
    (x,) = X.open()
    copied = cuda.threadIdx.x // 32 == 0
    if copied:
        store(x, zeros(R))
    cuda.syncthreads()
    load(x, R)  # guilty
    if copied:
        copy_async(x, array, (0, 0, 0))  # guilty
        commit_group()
        wait_group()


@broken("unfinished", "nobody has waited for the copy into shared tile 'x'", 0, X, 32)
def never_waited_for(array):
    (x,) = X.open()
    copy_async(x, array, (0, 0, 0))  # guilty
    commit_group()


@broken(
    "unfinished", "the copy into tile 1 of pipeline 'k': wait for it, or fill with end= the number of tiles", range(4), K, 128
)
def filled_past_the_last(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))
    for j in range(1):
        k.wait(j)
        k.fill(j + 1, array, (0, 32, 0))  # guilty


@broken(
    "bounds",
    "copy in pieces of 16 bytes: column 1 does not begin at a multiple of 16 bytes; vector_bytes=4 copies it$",
    0,
    X,
    32,
)
def column_not_aligned(array):
    (x,) = X.open()
    copy_async(x, array, (0, 0, 1))  # guilty


@broken("bounds", r"index 4 is out of range for axis 0 of an array of shape \(4, 128, 64\)", 0, X, 32)
def index_outside_the_array(array):
    (x,) = X.open()
    copy_async(x, array, (4, 0, 0))  # guilty


@broken(("race", "in flight"), "tile . of pipeline 'k', and nothing orders this after the", range(4), K, 128)
def slot_refilled_while_read(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))
    load(k.wait(0), WHOLE)  # guilty
    k.fill(2, array, (0, 64, 0))  # guilty
    k.wait(2)


@broken(
    "wait",
    "newer=1 lets the youngest 1 groups of copies stay in flight, and only 0 are younger than tile 1 .*: at most newer=0",
    range(4),
    K,
    128,
)
def count_that_does_not_cover(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))
    k.fill(1, array, (0, 32, 0))
    load(k.wait(1, newer=1), WHOLE)  # guilty


@broken("wait", "waits for tile 1 of pipeline 'k', which this warp has not filled", range(4), K, 128)
def tile_that_nobody_fills(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))
    k.wait(1)  # guilty


@broken("storage", r"is used, and the kernel has not opened it", range(4), K, 128)
def pipeline_that_is_not_open(array):
    K.items["k"].fill(0, array, (0, 0, 0))  # guilty


@broken("bounds", "pipeline 'k' has no tile -1", range(4), K, 128)
def tile_before_the_first(array):
    (k,) = K.open()
    k.fill(-1, array, (0, 0, 0))  # guilty


@broken("collective", r"is filled by a block of 8 warps", range(8), K, 256)
def block_of_another_size(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))  # guilty


@broken("deadlock", r"tile 0 of pipeline 'k': named barrier 0, where 96 of 128 threads have arrived", range(3), K, 128)
def one_warp_does_not_meet(array):
    (k,) = K.open()
    k.fill(0, array, (0, 0, 0))
    if cuda.threadIdx.x // 32 < 3:
        k.wait(0)  # guilty
    else:
        wait_group()


G = st(64, 64, bf16)
BOTH = shared(r=ring(G, 1, readers=4), x=G)


@broken("fence", "tile 0 of ring 'r', with no fence.proxy.async after the read of tile 0 of ring 'r'", range(4), BOTH, 128)
def ring_read_by_mma_sync_without_a_fence(source):
    """The asynchronous proxy may overwrite what ordinary reads have not been fenced from."""
    r, _ = BOTH.open()
    r.fill(0, source, (0, 0))
    tile = r.wait(0)
    mma_ABt(zeros(ACC), zeros(LEFT), tile)
    r.release(0)  # guilty
    warpgroup.sync()


ACC, LEFT = rt(16, 64, fp32), rt(16, 64, bf16)


@broken.sweep
def test_broken_kernels_stop(case, seed):
    check(case, seed)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_a_pipeline_refuses(stages):
    with pytest.raises(ValueError, match=f"got {stages} stages and 3 warps for st\\(32, 64, fp32\\)"):
        pipeline(P, stages, 3)


# ---- places that there are not, of copies by cp.async ----------------------------------------------------------------
V, PART = shared(x=sv(64, fp32)), st(16, 64, fp32)
POOL, PAGES = np.zeros((2, 8, 64), np.float32), np.zeros((1, 2), np.int32)


@pytest.mark.parametrize("row", [-1, 2])
@pytest.mark.parametrize("plan", [X, V], ids=["tile", "vector"])
def test_an_index_beside_the_array(plan, row):
    """What is copied may lie partly outside along its own axes, not along others."""

    @cuda.jit
    def body(array, row):
        (x,) = plan.open()
        copy_async(x, array, (row, 0, 0))

    with pytest.raises(Hazard, match=rf"index {row} is out of range for axis 0 of an array of shape \(2, 2, 64\)"):
        meaning(body, np.zeros((2, 2, 64), np.float32), row, shared=plan)


@pytest.mark.parametrize(("sequence", "first"), [(1, 0), (-1, 0), (0, 16), (0, 8)])
def test_rows_of_no_page(sequence, first):
    """Of rows below `last` the table must have the pages."""

    @cuda.jit
    def body(table, sequence, first):
        look_up(PART, table, 8, (sequence, first), 32)

    with pytest.raises(Hazard, match=rf"row \d+ of sequence {sequence} lies in no page of a table of shape \(1, 2\)"):
        meaning(body, PAGES, sequence, first, shared=X)


def test_pages_in_pieces_that_do_not_fit():
    @cuda.jit
    def body(pool, table):
        (x,) = X.open()
        copy_pages(x, pool, look_up(PART, table, 8, (0, 0), 16), (0, 1), 16)

    with pytest.raises(Hazard, match="copy in pieces of 16 bytes: "):
        meaning(body, POOL, PAGES, shared=X)
