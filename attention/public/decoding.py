"""attention.decode: from the caller's arrays to the Plan of a call."""

import math
from typing import TYPE_CHECKING, Any

from tiles.calls.plan import Fill, Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.calls.torch_op import is_traced

from ..families import choose_family
from ..names import suggests_argument_names
from ..options import (
    ResultOptions,
    ScoreArguments,
    ScoreOptions,
    check_flag,
    check_number,
    check_positive,
    split_norm,
)
from ..plans.decode.decode_launches import (
    TILES,
    DecodeOptions,
    check_bias,
    plan_new_keys,
    plan_prefill,
    plan_split_kv,
    select_loader,
    serves_prefill,
)
from ..plans.decode.decode_norms import select_norms
from ..plans.decode.page_checks import plan_page_checks
from ..plans.softmax.call_options import AUX_ROWS, NO_SCORES, score_options, window_ends
from ..plans.softmax.gradient import flatten_arrays
from ..plans.softmax.planning import check_extents, load_functions, resolve_scale
from ..scoring.index_checks import IndexingFunctions, plan_index_checks
from . import cache_append

if TYPE_CHECKING:
    from typing_extensions import Unpack

DECODE_ARGUMENTS = frozenset(ScoreArguments.__annotations__)
NO_FURTHER_SCORES = NO_SCORES[3:]  # after the window and softcap
FUNCTIONS = frozenset(("mask", "score"))  # which the schema DECODE does not serve
MAX_SPLITS = 1024
CACHES = """
    q  (batch, seqlen_q, heads, head_dim)            tile
    k  (batch_cache, seqlen_k, heads_k, head_dim)    cache
    v  (batch_cache, seqlen_k, heads_k, head_dim_v)  cache
"""
KEY_ARRAYS = """
    lengths      (sequences)                                                      key_lengths  optional
    pages        (sequences, pages_per_seq)                                       index        optional
    batch_index  (sequences)                                                      index        optional
    leftpad      (sequences)                                                      key_starts   optional
    alibi        (heads)|(alibi_batch, heads)                                     float32      optional
    sink         (heads)                                                          float32      optional
    k_descale    (heads_k)|(sequences, heads_k)|(batch_cache, seqlen_k, heads_k)  float32      optional
    v_descale    (heads_k)|(sequences, heads_k)|(batch_cache, seqlen_k, heads_k)  float32      optional
"""
BIAS = """
    bias  (bias_batch, bias_heads, bias_seqlen, bias_keys)  real  optional
"""
RESULTS = """
    out  (batch, seqlen_q, heads, head_dim_v)  tile     in_place
    lse  (batch, heads, seqlen_q)              float32  output  return_lse
"""
PACKED_QUERIES = """
    cu_seqlens  (ends)  ends_q  optional
"""
NORMS = """
    q_norm       (head_dim)|(heads, head_dim)    real  optional
    q_norm_bias  (head_dim)|(heads, head_dim)    real  optional
    k_norm       (head_dim)|(heads_k, head_dim)  real  optional
    k_norm_bias  (head_dim)|(heads_k, head_dim)  real  optional
"""
NEW_KEYS = """
    k_new            (batch, seqlen_new, heads_k, head_dim)    tile
    v_new            (batch, seqlen_new, heads_k, head_dim_v)  tile
    k_new_norm       (head_dim)|(heads_k, head_dim)            real      optional
    k_new_norm_bias  (head_dim)|(heads_k, head_dim)            real      optional
    cu_seqlens_new   (ends)                                    ends_new  optional
    cos              (positions, pairs)                        real      optional
    sin              (positions, pairs)                        real      optional
    positions        (sequences)                               index     optional
"""
WRITTEN_CACHES = CACHES.replace(" cache", " cache  updated")
NEEDED_LENGTHS = KEY_ARRAYS.replace("key_lengths  optional", "key_lengths")
DECODE = Schema("decode", CACHES + KEY_ARRAYS + RESULTS)
VARIANT = Schema("decode_variant", CACHES + PACKED_QUERIES + KEY_ARRAYS + BIAS + NORMS + AUX_ROWS + RESULTS)
APPEND_ARRAYS = WRITTEN_CACHES + PACKED_QUERIES + NEEDED_LENGTHS + BIAS + NORMS + AUX_ROWS + NEW_KEYS + RESULTS
APPENDING = Schema("decode_append", APPEND_ARRAYS)
QUANTISING = Schema("decode_append_quantising", cache_append.with_token_descales(APPEND_ARRAYS))


@suggests_argument_names
def decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    lengths: Any,
    pages: Any = None,
    batch_index: Any = None,
    leftpad: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    cu_seqlens: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    cu_seqlens_new: Any = None,
    rotary: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    positions: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    k_new_norm: Any = None,
    norm_eps: float = 1e-6,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    sink: Any = None,
    splits: int | None = None,
    scale: float | None = None,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    family: str | None = None,
    **arguments: "Unpack[ScoreArguments]",
) -> Any:
    """Attention of new tokens over caches of keys and values, which are read once. It is what a server does for each token and,
    with many query tokens, for a prompt or a part of one.

    q: (B, Sq, H, D): one query token a sequence, several, as in speculative decoding, or any number. k: (B, Sk, Hk, D) and v:
    (B, Sk, Hk, Dv): the caches. Sequence b uses the first lengths[b] keys, including those of the new tokens; the others are
    not read. bfloat16 or float16; D and Dv multiples of 8 up to 256; H a multiple of Hk. With layout="bhsd": (B, H, Sq, D)
    and (B, Hk, Sk, D). Any base addresses, and any strides with a contiguous last axis; multiples of 16 bytes are fast.

    lengths: (B), int32 or int64, on q's device; the host never reads them. Neither plans nor kernels depend on them, so a
    CUDA graph that holds the call serves sequences as they grow. None: all keys of the cache are in use.

    pages: (B, most pages), int32 or int64. Then k and v are pools, (pages, page size, Hk, D) and Dv, or for layout="bhsd"
    (pages, Hk, page size, D), and key j of sequence b is row j % size of page pages[b, j // size]. Any page size. Entries after
    a sequence's last page are not read. batch_index: (B), sequence b is batch batch_index[b] of k and v, which may have more.
    leftpad: (B), keys before leftpad[b] are not read.

    k and v of float8_e4m3fn (since Ada) or int8, at multiples of 4 bytes: they are converted to fp16, exactly, and queries are
    rounded to fp16. k_descale, v_descale: float32, positive, by which they are multiplied; both or none. (Hk) or (B, Hk). Or
    one for each token and head, shaped as k and v are: (B, Sk, Hk), or (pages, page size, Hk), for layout="bhsd" with Hk in the
    middle, with any strides; those of unused keys may be anything. Many query tokens are then served by split-KV, too.

    cu_seqlens: (N + 1), ascending from 0 to Sq: the query tokens of N sequences are packed in a batch of 1, those of sequence n
    from cu_seqlens[n] to cu_seqlens[n + 1]. Caches, lengths and pages are then those of N sequences.

    k_new, v_new: (B, S, Hk, D) and Dv: keys and values that are first written into the caches, in place, from key lengths[b]
    on; `lengths` does not count them yet. This is attention.append, by the same kernel, in the same call; it also writes the
    descales of each token. If queries are packed, so are these, by cu_seqlens_new or cu_seqlens.

    rotary: (cos, sin), as in attention.append. k_new is rotated, key i by position lengths[b] + i. So is q (the array itself
    stays as it is): query token i by the position of the i-th new key, or without causal and window all by that of the
    first. interleaved, positions: as in append.

    q_norm, k_norm, k_new_norm: norms of the rows of the argument of that name, as forward has them: weights of an RMS norm,
    or a pair (weights, bias) of a layer norm. What your cache holds decides which you need. k_new_norm: k_new is normalised
    once, before it is rotated and written, and the cache holds normalised keys, as Qwen3's does. k_norm: the cache holds
    keys without a norm, and all of them are normalised in every call, on the way to their scores, in float32; nothing of that
    is written, and k is read once. Neither implies the other, so nothing is normalised twice. q is normalised before it is
    rotated. With k_norm there is no rotary, which comes after a norm, and many query tokens are served by split-KV, too.

    Which keys a token sees. The last token is at the last key: token t is at key p = lengths[b] - Sq + t, where lengths include
    the new keys. causal: keys up to p. window: (left, right), keys from p - left to p + right; None is open. mask: mask(b, h,
    i, j, *aux), in Python, for query token i, counted from the sequence's first, and key j. A token that sees no key gives 0.

    How scores are changed: by scale, softcap, alibi, sink and `arguments`, in forward's order; mask, score and aux are as
    there. Here h may be a vector, the heads of the rows. bias: (B or 1, H or 1, Sq or 1, keys) of float32, bfloat16 or float16,
    by the numbers b, h, i and j that mask has: keys must be as many as a sequence may have, Sk or most pages times the page
    size, or more. What it holds for keys that are not seen may be anything.

    splits: the number of splits of each sequence's keys (split-KV); multiprocessors work on different splits, and a second
    launch combines their outputs. The same splits give a sequence the same bits among any other sequences, if queries are not
    packed (then the kernel follows from how many a sequence has on average). By default the keys of all sequences are divided
    evenly among the blocks that run at a time (stream-K), by the lengths on the device: the bits of a sequence then depend on
    the lengths of the others. If queries are packed, or lengths is None, the number of splits follows from the shapes.

    out, return_lse, stream: as in forward. family: None, "sm_80", the instructions of every GPU since Ampere, or "sm_90",
    Hopper's. These serve many query tokens; they also serve few, in caches of q's dtype, by default if tokens times the
    query heads that share a key head are more than 32.

    Returns `out`, or with return_lse=True `(out, lse)`, lse (B, H, Sq) as in forward.

    ValueError, TypeError: an argument is wrong; the message names it and prints the values. Nothing was launched."""
    arrays, scores = flatten_arrays(arguments, DECODE_ARGUMENTS) if arguments else ({}, {})
    if scores:
        fields = score_options({"window": window, "softcap": softcap, **scores})
    elif window is softcap is None:
        fields = NO_SCORES
    else:
        left, right = (None, None) if window is None else window_ends(window)
        fields = left, right, check_positive("softcap", softcap), *NO_FURTHER_SCORES
    options = (  # of every step of a server: each line costs it
        causal if causal is True else check_flag("causal", causal),
        *fields,
        None if splits is None else check_splits(splits),
        interleaved if interleaved is False else check_flag("interleaved", interleaved),
        0.0 if q_norm is k_norm is k_new_norm is None else check_positive("norm_eps", norm_eps),
        None if scale is None else check_number("scale", scale),
        return_lse if return_lse is False else check_flag("return_lse", return_lse),
        family,
    )
    if k_new is v_new is rotary is None:
        if not (cu_seqlens_new is positions is k_new_norm is None):
            new_key_options = {"positions": positions, "cu_seqlens_new": cu_seqlens_new, "k_new_norm": k_new_norm}
            name = next(name for name, x in new_key_options.items() if x is not None)
            raise ValueError(f"{name}: must be None unless k_new and v_new are passed: k_new=None")
        if cu_seqlens is q_norm is k_norm is None and (not arguments or (not arrays and FUNCTIONS.isdisjoint(scores))):
            few_arrays = q, k, v, lengths, pages, batch_index, leftpad, alibi, sink, k_descale, v_descale, out, None
            return _decode(stream, few_arrays, options, layout)
    norms, _ = flatten_arrays({"q_norm": q_norm, "k_norm": k_norm})
    arrays |= {"alibi": alibi, "sink": sink}
    arrays |= {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "lengths": lengths, "pages": pages, "leftpad": leftpad}
    arrays |= {"batch_index": batch_index, "k_descale": k_descale, "v_descale": v_descale, "out": out, **norms}
    if k_new is v_new is rotary is None:
        return _variant(stream, _variant.in_order(arrays), options, layout)
    if k_new is None or v_new is None:
        name, other = ("k_new", "v_new") if k_new is None else ("v_new", "k_new")
        raise ValueError(f"{name}: must be passed together with {'rotary' if k_new is v_new is None else other}: {name}=None")
    if k_norm is not None and rotary is not None:
        raise ValueError(
            "k_norm: must be None with rotary: it would normalise keys that are rotated already, and a norm comes before the "
            "rotation; k_new_norm normalises the new keys before they are rotated"
        )
    if is_traced(q):  # a torch op either writes in place or returns new tensors: here two ops
        new = k_new, v_new, cu_seqlens_new, rotary, positions, q_norm, k_new_norm, norm_eps
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        place = lengths, pages, batch_index, cu_seqlens
        arrays["q"], arrays["lengths"] = _append_before(q, k, v, place, new, options, layout, descales)
        arrays |= {} if rotary is None else {"q_norm": None, "q_norm_bias": None}
        return _variant(stream, _variant.in_order(arrays), options, layout)
    arrays |= {"k_new": k_new, "v_new": v_new, "cu_seqlens_new": cu_seqlens_new, "positions": positions}
    arrays |= dict(zip(("k_new_norm", "k_new_norm_bias"), split_norm("k_new_norm", k_new_norm)))
    arrays |= dict(zip(("cos", "sin"), cache_append.rotary_tables(rotary)))
    call = _append_quantising if cache_append.has_token_descales(k_descale, v_descale) else _append
    return call(stream, call.in_order(arrays), options, layout)


def _append_before(q, k, v, place, new, options, layout, descales) -> tuple[Any, Any]:
    """Append new keys by attention.append, on torch's tensors. Returns (the queries, rotated if there is rotary; the lengths
    after it)."""
    (lengths, pages, batch_index, cu_seqlens), (k_new, v_new, cu_seqlens_new, rotary, positions, *norms) = place, new
    (q_norm, k_new_norm, norm_eps) = norms
    causal, left, right, *_, interleaved, _, _, _, _ = options
    ends = cu_seqlens if cu_seqlens_new is None else cu_seqlens_new
    to_bshd = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x  # and back
    args: dict[str, Any] = {"pages": pages, "batch_index": batch_index, "cu_seqlens": ends, "positions": positions, **descales}
    args |= {} if k_new_norm is None else {"k_new_norm": k_new_norm, "norm_eps": norm_eps}
    if rotary is not None:
        if cu_seqlens_new is not None:
            raise NotImplementedError(
                "cu_seqlens_new: is not supported with rotary under torch.compile: call attention.append first, then decode"
            )
        local = causal or left is not None or right is not None
        args |= {"rotary": rotary, "interleaved": interleaved, "q": to_bshd(q), "causal": local}
        args |= {} if q_norm is None else {"q_norm": q_norm, "norm_eps": norm_eps}
    k_new, v_new = to_bshd(k_new), to_bshd(v_new)
    q_rotated = cache_append.append(to_bshd(k), to_bshd(v), k_new, v_new, lengths=lengths, **args)
    lengths_after = lengths + (k_new.shape[1] if ends is None else ends[1:] - ends[:-1])
    return q if q_rotated is None else to_bshd(q_rotated), lengths_after


def check_splits(splits):
    """splits as an int, or None. TypeError, ValueError: it is not an integer, or not from 1 to MAX_SPLITS."""
    if splits is None:
        return None
    if isinstance(splits, bool) or not hasattr(splits, "__index__") or getattr(splits, "shape", ()):
        raise TypeError(f"splits: must be an integer or None: {splits=}")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: must be from 1 to {MAX_SPLITS}: {splits=}")
    return int(splits)


NO_GRADIENT = "attention.decode has no gradient: attention.forward has"


@program(DECODE, no_gradient=NO_GRADIENT)
def _decode(
    problem: Problem,
    scores: ScoreOptions,
    splits: int | None,
    interleaved: bool,
    norm_eps: float,
    result: ResultOptions,
) -> Plan:
    """The Plan of a call of decode. The schema's `lse` is always a result: callers have no argument for it."""
    check_extents(problem)
    scale, return_lse, family = result
    cache = select_loader(problem, problem.bytes_at_once(*TILES))
    max_keys = cache.max_keys
    check_bias(problem, max_keys)
    is_local = scores.causal or scores.left is not None or scores.right is not None
    append = plan_new_keys(problem, interleaved, is_local, norm_eps, max_keys)
    batch, tokens, heads = problem("batch", "seqlen_q", "heads")
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in (batch, tokens, heads) or max_keys == 0:  # no token sees a key
        if "sink" in problem and 0 not in (batch, tokens, heads):
            raise problem.error("k", "must have at least one key where sink is passed", "k")
        choose_family(problem, family, tma=True)  # for its errors alone
        fills = [Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x]
        return Plan([*append.steps, *fills], append.scratch)
    if scores.mask is None:  # pages of keys that a mask hides may be missing
        append = append._replace(steps=[*plan_page_checks(problem, scores.left), *append.steps])
    mask, score, aux = load_functions(problem, scores, max_keys)
    checks = plan_index_checks(problem, IndexingFunctions(mask, score, aux, scores, max_keys))
    append = append._replace(steps=[*checks, *append.steps])
    options = DecodeOptions(scores, resolve_scale(problem, scale), mask, score, aux, splits, family)
    norms = select_norms(problem, norm_eps)
    if serves_prefill(problem, options, norms, max_keys):
        return plan_prefill(problem, options, append, norms, max_keys, out, lse)
    return plan_split_kv(problem, options, append, norms, cache, out, lse)


_variant = program(VARIANT, no_gradient=NO_GRADIENT)(_decode.planner)
_append = program(APPENDING, no_gradient=NO_GRADIENT)(_decode.planner)
_append_quantising = program(QUANTISING, no_gradient=NO_GRADIENT)(_decode.planner)
