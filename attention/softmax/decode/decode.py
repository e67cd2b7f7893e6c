"""attention.decode: from a user's arrays to its launches."""

import math
import operator
from typing import Any

from tiles.arrays import Operand
from tiles.device import hopper, machine
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, program
from tiles.schema import Problem, Schema

from ...families import choose
from ...options import flag, number
from ..asked import ends_of, positive
from ..forward import check_extents, scale_of
from ..launches import DTYPES, LOG2_E, over
from ..online import SLACK
from ..scores import Capped, Sunk
from ..variants import Both, Variant
from . import attend, combine
from .caches import Dense, Indexed, Paged
from .products import Narrow, Same
from .reach import Reach, Sloped
from .results import Either, Part, Whole
from .splits import Parted, Shares, shares_for, splits_for

MOST_SPLITS = 1024
TILES = "q", "k", "v", "out"
FP8, SINCE_FP8, LEAST_PIECE = "float8_e4m3fn", (8, 9), 4  # copies by cp.async take so many bytes at least
DECODE = Schema(
    "decode",
    """
    q            BSHD  tile
    k            CTGD  cache
    v            CTGV  cache
    lengths      B     key_lengths
    pages        BM    index    optional
    batch_index  B     index    optional
    leftpad      B     index    optional
    alibi        H|UH  float32  optional
    sink         H     float32  optional
    k_descale    G|BG  float32  optional
    v_descale    G|BG  float32  optional
    out          BSHV  tile     in_place
    lse          BHS   float32  made      return_lse
    """,
)


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
) -> Any:
    """Attention of a few new tokens over caches of keys and values, which are read once: what a server does for each token.

    q: (B, Sq, H, D), one query token a sequence or several, as in speculative decoding. k: (B, Sk, Hk, D) and v:
    (B, Sk, Hk, Dv), the caches, of which sequence b uses the first lengths[b] keys, the new tokens' among them; what lies
    behind is not looked at. bfloat16 or float16; D and Dv multiples of 8 up to 256; H a multiple of Hk. layout="bhsd":
    (B, H, Sq, D) and (B, Hk, Sk, D). Any base addresses and strides with a contiguous last axis, fast where they are multiples
    of 16 bytes.

    lengths: (B), int32 or int64, where q lies: they are never read on the host. Neither plans nor kernels depend on them, so
    that a CUDA graph which holds the call serves sequences as they grow.

    pages: (B, most pages), int32 or int64. Then k and v are pools, (pages, page size, Hk, D) and Dv, or for layout="bhsd"
    (pages, Hk, page size, D): key j of sequence b is row j % size of page pages[b, j // size]. Any page size. Numbers of pages
    behind a sequence's last one are not read. batch_index: (B), sequence b lies in batch batch_index[b] of k and v, which may
    have more. leftpad: (B), the keys before leftpad[b] are not looked at.

    k and v of float8_e4m3fn (since Ada), at multiples of 4 bytes: their numbers become fp16, exactly, and queries are rounded
    to that. k_descale, v_descale: float32, (Hk) or (B, Hk), what they are multiplied by; both or none.

    Which keys a token sees. The last token stands at the last key: token t at place p = lengths[b] - Sq + t. causal: keys up to
    p. window: (left, right), keys from p - left to p + right; None is open. A token that sees no key gives 0.

    What becomes of a score: softcap, alibi, sink and scale, as in forward.

    splits: into how many parts each sequence's keys go, which different multiprocessors work on, and which a second launch adds
    up. With as many splits the result has the same bits, always. By default all sequences' keys are shared out evenly, by the
    lengths as the device finds them: a sequence's bits then depend on the others' lengths.

    out, return_lse, stream: as in forward. family: None or "sm_80", the instructions of every GPU since Ampere.

    Returns `out`, or with return_lse=True `(out, lse)`, lse (B, H, Sq) as in forward.

    ValueError or TypeError, before anything is launched, names the argument and prints the values."""
    left, right = ends_of(window)
    arrays = q, k, v, lengths, pages, batch_index, leftpad, alibi, sink, k_descale, v_descale, out, None
    of_keys = flag("causal", causal), left, right, positive("softcap", softcap), _parts(splits)
    return _decode(stream, arrays, (*of_keys, number("scale", scale), flag("return_lse", return_lse), family), layout)


def _parts(splits):
    """The splits that are asked for; TypeError, ValueError."""
    if splits is None:
        return None
    if isinstance(splits, bool) or not hasattr(splits, "__index__"):
        raise TypeError(f"splits: must be an integer or None: {splits=}")
    if not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"splits: must be from 1 to {MOST_SPLITS}: {splits=}")
    return int(splits)


@program(DECODE, no_gradient="attention.decode has no gradient: attention.forward has")
def _decode(
    problem: Problem,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    splits: int | None,
    scale: float | None,
    return_lse: bool,
    family: str | None,
) -> Plan:
    """How decode does calls of this form; lse is never given."""
    check_extents(problem)
    if family == "sm_90":
        raise ValueError(f"family: attention.decode has kernels of sm_80, for every GPU since Ampere: {family=}")
    choose(problem, "sm_80")
    cache, most_keys, of_cache = _cache(problem)
    batch, tokens, heads, head_dim, kv_heads, value_dim = problem("BSHDGV")
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in (batch, tokens, heads) or most_keys == 0:  # no token sees a key
        if "sink" in problem and 0 not in (batch, tokens, heads):
            raise problem.error("k", "must have at least one key where there is a sink", "k")
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x])
    group, dtype, gpu = heads // kv_heads, DTYPES[problem.dtype], machine(problem.device)
    rows, piece = tokens * group, problem.bytes_at_once(*TILES)
    product, of_products = _product(problem)
    reach, of_keys, seen = _reach(problem, causal, left, right, most_keys)
    variant, sums, unit, of_scores, of_sums = _scores(problem, scale_of(problem, scale), softcap)
    early, whole, part = hopper(gpu.capability), Whole(dtype, piece), Part(dtype, piece)

    def config(split: type[Parted], result: Whole | Either) -> attend.Config:
        kind = variant, reach, cache, result, Variant() if result is part else sums, split, early
        return attend.config_for(head_dim, value_dim, product, *kind, rows > attend.BAND, gpu.shared_bytes)

    chosen, alone = config(Parted, whole), batch == 1  # one sequence's keys are shared out evenly if they are parted evenly
    bands = -(-rows // chosen.band)
    if splits is not None:
        number = splits
    elif alone:
        number = splits_for(kv_heads * bands, -(-seen // chosen.kv), gpu.processors)
    else:
        chosen = config(Shares, Either(whole, part))
        number = shares_for(kv_heads * bands, chosen.resident * gpu.processors)
    parted = alone or splits is not None or number == 1
    told = {"heads": kv_heads, "group": group, "scale": unit * LOG2_E, "sequences": batch, "tokens": tokens, "splits": number}
    to = {"out": _grouped(out, 2, group), "lse": lse and _grouped(lse, 1, group), **of_sums}
    steps, scratch, blocks = [], [], batch * number
    if number == 1:
        chosen = config(Parted, whole)
    else:
        if parted:
            chosen, places, split, of_split, ends = config(Parted, part), (number, batch), Parted(), {}, batch
        else:
            blocks, places, split, of_split = number, (number + batch, 1), Shares(reach, chosen.kv), of_keys
            ends = batch if batch <= number else number - 1
        scratch = [((*places, kv_heads, rows, value_dim), "float32"), ((*places, kv_heads, rows), "float32")]
        parts, weights = [problem.scratch(n, *each) for n, each in enumerate(scratch)]
        last, slabs = combine.Config(dtype, sums, split, early), -(-value_dim // combine.COLUMNS)
        given = {"parts": parts, "sums_": weights, "rows": rows, "slabs": slabs, **told, **to, **of_split}
        steps.append(kernel_for(combine, last, problem.device).bind(ends * kv_heads * rows * slabs, **given))
        to = {"parts": parts, "sums": weights, **({} if parted else to)}
    first = kernel_for(attend, chosen, problem.device).bind(
        blocks * kv_heads * bands,
        gQ=_by_rows(problem["q"], group),
        gK=problem["k"],
        gV=problem["v"],
        bands=bands,
        slack=SLACK / (unit * LOG2_E),
        **told,
        **of_cache,
        **of_products,
        **of_keys,
        **of_scores,
        **to,
    )
    return Plan([first, *steps], scratch)


def _cache(problem: Problem) -> tuple[Dense, int, dict[str, Operand]]:
    """How keys and values lie, how many a sequence can have at most, and what kernels are told of that. ValueError."""
    batch, batches, rows = problem("BCT")
    piece = problem.bytes_at_once(*TILES)
    if "pages" in problem:
        if "batch_index" in problem:
            raise ValueError("batch_index: must be None where there are pages, whose table says where a sequence lies")
        return Paged(piece), rows * problem("M")[0] if batches else 0, {"pages": problem["pages"]}
    if "batch_index" in problem:
        return Indexed(piece), rows if batches else 0, {"batch_index": problem["batch_index"]}
    if batches != batch:
        raise problem.error("k", "batch must equal q's where there are neither pages nor batch_index", "k", "q")
    return Dense(piece), rows, {}


def _product(problem: Problem) -> tuple[Same, dict[str, Any]]:
    """How products are made with what the cache holds, and what kernels are told of that. TypeError, ValueError."""
    held, dtype, gpu = problem["k"].form.dtype, DTYPES[problem.dtype], machine(problem.device)
    for name in ("k", "v"):
        form = problem[name].form
        if form.dtype not in (problem.dtype, FP8) or form.dtype != held:
            said = f"{name}.dtype={form.dtype!r}, k.dtype={held!r}, q.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be q's or float8_e4m3fn, as k's: {said}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    told = {name: over(problem, name, "BG") for name in ("k_descale", "v_descale")}
    scaled = [name for name, descale in told.items() if descale is not None]
    if len(scaled) == 1:
        raise ValueError("k_descale: must be given where v_descale is, and the other way round")
    if held != FP8:
        if scaled:
            raise ValueError(f"k_descale: is for a cache of float8_e4m3fn: k.dtype={held!r}")
        return Same(dtype), {}
    if gpu.capability < SINCE_FP8:
        raise ValueError(f"k: a cache of float8_e4m3fn takes a GPU of compute capability 8.9 or later; it lies on {gpu}")
    if problem.bytes_at_once("k", "v") < LEAST_PIECE:
        raise ValueError(f"k: addresses and strides of float8_e4m3fn must be multiples of {LEAST_PIECE} bytes")
    return Narrow(dtype, bool(scaled)), told if scaled else {}


def _reach(
    problem: Problem, causal: bool, left: int | None, right: int | None, most_keys: int
) -> tuple[Reach, dict[str, Any], int]:
    """Which keys tokens see, what kernels are told of that, and how many some tile's rows see at most. One token, at the last
    key, sees no later one, whatever it may."""
    (tokens,) = problem("S")
    if causal:
        right = 0
    if tokens == 1:
        right = None
    told: dict[str, Any] = {"lengths": problem["lengths"]}
    told |= {name: end for name, end in (("left", left), ("right", right)) if end is not None}
    told |= {"leftpad": problem["leftpad"]} if "leftpad" in problem else {}
    seen = most_keys if left is None else min(most_keys, left + tokens + (right or 0))
    return Reach(left is not None, right is not None, "leftpad" in problem), told, seen


def _scores(
    problem: Problem, unit: float, softcap: float | None
) -> tuple[Variant, Variant, float, dict[str, Any], dict[str, Any]]:
    """(what becomes of scores, what joins the sum of their weights, the unit of scores, what kernels are told of the former,
    and of the latter)"""
    parts: list[Variant] = []
    told: dict[str, Any] = {}
    if softcap is not None:
        parts.append(Capped())
        told["per_cap"], unit = unit / softcap, softcap
    if "alibi" in problem:
        parts.append(Sloped())
        told |= {"slopes": over(problem, "alibi", "BH"), "per_slope": 1 / unit}
    variant = Both(*parts) if len(parts) == 2 else parts[0] if parts else Variant()
    if "sink" not in problem:
        return variant, Variant(), unit, told, {}
    return variant, Sunk(), unit, told, {"sinks": problem["sink"], "per_sink": 1 / unit}


def _grouped(operand: Operand, axis: int, group: int) -> Operand:
    """With an axis of heads as two: key heads, and the query heads of each; tokens come first, as they did."""
    form = operand.form
    shape, strides = form.shape, form.strides
    shape = (*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    strides = (*strides[:axis], strides[axis] * group, *strides[axis:])
    return operand._replace(form=form._replace(shape=shape, strides=strides))


def _by_rows(q: Operand, group: int) -> Operand:
    """Queries as (token, which of a key head's query heads, sequence, key head, column)."""
    q = _grouped(q, 2, group)
    order = operator.itemgetter(1, 3, 0, 2, 4)
    return q._replace(form=q.form._replace(shape=order(q.form.shape), strides=order(q.form.strides)))
