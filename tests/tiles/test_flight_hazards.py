"""Broken kernels: copies and mmas in flight, and what the asynchronous proxy does not see yet. See test_hazards.py."""

from broken import ONE, RING, Cases, R, S, X, Y, check, operands
from numba import cuda

from ops import full, load, raw, store, warpgroup, zeros
from tiles import bf16, rt
from tiles.interpreter import current_warp
from tiles.op import lowers, op

broken = Cases()


# ---- data in flight ------------------------------------------------------------------------------------------------
@broken("in flight", "reads shared tile 'x', and nothing orders this after the end of the copy into shared tile 'x'", 0, X)
def read_before_the_wait(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        load(x, R)  # guilty
        raw.wait(full, 1)


@broken("in flight", "reads shared tile 'x', and nothing orders this after the end of the copy", 1, X)
def another_warp_has_waited(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        raw.wait(full, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        raw.wait(full, 2)
        raw.arrive(done)
    if cuda.threadIdx.x // 32 == 1:
        raw.arrive(done)
        raw.wait(done, 1)
        load(x, R)
        raw.named_arrive(1, 64)
    if cuda.threadIdx.x // 32 == 0:
        raw.named_sync(1, 64)
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        raw.arrive(done)
        raw.wait(full, 3)
    if cuda.threadIdx.x // 32 == 1:
        raw.arrive(done)
        raw.wait(done, 2)
        load(x, R)  # guilty


@broken("in flight", "fills shared tile 'x', and nothing orders this after the end of the copy into shared tile 'x'", 0, X)
def two_copies_into_one_tile(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, 2 * S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        raw.tma_load(x, small, (0, 1), full)  # guilty
        raw.wait(full, 1)


@broken(
    "wait",
    "newer=1 lets the youngest 1 mmas .* stay in flight, and only 0 are younger than .*: at most newer=0",
    range(4),
    Y,
)
def wait_that_does_not_cover_its_mma():
    x, y = operands()
    if warpgroup.id() == 0:
        s = warpgroup.mm_ABt(x, y)
        o = warpgroup.mm_AB(x, y)
        o = warpgroup.wait(o, 1)  # guilty
        s = warpgroup.wait(s)


@broken("wait", "this tile in flight was handed on to a later mma", range(4), Y)
def accumulator_used_after_it_was_handed_on():
    x, y = operands()
    if warpgroup.id() == 0:
        first = warpgroup.mm_AB(x, y)
        both = warpgroup.mma_AB(first, x, y)
        first = warpgroup.wait(first)  # guilty
        both = warpgroup.wait(both)


@broken("wait", "this tile in flight was handed on to a later mma", range(4), Y)
def accumulator_handed_on_twice():
    x, y = operands()
    if warpgroup.id() == 0:
        first = warpgroup.mm_AB(x, y)
        left = warpgroup.mma_AB(first, x, y)
        right = warpgroup.mma_AB(first, x, y)  # guilty


# ---- proxies -------------------------------------------------------------------------------------------------------
@broken("fence", r"mma reads shared tile 'x', with no fence.proxy.async \(warpgroup.sync\) after the write", range(4), Y)
def no_fence_before_an_mma():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
    cuda.syncthreads()
    if warpgroup.id() == 0:
        s = warpgroup.wait(warpgroup.mm_AB(x, y))  # guilty


@broken("fence", "stores shared tile 'x' by TMA, with no fence.proxy.async", 0, Y)
def no_fence_before_a_store(target):
    x, y = Y.open()
    warpgroup.store(x if warpgroup.id() == 0 else y, zeros(R))
    cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 0:
        raw.tma_store(target, (0, 0), x)  # guilty
        raw.store_wait()


@broken("fence", "fills shared tile 'x', with no fence.proxy.async .* after the write of shared tile 'x'", 0, X)
def no_fence_between_a_write_and_a_copy(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)  # guilty
        raw.wait(full, 1)


@op
def bare_load(tile, spec):
    """ops.load, without the fence that follows it."""
    return current_warp().read(tile, fence=False)


@lowers(bare_load)
def _(tile, spec: type):
    return spec, None


@broken("fence", r"the last of 1 releases \(the ring's readers\) of tile 0 .*no fence.proxy.async after the read", 4, ONE)
def no_fence_between_a_read_and_a_copy(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        bare_load(r.wait(0), R)
        r.release(0)  # guilty


@broken("fence", r"the last of 4 releases .* of tile 0 .*no fence.proxy.async after the read", range(4, 8), RING)
def no_fence_where_a_load_has_none(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    else:
        warpgroup.load(r.wait(0), rt(16, 64, bf16), fenced=False)
        r.release(0)  # guilty


@broken("fence", r"the last of 4 releases .* of tile 0 .*no fence.proxy.async after the read", range(4, 8), RING)
def no_fence_where_a_transposed_load_has_none(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    else:
        warpgroup.load_transposed(r.wait(0), rt(16, 64, bf16), fenced=False)
        r.release(0)  # guilty


@broken("fence", "of tile 0 of ring 'r', with no fence.proxy.async .* after the write of tile 0", 4, ONE)
def no_fence_between_a_write_and_a_refill(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        store(r.wait(0), full(R, 1.0))
        r.release(0)  # guilty


@broken.sweep
def test_stops(case, seed):
    check(case, seed)
