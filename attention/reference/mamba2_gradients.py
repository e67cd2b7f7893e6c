"""The gradients of Mamba-2, in NumPy: those of linear attention with q = C, k = B, v = dt x, decay = dt A, a scale of 1 and a
transposed state (linear_gradients.py), and of what is around it (`mamba2` in linear.py),

    dy = dout silu(z)                     dz = dout y silu'(z), for y before the gate
    dx = dt dv + D dy                     dD = sum of dy x, over tokens, and over columns if D has none
    ddt = dv . x + A ddecay               dA = sum of dt ddecay over tokens

where dt is softplus(dt + dt_bias) within limits. Its gradient is 0 beyond these, and passes softplus; ddt_bias is its sum."""

from typing import Any

import numpy as np

from tiles.testing.compare import host

from .linear import _rounding_to, mamba2
from .linear_gradients import linear_backward


def mamba2_backward(
    dout: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, np.inf),
    initial_states: Any = None,
    dstates: Any = None,
    cu_seqlens: Any = None,
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dx": , "ddt": , "dA": , "dB": , "dC": , "dinitial_states": } and "dD", "dz" and "ddt_bias" where there are such arrays.

    The arguments are those of `mamba2`, and its gradients, in float64; with `low` as in `linear_backward`, and dt x and dy are
    rounded, too."""
    x, real = host(x), np.float32 if low else np.float64
    dtype, round_operand = x.dtype, _rounding_to(x.dtype, low)
    swapped = {name: None if s is None else host(s).swapaxes(2, 3) for name, s in (("S", initial_states), ("dS", dstates))}
    values, rate, unclipped, dy = (host(a).astype(real) for a in (x, A, dt, dout))
    if cu_seqlens is not None:
        padding = slice(int(host(cu_seqlens)[-1]), None)
        values, dy = values.copy(), dy.copy()
        values[:, padding] = dy[:, padding] = 0
    if dt_bias is not None:
        unclipped = unclipped + host(dt_bias).astype(real)
    derivative = 1 / (1 + np.exp(-unclipped)) if dt_softplus else 1
    if dt_softplus:
        unclipped = np.logaddexp(unclipped, real(0))
    steps = unclipped.clip(*map(real, dt_limit))
    doutput = dy
    if z is not None:
        gate = host(z).astype(real)
        sigmoid = 1 / (1 + np.exp(-gate))
        dy = round_operand(dy * gate * sigmoid)
    u = round_operand(steps[..., None] * values)
    u, dy_operand = (a.astype(dtype if low else real) for a in (u, dy))
    options = {"initial_state": swapped["S"], "dstate": swapped["dS"], "cu_seqlens": cu_seqlens, "scale": 1, "low": low}
    gradients = linear_backward(dy_operand, C, B, u, decay=steps * rate, **options)
    du, dg = gradients["dv"], gradients["ddecay"]
    skip = 0 if D is None else np.broadcast_to(host(D).astype(real).reshape(x.shape[2], -1), x.shape[2:])
    ddt_raw = ((du * values).sum(-1) + rate * dg) * derivative * ((unclipped >= dt_limit[0]) & (unclipped <= dt_limit[1]))
    results = {"dx": round_operand(steps[..., None] * du + skip * dy), "ddt": ddt_raw, "dA": (steps * dg).sum((0, 1))}
    results |= {"dB": gradients["dk"], "dC": gradients["dq"]}
    results["dinitial_states"] = gradients["dinitial_state"].swapaxes(2, 3)
    if D is not None:
        dD = (dy * values).sum((0, 1))
        results["dD"] = dD if host(D).ndim == 2 else dD.sum(-1)
    if z is not None:
        shared = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        y, _ = mamba2(x, dt, A, B, C, **shared, initial_states=initial_states, cu_seqlens=cu_seqlens, low=low)
        dz = doutput * y * sigmoid * (1 + gate * (1 - sigmoid))
        if cu_seqlens is not None:
            dz[:, padding] = 0
        results["dz"] = round_operand(dz)
    if dt_bias is not None:
        results["ddt_bias"] = ddt_raw.sum((0, 1))
    return results
