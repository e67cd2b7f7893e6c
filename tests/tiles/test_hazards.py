"""Broken kernels: barriers, rings, copies and mmas. The interpreter must stop every one of them on any schedule, naming the
kind of mistake, the warp, the guilty statement and the cause. (A race has two guilty statements: whichever comes second is
caught.) Mistakes of other kinds are in test_limits.py."""

from broken import Cases, G, S, check
from numba import cuda

from ops import full, load, raw, store, warpgroup, zeros
from tiles import barrier, bf16, fp32, ring, rt, shared
from tiles.interpreter import here
from tiles.op import lowers, op

R = rt(16, 64, fp32)  # a warp's part
ONE = shared(r=ring(S, 2, readers=1))  # filled by warpgroup 0, read by warp 4
RING = shared(r=ring(G, 2, readers=4))  # filled by warpgroup 0, read by warpgroup 1
TWO = shared(r=ring(G, 2, readers=8))  # filled by warpgroup 0, read by warpgroups 1 and 2
X = shared(x=S, full=barrier(1), done=barrier(2))  # for raw ops
Y = shared(x=G, y=G)  # for mmas

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


# ---- a ring's tiles, used too long ---------------------------------------------------------------------------------
@broken({"arrivals", "released", "in flight", "phase"}, "ring 'r'", (0, *range(4, 12)), RING, 384)
def twice_as_many_readers_as_the_ring_knows(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        for j in range(6):
            r.fill(j, source, (0, 0))  # guilty
    else:
        a = bf16(zeros(R))
        for j in range(6):
            s = warpgroup.wait(warpgroup.mm_AB(a, r.wait(j)))  # guilty
            r.release(j)  # guilty


@broken({"released", "in flight", "phase"}, "ring 'r'", (0, 4, 5, 6, 7), ONE)
def only_one_of_four_readers_releases(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(6):
            r.fill(j, small, (0, j))  # guilty
    else:
        for j in range(6):
            load(r.wait(j), R)  # guilty
            if cuda.threadIdx.x // 32 == 4:
                r.release(j)  # guilty


@broken("released", "releases tile 1 of ring 'r', and has not waited for an mma that reads it", range(4, 8), RING)
def release_of_the_mma_that_may_go_on(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        for j in range(2):
            r.fill(j, source, (0, j))
    else:
        a = bf16(zeros(R))
        s = warpgroup.mm_AB(a, r.wait(0))
        s = warpgroup.mma_AB(s, a, r.wait(1))
        warpgroup.wait(newer=1)
        r.release(0)
        r.release(1)  # guilty
        s = warpgroup.wait(s)


@broken("released", "releases tile 0 of ring 'r', and has not waited for an mma that reads it", range(4, 8), RING)
def release_before_the_wait(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    else:
        s = warpgroup.mm_AB(bf16(zeros(R)), r.wait(0))
        r.release(0)  # guilty
        s = warpgroup.wait(s)


@broken("released", "releases tile 1 of ring 'r', for which it has not waited", 4, ONE)
def wrong_tile_released(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(2):
            r.fill(j, small, (0, j))
    elif cuda.threadIdx.x // 32 == 4:
        load(r.wait(0), R)
        r.release(1)  # guilty


@broken("released", "releases tile 0 of ring 'r' a second time", 4, TWO)
def released_twice(source):
    (r,) = TWO.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        r.wait(0)
        r.release(0)
        r.release(0)  # guilty


@broken("released", "reads tile 0 of ring 'r', which this warp has released", 4, ONE)
def read_after_release(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        tile = r.wait(0)
        r.release(0)
        load(tile, R)  # guilty


@broken("released", "mma reads tile 0 of ring 'r', which this warp has released", range(4, 8), RING)
def mma_after_release(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    else:
        tile = r.wait(0)
        r.release(0)
        s = warpgroup.wait(warpgroup.mm_AB(bf16(zeros(R)), tile))  # guilty


@broken({"arrivals", "released", "in flight", "phase"}, "tile 0 of ring 'r'", range(4, 8), ONE)
def more_releases_than_readers(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    else:
        r.wait(0)
        r.release(0)  # guilty


@broken("unfinished", "tile 0 of ring 'r' was released 4 times; the ring has readers=8", range(4, 8), TWO)
def fewer_releases_than_readers(source):
    (r,) = TWO.open()
    if warpgroup.id() == 0:
        r.fill(0, source, (0, 0))
    else:
        r.wait(0)
        r.release(0)  # guilty


# ---- arrivals, bytes and phases of raw barriers --------------------------------------------------------------------
@broken("arrivals", "arrives on barrier 'done', and nothing orders this after its phase 1, in which it might", (0, 1, 2), X)
def too_many_arrivals():
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 < 3:
        raw.arrive(done)  # guilty


@broken("arrivals", "one arrival too many on barrier 'full': a phase takes 1", 0, X)
def arrival_while_bytes_are_due(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)
        raw.tma_load(x, small, (0, 0), full)
        raw.arrive(full)  # guilty
        raw.wait(full, 1)


@broken("arrivals", "arrives on named barrier 1 once more before it has opened: this counts twice", 0, None, 64)
def counted_twice():
    if cuda.threadIdx.x // 32 == 0:
        raw.named_arrive(1, 64)
        raw.named_arrive(1, 64)  # guilty


@broken("arrivals", "arrives on named barrier 1, and nothing orders this after its opening number 1", range(4), None, 128)
def one_named_barrier_for_two_pairs():
    raw.named_sync(1, 64)  # guilty


@broken("bytes", "phase 1 of barrier 'full' expects 16 bytes less than its copies bring", 0, X)
def fewer_bytes_expected_than_come(small):
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, 2032)  # guilty
        raw.tma_load(x, small, (0, 0), full)
        raw.wait(full, 1)


BOTH = shared(x=S, y=S, full=barrier(1))


@broken("bytes", "phase 1 of barrier 'full' expects 2048 bytes less than its copies bring", 0, BOTH)
def one_of_two_copies_expected(small):
    x, y, full = BOTH.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)  # guilty
        raw.tma_load(x, small, (0, 0), full)
        raw.tma_load(y, small, (0, 1), full)
        raw.wait(full, 1)


@broken("bytes", "the block ends, and barrier 'full' still expects 2048 bytes", 0, X)
def bytes_that_nobody_waits_for():
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.expect(full, S.nbytes)  # guilty


@broken("phase", "phase 1 of barrier 'full'", (0, 1), X)
def parity_that_aliases():
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.arrive(full)
        raw.arrive(full)  # guilty
        raw.arrive(full)  # guilty
    if cuda.threadIdx.x // 32 == 1:
        raw.wait(full, 1)  # guilty


@broken("phase", "waits for phase 2 of barrier 'full', and nothing orders this after phase 1: .* parity of phase 0", 1, X)
def wait_two_phases_early():
    x, full, done = X.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.arrive(full)
        raw.arrive(full)
    if cuda.threadIdx.x // 32 == 1:
        raw.wait(full, 2)  # guilty


THREE = shared(r=ring(S, 3, readers=1))


@broken("phase", "tile [34] of ring 'r': waits for phase 2 of .*, and nothing orders this after phase 1", (4, 5), THREE)
def every_other_tile_of_three_slots(small):
    (r,) = THREE.open()
    if warpgroup.id() == 0:
        for j in range(6):
            r.fill(j, small, (0, j))
    elif cuda.threadIdx.x // 32 < 6:
        for j in range(cuda.threadIdx.x // 32 - 4, 6, 2):
            load(r.wait(j), R)  # guilty
            r.release(j)


@broken("phase", "fills tile 0 of ring 'r', and the next tile for slot 0 is number 2", 0, ONE)
def filled_twice(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
        r.fill(0, small, (0, 0))  # guilty


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
