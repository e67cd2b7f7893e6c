"""Correct kernels, each with a function `check_...(seed)` that runs it in the interpreter and demands the right numbers.

test_interpreter.py runs them in many orders; test_guards.py takes them apart, line by line."""

import functools
import math

import numpy as np
from numba import cuda

from ops import (
    cluster,
    exp2,
    finish_sum,
    full,
    lane_sum,
    load,
    log2,
    maximum,
    raw,
    right_fill,
    row_max,
    store,
    warpgroup,
    zeros,
)
from tiles import barrier, bf16, fp16, fp32, inlined, ring, rt, shared, st, tensor
from tiles.interpreter import interpret

S, G, R = st(16, 64, bf16), st(64, 64, bf16), rt(16, 64, fp32)


def numbers(*shape, dtype=bf16, seed=0):
    """Random normal numbers, in rows that begin at multiples of 16 bytes."""
    out = np.zeros((*shape[:-1], -(-shape[-1] // 8) * 8), dtype.np)[..., : shape[-1]]
    out[...] = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype.np)
    return out


# ---- attention: rings, taking turns, overlapped mmas, the query's slot reused for the output, TMA stores ------------
@inlined
def softmax_step(s, m, scale):
    m_new = maximum(m, row_max(s))
    return exp2(s * scale - m_new * scale), m_new, exp2((m - m_new) * scale)


@functools.cache
def attention(D, KV):
    """(kernel, tile of queries, tile of keys, shared memory)"""
    Q, K, O = st(64, D, bf16), st(KV, D, bf16), rt(16, D, fp32)
    smem = shared(q=ring(Q, 2), k=ring(K, 2, 8), v=ring(K, 2, 8))
    turn, PRODUCER = warpgroup.ping_pong(2), 2

    @cuda.jit(launch_bounds=(384, 1))
    def attend(gQ, gK, gV, gO, gL, kv_len, scale):
        q, k, v = smem.open()
        block, head, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        last, wg = (kv_len - 1) // KV, warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(24)
            for c in range(2):
                q.fill(c, gQ, (batch, 2 * block + c, head))
            for j in range(last + 1):
                k.fill(j, gK, (batch, last - j, head))
                v.fill(j, gV, (batch, last - j, head))
        else:
            warpgroup.claim_registers(240)
            turn.begin(wg)
            queries = q.wait(wg)
            s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(0)))
            k.release(0)
            p, m, alpha = softmax_step(right_fill(s, kv_len - last * KV, -math.inf), full(O.col_vec, -1e30), scale)
            l, p, o = lane_sum(p), bf16(p), zeros(O)
            for j in range(1, last + 1):
                turn.take(wg)
                s = warpgroup.mm_ABt(queries, k.wait(j))
                o = warpgroup.mma_AB(o, p, v.wait(j - 1))
                turn.give(wg)
                s = warpgroup.wait(s, 1)
                k.release(j)
                p, m, alpha = softmax_step(s, m, scale)
                l = l * alpha + lane_sum(p)
                o = warpgroup.wait(o) * alpha
                v.release(j - 1)
                p = bf16(p)
            o = warpgroup.wait(warpgroup.mma_AB(o, p, v.wait(last)))
            l = finish_sum(l)
            warpgroup.store(queries, o / l)
            warpgroup.tma_store(gO, (batch, 2 * block + wg, head), queries)
            warpgroup.store(gL, (m * scale + log2(l)) * math.log(2), (batch, head, 64 * (2 * block + wg)))
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


def check_attend(seed):
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


def check_gemm(seed):
    a, b, c = numbers(100, 150, dtype=fp16), numbers(150, 40, dtype=fp16), np.full((100, 40), np.nan, np.float32)
    interpret(gemm, (1, 1, 1), 256, [tensor(a, A), tensor(b, B), c, 5], gemm_smem, seed)
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), atol=1e-4)


# ---- the same with an mma in flight over the loop's edge: tile j - 1 is given back while mma j runs -----------------
@cuda.jit
def gemm_in_flight(gA, gB, gC, steps):
    a, b = gemm_smem.open()
    if warpgroup.id() == 0:
        for j in range(steps):
            a.fill(j, gA, (0, j))
            b.fill(j, gB, (j, 0))
    else:
        acc = warpgroup.mm_AB(a.wait(0), b.wait(0))
        for j in range(1, steps):
            acc = warpgroup.mma_AB(acc, a.wait(j), b.wait(j))
            warpgroup.wait(newer=1)
            a.release(j - 1)
            b.release(j - 1)
        acc = warpgroup.wait(acc)
        warpgroup.store(gC, acc, (0, 0))


def check_gemm_in_flight(seed):
    a, b, c = numbers(50, 250, dtype=fp16), numbers(250, 40, dtype=fp16), np.full((50, 40), np.nan, np.float32)
    interpret(gemm_in_flight, (1, 1, 1), 256, [tensor(a, A), tensor(b, B), c, 8], gemm_smem, seed)
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
        warpgroup.sync()  # for the next round
    warpgroup.store(out, acc, (0, 0))


def check_square(seed):
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


def check_double(seed):
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


def check_by_hand(seed):
    x = numbers(1, 160, 64)
    for early in (False, True):
        out = np.zeros((160, 64), np.float32)
        interpret(by_hand, (1, 1, 1), 96, [tensor(x, S, 1), out, early], plan, seed)
        np.testing.assert_array_equal(out, x[0].astype(np.float32))


# ---- a pair of blocks shares one operand: each brings half of it to both --------------------------------------------
H = st(32, 32, fp16)  # half of a tile of b
pair_smem = shared(a=ring(A, 2, readers=4), b=ring(st(64, 32, fp16), 2, readers=4, blocks=2))


@cuda.jit
def gemm_by_pairs(gA, gB, gC, steps):
    a, b = pair_smem.open()
    if warpgroup.id() == 0:
        for j in range(2 * steps):
            a.fill(j, gA, (cuda.blockIdx.x, j % steps))
            b.fill(j, gB, (j // steps, j % steps))
    else:
        for tile in range(2):
            acc = zeros(rt(16, 64, fp32))
            for j in range(tile * steps, (tile + 1) * steps):
                acc = warpgroup.wait(warpgroup.mma_ABt(acc, a.wait(j), b.wait(j)))
                a.release(j)
                b.release(j)
            warpgroup.store(gC, acc, (64 * cuda.blockIdx.x, 64 * tile))
    cluster.sync()


def check_gemm_by_pairs(seed):
    a, b, c = numbers(200, 150, dtype=fp16), numbers(100, 150, dtype=fp16), np.full((200, 100), np.nan, np.float32)
    interpret(gemm_by_pairs, (4, 1, 1), 256, [tensor(a, A), tensor(b, H), c, 5], pair_smem, seed, (2, 1, 1))
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32).T, atol=1e-4)
