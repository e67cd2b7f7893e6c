"""The gradients of softmax attention, in NumPy. With x, s, lse and out as in softmax.py, dout the gradient of out and dlse that
of lse (0 by default, and of rows that see nothing):

    P[i, j]  = exp(s[i, j] - lse[i])
    delta[i] = dout[i] . out[i] - dlse[i]
    dv[j]    = sum_i P[i, j] dout[i]
    ds[i, j] = P[i, j] (dout[i] . v[j] - delta[i])
    dS[i, j] = ds[i, j] times the derivative of s[i, j] by x[i, j]: 1 - tanh(x / softcap)^2, of score what differences say
    dq[i]    = scale * sum_j dS[i, j] k[j]
    dk[j]    = scale * sum_i dS[i, j] q[i]

    dbias    = the sum of ds[i, j] times score's derivative, over all i and j that share an element
    dalibi   = the same times -|d - j|
    daux     = the same with score's derivative by an element
    dsink    = -sum_i exp(sink - lse[i]) delta[i]

With norms of q and k, y = n weights + bias of a row x, n = (x - mean) / deviation (an RMS norm has no mean):

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

With dropout a term of dv, and dout[i] . v[j] in dS, is multiplied by 1 / (1 - dropout) or by 0, as in softmax.py.
A key head's gradients are the sums of those of the query heads that share it, dsink[h] is one of all batches.
"""

import itertools
from typing import Any

import numpy as np

from tiles.schema import ORDER
from tiles.testing.compare import host

from . import softmax
from .scores import ReferenceVariant


def backward(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv), then dbias and dalibi if dbias=True and dalibi=True ask for them, dsink with a sink, and with daux=True the
    gradient of each array of aux that is not of integers; in float64, in the caller's layout. Arrays as `forward` takes them;
    options: dlse (B, H, Sq), causal, window, softcap, alibi, bias, mask, score, aux, blocks, sink, cu_seqlens, cu_seqlens_k,
    lengths_k, dropout and seed or keep, scale, layout. by: the output to go by instead of the exact one."""
    dout, q, k, v = map(host, (dout, q, k, v))
    return _through_norms(dout, q, k, v, np.float64, np.float64, **options)


def backward_low(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """The same as the input dtype allows: sums in float32; out, P, dS and the gradients rounded to q's dtype."""
    dout, q, k, v = map(host, (dout, q, k, v))
    return _through_norms(dout, q, k, v, np.float32, q.dtype, **options)


def _through_norms(dout, q, k, v, real, rounded, *, q_norm=None, k_norm=None, norm_eps=1e-6, layout="bshd", **options):
    """The gradients, and behind them those of norms: of each an array, or a pair (of the weights, of the bias)."""
    axes, of_norms = np.argsort(ORDER[layout]), []
    rows = [x.transpose(axes).astype(real) for x in (q, k)]
    q, k = (
        softmax.normalize_rows(x, norm, norm_eps, real, rounded).transpose(axes).astype(rounded)
        for x, norm in zip(rows, (q_norm, k_norm))
    )
    found = [*_backward(dout, q, k, v, real, rounded, layout=layout, **options)]
    for n, (x, norm) in enumerate(zip(rows, (q_norm, k_norm))):
        if norm is not None:
            dx, *of_norm = _of_norm(x, norm, found[n].transpose(axes).astype(real), norm_eps, real)
            found[n] = dx.astype(rounded).transpose(axes)
            of_norms.append(tuple(of_norm) if isinstance(norm, tuple) else of_norm[0])
    return *found, *of_norms


def _of_norm(x, norm, dy, eps, real):
    """(dx, dweights, dbias) of rows x (B, S, H, D) and the gradient dy of what they became."""
    layer = isinstance(norm, tuple)
    weights, bias = map(host, norm) if layer else (host(norm), host(norm))
    x = x - x.mean(-1, keepdims=True) * layer
    deviation = np.sqrt((x * x).mean(-1, keepdims=True) + real(eps))
    n, dn = x / deviation, dy * weights.astype(real)
    dx = (dn - dn.mean(-1, keepdims=True) * layer - n * (dn * n).mean(-1, keepdims=True)) / deviation
    sums = [y.sum((0, 1) if like.ndim == 2 else (0, 1, 2)) for y, like in ((dy * n, weights), (dy, bias))]
    return dx, *sums


def _backward(
    dout, q, k, v, real, rounded, *, scale=None, layout="bshd", sink=None, cu_seqlens=None, cu_seqlens_k=None, lengths_k=None,
    dropout=0.0, seed=None, keep=None, dlse=None, dbias=False, dalibi=False, daux=False, by=None, **of_scores,
):  # fmt: skip
    """The formulas in dtype `real`, with out, P, dS and the gradients rounded to dtype `rounded`."""
    formula, lie = softmax.forward if real is np.float64 else softmax.forward_low, (cu_seqlens, cu_seqlens_k, lengths_k)
    ends = dict(zip(("cu_seqlens", "cu_seqlens_k", "lengths_k"), lie))
    of_weights = {"sink": sink, "dropout": dropout, "seed": seed, "keep": keep}
    out, lse = formula(q, k, v, scale=scale, layout=layout, **of_weights, **ends, **of_scores)
    out = out if by is None else host(by)
    axes = np.argsort(ORDER[layout])
    dout, q, k, v, out = (x.transpose(axes).astype(real) for x in (dout, q, k, v, out))
    variant, (*_, heads, head_dim) = ReferenceVariant(**of_scores).cast(real), q.shape
    kept = softmax.keep_function(dropout, seed, keep)
    scale = real(head_dim**-0.5 if scale is None else scale)
    dq, dk, dv = (np.zeros(x.shape, real) for x in (q, k, v))
    dsink = np.zeros(heads, real)
    of_bias, of_alibi = (None if x is None else np.zeros(x.shape, real) for x in (variant.bias, variant.alibi))
    of_aux = {n: np.zeros(x.shape, real) for n, x in enumerate(variant.aux) if daux and x.dtype.kind not in "biu"}
    for (b, place, queries, keys), h in itertools.product(softmax.sequence_slices(q.shape, k.shape, *lie), range(heads)):
        g, mine = h * k.shape[2] // heads, (place, queries, h)
        its = place, keys, g
        i, j = np.arange(queries.stop - queries.start)[:, None], np.arange(keys.stop - keys.start)[None]
        x, at = q[mine] @ k[its].T * scale, (b, h, i, j, j.size - i.size)
        s = variant.scores(x, *at)
        of_rows = lse[place, h, queries]
        top = np.where(np.isfinite(of_rows), of_rows, 0)[:, None]  # a row without keys is all exp(-inf) = 0
        p = np.exp(s - top)
        left = real(1) if kept is None else np.where(kept(b, h, i, j), 1 / real(1 - dropout), 0)
        delta = (dout[mine] * out[mine]).sum(1, keepdims=True)
        if dlse is not None:
            delta -= np.where(np.isfinite(of_rows), host(dlse)[place, h, queries].astype(real), 0)[:, None]
        of_score = p * (left * (dout[mine] @ v[its].T) - delta)
        ds = of_score * variant.score_grad(x, *at).astype(real)
        if dbias:
            one = b if of_bias.shape[0] > 1 else 0, h if of_bias.shape[1] > 1 else 0
            shared = ds if of_bias.shape[2] > 1 else ds.sum(0, keepdims=True)
            of_bias[one][: len(shared), : j.size] += shared
        if dalibi:
            of_alibi[(b, h) if of_alibi.ndim == 2 else h] -= (ds * np.abs(i + at[-1] - j)).sum()
        for n, found in of_aux.items():
            for one in np.ndindex(found.shape):
                found[one] += (of_score * variant.aux_grad(n, one, x, *at)).sum()
        bend = 1 if variant.softcap is None else 1 - np.tanh(x / real(variant.softcap)) ** 2
        ds = (bend * ds).astype(rounded).astype(real)
        dq[mine] = scale * (ds @ k[its])
        dk[its] += scale * (ds.T @ q[mine])
        if sink is not None:
            dsink[h] -= (np.exp(real(host(sink)[h]) - top) * delta).sum()
        dv[its] += (left * p.astype(rounded).astype(real)).T @ dout[mine]
    dq, dk, dv = (x.astype(rounded).transpose(axes) for x in (dq, dk, dv))
    asked = of_bias if dbias else None, of_alibi if dalibi else None, None if sink is None else dsink
    return dq, dk, dv, *[x for x in asked if x is not None], *of_aux.values()
