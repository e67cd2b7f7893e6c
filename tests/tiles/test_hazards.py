"""Broken kernels: deadlocks, races, work left behind. The interpreter must stop every one of them on any schedule, naming the
kind of mistake, the warp, the guilty statement and the cause. (A race has two guilty statements: whichever comes second is
caught.) Data in flight: test_flight_hazards.py; rings and barriers: test_ring_hazards.py; other kinds: test_limits.py."""

from broken import ONE, Cases, R, X, Y, check, operands
from numba import cuda

from ops import load, raw, store, warpgroup, zeros
from tiles import barrier, shared

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
    turn, wg = warpgroup.ping_pong(2), warpgroup.id()
    turn.take(wg)  # guilty
    turn.give(wg)


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
    x, y = operands()
    if warpgroup.id() == 0:
        s = warpgroup.mm_ABt(x, y)
        warpgroup.store(y, zeros(R))  # guilty
        warpgroup.wait(s)


@broken("race", "writes shared tile 'x', and nothing orders this after the end of the mma", range(4), Y)
def transposed_operand_overwritten_before_the_wait():
    x, y = operands()
    if warpgroup.id() == 0:
        s = warpgroup.mm_AtB(x, y)
        warpgroup.store(x, zeros(R))  # guilty
        warpgroup.wait(s)


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


@broken("unfinished", "the block ends, and this mma has not been waited for: warpgroup.wait is missing", range(4), Y)
def ends_with_an_mma_in_flight():
    x, y = operands()
    if warpgroup.id() == 0:
        warpgroup.mm_AB(x, y)  # guilty


# ---- phases that follow too soon -------------------------------------------------------------------------------------
BARS = shared(full=barrier(1), go=barrier(1))
TOO_SOON = "completes phase 2 of .* that wait would have missed its phase|which has completed 2 phases"


@broken("phase", TOO_SOON, (0, 1), BARS, 64)
def two_phases_at_once():
    full, _ = BARS.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.arrive(full)
        raw.arrive(full)  # guilty
    else:
        raw.wait(full, 1)  # guilty


@broken("phase", TOO_SOON, (0, 2), BARS, 96)
def a_phase_that_waits_for_somebody_else():
    full, go = BARS.open()
    if cuda.threadIdx.x // 32 == 0:
        raw.arrive(full)
        raw.wait(go, 1)
        raw.arrive(full)  # guilty
    elif cuda.threadIdx.x // 32 == 1:
        raw.arrive(go)
    else:
        raw.wait(full, 1)  # guilty


@broken("collective", r"named barrier 3 is used with (96 and 64|64 and 96) threads at once", range(3), None, 96)
def a_named_barrier_of_two_sizes():
    if cuda.threadIdx.x // 32 == 0:
        raw.named_sync(3, 64)  # guilty
    else:
        raw.named_sync(3, 96)  # guilty


@broken.sweep
def test_stops(case, seed):
    check(case, seed)
