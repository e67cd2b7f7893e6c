"""The launches of attention.decode: what serves a problem, and what its kernels are bound to."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from tiles.arrays import Operand
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.plan import Plan, Step
from tiles.schema import Problem
from tiles.targets import has_early_launch, has_fp8, is_hopper

from ...cache import append as appending
from ...cache import write_kernel
from ...families import choose_family
from ..assembled import build_variant
from ..key_sources import IndexedCache, OneBuffer, PagedKeys
from ..launches import DTYPES, LOG2_E, over
from ..online import SLACK
from ..planning import INDICES
from ..scores import Capped, Scored, Sunk
from ..variants import Both, Variant
from . import ampere, combine, hopper, many_queries
from .caches import DenseLoader, IndexedLoader, PagedLoader
from .norms import Norms
from .products import Fp8KeyScaledProducts, Fp8Products, SameDtypeProducts
from .reach import AlibiRows, GrowingKeyWindow, KeyWindow, MaskedRows, ScoredRows, WholeCacheWindow
from .results import FinalOrPartialOutput, FinalOutput, PackedPartialOutput, PartialOutput
from .splits import FixedSplits, StreamKSplits, choose_share_count, choose_split_count, underfills_gpu
from .tokens import PackedRows, UniformRows

TILES = "q", "k", "v", "out"
BRIEF, MANY = 1024, 8  # keys, and blocks a multiprocessor: of so many short sequences one's beginning hides another's end
FP8, LEAST_PIECE = "float8_e4m3fn", 4  # copies by cp.async take so many bytes at least


class DecodeOptions(NamedTuple):
    """What a call asks for: which keys tokens see, and what becomes of their scores. mask and score are functions, which read
    aux."""

    causal: bool
    left: int | None
    right: int | None
    softcap: float | None
    scale: float
    mask: Callable | None
    score: Callable | None
    aux: list[Operand]


class AppendPlan(NamedTuple):
    """What comes before attention. steps, scratch: launches and their scratch memory. queries: those that attention gets.
    told: the kernel's arguments for the keys that are in use then."""

    steps: list[Step]
    scratch: list[tuple[tuple[int, ...], str]]
    queries: Operand
    told: dict[str, Any]


def appended(problem: Problem, interleaved: bool, local: bool, norm_eps: float, most_keys: int) -> AppendPlan:
    """The Before of a call: the launch that appends new keys, if there are any. local: does each query stand at its own
    position? ValueError: arguments for new keys do not fit each other."""
    told: dict[str, Any] = {"lengths": problem["lengths"], "added": 0}
    if "lengths" not in problem:
        told = {"keys": most_keys}
    if "k_new" not in problem:
        return AppendPlan([], [], problem["q"], told)
    ends = problem["cu_seqlens_new"] or problem["cu_seqlens"]
    if "cu_seqlens_new" in problem and "cu_seqlens" not in problem:
        raise ValueError("cu_seqlens_new: takes cu_seqlens, too, which is None")
    told |= {"new_ends": ends} if ends else {"added": problem("s")[0]}
    queries, scratch = problem["q"], []
    if "cos" in problem:
        scratch = [(problem("BSHD"), problem.dtype)]
        queries = problem.scratch(0, *scratch[0])
    turned, alone = (problem["q"], queries) if scratch else None, "cu_seqlens_new" in problem
    names = appending.AppendNames("s", "S", None if alone else turned, ends)
    steps = appending.plan_append(problem, interleaved, local, names, norm_eps)
    if turned and alone and 0 not in problem("SH"):  # they lie by other ends than new keys
        how: dict[str, Any] = {"ends": problem["cu_seqlens"], "positions": problem["positions"], "interleaved": interleaved}
        how |= {"causal": local, "norm": appending.norm_operands(problem, "q_norm", "H"), "norm_eps": norm_eps}
        tables = problem["cos"], problem["sin"]
        steps.append(write_kernel.launch_rotation(problem.device, turned, problem["lengths"], tables, **how))
    return AppendPlan(steps, scratch, queries, told)


def of_many(
    problem: Problem,
    options: DecodeOptions,
    before: AppendPlan,
    norms: Norms,
    most_keys: int,
    family: str | None,
    out: Operand,
    lse: Operand | None,
) -> Plan:
    """The Plan with tiles of query tokens of one head, which are forward's kernels."""
    causal, left, right, softcap, scale, mask, score, aux = options
    given = "alibi" in problem, None, "sink" in problem
    spec = build_variant(scale, causal, (left, right), softcap, *given, mask, score and Scored(score), norms.queries)
    step = many_queries.planned(problem, spec, family, before.queries, most_keys, aux, {"gO": out, "gLse": lse, **before.told})
    return Plan([*before.steps, step], before.scratch)


def shared_out(problem: Problem, queries: int, keys: int, left: int | None = None, family: str | None = None) -> bool:
    """Should many queries go in tiles of 64 rows over parts of the keys, as few do? They should on Hopper, if forward has too
    few tiles for them."""
    gpu = machine(problem.device)
    if not (family is None and is_hopper(gpu.capability) and problem.by_tma):
        return False
    batch, heads = problem("BH")
    sequences = problem("N")[0] if "cu_seqlens" in problem else batch
    seen = keys if left is None else min(keys, left + queries)
    return underfills_gpu(sequences, -(-batch * queries // sequences), heads, seen, gpu.processors)


def of_few(
    problem: Problem,
    options: DecodeOptions,
    before: AppendPlan,
    norms: Norms,
    cache: DenseLoader,
    of_cache: dict[str, Operand],
    most_keys: int,
    splits: int | None,
    family: str | None,
    out: Operand,
    lse: Operand | None,
) -> Plan:
    """The Plan with tiles whose rows are query tokens and the heads that share a key head, over parts of the keys. family:
    "sm_90" if that is asked for; otherwise Hopper's tiles serve what would take more than one of the smaller ones. ValueError:
    the family cannot serve the call."""
    batch, tokens, heads, head_dim, kv_heads, value_dim = problem("BSHDGV")
    packed, axes = "cu_seqlens" in problem, tuple(len(x.form.shape) for x in options.aux)
    sequences = problem("N")[0] if packed else batch
    group, dtype, gpu = heads // kv_heads, DTYPES[problem.dtype], machine(problem.device)
    rows, vector_bytes = tokens * group, problem.bytes_at_once(*TILES)
    product, of_products = _product(problem)
    window, of_keys, seen = _reach(problem, options, most_keys)
    of_keys |= before.told
    variant, sums, unit, of_scores, of_sums = _scores(problem, options, norms)
    pdl, whole = has_early_launch(gpu.capability), FinalOutput(dtype, vector_bytes)
    lie, part, each = (
        (PackedRows, PackedPartialOutput(dtype, vector_bytes), -(-rows // sequences))
        if packed
        else (UniformRows, PartialOutput(dtype, vector_bytes), rows)
    )

    plain = type(product) is SameDtypeProducts and not packed and not norms.rows and not norms.keys.prepares
    if family == "sm_90" and not plain:
        raise ValueError(
            "family: of few query tokens sm_90's tiles take caches of q's dtype, a batch a sequence, and no norms: "
            f"{family=} (the default, None, takes these)"
        )
    tma = choose_family(problem, family, problem.by_tma and plain) == "sm_90" and (family == "sm_90" or each > ampere.MOST)
    kernels, held = (hopper, _held(problem, options)) if tma else (ampere, None)

    def config(split: type[FixedSplits], result: FinalOutput | FinalOrPartialOutput) -> Any:
        joins = Variant() if result is part else sums
        if tma:
            return hopper.config_for(head_dim, value_dim, dtype, variant, window, held, result, joins, split, axes)
        kind = variant, window, cache, result, joins, split, pdl
        shape = each > ampere.BAND, gpu.shared_bytes, lie, axes, norms.keys
        return ampere.config_for(head_dim, value_dim, product, *kind, *shape, brief)

    brief = False
    chosen, evenly = config(FixedSplits, whole), "lengths" in problem and not packed and batch > 1  # are all keys shared out?
    bands = rows // chosen.band + sequences if packed else -(-rows // chosen.band)
    brief = splits is None and evenly and not tma and seen <= BRIEF and batch * kv_heads * bands >= MANY * gpu.processors
    if splits is not None:
        number, evenly = splits, False
    elif brief:
        number, evenly = 1, False
    elif evenly:
        window = GrowingKeyWindow(window.left, window.right, window.padded) if "k_new" in problem else window
        chosen = config(StreamKSplits, FinalOrPartialOutput(whole, part))
        number = choose_share_count(kv_heads * bands, chosen.resident * gpu.processors)
    else:
        number = choose_split_count(batch * kv_heads * bands, -(-seen // chosen.kv), gpu.processors)
    told = {"heads": kv_heads, "group": group, "scale": unit * LOG2_E, "sequences": batch, "tokens": tokens, "splits": number}
    to = {"out": _grouped(out, 2, group), "lse": lse and _grouped(lse, 1, group), **of_sums}
    steps, scratch, blocks = [], before.scratch, batch * number
    if number == 1:
        chosen = config(FixedSplits, whole)
    else:
        ends, places, of_split = batch, (number, batch), {}
        split = StreamKSplits(window, chosen.kv) if evenly else FixedSplits()
        if evenly:
            blocks, places, of_split = number, (number + batch, 1), of_keys
            ends = batch if batch <= number else number - 1
        else:
            chosen = config(FixedSplits, part)
        shapes = (*places, kv_heads, rows, value_dim), (*places, kv_heads, rows)
        out_partial, lse_partial = [problem.scratch(n, shape, "float32") for n, shape in enumerate(shapes, len(scratch))]
        scratch = [*scratch, *((shape, "float32") for shape in shapes)]
        last, slabs = combine.Config(dtype, sums, split, pdl), -(-value_dim // combine.COLUMNS)
        given = {"out_partial": out_partial, "lse_partial": lse_partial, "rows": rows, "slabs": slabs, **told, **to, **of_split}
        steps.append(kernel_for(combine, last, problem.device).bind(ends * kv_heads * rows * slabs, **given))
        to = {"out_partial": out_partial, "lse_partial": lse_partial, **(to if evenly else {})}
    sized = {"page_size": problem("T")[0]} if held is not None and held.paged else {}
    first = kernel_for(kernels, chosen, problem.device).bind(
        blocks * kv_heads * bands,
        gQ=_grouped(before.queries, 2, group) if tma else by_rows(before.queries, group),
        gK=problem["k"],
        gV=problem["v"],
        bands=bands,
        slack=SLACK / (unit * LOG2_E),
        **({"ends": problem["cu_seqlens"]} if packed else {}),
        **{f"aux{n}": x for n, x in enumerate(options.aux)},
        **told,
        **of_cache,
        **sized,
        **of_products,
        **of_keys,
        **(of_scores | norms.of_keys),
        **to,
    )
    return Plan([*before.steps, first, *steps], scratch)


def cache_of(problem: Problem) -> tuple[DenseLoader, int, dict[str, Operand]]:
    """(how keys and values lie, the most keys that a sequence can have, the kernel's arguments for it). ValueError: arguments
    for caches do not fit each other."""
    batch, batches, rows = problem("NCT")
    vector_bytes = problem.bytes_at_once(*TILES)
    if "pages" in problem:
        if "batch_index" in problem:
            raise ValueError("batch_index: must be None where there are pages, whose table says where a sequence lies")
        return PagedLoader(vector_bytes), rows * problem("M")[0] if batches else 0, {"pages": problem["pages"]}
    if "batch_index" in problem:
        return IndexedLoader(vector_bytes), rows if batches else 0, {"batch_index": problem["batch_index"]}
    if batches != batch:
        if "cu_seqlens" in problem:
            raise problem.error("k", f"must have {batch} batches, one a sequence, or pages or batch_index", "k")
        raise problem.error("k", "batch must equal q's where there are neither pages nor batch_index", "k", "q")
    return DenseLoader(vector_bytes), rows, {}


def _held(problem: Problem, options: DecodeOptions) -> OneBuffer | None:
    """How TMA finds keys. None if it cannot, because tiles may begin anywhere in a page, or span several pages."""
    if "pages" in problem:
        whole = problem("T")[0] % hopper.KV == 0 and "leftpad" not in problem and options.left is None
        return PagedKeys(1) if whole else None
    return IndexedCache() if "batch_index" in problem else OneBuffer()


def _product(problem: Problem) -> tuple[SameDtypeProducts, dict[str, Any]]:
    """(how products are made with what the cache holds, the kernel's arguments for it). TypeError, ValueError: the dtypes or
    descales do not fit."""
    held, dtype, gpu = problem["k"].form.dtype, DTYPES[problem.dtype], machine(problem.device)
    for name in ("k", "v"):
        form = problem[name].form
        if form.dtype not in (problem.dtype, FP8) or form.dtype != held:
            also, said = (", as k's", f"k.dtype={held!r}, ") if name == "v" else ("", "")
            said = f"{name}.dtype={form.dtype!r}, {said}q.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be q's or float8_e4m3fn{also}: {said}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    names = "k_descale", "v_descale"
    by_key = appending.has_descale_per_key(problem)
    told = {name: problem[name] if by_key else over(problem, name, "NG") for name in names}
    scaled = [name for name, descale in told.items() if descale is not None]
    if len(scaled) == 1:
        raise ValueError("k_descale: must be given where v_descale is, and the other way round")
    if held != FP8:
        if scaled:
            raise ValueError(f"k_descale: is for a cache of float8_e4m3fn: k.dtype={held!r}")
        return SameDtypeProducts(dtype), {}
    if not has_fp8(gpu.capability):
        raise ValueError(f"k: a cache of float8_e4m3fn takes a GPU of compute capability 8.9 or later; it lies on {gpu}")
    if problem.bytes_at_once("k", "v") < LEAST_PIECE:
        raise ValueError(f"k: addresses and strides of float8_e4m3fn must be multiples of {LEAST_PIECE} bytes")
    if by_key:
        pages, rows, most = problem("CT") + (problem("M") if "pages" in problem else (1,))
        if max(pages, rows * most) >= INDICES:
            wanted = "of each key and head are for pools of fewer than 2**24 pages, and as many keys of a sequence"
            raise problem.error("k_descale", wanted, "k_descale")
        return Fp8KeyScaledProducts(dtype, True), told
    return Fp8Products(dtype, bool(scaled)), told if scaled else {}


def _reach(problem: Problem, options: DecodeOptions, most_keys: int) -> tuple[KeyWindow, dict[str, Any], int]:
    """(which keys tokens see, the kernel's arguments for it, the most keys that the rows of a tile see). A single token is at
    the last key, so it sees no later one, whatever its window is."""
    (tokens,), left, right = problem("S"), options.left, 0 if options.causal else options.right
    if tokens == 1 and "cu_seqlens" not in problem:
        right = None
    told: dict[str, Any] = {name: end for name, end in (("left", left), ("right", right)) if end is not None}
    told |= {"leftpad": problem["leftpad"]} if "leftpad" in problem else {}
    seen = most_keys if left is None else min(most_keys, left + tokens + (right or 0))
    kind = KeyWindow if "lengths" in problem else WholeCacheWindow
    return kind(left is not None, right is not None, "leftpad" in problem), told, seen


def _scores(
    problem: Problem, options: DecodeOptions, norms: Norms
) -> tuple[Variant, Variant, float, dict[str, Any], dict[str, Any]]:
    """(the variant, what is added to the sum of weights, the unit of scores, the kernel's arguments for the variant, those for
    the sum)"""
    parts, told, unit = [*norms.rows], {**norms.of_queries}, options.scale
    if options.softcap is not None:
        parts.append(Capped())
        told["per_cap"], unit = unit / options.softcap, options.softcap
    if "alibi" in problem:
        parts.append(AlibiRows())
        told |= {"slopes": over(problem, "alibi", "NH"), "per_slope": 1 / unit}
    if options.score is not None:
        parts.append(ScoredRows(options.score))
        told["score_unit"], unit = unit, 1.0
    if options.mask is not None:
        parts.append(MaskedRows(options.mask))
    variant = functools.reduce(Both, parts) if parts else Variant()
    if "sink" not in problem:
        return variant, Variant(), unit, told, {}
    return variant, Sunk(), unit, told, {"sinks": problem["sink"], "per_sink": 1 / unit}


def _grouped(operand: Operand, axis: int, group: int) -> Operand:
    """The operand with its axis of heads as two, key heads and the query heads of each; tokens stay first."""
    form = operand.form
    shape, strides = form.shape, form.strides
    shape = (*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    strides = (*strides[:axis], strides[axis] * group, *strides[axis:])
    return operand._replace(form=form._replace(shape=shape, strides=strides))


def by_rows(q: Operand, group: int) -> Operand:
    """Queries as (token, query head of a key head, sequence, key head, column)."""
    q = _grouped(q, 2, group)
    order = operator.itemgetter(1, 3, 0, 2, 4)
    return q._replace(form=q.form._replace(shape=order(q.form.shape), strides=order(q.form.strides)))
