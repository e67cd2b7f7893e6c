"""Softmax attention: the formula itself, in NumPy.

For query i and key j of a head (K and V heads shared by heads_q // heads_kv query heads):

    x[i, j] = scale * q[i] . k[j]                       of q and k normalised, where there are q_norm and k_norm
    s[i, j] = what scores.py makes of x[i, j]           softcap, ALiBi, bias, score; -inf where i does not see j
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink[h]))    natural logarithm; -inf for a row without keys and sink
    out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]        0 for a row without keys

With dropout a term of out, not of lse, is multiplied by 1 / (1 - dropout) or by 0. q, k and v are multiplied by q_descale,
k_descale and v_descale first: numbers, or one of each head of keys, or sequence and head; or (B, blocks, H), of each block of
128 rows and each head that the array itself has. Rows and columns are those of a sequence: packed ones (cu_seqlens) count from
their own start, b being the sequence's number; lengths_k ends the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from tiles.schema import ORDER
from tiles.testing.compare import host

from ..dropout import dropout_mask
from .scores import ReferenceVariant

ROWS = 1024  # rows of scores that are held at once
BLOCK = 128  # rows that share a descale where there are several of a head


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64: out in the caller's layout, lse (B, Hq, Sq).

    Takes host arrays of any float dtype and any framework that `arrays.describe` knows; trusts their shapes. Options, all by
    keyword, are attention.forward's:

    - of the scores: causal, window, softcap, alibi, bias, mask, score, aux, blocks (see `scores.ReferenceVariant`);
    - scale: Dk^-1/2 by default; layout: "bshd" or "bhsd"; sink: (Hq,);
    - q_norm, k_norm: weights (Dk,) or (H, Dk) of an RMS norm of each row, or a pair (weights, bias) of a layer norm, with
      norm_eps added to the mean of the squares;
    - cu_seqlens, cu_seqlens_k: (N + 1,), the latter equal to the former by default; lengths_k: (B,) or (N,);
    - dropout: the share of P that is dropped, and seed, from which `dropout_mask` follows; or instead of it `keep`: an array
      (B, Hq, Sq, Sk), or a function keep(b, h, i, j), true where P is kept.
    """
    q, k, v = map(host, (q, k, v))
    return _forward(q, k, v, np.float64, np.float64, **options)


def forward_low(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) as the input dtype allows: scores, softmax and sums in float32; P, out and normalised q and k rounded to
    q's dtype. Options: see `forward`.

    Returns out in q's dtype and lse in float32: what a faithful kernel may lose, and the yardstick of `tolerance`. Of
    float8_e4m3fn P is rounded 2^8 times what it is, the greatest of a row being 1, and out is bfloat16.
    """
    q, k, v = map(host, (q, k, v))
    return _forward(q, k, v, np.float32, q.dtype, **options)


def _forward(
    q,
    k,
    v,
    real,
    rounded,
    *,
    scale=None,
    layout="bshd",
    sink=None,
    q_norm=None,
    k_norm=None,
    norm_eps=1e-6,
    cu_seqlens=None,
    cu_seqlens_k=None,
    lengths_k=None,
    dropout=0.0,
    seed=None,
    keep=None,
    q_descale=1.0,
    k_descale=1.0,
    v_descale=1.0,
    **of_scores,
):
    """The formula in dtype `real`, with P, out and normalised q and k rounded to dtype `rounded`."""
    axes = np.argsort(ORDER[layout])  # canonical (B, S, H, D) <-> the caller's: both permutations are their own inverse
    q, k, v = (x.transpose(axes).astype(real) for x in (q, k, v))
    q, k = (normed(x, norm, norm_eps, real, rounded) for x, norm in ((q, q_norm), (k, k_norm)))
    variant = ReferenceVariant(**of_scores).cast(real)
    batch, seqlen_q, heads_q, head_dim = q.shape
    scale = real(head_dim**-0.5 if scale is None else scale)
    sink = np.full(heads_q, -np.inf, real) if sink is None else host(sink).astype(real)
    kept = keep_function(dropout, seed, keep)
    held, lift = (ml_dtypes.bfloat16, 2.0**8) if rounded == ml_dtypes.float8_e4m3fn else (rounded, None)
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[-1]), held)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, real)
    for b, place, queries, keys in sequence_slices(q.shape, k.shape, cu_seqlens, cu_seqlens_k, lengths_k):
        first, count = queries.start, queries.stop - queries.start
        for h, start in np.ndindex(heads_q, -(-count // ROWS)):
            i, j = np.arange(count)[start * ROWS : start * ROWS + ROWS, None], np.arange(keys.stop - keys.start)[None]
            rows, kv_head = first + i[:, 0], h * k.shape[2] // heads_q
            q_unit = _of_rows(q_descale, b, kv_head, h, i, layout).astype(real)
            k_unit, v_unit = (_of_rows(x, b, kv_head, kv_head, j, layout).astype(real) for x in (k_descale, v_descale))
            x = q[place, rows, h] @ k[place, keys, kv_head].T * (scale * q_unit * k_unit)
            s = variant.scores(x, b, h, i, j, j.size - count)
            top = s.max(axis=1, keepdims=True, initial=sink[h])
            shift = np.where(top == -np.inf, 0, top)  # a row without keys is all exp(-inf) = 0
            p = np.exp(s - shift)
            total = p.sum(axis=1, keepdims=True) + np.exp(sink[h] - shift)
            with np.errstate(divide="ignore"):
                lse[place, h, rows] = (np.log(total) + top)[:, 0]
            total = np.where(total == 0, 1, total)
            p = (p * lift).astype(rounded).astype(real) / lift / total if lift else (p / total).astype(rounded).astype(real)
            if kept is not None:
                p = np.where(kept(b, h, i, j), p / real(1 - dropout), 0)
            values = v[place, keys, kv_head]
            found = p @ values * v_unit if np.ndim(v_unit) == 0 else p @ (values * v_unit.T)
            out[place, rows, h] = found.astype(held)
    return out.transpose(axes), lse


def _of_rows(descale, b, kv_head, head, rows, layout):
    """What these rows of a sequence are multiplied by: of its head of keys, or of each of their blocks and its own head."""
    if np.ndim(descale) == 3:
        of_blocks = host(descale)[b] if layout == "bshd" else host(descale)[b].T
        return of_blocks[rows // BLOCK, head]
    return np.asarray(descale if np.ndim(descale) == 0 else host(descale)[(b, kv_head)[2 - np.ndim(descale) :]])


def keep_function(dropout: float, seed: Any, keep: Any) -> Callable[..., np.ndarray] | None:
    """kept(b, h, i, j), true where P is; None: everywhere."""
    if seed is not None and keep is None:
        keep = partial(dropout_mask, seed if isinstance(seed, int) else int(host(seed)[0]), dropout)
    return keep if keep is None or callable(keep) else lambda b, h, i, j: host(keep)[b, h][i, j]


def sequence_slices(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], cu_seqlens: Any, cu_seqlens_k: Any, lengths_k: Any
) -> list[tuple[int, int, slice, slice]]:
    """(b, its place in the batch, its queries, its keys) of every sequence, the latter two as slices."""
    if cu_seqlens is None:
        found = [(b, b, slice(0, q_shape[1]), slice(0, k_shape[1])) for b in range(q_shape[0])]
    else:
        ends = [[int(e) for e in host(x)] for x in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
        spans = zip(*([slice(*span) for span in pairwise(x)] for x in ends), strict=True)
        found = [(n, 0, queries, keys) for n, (queries, keys) in enumerate(spans)]
    if lengths_k is None:
        return found
    return [(b, p, queries, slice(keys.start, keys.start + int(host(lengths_k)[b]))) for b, p, queries, keys in found]


def normed(x, norm, eps, real, rounded):
    """x (B, S, H, D), its rows normalised: by their RMS, or with a pair (weights, bias) by mean and deviation."""
    if norm is None:
        return x
    weight, bias = (host(y).astype(real) for y in norm) if isinstance(norm, tuple) else (host(norm).astype(real), None)
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + real(eps)) * weight
    return (x if bias is None else x + bias).astype(rounded).astype(real)
