"""Attention in one pass: O = softmax(Q K^T / sqrt(D)) V without ever storing the scores (Dao et al. 2022).

The plain version, to read first: each consumer warpgroup owns 64 query rows, walks over the blocks of keys and keeps a
running maximum m and sum l of each row. The fast one, which overlaps the two products, is
`attention/kernels/softmax/forward_hopper.py`.
"""

import math

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import exp2, full, maximum, right_fill, row_max, row_sum, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st

D, KV, CONSUMERS, STAGES = 64, 128, 2, 2
PRODUCER, THREADS = CONSUMERS, warpgroup.THREADS * (CONSUMERS + 1)
READERS = CONSUMERS * warpgroup.WARPGROUP
LOWEST = -1e30  # a maximum to begin with, below every score
Q, K, O = st(64, D, bf16), st(KV, D, bf16), rt(16, D, fp32)
smem = shared(q=ring(Q, CONSUMERS), k=ring(K, STAGES, READERS), v=ring(K, STAGES, READERS))


@cuda.jit(launch_bounds=(THREADS, 1), fastmath=True)
def attend(gQ, gK, gV, gO, kv_len, scale):
    """One block of query rows of one head; `scale` is log2(e) / sqrt(D)."""
    q, k, v = smem.open()
    block, head = cuda.blockIdx.x, cuda.blockIdx.y
    blocks = (kv_len + KV - 1) // KV
    wg = warpgroup.id()
    if wg == PRODUCER:
        for c in range(CONSUMERS):
            q.fill(c, gQ, (CONSUMERS * block + c, head))
        for j in range(blocks):
            k.fill(j, gK, (j, head))
            v.fill(j, gV, (j, head))
    else:
        queries = q.wait(wg)
        m, l, o = full(O.col_vec, LOWEST), zeros(O.col_vec), zeros(O)
        for j in range(blocks):
            s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(j))) * scale
            k.release(j)
            s = right_fill(s, kv_len - KV * j, -math.inf)
            m_new = maximum(m, row_max(s))
            alpha = exp2(m - m_new)
            p = exp2(s - m_new)
            l = l * alpha + row_sum(p)
            m = m_new
            o = warpgroup.wait(warpgroup.mma_AB(o * alpha, bf16(p), v.wait(j)))
            v.release(j)
        warpgroup.store(gO, o / l, (Q.rows * (CONSUMERS * block + wg), head, 0), rows=0, cols=2)


def main(to_device=to_device, q_len=200, kv_len=300, heads=2):
    """Attention over lengths that are no multiples of the tiles', compared with the formula in float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, heads, D), np.float32).astype(bf16.np) for n in (q_len, kv_len, kv_len))
    out = to_device(np.full_like(q, np.nan))
    gQ, gK, gV = (tiles.tensor(to_device(x), tile, rows=0, cols=2) for x, tile in ((q, Q), (k, K), (v, K)))
    scale = math.log2(math.e) / math.sqrt(D)
    grid = -(-q_len // (Q.rows * CONSUMERS)), heads
    tiles.launch(attend, grid, THREADS, shared=smem)(gQ, gK, gV, out, kv_len, scale)

    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    p = np.exp(np.einsum("ihd,jhd->hij", q, k) / math.sqrt(D))
    exact = np.einsum("hij,jhd->ihd", p / p.sum(axis=2, keepdims=True), v)
    np.testing.assert_allclose(to_host(out), exact, rtol=2**-7, atol=2**-7)
    print(f"attention, {heads} heads of {q_len} queries and {kv_len} keys: agrees with NumPy")


if __name__ == "__main__":
    main()
