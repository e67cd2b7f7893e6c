"""The gradients of linear attention, in NumPy, token by token. With S_t, o_t and the arguments as in linear.py, dout the
gradient of o, and dstate that of the state after the last token (0 by default), from the last token to the first:

    dS     = dS + scale q dout^T           dS = dstate after the last token
    dk     = dS v                          dv    = dS^T k
    dq     = scale S dout                  ddecay = exp(decay) sum(S_(t-1) * dS), over all of S, or over each of its rows
    dS     = exp(decay) * dS               of the token before; at last the gradient of the initial state

Under the delta rule S_t = S' + k u^T, with u = beta e, e = v - S'^T k, and S' = exp(decay) S_(t-1). Then dS^T k is du, and

    dv     = beta du                       dk    = dS u - S' dv
    dbeta  = du . e                        dS    = dS - k dv^T              before it decays

With a normalizer, which is an output n for a value that is always 1, the gradients are those of outputs N and n: dout / n and
-(dout . N) / n^2.

The gradients of a key head are sums over the value heads that share it; that of a decay of each head is a sum over all
tokens."""

from itertools import pairwise
from typing import Any

import numpy as np

from tiles.calls.schema import ORDER
from tiles.testing.compare import host

from .linear import EPSILON, _append_z, _expand_to_tokens, _rounding_to, linear


def linear_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dq": , "dk": , "dv": , "ddecay": , "dbeta": , "dinitial_state": } of whole sequences, without "ddecay" where there is
    no decay, and without "dbeta" where there is no beta. normalize: states are pairs (S, z), and so is "dinitial_state".

    The arguments are those of `linear`, in float64; with `low` sums are computed in float32, and what is multiplied (P, S and
    dS, the delta rule's u and dv) and dq, dk and dv are rounded to v's dtype."""
    if normalize:
        shared = {"decay": decay, "scale": scale, "cu_seqlens": cu_seqlens, "layout": layout, "low": low}
        return _normalized_backward(dout, q, k, v, initial_state, dstate, shared)
    axes, dtype = np.argsort(ORDER[layout]), host(v).dtype
    round_operand, real = _rounding_to(dtype, low), np.float32 if low else np.float64
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
    b = None if beta is None else _expand_to_tokens(beta, axes, v.shape[:3]).astype(real)
    gradients = [np.zeros_like(x) for x in (q, k, v, g)] + [None if b is None else np.zeros_like(b)]
    dinitial_state = dS.copy()
    for n, tokens in enumerate(sequences):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        inputs = [None if x is None else x[:, tokens] for x in (do, q, k, v, g, b)]
        outputs = [None if x is None else x[:, tokens] for x in gradients]
        dinitial_state[rows] = _walk(inputs, outputs, S[rows], dS[rows], scale, round_operand)
    dq, dk, dv, dg, db = gradients
    results = {"dq": _sum_heads(dq, key_heads), "dk": _sum_heads(dk, key_heads), "dv": dv}
    results = {name: round_operand(x).transpose(axes) for name, x in results.items()} | {"dinitial_state": dinitial_state}
    if decay is not None:
        shape = host(decay).shape
        results["ddecay"] = dg.sum((0, 1))[:, 0] if len(shape) == 1 else dg.transpose(axes).reshape(shape)
    if beta is not None:
        results["dbeta"] = db.transpose(axes)[..., 0]
    return results


def _normalized_backward(dout, q, k, v, initial_state, dstate, shared):
    """`linear_backward` with normalize=True. shared: the options of `linear` and its gradients."""
    real, v = np.float32 if shared["low"] else np.float64, host(v)
    values = np.concatenate([v, np.ones_like(v[..., :1])], -1)
    start, dend = (None if x is None else _append_z(x) for x in (initial_state, dstate))
    out, _ = linear(q, k, values, **shared, initial_state=start)
    dout, out, n = host(dout).astype(real), out[..., :-1].astype(real), out[..., -1:].astype(real) + real(EPSILON)
    n = np.where(n == real(EPSILON), real(1), n)  # of tokens that belong to no sequence
    doutputs = np.concatenate([dout / n, -(dout * out).sum(-1, keepdims=True) / n**2], -1)
    if shared["low"]:
        doutputs = doutputs.astype(v.dtype)
    results = linear_backward(doutputs, q, k, values, **shared, initial_state=start, dstate=dend)
    dstart = results["dinitial_state"]
    return results | {"dv": results["dv"][..., :-1], "dinitial_state": (dstart[..., :-1], dstart[..., -1])}


def _walk(inputs, gradients, S, dS, scale, round_operand):
    """Write the gradients of the inputs q, k, v, decay and beta of a sequence that starts from S, where dS is the gradient of
    its last state, and return that of S."""
    do, q, k, v, g, beta = inputs
    dq, dk, dv, dg, dbeta = gradients
    length, states, errors, updates = q.shape[1], [S], np.zeros_like(v), v
    if beta is not None:
        updates = np.zeros_like(v)
    for t in range(length):
        S = np.exp(g[:, t])[..., None] * S
        if beta is not None:
            errors[:, t] = v[:, t] - _apply(round_operand(S).swapaxes(2, 3), k[:, t])
            updates[:, t] = round_operand(beta[:, t] * errors[:, t])
        S = S + k[:, t, :, :, None] * updates[:, t, :, None]
        states.append(S)
    for t in reversed(range(length)):
        dq[:, t] = scale * _apply(round_operand(states[t + 1]), do[:, t])
        dS = dS + scale * q[:, t, :, :, None] * do[:, t, :, None]
        dk[:, t], dv[:, t] = _apply(round_operand(dS), updates[:, t]), _apply(round_operand(dS).swapaxes(2, 3), k[:, t])
        if beta is not None:
            dbeta[:, t] = (dv[:, t] * errors[:, t]).sum(-1, keepdims=True)
            dv[:, t] = beta[:, t] * dv[:, t]
            dk[:, t] -= _apply(round_operand(np.exp(g[:, t])[..., None] * states[t]), round_operand(dv[:, t]))
            dS = dS - k[:, t, :, :, None] * round_operand(dv[:, t])[:, :, None]
        dS = np.exp(g[:, t])[..., None] * dS
        products = (round_operand(states[t]) * round_operand(dS)).sum(-1)
        dg[:, t] = products if g.shape[-1] > 1 else products.sum(-1, keepdims=True)
    return dS


def _apply(S, x):
    """S x: S (B, H, Dk, Dv), x (B, H, Dv)."""
    return (S @ x[..., None])[..., 0]


def _sum_heads(x, key_heads):
    """The sum over the value heads of each key head."""
    batch, length, heads, dim = x.shape
    return x.reshape(batch, length, key_heads, heads // key_heads, dim).sum(3)
