"""A variant of attention in a page: each query sees the last `window` keys, and scores are capped, cap tanh(s / cap) (Gemma 2).

One warp takes 16 queries and multiplies by mma.sync, so it runs on every GPU since Ampere; what a warpgroup would gain from TMA
and wgmma is in flash_attention.py. Blocks of keys that no query of the 16 sees are not visited.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import causal, exp, full, load, maximum, mma_AB, mma_ABt, row_max, row_sum, store, tanh, triu, zeros
from tiles import bf16, fp32, inlined, rt

ROWS, KEYS, D = 16, 32, 64
Q, K, V = rt(ROWS, D, bf16), rt(KEYS, D, bf16), rt(KEYS, D, bf16, "col")
S, O = rt(ROWS, KEYS, fp32), rt(ROWS, D, fp32)
LOWEST = -1e30  # the score of a key that is not seen: below every other


class WindowState(NamedTuple):
    """The weighted values so far, the greatest score of each row, and the sum of exponentials relative to it."""

    o: Any
    m: Any
    l: Any

    @inlined
    def absorb(self, s, v):
        m = maximum(self.m, row_max(s))
        p, alpha = exp(s - m), exp(self.m - m)
        return WindowState(mma_AB(self.o * alpha, bf16(p), v), m, self.l * alpha + row_sum(p))


@cuda.jit
def attend(q, k, v, out, window, cap):
    """16 queries of one head: out = softmax(cap tanh(q kᵀ / (cap sqrt(D)))) v over the keys j with i - window < j <= i."""
    row, head = ROWS * cuda.blockIdx.x, cuda.blockIdx.y
    queries = load(q, Q, (row, head, 0), rows=0, cols=2)
    first = max(row - window + 1, 0) // KEYS
    state = WindowState(zeros(O), full(S.col_vec, LOWEST), zeros(S.col_vec))
    for col in range(KEYS * first, row + ROWS, KEYS):
        s = mma_ABt(zeros(S), queries, load(k, K, (col, head, 0), rows=0, cols=2)) / math.sqrt(D)
        s = cap * tanh(s / cap)
        s = causal(s, row - col, LOWEST)  # no key after the query
        s = triu(s, row - col - window + 1, LOWEST)  # and none before its window
        state = state.absorb(s, load(v, V, (col, head, 0), rows=0, cols=2))
    store(out, state.o / state.l, (row, head, 0), rows=0, cols=2)


def main(to_device=to_device, length=100, window=40, cap=3.0, heads=2):
    """Over a length that is no multiple of the tiles', compared with the formula in float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, heads, D), np.float32).astype(bf16.np) for _ in range(3))
    out = to_device(np.full_like(q, np.nan))
    tiles.launch(attend, (-(-length // ROWS), heads), 32)(*map(to_device, (q, k, v)), out, window, cap)

    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = cap * np.tanh(np.einsum("ihd,jhd->hij", q, k) / math.sqrt(D) / cap)
    i, j = np.indices((length, length))
    p = np.where((j <= i) & (j > i - window), np.exp(s), 0)
    exact = np.einsum("hij,jhd->ihd", p / p.sum(axis=2, keepdims=True), v)
    np.testing.assert_allclose(to_host(out), exact, rtol=2**-7, atol=2**-6)
    print(f"attention over windows of {window}, {heads} heads of {length} tokens: agrees with NumPy")


if __name__ == "__main__":
    main()
