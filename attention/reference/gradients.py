"""The gradients of softmax attention, in NumPy. With x, s, lse and out as in softmax.py, dout the gradient of out and dlse that
of lse (0 by default, and for rows that see no key):

    P[i, j]  = exp(s[i, j] - lse[i])
    delta[i] = dout[i] . out[i] - dlse[i]
    dv[j]    = sum_i P[i, j] dout[i]
    ds[i, j] = P[i, j] (dout[i] . v[j] - delta[i])
    dS[i, j] = ds[i, j] times the derivative of s[i, j] by x[i, j]: of softcap 1 - tanh(x / softcap)^2, and of score a finite
               difference
    dq[i]    = scale * sum_j dS[i, j] k[j]
    dk[j]    = scale * sum_i dS[i, j] q[i]

    dbias    = the sum of ds[i, j] times the derivative of score, over all i and j that share an element of bias
    dalibi   = the sum over i and j of ds[i, j] times the derivative of score times -|i + Sk - Sq - j|
    daux     = the sum over i and j of ds[i, j] times the derivative of score by an element of aux
    dsink    = -sum_i exp(sink - lse[i]) delta[i]

With norms of q and k, y = n weights + bias of a row x, n = (x - mean) / deviation (an RMS norm has no mean):

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

With dropout a term of dv, and dout[i] . v[j] in dS, is multiplied by 1 / (1 - dropout) or by 0, as in softmax.py.
The gradients of a key head are sums over the query heads that share it, and dsink[h] is a sum over all batches.
"""

import itertools
from typing import Any

import numpy as np

from tiles.calls.schema import ORDER
from tiles.testing.compare import host

from . import softmax
from .scores import ReferenceVariant


def backward(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """The gradients in float64, in the caller's layout: (dq, dk, dv), then dbias with dbias=True, dalibi with dalibi=True,
    dsink where there is a sink, with daux=True those of all arrays of aux that do not hold integers, and those of norms.

    Arrays: as `forward` takes them. options: dlse (B, H, Sq), causal, window, softcap, alibi, bias, mask, score, aux, blocks,
    sink, cu_seqlens, cu_seqlens_k, lengths_k, dropout and seed or keep, q_norm, k_norm, norm_eps, scale, layout. out: the
    output from which delta is computed, instead of the exact one."""
    dout, q, k, v = map(host, (dout, q, k, v))
    return _backward_through_norms(dout, q, k, v, np.float64, np.float64, **options)


def backward_low(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """`backward` as accurate as q's dtype allows: sums in float32; out, P, dS and the gradients rounded to q's dtype."""
    dout, q, k, v = map(host, (dout, q, k, v))
    return _backward_through_norms(dout, q, k, v, np.float32, q.dtype, **options)


def _backward_through_norms(
    dout, q, k, v, real, operand_dtype, *, q_norm=None, k_norm=None, norm_eps=1e-6, layout="bshd", **options
):
    """The gradients before the norms of q and k, followed by those of each norm: an array, or a pair (of weights, of bias)."""
    axes, norm_gradients = np.argsort(ORDER[layout]), []
    rows = [x.transpose(axes).astype(real) for x in (q, k)]
    q, k = (
        softmax.normalize_rows(x, norm, norm_eps, real, operand_dtype).transpose(axes).astype(operand_dtype)
        for x, norm in zip(rows, (q_norm, k_norm))
    )
    gradients = [*_backward(dout, q, k, v, real, operand_dtype, layout=layout, **options)]
    for n, (x, norm) in enumerate(zip(rows, (q_norm, k_norm))):
        if norm is not None:
            dx, *d_norm = norm_backward(x, norm, gradients[n].transpose(axes).astype(real), norm_eps, real)
            gradients[n] = dx.astype(operand_dtype).transpose(axes)
            norm_gradients.append(tuple(d_norm) if isinstance(norm, tuple) else d_norm[0])
    return *gradients, *norm_gradients


def norm_backward(x, norm, dy, eps, real):
    """(dx, dweights, dbias) of rows x (B, S, H, D), where dy is the gradient of the normalised rows. norm: weights of an RMS
    norm, or a pair (weights, bias) of a layer norm."""
    layer = isinstance(norm, tuple)
    weights, bias = map(host, norm) if layer else (host(norm), host(norm))
    x = x - x.mean(-1, keepdims=True) * layer
    deviation = np.sqrt((x * x).mean(-1, keepdims=True) + real(eps))
    n, dn = x / deviation, dy * weights.astype(real)
    dx = (dn - dn.mean(-1, keepdims=True) * layer - n * (dn * n).mean(-1, keepdims=True)) / deviation
    sums = [y.sum((0, 1) if like.ndim == 2 else (0, 1, 2)) for y, like in ((dy * n, weights), (dy, bias))]
    return dx, *sums


def _backward(
    dout, q, k, v, real, operand_dtype, *, scale=None, layout="bshd", sink=None, cu_seqlens=None, cu_seqlens_k=None,
    lengths_k=None, dropout=0.0, seed=None, keep=None, dlse=None, dbias=False, dalibi=False, daux=False, out=None,
    **score_options,
):  # fmt: skip
    """The formulas in dtype `real`, with out, P, dS and the gradients rounded to dtype `operand_dtype`."""
    forward = softmax.forward if real is np.float64 else softmax.forward_low
    lengths = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "lengths_k": lengths_k}
    weight_options = {"sink": sink, "dropout": dropout, "seed": seed, "keep": keep}
    computed_out, lse = forward(q, k, v, scale=scale, layout=layout, **weight_options, **lengths, **score_options)
    out = computed_out if out is None else host(out)
    axes = np.argsort(ORDER[layout])
    dout, q, k, v, out = (x.transpose(axes).astype(real) for x in (dout, q, k, v, out))
    variant, (*_, heads, head_dim) = ReferenceVariant(**score_options).cast(real), q.shape
    keeps = softmax.keep_function(dropout, seed, keep)
    scale = real(head_dim**-0.5 if scale is None else scale)
    dq, dk, dv = (np.zeros(x.shape, real) for x in (q, k, v))
    dsink = np.zeros(heads, real)
    bias_grad, alibi_grad = (None if x is None else np.zeros(x.shape, real) for x in (variant.bias, variant.alibi))
    aux_grads = {n: np.zeros(x.shape, real) for n, x in enumerate(variant.aux) if daux and x.dtype.kind not in "biu"}
    slices = softmax.sequence_slices(q.shape, k.shape, *lengths.values())
    for (b, row, queries, keys), h in itertools.product(slices, range(heads)):
        q_index, kv_index = (row, queries, h), (row, keys, h * k.shape[2] // heads)
        i, j = np.arange(queries.stop - queries.start)[:, None], np.arange(keys.stop - keys.start)[None]
        x, at = q[q_index] @ k[kv_index].T * scale, (b, h, i, j, j.size - i.size)
        s = variant.scores(x, *at)
        lse_rows = lse[row, h, queries]
        finite_lse = np.where(np.isfinite(lse_rows), lse_rows, 0)[:, None]  # a row without keys is all exp(-inf) = 0
        p = np.exp(s - finite_lse)
        dropout_scale = real(1) if keeps is None else np.where(keeps(b, h, i, j), 1 / real(1 - dropout), 0)
        delta = (dout[q_index] * out[q_index]).sum(1, keepdims=True)
        if dlse is not None:
            delta -= np.where(np.isfinite(lse_rows), host(dlse)[row, h, queries].astype(real), 0)[:, None]
        dscore = p * (dropout_scale * (dout[q_index] @ v[kv_index].T) - delta)
        ds = dscore * variant.score_grad(x, *at).astype(real)
        if dbias:
            element = b if bias_grad.shape[0] > 1 else 0, h if bias_grad.shape[1] > 1 else 0
            by_row = ds if bias_grad.shape[2] > 1 else ds.sum(0, keepdims=True)
            bias_grad[element][: len(by_row), : j.size] += by_row
        if dalibi:
            alibi_grad[(b, h) if alibi_grad.ndim == 2 else h] -= (ds * np.abs(i + at[-1] - j)).sum()
        for n, aux_grad in aux_grads.items():
            for element in np.ndindex(aux_grad.shape):
                aux_grad[element] += (dscore * variant.aux_grad(n, element, x, *at)).sum()
        _, mods_grad = variant.apply_score_mods(x)
        ds = (mods_grad * ds).astype(operand_dtype).astype(real)
        dq[q_index] = scale * (ds @ k[kv_index])
        dk[kv_index] += scale * (ds.T @ q[q_index])
        if sink is not None:
            dsink[h] -= (np.exp(real(host(sink)[h]) - finite_lse) * delta).sum()
        dv[kv_index] += (dropout_scale * p.astype(operand_dtype).astype(real)).T @ dout[q_index]
    dq, dk, dv = (x.astype(operand_dtype).transpose(axes) for x in (dq, dk, dv))
    optional = bias_grad if dbias else None, alibi_grad if dalibi else None, None if sink is None else dsink
    return dq, dk, dv, *[x for x in optional if x is not None], *aux_grads.values()
