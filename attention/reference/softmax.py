"""Softmax attention: the formula, in NumPy.

For query i and key j of a head (K and V heads shared by heads_q // heads_kv query heads):

    x[i, j] = scale * q[i] . k[j]                       with q_norm and k_norm, q and k are normalised first
    s[i, j] = scores.py's function of x[i, j]           softcap, ALiBi, bias, score; -inf where key j is not visible
    lse[i]  = log(sum_j exp(s[i, j]) + exp(sink[h]))    natural logarithm; -inf for a row without keys and sink
    out[i]  = sum_j exp(s[i, j] - lse[i]) * v[j]        0 for a row without keys

With dropout a term of out, not of lse, is multiplied by 1 / (1 - dropout) or by 0. q, k and v are multiplied by q_descale,
k_descale and v_descale first: a number, or one for each key head, or for each sequence and key head; or (B, blocks, H), one for
each block of 128 rows and each head of the array itself. Rows i and columns j count from the start of their sequence; of packed
sequences (cu_seqlens) b is the index. lengths_k is the number of keys of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from tiles.calls.schema import ORDER
from tiles.testing.compare import host

from ..dropout import dropout_mask
from .scores import ReferenceVariant

ROWS = 1024  # rows of scores that are computed at once
BLOCK = 128  # rows that share a descale if there are several for a head


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64: out in the caller's layout, lse (B, Hq, Sq).

    Takes host arrays of any float dtype and any framework that `arrays.describe` knows; does not check their shapes. Options,
    all by keyword, are attention.forward's:

    - for scores: causal, window, softcap, alibi, bias, mask, score, aux, blocks (see `scores.ReferenceVariant`);
    - scale: Dk^-1/2 by default; layout: "bshd" or "bhsd"; sink: (Hq,);
    - q_norm, k_norm: weights (Dk,) or (H, Dk) of an RMS norm of each row, or a pair (weights, bias) of a layer norm, with
      norm_eps added to the mean of the squares;
    - cu_seqlens, cu_seqlens_k: (N + 1,), the latter equal to the former by default; lengths_k: (B,) or (N,);
    - dropout: the probability with which an element of P is dropped, and seed, for `dropout_mask`; or `keep` in place of a
      seed: an array (B, Hq, Sq, Sk), or a function keep(b, h, i, j), true where P is kept.
    """
    q, k, v = map(host, (q, k, v))
    return _forward(q, k, v, np.float64, np.float64, **options)


def forward_low(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) with the precision of the input dtype: scores, softmax and sums in float32; P, out and normalised q and k
    rounded to q's dtype. The options are those of `forward`.

    Returns out in q's dtype and lse in float32. The error of these is what `tolerance` allows a kernel. For float8_e4m3fn, P is
    rounded after a multiplication by 2^8, where the largest element of a row is 1, and out is bfloat16.
    """
    q, k, v = map(host, (q, k, v))
    return _forward(q, k, v, np.float32, q.dtype, **options)


def _forward(
    q,
    k,
    v,
    real,
    operand_dtype,
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
    **score_options,
):
    """(out, lse), computed in dtype `real`, with P, out and normalised q and k rounded to dtype `operand_dtype`."""
    axes = np.argsort(ORDER[layout])  # the caller's layout <-> (B, S, H, D): the permutation is its own inverse
    q, k, v = (x.transpose(axes).astype(real) for x in (q, k, v))
    q, k = (normalize_rows(x, norm, norm_eps, real, operand_dtype) for x, norm in ((q, q_norm), (k, k_norm)))
    variant = ReferenceVariant(**score_options).cast(real)
    batch, seqlen_q, heads_q, head_dim = q.shape
    scale = real(head_dim**-0.5 if scale is None else scale)
    sink = np.full(heads_q, -np.inf, real) if sink is None else host(sink).astype(real)
    is_kept = keep_function(dropout, seed, keep)
    out_dtype, p_scale = (ml_dtypes.bfloat16, 2.0**8) if operand_dtype == ml_dtypes.float8_e4m3fn else (operand_dtype, None)
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[-1]), out_dtype)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, real)
    for b, batch_index, queries, keys in sequence_slices(q.shape, k.shape, cu_seqlens, cu_seqlens_k, lengths_k):
        first, count = queries.start, queries.stop - queries.start
        for h, start in np.ndindex(heads_q, -(-count // ROWS)):
            i, j = np.arange(count)[start * ROWS : start * ROWS + ROWS, None], np.arange(keys.stop - keys.start)[None]
            rows, kv_head = first + i[:, 0], h * k.shape[2] // heads_q
            q_factor = _descale_of_rows(q_descale, b, kv_head, h, i, layout).astype(real)
            key_descales = (_descale_of_rows(x, b, kv_head, kv_head, j, layout) for x in (k_descale, v_descale))
            k_factor, v_factor = (x.astype(real) for x in key_descales)
            x = q[batch_index, rows, h] @ k[batch_index, keys, kv_head].T * (scale * q_factor * k_factor)
            s = variant.scores(x, b, h, i, j, j.size - count)
            row_max = s.max(axis=1, keepdims=True, initial=sink[h])
            shift = np.where(row_max == -np.inf, 0, row_max)  # a row without keys is all exp(-inf) = 0
            p = np.exp(s - shift)
            row_sum = p.sum(axis=1, keepdims=True) + np.exp(sink[h] - shift)
            with np.errstate(divide="ignore"):
                lse[batch_index, h, rows] = (np.log(row_sum) + row_max)[:, 0]
            row_sum = np.where(row_sum == 0, 1, row_sum)
            if p_scale:
                p = (p * p_scale).astype(operand_dtype).astype(real) / p_scale / row_sum
            else:
                p = (p / row_sum).astype(operand_dtype).astype(real)
            if is_kept is not None:
                p = np.where(is_kept(b, h, i, j), p / real(1 - dropout), 0)
            values = v[batch_index, keys, kv_head]
            o = p @ values * v_factor if np.ndim(v_factor) == 0 else p @ (values * v_factor.T)
            out[batch_index, rows, h] = o.astype(out_dtype)
    return out.transpose(axes), lse


def _descale_of_rows(descale, b, kv_head, head, rows, layout):
    """The descale of these rows of sequence b: a number, that of the key head, or for each row that of its block and head."""
    if np.ndim(descale) == 3:
        block_descales = host(descale)[b] if layout == "bshd" else host(descale)[b].T
        return block_descales[rows // BLOCK, head]
    return np.asarray(descale if np.ndim(descale) == 0 else host(descale)[(b, kv_head)[2 - np.ndim(descale) :]])


def keep_function(dropout: float, seed: Any, keep: Any) -> Callable[..., np.ndarray] | None:
    """A function of (b, h, i, j) that is true where an element of P is kept; None if all are."""
    if seed is not None and keep is None:
        keep = partial(dropout_mask, seed if isinstance(seed, int) else int(host(seed)[0]), dropout)
    return keep if keep is None or callable(keep) else lambda b, h, i, j: host(keep)[b, h][i, j]


def sequence_slices(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], cu_seqlens: Any, cu_seqlens_k: Any, lengths_k: Any
) -> list[tuple[int, int, slice, slice]]:
    """(b, batch, queries, keys) of each sequence: its index, its index in the batch, and its rows of q and of k as slices."""
    if cu_seqlens is None:
        sequences = [(b, b, slice(0, q_shape[1]), slice(0, k_shape[1])) for b in range(q_shape[0])]
    else:
        offsets = [[int(e) for e in host(x)] for x in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
        ranges = zip(*([slice(*ends) for ends in pairwise(x)] for x in offsets), strict=True)
        sequences = [(n, 0, queries, keys) for n, (queries, keys) in enumerate(ranges)]
    if lengths_k is None:
        return sequences
    ends = [keys.start + int(host(lengths_k)[b]) for b, _, _, keys in sequences]
    return [(b, batch, queries, slice(keys.start, end)) for (b, batch, queries, keys), end in zip(sequences, ends, strict=True)]


def normalize_rows(x, norm, eps, real, operand_dtype):
    """x (B, S, H, D) with its rows normalised: an RMS norm, or for a pair (weights, bias) a layer norm. Rounded to dtype
    `operand_dtype`."""
    if norm is None:
        return x
    weight, bias = (host(y).astype(real) for y in norm) if isinstance(norm, tuple) else (host(norm).astype(real), None)
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + real(eps)) * weight
    return (x if bias is None else x + bias).astype(operand_dtype).astype(real)
