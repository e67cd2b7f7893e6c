"""Broken kernels: tiles of a ring used too long, arrivals, bytes and phases of barriers. See test_hazards.py."""

import pytest
from broken import ONE, RING, TWO, Cases, R, S, X, check
from numba import cuda

from ops import load, raw, warpgroup, zeros
from tiles import barrier, bf16, ring, rt, shared

broken = Cases()


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
def release_of_keys_that_a_state_is_still_made_of(source):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        for j in range(2):
            r.fill(j, source, (0, j))
    else:
        state = warpgroup.mm_AtB(r.wait(0), r.wait(1))
        r.release(0)  # guilty
        r.release(1)
        state = warpgroup.wait(state)


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


@broken("phase", "fills tile 0 of ring 'r', and the next tile for slot 0 is number 2: one warp fills a ring, ", 0, ONE)
def filled_twice(small):
    (r,) = ONE.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
        r.fill(0, small, (0, 0))  # guilty


@broken.sweep
def test_stops(case, seed):
    check(case, seed)


@pytest.mark.parametrize("tile", [rt(16, 64, bf16), rt(16, 64, bf16).row_vec, 64], ids=str)
def test_a_ring_is_of_tiles_in_shared_memory(tile):
    with pytest.raises(TypeError, match="ring: must be of a tile in shared memory, st or sv, got"):
        ring(tile, 2)
