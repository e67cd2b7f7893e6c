"""Correct kernels run to their end with the right numbers and without a false alarm, in the strict order and by twenty seeds;
and the kernel language is as tiles/interpreter says. (Broken kernels: test_hazards.py, test_limits.py.)"""

import math
import sys
import time
import warnings

import numpy as np
import pytest
from broken import G, S, run
from numba import cuda

import ops
from ops import exp2, full, lane_sum, load, log2, maximum, raw, right_fill, row_max, row_sum, store, total, warpgroup, zeros
from tiles import Hazard, barrier, bf16, fp16, fp32, inlined, ring, rt, shared, st, tensor
from tiles.interpreter import interpret

ORDERS = [None, *range(20)]
R = rt(16, 64, fp32)
every_order = pytest.mark.parametrize("seed", ORDERS)


def numbers(*shape, dtype=bf16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype.np)


# ---- attention: rings, taking turns, overlapped mmas, the query's slot reused for the output, TMA stores ------------
@inlined
def softmax_step(s, m, scale):
    m_new = maximum(m, row_max(s))
    return exp2(s * scale - m_new * scale), m_new, exp2((m - m_new) * scale)


def attention(D, KV):
    """(kernel, tile of queries, tile of keys, shared memory)"""
    Q, K, O = st(64, D, bf16), st(KV, D, bf16), rt(16, D, fp32)
    smem = shared(q=ring(Q, 2), k=ring(K, 2, 8), v=ring(K, 2, 8))
    turn, PRODUCER = warpgroup.turns(2), 2

    @cuda.jit(launch_bounds=(384, 1))
    def attend(gQ, gK, gV, gO, gL, kv_len, scale):
        q, k, v = smem.open()
        block, head, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        last, me = (kv_len - 1) // KV, warpgroup.id()
        if me == PRODUCER:
            warpgroup.release_registers(24)
            for c in range(2):
                q.fill(c, gQ, (batch, 2 * block + c, head))
            for j in range(last + 1):
                k.fill(j, gK, (batch, last - j, head))
                v.fill(j, gV, (batch, last - j, head))
        else:
            warpgroup.claim_registers(240)
            turn.begin(me)
            queries = q.wait(me)
            s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(0)))
            k.release(0)
            p, m, alpha = softmax_step(right_fill(s, kv_len - last * KV, -math.inf), full(O.col_vec, -1e30), scale)
            l, p, o = lane_sum(p), bf16(p), zeros(O)
            for j in range(1, last + 1):
                turn.take(me)
                s = warpgroup.mm_ABt(queries, k.wait(j))
                o = warpgroup.mma_AB(o, p, v.wait(j - 1))
                turn.give(me)
                s = warpgroup.wait(s, 1)
                k.release(j)
                p, m, alpha = softmax_step(s, m, scale)
                l = l * alpha + lane_sum(p)
                o = warpgroup.wait(o) * alpha
                v.release(j - 1)
                p = bf16(p)
            o = warpgroup.wait(warpgroup.mma_AB(o, p, v.wait(last)))
            l = total(l)
            warpgroup.store(queries, o / l)
            warpgroup.tma_store(gO, (batch, 2 * block + me, head), queries)
            warpgroup.store(gL, (m * scale + log2(l)) * math.log(2), (batch, head, 64 * (2 * block + me)))
            warpgroup.store_wait()

    return attend, Q, K, smem


def attention_error(D, KV, q_len, kv_len, seed=None):
    """The greatest error of the kernel's output and lse against float64."""
    kernel, Q, K, smem = attention(D, KV)
    q, k, v = (numbers(1, n, 1, D, seed=i) for i, n in enumerate((q_len, kv_len, kv_len)))
    out, lse = np.full_like(q, np.nan), np.full((1, 1, q_len), np.nan, np.float32)
    args = [tensor(q, Q, 1), tensor(k, K, 1), tensor(v, K, 1), tensor(out, Q, 1), lse, kv_len, math.log2(math.e) / math.sqrt(D)]
    interpret(kernel, (-(-q_len // 128), 1, 1), 384, args, smem, seed)
    scores = q[0, :, 0].astype(float) @ k[0, :, 0].astype(float).T / math.sqrt(D)
    exact = np.log(np.exp(scores).sum(axis=1))
    output = np.exp(scores - exact[:, None]) @ v[0, :, 0].astype(float)
    return max(np.abs(out[0, :, 0] - output).max(), np.abs(lse - exact).max())


@every_order
def test_attention(seed):
    assert attention_error(64, 32, 130, 150, seed) < 2**-7


# ---- a GEMM's ring, persistent over two tiles of C: slots are refilled many times, j runs on --------------------------
A, B = st(64, 32, fp16), st(32, 48, fp16)
gemm_smem = shared(a=ring(A, 3, readers=4), b=ring(B, 3, readers=4))


@cuda.jit
def gemm(gA, gB, gC, steps):
    a, b = gemm_smem.open()
    if warpgroup.id() == 0:
        for j in range(2 * steps):
            a.fill(j, gA, (j // steps, j % steps))
            b.fill(j, gB, (j % steps, 0))
    else:
        for tile in range(2):
            acc = zeros(rt(16, 48, fp32))
            for j in range(tile * steps, (tile + 1) * steps):
                acc = warpgroup.wait(warpgroup.mma_AB(acc, a.wait(j), b.wait(j)))
                a.release(j)
                b.release(j)
            warpgroup.store(gC, acc, (64 * tile, 0))


@every_order
def test_gemm(seed):
    a, b, c = numbers(100, 150, dtype=fp16), numbers(150, 40, dtype=fp16), np.full((100, 40), np.nan, np.float32)
    interpret(gemm, (1, 1, 1), 256, [tensor(a, A), tensor(b, B), c, 5], gemm_smem, seed)
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), atol=1e-4)


# ---- ordinary stores, then an mma; then another into the same tiles --------------------------------------------------
two = shared(x=G, y=G)


@cuda.jit
def square(source, out):
    x, y = two.open()
    acc = zeros(R)
    for k in range(3):
        tile = load(source, R, (64 * k + 16 * (cuda.threadIdx.x // 32), 0))
        warpgroup.store(x, tile)
        warpgroup.store(y, tile)
        warpgroup.sync()
        acc = warpgroup.wait(warpgroup.mma_AB(acc, x, y))
        warpgroup.sync()
    warpgroup.store(out, acc, (0, 0))


@every_order
def test_store_then_mma(seed):
    x, out = numbers(192, 64), np.zeros((64, 64), np.float32)
    interpret(square, (1, 1, 1), 128, [x, out], two, seed)
    np.testing.assert_allclose(out, sum(t @ t for t in np.split(x.astype(np.float32), 3)), atol=1e-3)


# ---- a ring read with ordinary loads, written back and stored by TMA --------------------------------------------------
through = shared(r=ring(G, 2, readers=4), out=G)


@cuda.jit
def double(source, target):
    r, out = through.open()
    if warpgroup.id() == 0:
        for j in range(6):
            r.fill(j, source, (0, j))
    else:
        for j in range(6):
            x = warpgroup.load(r.wait(j), R)
            r.release(j)
            warpgroup.store_wait()
            warpgroup.sync()
            warpgroup.store(out, x + x)
            warpgroup.tma_store(target, (0, j), out)
        warpgroup.store_wait()


@every_order
def test_loads_and_stores(seed):
    x = numbers(1, 350, 64)
    y = np.zeros_like(x)
    interpret(double, (1, 1, 1), 256, [tensor(x, G, 1), tensor(y, G, 1)], through, seed)
    np.testing.assert_array_equal(y.astype(np.float32), 2 * x.astype(np.float32))


# ---- raw barriers: two copies on one, expected before or after they start; used again and again -----------------------
plan = shared(x=S, y=S, full=barrier(1), empty=barrier(2))


@cuda.jit
def by_hand(small, out, early):
    x, y, full, empty = plan.open()
    warp = cuda.threadIdx.x // 32
    for j in range(5):
        if warp == 0:
            raw.wait(empty, j)
            if early:
                raw.expect(full, 2 * S.nbytes)
            raw.tma_load(x, small, (0, 2 * j), full)
            raw.tma_load(y, small, (0, 2 * j + 1), full)
            if not early:
                raw.expect(full, 2 * S.nbytes)
        elif warp <= 2:
            raw.wait(full, j + 1)
            tile = x if warp == 1 else y
            store(out, load(tile, R), (16 * (2 * j + warp - 1), 0))
            raw.arrive(empty)


@pytest.mark.parametrize("early", [False, True])
@every_order
def test_raw_barriers(seed, early):
    x, out = numbers(1, 160, 64), np.zeros((160, 64), np.float32)
    interpret(by_hand, (1, 1, 1), 96, [tensor(x, S, 1), out, early], plan, seed)
    np.testing.assert_array_equal(out, x[0].astype(np.float32))


# ---- named barriers: three players, each in its turn ---------------------------------------------------------------------
@every_order
def test_turns(seed):
    said, three = [], warpgroup.turns(3)

    @cuda.jit
    def play():
        me = warpgroup.id()
        three.begin(me)
        for round in range(4):
            three.take(me)
            if cuda.threadIdx.x // 32 % 4 == 0:
                said.append((round, me))
            three.give(me)
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


def test_data_in_flight_is_poison_until_it_lands():
    """A copy's data comes late: what lies in its tile meanwhile is neither the old data nor the new."""
    seen = []

    @cuda.jit
    def kernel(small):
        x, _y, full, _empty = plan.open()
        if cuda.threadIdx.x // 32 == 0:
            raw.expect(full, S.nbytes)
            raw.tma_load(x, small, (0, 1), full)
            seen.append(ops.raw.here().block.shadow.get(x).copy())
            raw.wait(full, 1)
            seen.append(ops.raw.here().block.shadow.get(x).copy())

    run(kernel, plan, 96)
    assert np.isnan(seen[0].astype(np.float32)).all() and not np.isnan(seen[1].astype(np.float32)).any()


def test_speed():
    """Attention over 1024 queries and keys, D = 128: 0.3 s on an idle core. (Processor time, so that busy cores matter little.)"""
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


@pytest.mark.parametrize("index", [np.int64(-1), np.int32(4), np.uint8(9)])
def test_numpy_integers_are_checked_too(index):
    @cuda.jit
    def kernel(array):
        array[index] = 0

    with pytest.raises(Hazard, match="out of range"):
        interpret(kernel, (1, 1, 1), 32, [np.zeros(4, np.float32)])


def test_a_mistake_in_python_stays_what_it_is():
    @cuda.jit
    def kernel():
        1 // (cuda.blockIdx.x - cuda.blockIdx.x)

    with pytest.raises(ZeroDivisionError):
        interpret(kernel, (1, 1, 1), 32, [])


@pytest.mark.parametrize("threads", [0, 33, 1056])
def test_threads_must_be_whole_warps(threads):
    with pytest.raises(ValueError, match=f"a multiple of 32 up to 1024, got {threads}"):
        interpret(gemm, (1, 1, 1), threads, [])


def test_ops_of_memory_need_a_kernel():
    with pytest.raises(RuntimeError, match="only inside a kernel: run it with tiles.launch"):
        warpgroup.sync()
