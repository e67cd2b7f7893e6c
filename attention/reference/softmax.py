"""Softmax attention: the formula itself, in NumPy.

For query i and key j of a head (K and V heads shared by heads_q // heads_kv query heads):

    s[i, j] = scale * q[i] . k[j]                   -inf where causal and j > i + Sk - Sq
    lse[i]  = log(sum_j exp(s[i, j]))               natural logarithm; -inf for a row without keys
    out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]    0 for a row without keys
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiles.schema import ORDER
from tiles.testing.compare import host

ROWS = 1024  # rows of scores that are held at once


def forward(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64: out in the caller's layout, lse (B, Hq, Sq).

    Takes host arrays of any float dtype and any framework that `arrays.describe` knows; trusts their shapes.
    """
    return _forward(host(q), host(k), host(v), causal, scale, layout, np.float64, np.float64)


def forward_low(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as the input dtype allows: scores, softmax and sums in float32, P and out rounded to q's dtype.

    Returns out in q's dtype and lse in float32: what a faithful kernel may lose, and the yardstick of `tolerance`.
    """
    q, k, v = map(host, (q, k, v))
    return _forward(q, k, v, causal, scale, layout, np.float32, q.dtype)


def _forward(q, k, v, causal, scale, layout, real, rounded):
    """The formula in dtype `real`, with P and out rounded to dtype `rounded`."""
    axes = np.argsort(ORDER[layout])  # canonical (B, S, H, D) <-> the caller's: both permutations are their own inverse
    q, k, v = (x.transpose(axes).astype(real) for x in (q, k, v))
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_kv, heads_kv = k.shape[1:3]
    scale = real(head_dim**-0.5 if scale is None else scale)
    out = np.zeros(q.shape, rounded)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, real)
    for b, h, start in np.ndindex(batch, heads_q, -(-seqlen_q // ROWS)):
        rows = np.arange(start * ROWS, min(start * ROWS + ROWS, seqlen_q))
        keys, values = k[b, :, h * heads_kv // heads_q], v[b, :, h * heads_kv // heads_q]
        s = q[b, rows, h] @ keys.T * scale
        if causal:
            s[np.arange(seqlen_kv) > rows[:, None] + seqlen_kv - seqlen_q] = -np.inf
        top = s.max(axis=1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(top == -np.inf, 0, top))  # a row without keys is all exp(-inf) = 0
        total = p.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[b, h, rows] = (np.log(total) + top)[:, 0]
        p = (p / np.where(total == 0, 1, total)).astype(rounded).astype(real)
        out[b, rows, h] = (p @ values).astype(rounded)
    return out.transpose(axes), lse
