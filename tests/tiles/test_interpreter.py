"""Correct kernels run to their end with the right numbers and without a false alarm, in the strict order and by twenty seeds;
and the kernel language is as tiles/interpreter says. (Broken kernels: test_hazards.py, test_limits.py.)"""

import sys
import time
import warnings
import weakref

import correct
import numpy as np
import pytest
from broken import run
from correct import R, S, attention_error, numbers, plan, two
from numba import cuda, float32

from ops import full, load, log2, raw, row_sum, store, warpgroup, zeros
from tiles import Hazard, barrier, emulator, fp32, inlined, launch, rt, shared
from tiles.compiling.numba_types import void
from tiles.emulator import emulate
from tiles.interpreter import current_warp, interpret
from tiles.op import lowers, op

ORDERS = [None, *range(20)]
every_order = pytest.mark.parametrize("seed", ORDERS)


@pytest.mark.parametrize("check", [f for name, f in vars(correct).items() if name.startswith("check_")])
def test_correct_kernels(check):
    for seed in ORDERS[::2]:
        print(f"{seed=}")
        check(seed)


# ---- named barriers: three players, each in its turn ---------------------------------------------------------------------
@every_order
def test_turns(seed):
    said, three = [], warpgroup.ping_pong(3)

    @cuda.jit
    def play():
        wg = warpgroup.id()
        three.begin(wg)
        for round in range(4):
            three.take(wg)
            if cuda.threadIdx.x // 32 % 4 == 0:
                said.append((round, wg))
            three.give(wg)
            if round % 2:
                cuda.syncthreads()

    interpret(play, (1, 1, 1), 384, [], None, seed)
    assert said == [(r, p) for r in range(4) for p in range(3)]


# ---- mmas are done in order: an old one keeps the data it read -----------------------------------------------------------
@every_order
def test_a_later_wait_ends_earlier_mmas(seed):
    x, out = numbers(64, 64), np.zeros((64, 64), np.float32)

    @cuda.jit
    def kernel(source, out):
        a, b = two.open()
        mine = load(source, R, (16 * (cuda.threadIdx.x // 32), 0))
        warpgroup.store(a, mine)
        warpgroup.store(b, mine)
        warpgroup.sync()
        first = warpgroup.mm_AB(a, b)
        warpgroup.wait(warpgroup.mm_ABt(a, b))  # the first is over, too
        warpgroup.sync()
        warpgroup.store(b, zeros(R))
        warpgroup.store(out, warpgroup.wait(first), (0, 0))

    interpret(kernel, (1, 1, 1), 128, [x, out], two, seed)
    np.testing.assert_allclose(out, x.astype(np.float32) @ x.astype(np.float32), atol=1e-3)


SEEN = []


@op
def peek(tile):
    """Note what lies in a shared tile, whatever its state."""
    SEEN.append(current_warp().block.shadow.get(tile).astype(np.float32))


@lowers(peek)
def _(tile):
    return void, None


def test_data_in_flight_is_poison_until_it_lands():
    """A copy's data comes late: what lies in its tile meanwhile is neither the old data nor the new."""
    SEEN.clear()

    @cuda.jit
    def kernel(small):
        x, _y, full, _empty = plan.open()
        if cuda.threadIdx.x // 32 == 0:
            for i in range(2):
                raw.expect(full, S.nbytes)
                raw.tma_load(x, small, (0, 1 + i), full)
                peek(x)
                raw.wait(full, i + 1)
                peek(x)

    run(kernel, plan, 96)
    for before, after in (SEEN[:2], SEEN[2:]):
        assert np.isnan(before).all() and not np.isnan(after).any()


def test_speed():
    """Attention over 1024 queries and keys, D = 128: 0.3 s on an idle core. (Processor time: busy cores matter little.)"""
    start = time.process_time()
    assert attention_error(128, 128, 1024, 1024) < 2**-7
    assert time.process_time() - start < 2


# ---- the kernel language -------------------------------------------------------------------------------------------------
def test_print_says_who(capsys):
    @cuda.jit
    def kernel(n):
        x = full(rt(16, 16, fp32), 1.5)
        print("sum", n)
        print(row_sum(x))

    interpret(kernel, (2, 1, 1), 64, [7])
    said = capsys.readouterr().out
    assert said.count("sum 7") == 4
    assert "[block (1, 0, 0), warp 1] sum 7\n" in said
    assert "[block (0, 0, 0), warp 0] col_vec(16, fp32)\n  24.0000\n  24.0000" in said


def test_threads_are_numbers_per_lane():
    seen = []

    @cuda.jit
    def kernel():
        lane, thread = cuda.laneid, cuda.threadIdx.x
        seen.append((thread // 32, (thread - lane) // 32, 2 * (thread >> 5) + 1, -(thread // 32), (lane * 0 == 0)))
        if lane < 32 and thread >= 0 and not lane < 0:
            seen.append(cuda.blockDim.x)

    interpret(kernel, (1, 1, 1), 64, [])
    assert seen == [(0, 0, 1, 0, True), 64, (1, 1, 3, -1, True), 64]
    assert all(type(x) in (int, bool) for x in seen[0])


def test_helpers_by_name_and_by_module():
    @cuda.jit(device=True)
    def where(n):
        return cuda.blockIdx.x + n

    def recursive(n):
        return 0 if n == 0 else cuda.blockIdx.x + recursive(n - 1)

    recursive.dispatcher = None  # as @inlined marks it
    helpers = type(sys)("helpers")
    helpers.where = where

    @cuda.jit
    def kernel(out):
        out[cuda.blockIdx.x] = where(1) + helpers.where(10) + recursive(2)

    out = np.zeros(3, np.int64)
    interpret(kernel, (3, 1, 1), 32, [out])
    np.testing.assert_array_equal(out, [11, 15, 19])


def test_arithmetic_makes_no_noise():
    """log2(0) = -inf, as on the GPU, without NumPy's warnings."""
    out = np.zeros((16, 16), np.float32)

    @cuda.jit
    def kernel(out):
        store(out, log2(zeros(rt(16, 16, fp32))) * 0.0, (0, 0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interpret(kernel, (1, 1, 1), 32, [out])
    assert np.isnan(out).all()


def test_arrays_by_integers_and_slices():
    @cuda.jit
    def kernel(lengths, out):
        part = out[cuda.blockIdx.x, 1:3]
        part[0] = lengths[cuda.blockIdx.x] + 1
        out[cuda.blockIdx.x, lengths[cuda.blockIdx.x]] = 9

    out = np.zeros((2, 4), np.int32)
    interpret(kernel, (2, 1, 1), 32, [np.array([0, 3], np.int32), out])
    np.testing.assert_array_equal(out, [[9, 1, 0, 0], [0, 4, 0, 9]])


@pytest.mark.parametrize("ptx", [False, True])
def test_integers_have_64_bits_whatever_they_were_read_from(ptx, monkeypatch):
    """As Numba computes them: NumPy's own would go on with 8 or 32."""
    million = np.int32(10**6)

    @cuda.jit
    def kernel(numbers, bytes_, n, out):
        out[0] = numbers[0] * numbers[1]
        out[1] = numbers[0] + 2147483647
        out[2] = bytes_[0] - 1
        out[3] = bytes_[1] * bytes_[1]
        out[4] = n * million

    monkeypatch.setenv("TILES_INTERPRET", "ptx" if ptx else "0")
    numbers, out = np.array([10**5, 3 * 10**5], np.int32), np.zeros(5, np.int64)
    launch(kernel, 1, 32)(numbers, np.array([0, 200], np.uint8), np.int32(10**6), out)
    np.testing.assert_array_equal(out, [3 * 10**10, 10**5 + 2**31 - 1, -1, 40000, 10**12])


@pytest.mark.parametrize("ptx", [False, True])
def test_max_and_min_of_nan(ptx, monkeypatch):
    """Of two floats of one type the other one is taken, whichever is NaN; else they are compared in turn, as in Python."""

    @cuda.jit
    def kernel(x, y, n, out):
        for i in range(x.shape[0]):
            out[0, i] = max(x[i], y[i])
            out[1, i] = min(x[i], y[i])
            out[2, i] = max(x[i], y[i], x[i])
            out[3, i] = max(x[i], n)
            out[4, i] = min(float32(1), x[i])

    monkeypatch.setenv("TILES_INTERPRET", "ptx" if ptx else "0")
    nan = np.nan
    x, y, out = np.float32([nan, 2, 5, nan]), np.float32([3, nan, 4, nan]), np.zeros((5, 4), np.float32)
    launch(kernel, 1, 32)(x, y, np.int32(1), out)
    expected = [[3, 2, 5, nan], [3, 2, 4, nan], [nan, 2, 5, nan], [nan, 2, 5, nan], [1, 1, 1, 1]]
    np.testing.assert_array_equal(out, np.float32(expected))


@pytest.mark.parametrize("index", [np.int64(-1), np.int32(4), np.uint8(9)])
def test_numpy_integers_are_checked_too(index):
    @cuda.jit
    def kernel(array):
        array[index] = 0

    with pytest.raises(Hazard, match="out of range"):
        interpret(kernel, (1, 1, 1), 32, [np.zeros(4, np.float32)])


@pytest.mark.parametrize("ptx", [False, True])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_phase_that_is_known_by_other_means_need_not_be_waited_for(which, ptx, monkeypatch):
    """Another barrier orders it: then no parity is in doubt."""
    smem = shared(done=barrier(1))

    @cuda.jit
    def kernel(out):
        (done,) = smem.open()
        for _ in range(which):
            if cuda.threadIdx.x < 32:
                raw.arrive(done)
            cuda.syncthreads()
        if cuda.threadIdx.x >= 32:
            raw.wait(done, which)
            out[0] = which

    monkeypatch.setenv("TILES_INTERPRET", "ptx" if ptx else "0")
    out = np.zeros(1, np.int32)
    launch(kernel, 1, 64, shared=smem)(out)
    assert out[0] == which


def test_a_phase_that_nothing_orders():
    smem = shared(done=barrier(1))

    @cuda.jit
    def kernel(out):
        (done,) = smem.open()
        for n in range(2):
            if cuda.threadIdx.x < 32:
                raw.arrive(done)
            if n == 1:
                cuda.syncthreads()
        if cuda.threadIdx.x >= 32:
            raw.wait(done, 2)
            raw.wait(done, 1)

    with pytest.raises(Hazard, match="waits for phase 1 of barrier 'done', which has completed 2 phases"):
        launch(kernel, 1, 64, shared=smem)(np.zeros(1, np.int32))


def test_a_name_without_a_value_tells_the_line():
    """Numba compiles such a kernel."""

    @inlined
    def helper(n):
        if n > 3:
            y = 1.0
        return y

    @cuda.jit
    def kernel(out):
        out[0] = helper(2)

    with pytest.raises(UnboundLocalError, match="variable 'y'.* on this way through the kernel") as error:
        launch(kernel, 1, 32)(np.zeros(1, np.float32))
    assert "at warp 0" in str(error.value) and "`return y`, called at" in str(error.value)


def test_a_mistake_in_python_stays_what_it_is():
    @cuda.jit
    def kernel():
        1 // (cuda.blockIdx.x - cuda.blockIdx.x)

    with pytest.raises(ZeroDivisionError):
        interpret(kernel, (1, 1, 1), 32, [])


@pytest.mark.parametrize("threads", [0, 33, 1056])
def test_threads_must_be_whole_warps(threads):
    with pytest.raises(ValueError, match=f"a multiple of 32 up to 1024, got {threads}"):
        interpret(correct.gemm, (1, 1, 1), threads, [])


def test_ops_of_memory_need_a_kernel():
    with pytest.raises(RuntimeError, match="only inside a kernel: run it with tiles.launch"):
        warpgroup.sync()


def test_nothing_of_a_run_waits_for_the_collector(collect):
    """Blocks, warps and lanes are gone with the run, and what the kernel was compiled to when it is forgotten."""

    @cuda.jit
    def body(x):
        store(x, zeros(rt(16, 16, fp32)), (0, 0))

    args = [np.ones((16, 16), np.float32)]
    emulate(body, (1, 1, 1), 32, args)
    (program,) = emulator._programs[body].values()
    alive = weakref.ref(program)
    emulator.forget(body)
    del program
    assert alive() is None
    for execute in (interpret, emulate):
        execute(body, (2, 1, 1), 32, args)
        collect()
        execute(body, (2, 1, 1), 32, args)
        assert collect() < 50
