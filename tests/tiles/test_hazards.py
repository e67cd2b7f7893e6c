"""Broken kernels: deadlocks, races, copies and mmas in flight, proxies, work left behind. The interpreter must stop every one
of them on any schedule, naming the kind of mistake, the warp, the guilty statement and the cause. (A race has two guilty
statements: whichever comes second is caught.) Rings and barriers: test_ring_hazards.py; other kinds: test_limits.py."""

from broken import ONE, Cases, R, S, X, Y, check
from numba import cuda

from ops import full, load, raw, store, warpgroup, zeros
from tiles.interpreter import here
from tiles.op import lowers, op

broken = Cases()


# ---- deadlock ------------------------------------------------------------------------------------------------------
@broken("deadlock", "wait for tile 3 of ring 'r': nobody fills it", 4, ONE)
def producer_stops_short(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(3):
            r.fill(j, small, (0, j))
    elif cuda.threadIdx.x // 32 == 4:
        for j in range(4):
            load(r.wait(j), R)  # guilty
            r.release(j)


@broken("deadlock", "the slot for tile 2 of ring 'r': tile 0 of ring 'r' lies there and was released by 0 of 1 readers", 0, ONE)
def forgotten_release(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(3):
            r.fill(j, small, (0, j))  # guilty
    elif cuda.threadIdx.x // 32 == 4:
        for j in range(3):
            load(r.wait(j), R)  # guilty


@broken("deadlock", r"the turn of player 0 \(`begin` grants the first.* 128 of 256 threads", 0, None, 256)
def unprimed_ping_pong():
    turn, me = warpgroup.turns(2), warpgroup.id()
    turn.take(me)  # guilty
    turn.give(me)


@broken("deadlock", r"phase 1 of barrier 'done', which lacks 1 of 2 arrivals \(came: warp 0 at .*raw.arrive", 0, X)
def too_few_arrivals():
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.arrive(done)
        raw.wait(done, 1)  # guilty


@broken("deadlock", r"lacks 16 bytes that no copy brings, expected by warp 0 .*raw.expect\(full, 2064\)", 1, X)
def more_bytes_expected_than_come(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, 2064)
        raw.tma_load(x, small, (0, 0), full)
    elif cuda.threadIdx.x // 32 == 1:
        raw.wait(full, 1)  # guilty


@broken("deadlock", "88 more registers a thread; the block's pool, what others have given back, holds 0", range(12), None, 384)
def registers_that_nobody_gives_back():
    warpgroup.claim_registers(256)  # guilty


# ---- races ---------------------------------------------------------------------------------------------------------
@broken("race", "(reads|writes) shared tile 'x', and nothing orders this after the (read|write) of shared tile 'x'", (0, 1), X)
def read_and_write():
    x, _, _ = X.open()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))
    cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))  # guilty
    if cuda.threadIdx.x // 32 == 1:
        load(x, R)  # guilty


@broken("race", "writes shared tile 'x', and nothing orders this after the write of shared tile 'x'", (0, 1), X)
def two_writers():
    x, _, _ = X.open()
    if cuda.threadIdx.x // 32 < 2:
        store(x, zeros(R))  # guilty


@broken("race", "writes shared tile 'x', and nothing orders this after the TMA store of shared tile 'x'", range(4), Y)
def source_of_a_store_overwritten(target):
    x, _ = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.tma_store(target, (0, 0), x)
        warpgroup.sync()
        warpgroup.store(x, zeros(R))  # guilty
        warpgroup.store_wait()


@broken("race", "shared tile 'x'.*, and nothing orders this after the", range(4), Y)
def only_one_warp_waits_for_its_store(target):
    x, _ = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.tma_store(target, (0, 0), x)  # guilty
        warpgroup.store_wait()
        warpgroup.store(x, zeros(R))  # guilty


@broken("race", "writes shared tile 'y', and nothing orders this after the end of the mma", range(4), Y)
def operand_overwritten_before_the_wait():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        s = warpgroup.mm_ABt(x, y)
        warpgroup.store(y, zeros(R))  # guilty
        warpgroup.wait(s)


@broken("race", "writes shared tile 'x', and nothing orders this after the end of the mma", range(4), Y)
def transposed_operand_overwritten_before_the_wait():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        s = warpgroup.mm_AtB(x, y)
        warpgroup.store(x, zeros(R))  # guilty
        warpgroup.wait(s)


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
    "wait", "newer=1 lets the youngest 1 mmas .* stay in flight, and only 0 are younger than the one asked for", range(4), Y
)
def wait_that_does_not_cover_its_mma():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        s = warpgroup.mm_ABt(x, y)
        o = warpgroup.mm_AB(x, y)
        o = warpgroup.wait(o, 1)  # guilty
        s = warpgroup.wait(s)


@broken("wait", "this tile in flight was handed on to a later mma", range(4), Y)
def accumulator_used_after_it_was_handed_on():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        first = warpgroup.mm_AB(x, y)
        both = warpgroup.mma_AB(first, x, y)
        first = warpgroup.wait(first)  # guilty
        both = warpgroup.wait(both)


@broken("wait", "this tile in flight was handed on to a later mma", range(4), Y)
def accumulator_handed_on_twice():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
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
    return here().read(tile, fence=False)


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


@broken("fence", "of tile 0 of ring 'r', with no fence.proxy.async .* after the write of tile 0", 4, ONE)
def no_fence_between_a_write_and_a_refill(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        store(r.wait(0), full(R, 1.0))
        r.release(0)  # guilty


# ---- work left behind ----------------------------------------------------------------------------------------------
@broken("unfinished", "the block ends, and nobody has waited for the copy into tile 1 of ring 'r'", 0, ONE)
def ends_with_a_copy_in_flight(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
        r.fill(1, small, (0, 1))  # guilty
    elif cuda.threadIdx.x // 32 == 4:
        load(r.wait(0), R)
        r.release(0)


@broken("unfinished", "nobody has waited for the TMA store of shared tile 'x': store_wait is missing", 0, Y)
def ends_with_a_store_in_flight(target):
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.tma_store(target, (0, 0), x)  # guilty


@broken("unfinished", "the block ends, and this mma has not been waited for", range(4), Y)
def ends_with_an_mma_in_flight():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        warpgroup.mm_AB(x, y)  # guilty


@broken.sweep
def test_stops(case, seed):
    check(case, seed)
