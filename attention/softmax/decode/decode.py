"""attention.decode: from a user's arrays to its launches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tiles.plan import Fill, Plan
from tiles.program import program
from tiles.schema import Problem, Schema
from tiles.torch_op import traced

from ...cache import append as appending
from ...families import choose_family
from ...names import suggests_argument_names
from ...options import check_flag, check_number, check_positive, split_norm
from ..call_options import OF_AUX, eight, ends_of
from ..index_checks import Asking, indexed
from ..planning import check_extents, functions_of, scale_of
from ..python_functions import named
from .launches import DecodeOptions, appended, cache_of, of_few, of_many, shared_out
from .norms import norms_of
from .page_checks import placed

MOST_SPLITS = 1024
MANY = 64  # query tokens of a sequence, from which on forward's tiles serve it: bench/notes/decode.md has the estimate
HELD = """
    q               BSHD  tile
    k               CTGD  cache
    v               CTGV  cache
"""
KEYS = """
    lengths         N     key_lengths  optional
    pages           NM    index    optional
    batch_index     N     index    optional
    leftpad         N     key_starts  optional
    alibi           H|UH  float32  optional
    sink            H     float32  optional
    k_descale       G|NG|CTG  float32  optional
    v_descale       G|NG|CTG  float32  optional
"""
MADE = """
    out             BSHV  tile     in_place
    lse             BHS   float32  made      return_lse
"""
PACKED = """
    cu_seqlens      E     ends     optional
"""
NORMS = """
    q_norm          D|HD  real     optional
    q_norm_bias     D|HD  real     optional
    k_norm          D|GD  real     optional
    k_norm_bias     D|GD  real     optional
"""
NEW = """
    k_new           BsGD  tile
    v_new           BsGV  tile
    k_new_norm      D|GD  real     optional
    k_new_norm_bias  D|GD  real    optional
    cu_seqlens_new  E     new_ends  optional
    cos             ZR    real      optional
    sin             ZR    real      optional
    positions       N     index     optional
"""
GROWN, BEGUN = HELD.replace("cache", "cache  updated"), KEYS.replace("key_lengths  optional", "key_lengths")


def _schema(name: str, *tables: str) -> Schema:
    return Schema(name, "\n".join(row for table in tables for row in table.splitlines() if row.strip()))


DECODE = _schema("decode", HELD, KEYS, MADE)
VARIANT = _schema("decode_variant", HELD, PACKED, KEYS, NORMS, OF_AUX, MADE)
OF_APPEND = GROWN, PACKED, BEGUN, NORMS, OF_AUX, NEW, MADE
APPENDING = _schema("decode_append", *OF_APPEND)
QUANTISING = _schema("decode_append_quantising", *map(appending.with_token_descales, OF_APPEND))


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
    mask: Callable | None = None,
    score: Callable | None = None,
    aux: Sequence[Any] = (),
    splits: int | None = None,
    scale: float | None = None,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Attention of new tokens over caches of keys and values, which are read once. It is what a server does for each token and,
    with many query tokens, for a prompt or a part of one.

    q: (B, Sq, H, D): one query token a sequence, several, as in speculative decoding, or any number. k: (B, Sk, Hk, D) and
    v: (B, Sk, Hk, Dv): the caches. Sequence b uses the first lengths[b] keys, including those of the new tokens; the others
    are not looked at. bfloat16 or float16; D and Dv multiples of 8 up to 256; H a multiple of Hk. With layout="bhsd":
    (B, H, Sq, D) and (B, Hk, Sk, D). Any base addresses, and any strides with a contiguous last axis; multiples of 16 bytes
    are fast.

    lengths: (B), int32 or int64, on q's device; the host never reads them. Neither plans nor kernels depend on them, so a
    CUDA graph that holds the call serves sequences as they grow. None: all keys that there is room for are in use.

    pages: (B, most pages), int32 or int64. Then k and v are pools, (pages, page size, Hk, D) and Dv, or for layout="bhsd"
    (pages, Hk, page size, D), and key j of sequence b is row j % size of page pages[b, j // size]. Any page size. Entries
    behind a sequence's last page are not read. batch_index: (B), sequence b lies in batch batch_index[b] of k and v, which
    may have more. leftpad: (B), keys before leftpad[b] are not looked at.

    k and v of float8_e4m3fn (since Ada), at multiples of 4 bytes: they are converted to fp16, exactly, and queries are
    rounded to fp16. k_descale, v_descale: float32, positive, by which they are multiplied; both or none. (Hk) or (B, Hk). Or
    one for each token, at the place of k and v: (B, Sk, Hk), or (pages, page size, Hk), for layout="bhsd" with Hk in the
    middle, with any strides; those of keys that are not looked at may be anything. Query tokens then go in as many small
    tiles as it takes.

    cu_seqlens: (N + 1), ascending from 0 to Sq: the query tokens of N sequences lie one after the other in a batch of 1,
    those of sequence n from cu_seqlens[n] to cu_seqlens[n + 1]. Caches and all that is said of them are then of N sequences.

    k_new, v_new: (B, S, Hk, D) and Dv: keys and values that are first written into the caches, in place, from key lengths[b]
    on; `lengths` does not count them yet. This is attention.append, by the same kernel, in the same call; it also writes the
    descales of each token. If queries are packed, so are these, by cu_seqlens_new or cu_seqlens.

    rotary: (cos, sin), as in attention.append. k_new is rotated, key i by position lengths[b] + i. So is q (the array itself
    stays as it is): query token i by the position of the i-th new key, or without causal and window all by that of the
    first. interleaved, positions: as in append.

    q_norm, k_norm, k_new_norm: norms of the rows of the argument of that name, as forward has them: weights of an RMS norm,
    or a pair (weights, bias) of a layer norm. What your cache holds decides which you need. k_new_norm: k_new is normalised
    once, before it is rotated and written, and the cache holds normalised keys, as Qwen3's does. k_norm: the cache holds
    keys as they came, and all of them are normalised in every call, on the way to their scores, in float32; nothing of that
    is written, and k is read once. Neither implies the other, so nothing is normalised twice. q is normalised before it is
    rotated. With k_norm there is no rotary, which comes after a norm, and query tokens go in as many small tiles as it
    takes.

    Which keys a token sees. The last token stands at the last key: token t is at place p = lengths[b] - Sq + t, where
    lengths include the new ones. causal: keys up to p. window: (left, right), keys from p - left to p + right; None is open.
    mask: mask(b, h, i, j, *aux), in Python, for query token i, counted from the sequence's first, and key j. A token that
    sees no key gives 0.

    What becomes of a score: softcap, alibi, score(s, b, h, i, j, *aux), sink and scale, as in forward; so are mask, score
    and aux. Here h may be a vector, the heads of the rows.

    splits: the number of parts that each sequence's keys are split into; multiprocessors work on different parts, and a
    second launch combines them. The same splits give a sequence the same bits among any other sequences, if queries are not
    packed (then the kernel follows from how many a sequence has on average). By default the keys of all sequences are
    divided evenly, by the lengths as the device finds them: the bits of a sequence then depend on the lengths of the others.
    If queries are packed, or caches are whole, the number of parts follows from the shapes.

    out, return_lse, stream: as in forward. family: None, "sm_80", the instructions of every GPU since Ampere, or "sm_90",
    Hopper's. These serve many query tokens; they also serve few, in caches of q's dtype, by default if tokens times the
    query heads that share a key head are more than 32.

    Returns `out`, or with return_lse=True `(out, lse)`, lse (B, H, Sq) as in forward.

    ValueError, TypeError: name the argument and print the values, before anything is launched."""
    left, right = ends_of(window)
    options = (  # of every step of a server: each line costs it
        check_flag("causal", causal),
        left,
        right,
        None if softcap is None else check_positive("softcap", softcap),
        parts_of(splits),
        None if mask is None else named("mask", mask),
        None if score is None else named("score", score),
        check_flag("interleaved", interleaved),
        0.0 if q_norm is k_norm is k_new_norm is None else check_positive("norm_eps", norm_eps),
        None if scale is None else check_number("scale", scale),
        check_flag("return_lse", return_lse),
        family,
    )
    if k_new is v_new is rotary is None:
        if not (cu_seqlens_new is positions is k_new_norm is None):
            told = {"positions": positions, "cu_seqlens_new": cu_seqlens_new, "k_new_norm": k_new_norm}
            raise ValueError(f"{next(name for name, x in told.items() if x is not None)}: takes k_new, too, which is None")
        if cu_seqlens is mask is score is q_norm is k_norm is None and isinstance(aux, tuple) and not aux:
            given = q, k, v, lengths, pages, batch_index, leftpad, alibi, sink, k_descale, v_descale, out, None
            return _decode(stream, given, options, layout)
    arrays, keys = (q, k, v), (lengths, pages, batch_index, leftpad, alibi, sink, k_descale, v_descale)
    norms = *split_norm("q_norm", q_norm), *split_norm("k_norm", k_norm)
    if k_new is v_new is rotary is None:
        return _variant(stream, (*arrays, cu_seqlens, *keys, *norms, *eight(aux), out, None), options, layout)
    if k_new is None or v_new is None:
        name = "k_new" if k_new is None else "v_new"
        raise ValueError(f"{name}: must be given where {'rotary' if k_new is v_new is None else 'the other'} is: {name}=None")
    if k_norm is not None and rotary is not None:
        raise ValueError(
            "k_norm: normalises the keys of the cache, which with rotary are rotated, and a norm comes before that: k_new_norm "
            "normalises k_new alone, and first"
        )
    if traced(q):  # torch makes no functional op of what writes in place and has several results: here they are two
        new = k_new, v_new, cu_seqlens_new, rotary, positions, q_norm, k_new_norm, norm_eps
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        turned, after = _appended_before(q, k, v, lengths, pages, batch_index, cu_seqlens, new, options, layout, descales)
        keys = after, *keys[1:], *((None, None) if rotary is not None else norms[:2]), *norms[2:]
        return _variant(stream, (turned, k, v, cu_seqlens, *keys, *eight(aux), out, None), options, layout)
    new = k_new, v_new, *split_norm("k_new_norm", k_new_norm), cu_seqlens_new, *appending.rotary_tables(rotary), positions
    call = _append_quantising if appending.has_token_descales(k_descale, v_descale) else _append
    return call(stream, (*arrays, cu_seqlens, *keys, *norms, *eight(aux), *new, out, None), options, layout)


def _appended_before(q, k, v, lengths, pages, batch_index, cu_seqlens, new, options, layout, descales) -> tuple[Any, Any]:
    """(the queries, and the keys in use) after attention.append has written new keys, as torch's tensors."""
    k_new, v_new, cu_seqlens_new, rotary, positions, q_norm, k_new_norm, norm_eps = new
    causal, left, right, *_, interleaved, _, _, _, _ = options
    ends = cu_seqlens if cu_seqlens_new is None else cu_seqlens_new
    turn = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    told: dict[str, Any] = {"pages": pages, "batch_index": batch_index, "cu_seqlens": ends, "positions": positions, **descales}
    told |= {} if k_new_norm is None else {"k_new_norm": k_new_norm, "norm_eps": norm_eps}
    if rotary is not None:
        if cu_seqlens_new is not None:
            raise NotImplementedError("cu_seqlens_new: is not served together with rotary where torch traces the call")
        local = causal or left is not None or right is not None
        told |= {"rotary": rotary, "interleaved": interleaved, "q": turn(q), "causal": local}
        told |= {} if q_norm is None else {"q_norm": q_norm, "norm_eps": norm_eps}
    turned = appending.append(turn(k), turn(v), turn(k_new), turn(v_new), lengths=lengths, **told)
    return q if turned is None else turn(turned), lengths + (turn(k_new).shape[1] if ends is None else ends[1:] - ends[:-1])


def parts_of(splits):
    """The number of splits that is asked for, None for none. TypeError, ValueError: it is not an integer, or out of range."""
    if splits is None:
        return None
    if isinstance(splits, bool) or not hasattr(splits, "__index__"):
        raise TypeError(f"splits: must be an integer or None: {splits=}")
    if not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"splits: must be from 1 to {MOST_SPLITS}: {splits=}")
    return int(splits)


NO_GRADIENT = "attention.decode has no gradient: attention.forward has"


@program(DECODE, no_gradient=NO_GRADIENT)
def _decode(
    problem: Problem,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    splits: int | None,
    mask: str | None,
    score: str | None,
    interleaved: bool,
    norm_eps: float,
    scale: float | None,
    return_lse: bool,
    family: str | None,
) -> Plan:
    """The Plan of a call of decode. The schema's `lse` is a result, which a caller cannot give."""
    check_extents(problem)
    cache, most_keys, of_cache = cache_of(problem)
    before = appended(problem, interleaved, causal or left is not None or right is not None, norm_eps, most_keys)
    batch, tokens, heads, sequences = problem("BSHN")
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in (batch, tokens, heads) or most_keys == 0:  # no token sees a key
        if "sink" in problem and 0 not in (batch, tokens, heads):
            raise problem.error("k", "must have at least one key where there is a sink", "k")
        choose_family(problem, family, tma=True)  # which refuses what it refuses of other calls: nothing is read
        nothing = [Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x]
        return Plan([*before.steps, *nothing], before.scratch)
    if mask is None:  # what a mask leaves out need not be there
        before = before._replace(steps=[*placed(problem, left), *before.steps])
    *functions, aux = functions_of(problem, mask, score, most_keys)
    looks = indexed(problem, Asking(functions[0], functions[1], aux, causal, left, right, most_keys))
    before = before._replace(steps=[*looks, *before.steps])
    options = DecodeOptions(causal, left, right, softcap, scale_of(problem, scale), functions[0], functions[1], aux)
    counted = "leftpad" in problem and (mask or score)  # functions count a cache's keys from its first, forward from leftpad
    several = tokens >= MANY * (sequences if "cu_seqlens" in problem else 1)
    norms = norms_of(problem, norm_eps)
    few = counted or norms.keys.prepares or "lengths" not in problem or problem["k"].form.dtype != problem.dtype
    few = few or (several and splits is None and shared_out(problem, tokens, most_keys, left, family))
    if several and splits in (None, 1) and not few:
        return of_many(problem, options, before, norms, most_keys, family, out, lse)
    return of_few(problem, options, before, norms, cache, of_cache, most_keys, splits, family, out, lse)


_variant = program(VARIANT, no_gradient=NO_GRADIENT)(_decode.planner)
_append = program(APPENDING, no_gradient=NO_GRADIENT)(_decode.planner)
_append_quantising = program(QUANTISING, no_gradient=NO_GRADIENT)(_decode.planner)
