"""Broken kernels: limits of arrays, rings and barriers, branches that would split a warp, warps of a warpgroup that part,
registers, plans, and what the kernel language cannot say. (Races and barriers: test_hazards.py.)"""

import numpy as np
import pytest
from broken import Cases, G, S, arguments, check, run
from numba import cuda

from ops import load, raw, store, tile_any, warpgroup, zeros
from tiles import Hazard, barrier, bf16, fp32, inlined, ring, rt, shared

R = rt(16, 64, fp32)
RING = shared(r=ring(S, 2, readers=1))
X = shared(x=S, full=barrier(1))
Y = shared(x=G, y=G)
Z = shared(x=S)

broken = Cases()


# ---- bounds --------------------------------------------------------------------------------------------------------
@broken("bounds", r"index 4 is out of range for axis 0 of an array of shape \(4, 128, 64\)")
def index_past_the_end(array):
    for i in range(5):
        array[i, 0, 0] = 1.0  # guilty


@broken("bounds", r"index -1 is out of range for axis 1 of an array of shape \(4, 128, 64\)")
def negative_index(array):
    x = array[0, cuda.blockIdx.x - 1, 0]  # guilty


@broken("bounds", r"index \(4, 0, 0\) is out of range for an array of shape \(4, 128, 64\)")
def load_outside(array):
    x = load(array, R, (4, 0, 0))  # guilty


@broken("bounds", r"index \(-1, 0, 0\) is out of range")
def store_outside(array):
    store(array, zeros(R), (cuda.blockIdx.x - 1, 0, 0))  # guilty


@broken("bounds", r"index 4 is out of range for axis 0 of an array of shape \(4, 128, 64\)", 0, RING)
def batch_of_a_copy_outside(small):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (4, 0))  # guilty


@broken("bounds", r"index -1 is out of range for axis 0", 0, Y)
def batch_of_a_store_outside(target):
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.tma_store(target, (-1, 0), x)  # guilty


@broken("bounds", "ring 'r' has no tile -1", 4, RING)
def tile_before_the_first(small):
    (r,) = RING.open()
    if cuda.threadIdx.x // 32 == 4:
        r.wait(-1)  # guilty


@broken("deadlock", "tile 1 of ring 'r': nobody fills it", 4, RING)
def wrong_tile(small):
    (r,) = RING.open()
    if warpgroup.id() == 0:
        r.fill(0, small, (0, 0))
    elif cuda.threadIdx.x // 32 == 4:
        r.wait(1)  # guilty


@broken("bounds", "named barriers are numbered 0 to 15, got 16")
def no_such_named_barrier():
    raw.named_sync(16, 256)  # guilty


@broken("bounds", r"ping_pong\(2 players\) has no player 3")
def no_such_player():
    warpgroup.ping_pong(2).take(3)  # guilty


# ---- branches that would split a warp ------------------------------------------------------------------------------
@broken(
    "divergence",
    r"a branch takes .* a number per lane \(True .. False\); branch on the warp, cuda.threadIdx.x // 32",
)
def branch_on_the_thread():
    if cuda.threadIdx.x == 0:  # guilty
        cuda.syncthreads()


@broken("divergence", r"a branch .* a number per lane \(False .. True\)")
def branch_on_the_lane():
    half = cuda.laneid >= 16
    while half:  # guilty
        break


@broken("divergence", r"an index, a range or a conversion takes .* a number per lane \(0 .. 31\)")
def index_by_the_thread(array):
    array[0, 0, cuda.threadIdx.x] = 0.0  # guilty


@broken("divergence", r"an op takes one number .* a number per lane \(0.0 .. 31.0\)")
def number_per_lane_for_an_op():
    x = zeros(R) * (cuda.laneid * 1.0)  # guilty


@inlined
def first_half(lane):
    return 1 if lane < 16 else 2  # guilty


@broken("divergence", "a branch takes one number")
def branch_in_a_helper():
    first_half(cuda.laneid)


# ---- warps of a warpgroup that part --------------------------------------------------------------------------------
@broken("collective", "mma on shared tile '[xy]', .* another warp of its warpgroup did: mma on shared tile '[xy]'", range(4), Y)
def different_mmas():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.store(y, zeros(R))
        warpgroup.sync()
        a = bf16(zeros(R))
        if cuda.threadIdx.x // 32 == 2:
            s = warpgroup.wait(warpgroup.mm_AB(a, y))  # guilty
        else:
            s = warpgroup.wait(warpgroup.mm_AB(a, x))  # guilty


@broken("deadlock", "the other warps of its warpgroup to issue the mma", (0, 1, 3), Y)
def a_warp_leaves_an_mma_out():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.sync()
        if cuda.threadIdx.x // 32 != 2:
            s = warpgroup.wait(warpgroup.mm_AB(bf16(zeros(R)), x))  # guilty


@broken("collective", "takes a warpgroup of 4 warps; this block has 2 warps", (0, 1), None, 64)
def half_a_warpgroup():
    warpgroup.release_registers(24)  # guilty


@broken("collective", "named barrier 1 is used with (128 and 64|64 and 128) threads at once", (0, 1), None, 128)
def two_opinions_of_a_named_barrier():
    if cuda.threadIdx.x // 32 == 0:
        raw.named_sync(1, 64)  # guilty
    elif cuda.threadIdx.x // 32 == 1:
        raw.named_sync(1, 128)  # guilty


@broken("collective", "named barrier 1 is to wait for 512 threads, in a block of 32")
def more_threads_than_there_are():
    raw.named_sync(1, 512)  # guilty


@broken("collective", "named barrier 15: some warps sync, others vote", range(4), None, 128)
def a_vote_that_some_take_for_a_meeting():
    """PTX has no meaning for bar.red and bar.sync at one barrier."""
    if cuda.threadIdx.x // 32 < 2:
        warpgroup.sync()  # guilty
    else:
        warpgroup.reduce_any(tile_any(zeros(R)))  # guilty


# ---- registers, plans, memory, language ----------------------------------------------------------------------------
@broken("registers", "claims 40 registers a thread, and it has 256", range(4), None, 128)
def claim_of_fewer():
    warpgroup.claim_registers(40)  # guilty


@broken("registers", "keeps 240 registers a thread, and it has 168", range(12), None, 384)
def release_of_more():
    warpgroup.release_registers(240)  # guilty


@broken(
    "collective", "the block ends, and warp 1 has not come to an operation of its warpgroup: setmaxnreg 40", (0,), None, 128
)
def registers_of_one_warp():
    if cuda.threadIdx.x // 32 == 0:
        warpgroup.release_registers(40)  # guilty


@broken("registers", "nothing orders this after the four warps of its warpgroup have set them before", range(4), None, 128)
def registers_set_twice():
    """The warps have not met between."""
    warpgroup.release_registers(80)
    warpgroup.release_registers(40)  # guilty


@broken("registers", "warpgroup.sync.. is missing between", range(4), None, 128)
def registers_set_thrice():
    warpgroup.release_registers(80)
    warpgroup.sync()
    warpgroup.release_registers(40)
    warpgroup.claim_registers(80)  # guilty


@broken("storage", r"the kernel opens shared\(x=st\(64.*the launch reserved shared\(x=st\(16", range(8), Z)
def another_plan():
    x, y = Y.open()  # guilty


@broken("storage", "the launch reserved no shared memory: tiles.launch.*shared=smem")
def no_plan():
    x, y = Y.open()  # guilty


@broken("storage", r"is used, and the kernel has not opened it", 4, RING)
def ring_that_is_not_open():
    if cuda.threadIdx.x // 32 == 4:
        RING.items["r"].wait(0)  # guilty


@broken("never written", "reads shared tile 'x', which nobody has written", 0, X)
def memory_never_written():
    x, full = X.open()
    if cuda.threadIdx.x // 32 == 0:
        load(x, R)  # guilty


@broken("never written", "mma reads shared tile 'y', which nobody has written", range(4), Y)
def operand_never_written():
    x, y = Y.open()
    if warpgroup.id() == 0:
        warpgroup.store(x, zeros(R))
        warpgroup.sync()
        s = warpgroup.wait(warpgroup.mm_AB(x, y))  # guilty


@broken("language", "cuda.atomic has no meaning for a whole warp; add a shared tile to global memory by warpgroup.tma_add")
def atomics(array):
    cuda.atomic.add(array, 0, 1)  # guilty


@broken("language", r"cuda.shared has no meaning for a whole warp; lay it out on the host, smem = shared\(name=st\(...\)\)")
def shared_arrays(array):
    cuda.shared.array(32, np.float32)  # guilty


@broken("language", "cuda.grid has no meaning for a whole warp; .* or run it lane by lane, TILES_INTERPRET=ptx")
def elements_of_lanes(array):
    cuda.grid(1)  # guilty


def undecorated(x):
    return x


@broken("language", "undecorated is a plain Python function, which a kernel cannot call: decorate it with @tiles.inlined")
def plain_function():
    undecorated(1)  # guilty


@broken("language", "integers and slices, one per axis")
def fancy_index(array):
    array[..., 0] = 1.0  # guilty


@broken.sweep
def test_stops(case, seed):
    if case[0].py_func is branch_in_a_helper:
        with pytest.raises(Hazard, match=r"return 1 if lane < 16 else 2`, called at test_limits.py:\d+ `first_half\("):
            run(case[0], seed=seed)
    else:
        check(case, seed)


def test_arguments_are_fresh():
    """A case does not see what another one wrote."""
    (array,) = arguments(index_past_the_end)
    array[:] = 0
    assert np.any(arguments(index_past_the_end)[0])
