"""The gradients of linear attention, in NumPy, token by token. With S_t, o_t and the arguments as in linear.py, dout the
gradient of o, and dstate that of the state after the last token (0 by default), from the last token to the first:

    dS     = dS + scale q dout^T           dS = dstate after the last token
    dk     = dS v                          dv    = dS^T k
    dq     = scale S dout                  ddecay = exp(decay) sum(S_(t-1) * dS), over all of S, or over each of its rows
    dS     = exp(decay) * dS               of the token before; at last the gradient of the initial state

The gradients of a key head are sums over the value heads that share it; that of a decay of each head is a sum over all
tokens."""

from itertools import pairwise
from typing import Any

import numpy as np

from tiles.calls.schema import ORDER
from tiles.testing.compare import host

from .linear import _expand_to_tokens, _rounding_to


def linear_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dq": , "dk": , "dv": , "ddecay": , "dinitial_state": } of whole sequences, without "ddecay" where there is no decay.

    The arguments are those of `linear`, in float64; with `low` sums are computed in float32, and what is multiplied (P, S and
    dS) and dq, dk and dv are rounded to v's dtype."""
    axes, dtype = np.argsort(ORDER[layout]), host(v).dtype
    rounded, real = _rounding_to(dtype, low), np.float32 if low else np.float64
    do, q, k, v = (host(x).transpose(axes).astype(real) for x in (dout, q, k, v))
    key_heads, heads, key_dim = q.shape[2], v.shape[2], q.shape[3]
    scale = real(key_dim**-0.5 if scale is None else scale)
    q, k = (x.repeat(heads // key_heads, axis=2) for x in (q, k))
    g = np.zeros((*v.shape[:3], 1), real) if decay is None else _expand_to_tokens(decay, axes, v.shape[:3]).astype(real)
    sequences = [slice(None)] if cu_seqlens is None else [slice(*ends) for ends in pairwise(host(cu_seqlens))]
    count = len(v) if cu_seqlens is None else len(sequences)
    S, dS = (
        np.zeros((count, heads, key_dim, v.shape[3]), real) if x is None else host(x).astype(real)
        for x in (initial_state, dstate)
    )
    dq, dk, dv, dg, first = (
        np.zeros_like(q),
        np.zeros_like(k),
        np.zeros_like(v),
        np.zeros(np.broadcast_shapes(g.shape), real),
        dS.copy(),
    )
    for n, tokens in enumerate(sequences):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        inputs = [x[:, tokens] for x in (do, q, k, v, g)]
        dq[:, tokens], dk[:, tokens], dv[:, tokens], dg[:, tokens], first[rows] = _walk(
            inputs, S[rows], dS[rows], scale, rounded
        )
    results = {"dq": _sum_heads(dq, key_heads), "dk": _sum_heads(dk, key_heads), "dv": dv}
    results = {name: rounded(x).transpose(axes) for name, x in results.items()} | {"dinitial_state": first}
    if decay is not None:
        shape = host(decay).shape
        results["ddecay"] = dg.sum((0, 1))[:, 0] if len(shape) == 1 else dg.transpose(axes).reshape(shape)
    return results


def _walk(inputs, S, dS, scale, rounded):
    """(dq, dk, dv, ddecay, the gradient of S) of a sequence that starts from S, where dS is the gradient of its last state."""
    do, q, k, v, g = inputs
    length, states = q.shape[1], [S]
    for t in range(length):
        states.append(np.exp(g[:, t])[..., None] * states[-1] + k[:, t, :, :, None] * v[:, t, :, None])
    dq, dk, dv, dg = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(g)
    for t in reversed(range(length)):
        dq[:, t] = scale * _apply(rounded(states[t + 1]), do[:, t])
        dS = dS + scale * q[:, t, :, :, None] * do[:, t, :, None]
        dk[:, t], dv[:, t] = _apply(rounded(dS), v[:, t]), _apply(rounded(dS).swapaxes(2, 3), k[:, t])
        dS = np.exp(g[:, t])[..., None] * dS
        products = (rounded(states[t]) * rounded(dS)).sum(-1)
        dg[:, t] = products if g.shape[-1] > 1 else products.sum(-1, keepdims=True)
    return dq, dk, dv, dg, dS


def _apply(S, x):
    """S x: S (B, H, Dk, Dv), x (B, H, Dv)."""
    return (S @ x[..., None])[..., 0]


def _sum_heads(x, key_heads):
    """The sum over the value heads of each key head."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, key_heads, heads // key_heads, dim).sum(3)
