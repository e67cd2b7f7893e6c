"""The gated RMS norm and its gradients, in NumPy. With u = x, or x act(gate) where the gate comes first,

    n = u / sqrt(mean(u^2) + eps)        y = n weight act(gate), or n weight where the gate comes first

The gradients are those of each factor: see gated_rms_norm_backward."""

from typing import Any

import numpy as np

from tiles.testing.compare import host

from .linear import _rounding_to


def gated_rms_norm(
    x: Any,
    weight: Any,
    gate: Any = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    low: bool = False,
) -> np.ndarray:
    """y of attention.gated_rms_norm, in float64; with `low` weights, each factor and y are rounded to x's dtype, and means are
    float32."""
    u, weight, a, _, r, rounded = _parts(x, weight, gate, eps, activation, norm_before_gate, low)
    return rounded(rounded(u * r * weight) * (a if norm_before_gate else 1))


def gated_rms_norm_backward(
    dout: Any,
    x: Any,
    weight: Any,
    gate: Any = None,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dx": , "dweight": , "dgate": } of attention.gated_rms_norm, in float64; with `low`, as there."""
    u, weight, a, slope, r, rounded = _parts(x, weight, gate, eps, activation, norm_before_gate, low)
    x, dy = (host(y).astype(u.dtype) for y in (x, dout))
    after, first = (a, 1) if norm_before_gate else (1, a)
    n, dscaled = rounded(u * r), rounded(dy * after)
    dn = rounded(dscaled * weight)
    du = rounded((dn - n * (dn * n).mean(-1, keepdims=True)) * r)
    over = tuple(range(x.ndim - host(weight).ndim))
    dgate = dy * n * weight * slope if norm_before_gate else du * x * slope
    return {"dx": rounded(du * first), "dweight": (dscaled * n).sum(over), "dgate": rounded(dgate)}


def _parts(x: Any, weight: Any, gate: Any, eps: float, activation: str, norm_before_gate: bool, low: bool) -> tuple:
    """(u, weight, act(gate), act'(gate), 1 / sqrt(mean(u^2) + eps), rounding). Without a gate act(gate) is 1."""
    real, rounded = np.float32 if low else np.float64, _rounding_to(host(x).dtype, low)
    rows, weight = host(x).astype(real), rounded(host(weight).astype(real))
    z = np.zeros(rows.shape, real) if gate is None else host(gate).astype(real)
    s = 1 / (1 + np.exp(-z))
    a, slope = (z * s, s + z * s * (1 - s)) if activation == "silu" else (s, s * (1 - s))
    a = np.ones_like(a) if gate is None else rounded(a)
    u = rows if norm_before_gate else rounded(rows * a)
    return u, weight, a, slope, 1 / np.sqrt((u * u).mean(-1, keepdims=True) + eps), rounded
