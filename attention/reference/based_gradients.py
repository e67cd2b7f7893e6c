"""The gradients of Based, in NumPy: those of linear attention with its features as queries and keys (linear_gradients.py),
taken back to these. States have the 160 features of attention.based."""

from typing import Any

import numpy as np

from tiles.testing.compare import host

from .linear import _rounding_to
from .linear_gradients import linear_backward

BASE, FEATURES, ONE = 16, 160, 136  # columns of a row; features; the feature that is always 1
PAIRS = [(BASE * d + i, i, (i + d) % BASE) for i in range(BASE) for d in range(9 if i < 8 else 8)]  # (feature, i, j) of x_i x_j


def based_features(x: np.ndarray, squares: float) -> np.ndarray:
    """f(x) of rows x. squares: what x_i^2 is multiplied by."""
    f = np.zeros((*x.shape[:-1], FEATURES), x.dtype)
    for feature, i, j in PAIRS:
        f[..., feature] = x[..., i] * x[..., j] * (squares if i == j else 1)
    f[..., ONE], f[..., -BASE:] = 1, x
    return f


def _differentiate_features(x, df, squares):
    """The gradient of rows x, from that of their features."""
    dx = df[..., -BASE:].copy()
    for feature, i, j in PAIRS:
        products = df[..., feature] * (squares if i == j else 1)
        dx[..., i] += products * x[..., j]
        dx[..., j] += products * x[..., i]
    return dx


def based_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Any = None,
    dstate: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    low: bool = False,
) -> dict[str, Any]:
    """{"dq": , "dk": , "dv": , "dinitial_state": }, in float64; with `low` as in `linear_backward`, features and their
    gradients rounded, too. States are pairs with `normalize`."""
    real, dtype = np.float32 if low else np.float64, host(v).dtype
    round_operand, scale = _rounding_to(dtype, low), BASE**-0.5 if scale is None else scale
    rows = {"q": round_operand(host(q).astype(real) * real(scale)), "k": host(k).astype(real)}
    squares = {"q": 1, "k": 0.5}
    features = {x: round_operand(based_features(rows[x], squares[x])).astype(dtype if low else real) for x in rows}
    options = {"initial_state": initial_state, "dstate": dstate, "cu_seqlens": cu_seqlens, "layout": layout, "low": low}
    results = linear_backward(dout, features["q"], features["k"], v, scale=1, normalize=normalize, **options)
    row_gradients = {x: _differentiate_features(rows[x], results["d" + x], squares[x]) for x in rows}
    return results | {"dq": round_operand(row_gradients["q"] * real(scale)), "dk": round_operand(row_gradients["k"])}
