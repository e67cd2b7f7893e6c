"""attention.append: new keys and values into a cache, in place, rotated and quantised on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tiles.calls.plan import Plan, return_none
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema

from ..names import suggests_argument_names
from ..options import check_flag, check_positive, split_norm
from ..plans.decode.cache_append import plan_append

ARRAYS = """
    k_new            (batch, seqlen_new, heads_k, head_dim)        tile
    v_new            (batch, seqlen_new, heads_k, head_dim_v)      tile      optional
    k                (batch_cache, seqlen_k, heads_k, head_dim)    cache     updated
    v                (batch_cache, seqlen_k, heads_k, head_dim_v)  cache     updated?
    cu_seqlens       (ends)                                        ends_new  optional
    lengths          (sequences)                                   index
    pages            (sequences, pages_per_seq)                    index     optional
    batch_index      (sequences)                                   index     optional
    cos              (positions, pairs)                            real      optional
    sin              (positions, pairs)                            real      optional
    positions        (sequences)                                   index     optional
    k_descale        (heads_k)|(sequences, heads_k)                float32   optional
    v_descale        (heads_k)|(sequences, heads_k)                float32   optional
    k_new_norm       (head_dim)|(heads_k, head_dim)                real      optional
    k_new_norm_bias  (head_dim)|(heads_k, head_dim)                real      optional
"""
QUERIES = """
    q            (batch, seqlen_q, heads, head_dim)  tile
"""
QUERY_ARRAYS = """
    q_norm       (head_dim)|(heads, head_dim)        real  optional
    q_norm_bias  (head_dim)|(heads, head_dim)        real  optional
    out          (batch, seqlen_q, heads, head_dim)  tile  in_place
"""
ARRAYS_AND_QUERIES = QUERIES + ARRAYS + QUERY_ARRAYS


def with_token_descales(table: str) -> str:
    """A schema's rows with descales of each token and head, shaped as the cache is, which the call writes."""
    return re.sub(r"(_descale +)\(.*\)( +float32 +)optional", r"\1(batch_cache, seqlen_k, heads_k)\2updated", table)


def _with_descales_of_keys(table: str) -> str:
    """These rows with descales of each token and head; those of values are left out with the values."""
    return re.sub(r"(v_descale .*)updated", r"\1updated?", with_token_descales(table))


APPEND, WITH_QUERIES = Schema("append", ARRAYS), Schema("append_with_queries", ARRAYS_AND_QUERIES)
QUANTISING = Schema("append_quantising", _with_descales_of_keys(ARRAYS))
QUANTISING_WITH_QUERIES = Schema("append_quantising_with_queries", _with_descales_of_keys(ARRAYS_AND_QUERIES))


@suggests_argument_names
def append(
    k: Any,
    v: Any,
    k_new: Any,
    v_new: Any,
    *,
    lengths: Any,
    pages: Any = None,
    batch_index: Any = None,
    cu_seqlens: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    positions: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    k_new_norm: Any = None,
    q: Any = None,
    q_norm: Any = None,
    norm_eps: float = 1e-6,
    causal: bool = True,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Write new keys and values into a cache, in place, after those that it has. For sequence b,

        k[b, lengths[b] + i] = rotate(k_new[b, i], lengths[b] + i);  v[b, lengths[b] + i] = v_new[b, i]

    k_new: (B, S, Hk, D), v_new: (B, S, Hk, Dv), bfloat16 or float16. With cu_seqlens (N + 1), ascending from 0 to S, the
    sequences are packed in a batch of 1. k, v: the cache, (B, Sk, Hk, D) and (B, Sk, Hk, Dv), of the same dtype,
    float8_e4m3fn or int8, the last axis contiguous. batch_index: (B), the batch of k and v that belongs to each sequence. With
    pages (B, most pages), the cache is a pool (pages, page size, Hk, D), and a sequence's n-th key is in page pages[b, n //
    page size]; entries beyond the pages in use may be anything. Any page size; no two sequences may write to one place. v and
    v_new may be None: a cache of keys alone, such as the latents of MLA, or their rotated columns.

    lengths: (B), int32 or int64, the number of keys before. They are read on the device, so a CUDA graph that holds the call
    serves sequences as they grow; the caller adds S to them. Tokens beyond the cache's end are not written, nor those whose
    page is not in the pool (-1, for instance). With host arrays such a call is refused, and with others under TILES_CHECK=1.
    Left padding shifts no index.

    rotary: (cos, sin), each (positions, pairs), float32, bfloat16 or float16. Of the first 2 pairs columns, n and pairs + n
    are rotated together (NeoX), or with interleaved=True 2n and 2n + 1: (x1 cos - x2 sin, x2 cos + x1 sin). It is computed
    in float32, each product and sum rounded, and rounded once to the cache's dtype: the same bits as by hand. positions:
    (B), of a sequence's first new key, if it is not `lengths`. Beyond the end of the tables nothing is written.

    k_descale, v_descale: float32, by which the numbers of a cache of fp8 or int8 are multiplied when they are read; both or
    none (v_descale is None without v). Rows are divided by them, to 2 ulp of float32, and rounded; what is beyond 448 times
    the descale, in int8 beyond -128 or 127 times, is clamped to it. (Hk) or (B, Hk): they are read. Or shaped as k and v
    are, (B, Sk, Hk) or with pages (pages, page size, Hk), with any strides: then they are computed and written, for each
    new token and head, so that its largest rotated number becomes 448, or 127 in int8; at least 2^-120. A NaN becomes 0 in
    int8.

    k_new_norm, q_norm: norms of the rows of k_new and of q, before they are rotated, as attention.forward has them: weights
    (D), or of each head, of an RMS norm, or a pair (weights, bias) of a layer norm. They are computed in float32, and the
    result of norm and rotation is rounded once.

    q: (B, Sq, H, D), of k_new's dtype: rotated as well, query i at position lengths[b] + i, or with causal=False all at
    lengths[b], and returned, in `out` if given, which may be q. Beyond the end of the tables it is NaN.

    layout="bhsd": keys, values, caches and q are (B, H, S, D), a pool is (pages, Hk, page size, D), and descales of each
    token are (B, Hk, Sk).

    Returns out, or None without q. Arrays, `stream` and errors are those of attention.forward. JAX arrays cannot be written;
    see cache.PagedCache."""
    cos, sin = rotary_tables(rotary)
    if q is None and out is not None:
        raise ValueError("out: is where the rotated q goes, and needs q: q=None")
    if q is None and q_norm is not None:
        raise ValueError("q_norm: normalises q, and needs it: q=None")
    tensors = k_new, v_new, k, v, cu_seqlens, lengths, pages, batch_index, cos, sin, positions, k_descale, v_descale
    arrays = *tensors, *split_norm("k_new_norm", k_new_norm)
    options = check_flag("interleaved", interleaved), check_flag("causal", causal), check_positive("norm_eps", norm_eps)
    quantizes = has_token_descales(*[k_descale] if v is None else [k_descale, v_descale])
    if q is None:
        return (_append_quantising if quantizes else _append)(stream, arrays, options, layout)
    call = _append_quantising_with_queries if quantizes else _append_with_queries
    return call(stream, (q, *arrays, *split_norm("q_norm", q_norm), out), options, layout)


def has_token_descales(*descales: Any) -> bool:
    """Are all descales given, and is any of them shaped for each token and head (three axes)?"""
    return all([x is not None for x in descales]) and any([len(getattr(x, "shape", ())) == 3 for x in descales])


def rotary_tables(rotary: Any) -> Sequence[Any]:
    """(cos, sin), (None, None) if there is no rotary. TypeError: it is not a pair of arrays."""
    if rotary is not None and (not isinstance(rotary, Sequence) or len(rotary) != 2):
        raise TypeError(f"rotary: must be a pair (cos, sin): {type(rotary).__name__}")
    return rotary or (None, None)


@program(APPEND)
def _append(problem: Problem, interleaved: bool, causal: bool, norm_eps: float) -> Plan:
    """The Plan of a call of append."""
    queries = (problem["q"], problem["out"]) if "q" in problem else None
    steps = plan_append(problem, interleaved, causal, queries, problem["cu_seqlens"], norm_eps)
    return Plan(steps, make_result=None if queries else return_none)


_append_with_queries = program(WITH_QUERIES)(_append.planner)
_append_quantising = program(QUANTISING)(_append.planner)
_append_quantising_with_queries = program(QUANTISING_WITH_QUERIES)(_append.planner)
