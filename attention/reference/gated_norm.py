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
    u, weight, gate_factor, _, r, round_operand = _intermediates(x, weight, gate, eps, activation, norm_before_gate, low)
    return round_operand(round_operand(u * r * weight) * (gate_factor if norm_before_gate else 1))


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
    u, weight, gate_factor, derivative, r, round_operand = _intermediates(
        x, weight, gate, eps, activation, norm_before_gate, low
    )
    x, dy = (host(y).astype(u.dtype) for y in (x, dout))
    factor_after, factor_before = (gate_factor, 1) if norm_before_gate else (1, gate_factor)
    n, dscaled = round_operand(u * r), round_operand(dy * factor_after)
    dn = round_operand(dscaled * weight)
    du = round_operand((dn - n * (dn * n).mean(-1, keepdims=True)) * r)
    token_axes = tuple(range(x.ndim - host(weight).ndim))
    dgate = dy * n * weight * derivative if norm_before_gate else du * x * derivative
    return {"dx": round_operand(du * factor_before), "dweight": (dscaled * n).sum(token_axes), "dgate": round_operand(dgate)}


def _intermediates(x: Any, weight: Any, gate: Any, eps: float, activation: str, norm_before_gate: bool, low: bool) -> tuple:
    """(u, weight, act(gate), act'(gate), 1 / sqrt(mean(u^2) + eps), rounding). Without a gate act(gate) is 1."""
    real, round_operand = np.float32 if low else np.float64, _rounding_to(host(x).dtype, low)
    rows, weight = host(x).astype(real), round_operand(host(weight).astype(real))
    z = np.zeros(rows.shape, real) if gate is None else host(gate).astype(real)
    s = 1 / (1 + np.exp(-z))
    gate_factor, derivative = (z * s, s + z * s * (1 - s)) if activation == "silu" else (s, s * (1 - s))
    gate_factor = np.ones_like(gate_factor) if gate is None else round_operand(gate_factor)
    u = rows if norm_before_gate else round_operand(rows * gate_factor)
    return u, weight, gate_factor, derivative, 1 / np.sqrt((u * u).mean(-1, keepdims=True) + eps), round_operand
