"""The formula itself, in NumPy, and the rule by which a result is judged against it.

For query i and key j of a head (K and V heads shared by heads_q // heads_kv query heads):

    s[i, j] = scale * q[i] . k[j]                   -inf where causal and j > i + Sk - Sq
    lse[i]  = log(sum_j exp(s[i, j]))               natural logarithm; -inf for a row without keys
    out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]    0 for a row without keys
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tiles.arrays import describe, numpy_view

from .problem import AXES

ROWS = 1024  # rows of scores that are held at once


def forward(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64: out in the caller's layout, lse (B, Hq, Sq).

    Takes host arrays of any float dtype and any framework that `arrays.describe` knows; trusts their shapes.
    """
    return _forward(_host(q), _host(k), _host(v), causal, scale, layout, np.float64, np.float64)


def forward_low(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as the input dtype allows: scores, softmax and sums in float32, P and out rounded to q's dtype.

    Returns out in q's dtype and lse in float32: what a faithful kernel may lose, and the yardstick of `tolerance`.
    """
    q, k, v = map(_host, (q, k, v))
    return _forward(q, k, v, causal, scale, layout, np.float32, q.dtype)


def _forward(q, k, v, causal, scale, layout, real, rounded):
    """The formula in dtype `real`, with P and out rounded to dtype `rounded`."""
    axes = np.argsort(AXES[layout])  # canonical (B, S, H, D) <-> the caller's: both permutations are their own inverse
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


def tolerance(ref: Any, low: Any, dtype: Any, *, factor: float = 2) -> float:
    """factor * max|low - ref| + u * max|ref|, u being the unit roundoff of dtype: half the gap after 1.

    FlashAttention's rule (factor 2; 3 for gradients) with one rounding of the greatest element as its floor. Elements
    where ref is infinite do not count. Raises ValueError if ref or low has a NaN.
    """
    ref, low = (_host(x).astype(np.float64) for x in (ref, low))
    if np.isnan(ref).any() or np.isnan(low).any():
        raise ValueError(f"NaN in {np.isnan(ref).sum()} elements of ref and {np.isnan(low).sum()} of low")
    finite = np.isfinite(ref)
    roundoff = float(ml_dtypes.finfo(dtype).eps) / 2
    error = np.abs(low[finite] - ref[finite]).max(initial=0)
    return float(factor * error + roundoff * np.abs(ref[finite]).max(initial=0))


def assert_close(out: Any, ref: Any, low: Any, *, factor: float = 2, name: str = "out") -> None:
    """Assert |out - ref| <= tolerance(ref, low, out's dtype) everywhere, and equal infinities; NaN never passes.

    The AssertionError prints the worst element, its index and the limit. Shapes must be equal.
    """
    out, ref = _host(out), _host(ref)
    limit = tolerance(ref, low, out.dtype, factor=factor)
    assert out.shape == ref.shape, f"{name}: {out.shape=} is not {ref.shape=}"
    wide = out.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(wide == ref, 0, np.abs(wide - ref))
    bad = ~(error <= limit)
    if bad.any():
        worst = np.unravel_index(np.where(np.isnan(error), np.inf, error).argmax(), error.shape)
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} elements are off, {np.isnan(wide).sum()} of them NaN; the worst: "
            f"{name}{list(map(int, worst))} = {wide[worst]}, not {ref[worst]}; error {error[worst]:.2g} > {limit:.2g}"
        )


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else numpy_view(describe(x, "array"))
