"""The launches of attention.decode: which kernels serve a problem, and with which arguments."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiles.calls.plan import Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ..families import HOPPER_FAMILY, uses_hopper_kernels
from ..kernels import decode_ampere, decode_combine, decode_hopper
from ..options import ScoreOptions
from ..parts.cache_scales import QUANTIZED
from ..parts.decode.cache_loaders import DenseLoader, IndexedLoader, PagedLoader
from ..parts.decode.key_window import GrowingKeyWindow, KeyWindow, TokenHeadScoreMod, WholeCacheWindow
from ..parts.decode.outputs import FinalOrPartialOutput, FinalOutput, PackedPartialOutput, PartialOutput
from ..parts.decode.products import KeyScaledProducts, QuantizedProducts, SameDtypeProducts
from ..parts.decode.splits import FixedSplits, StreamKSplits, choose_share_count, choose_split_count, underfills_gpu
from ..parts.decode.token_rows import PackedRows, UniformRows
from ..parts.key_sources import IndexedCache, OneBuffer, PagedKeys
from ..parts.online_softmax import SLACK
from ..parts.scores import PrefetchedBias, ScoreMod, Sink
from ..parts.variant import Variant
from ..parts.visibility import FULL
from . import prefill_from_cache
from .cache_append import has_descale_per_key, launch_append, plan_append
from .decode_norms import DecodeNorms
from .forward_launches import DTYPES, LOG2_E, expand_axes, variant_arguments
from .planning import INDICES, bias_part
from .variant_spec import build_variant

TILES = "q", "k", "v", "out"
FEW_KEYS, MANY_BLOCKS = 1024, 8  # of a sequence; per multiprocessor: these hide each other's prologues and epilogues
MIN_VECTOR_BYTES = 4  # cp.async copies so many bytes at least


class DecodeOptions(NamedTuple):
    """A call's options, with the functions in Python that they name, mask and score, which read aux."""

    scores: ScoreOptions
    scale: float
    mask: Callable | None = None
    score: Callable | None = None
    aux: Sequence[Operand] = ()


class AppendPlan(NamedTuple):
    """The steps before attention, which append new keys, with their scratch memory. queries: attention's, rotated if that was
    asked for. length_args: the kernel's arguments for the keys that are in use after these steps."""

    steps: list[Step]
    scratch: list[tuple[tuple[int, ...], str]]
    queries: Operand
    length_args: dict[str, Any]


def plan_new_keys(problem: Problem, interleaved: bool, local: bool, norm_eps: float, max_keys: int) -> AppendPlan:
    """The AppendPlan of a call; without k_new it has no steps. local: is each query rotated by its own position? ValueError:
    arguments for new keys do not fit each other."""
    args: dict[str, Any] = {"lengths": problem["lengths"], "added": 0}
    if "lengths" not in problem:
        args = {"keys": max_keys}
    if "k_new" not in problem:
        return AppendPlan([], [], problem["q"], args)
    ends = problem["cu_seqlens_new"] or problem["cu_seqlens"]
    if "cu_seqlens_new" in problem and "cu_seqlens" not in problem:
        raise ValueError("cu_seqlens_new: needs cu_seqlens, as both queries and new keys are packed then: cu_seqlens=None")
    args |= {"new_ends": ends} if ends else {"added": problem.extents["seqlen_new"]}
    queries, scratch = problem["q"], []
    if "cos" in problem:
        scratch = [(problem("batch", "seqlen_q", "heads", "head_dim"), problem.dtype)]
        queries = problem.scratch(0, *scratch[0])
    q_and_out, own_ends = (problem["q"], queries) if scratch else None, "cu_seqlens_new" in problem
    steps = plan_append(problem, interleaved, local, None if own_ends else q_and_out, ends, norm_eps)
    # if queries have other ends than new keys, a launch of their own rotates them
    if q_and_out and own_ends and 0 not in problem("seqlen_q", "heads"):
        steps.append(launch_append(problem, interleaved, local, q_and_out, problem["cu_seqlens"], norm_eps, writes=False))
    return AppendPlan(steps, scratch, queries, args)


def plan_prefill(
    problem: Problem,
    options: DecodeOptions,
    append: AppendPlan,
    norms: DecodeNorms,
    max_keys: int,
    family: str | None,
    out: Operand,
    lse: Operand | None,
) -> Plan:
    """The Plan with forward's kernels, whose tiles have query tokens of one head as rows."""
    spec = build_variant(
        options.scale,
        options.scores,
        alibi="alibi" in problem,
        bias=bias_part(problem, is_last=options.score is None, in_units_of_one=True),
        sink="sink" in problem,
        mask=options.mask,
        score=options.score and ScoreMod(options.score),
        extra_parts=norms.queries,
    )
    args = {"gO": out, "gLse": lse, **append.length_args}
    step = prefill_from_cache.plan_launch(problem, spec._replace(aux=options.aux), family, append.queries, max_keys, args)
    return Plan([*append.steps, step], append.scratch)


def prefers_split_kv(problem: Problem, queries: int, keys: int, left: int | None = None, family: str | None = None) -> bool:
    """Should many queries, too, be served by split-KV? On Hopper they should if forward has too few tiles to fill the GPU."""
    gpu = machine(problem.device)
    if not (family is None and gpu.target.is_hopper and problem.by_tma):
        return False
    batch, heads = problem("batch", "heads")
    sequences = problem.extents["sequences"] if "cu_seqlens" in problem else batch
    visible = keys if left is None else min(keys, left + queries)
    return underfills_gpu(sequences, -(-batch * queries // sequences), heads, visible, gpu.processors)


def plan_split_kv(
    problem: Problem,
    options: DecodeOptions,
    append: AppendPlan,
    norms: DecodeNorms,
    cache: DenseLoader,
    cache_args: dict[str, Operand],
    max_keys: int,
    splits: int | None,
    family: str | None,
    out: Operand,
    lse: Operand | None,
) -> Plan:
    """The Plan with decode_ampere.py's or decode_hopper.py's kernel, whose tiles have query tokens and the heads that share a
    key head as rows, over splits of the keys; and decode_combine.py's if there are several splits. family: "sm_90" for
    decode_hopper.py; by default that serves what would take more than one of decode_ampere.py's tiles. ValueError: the family
    cannot serve the call."""
    batch, tokens, heads, head_dim, kv_heads, value_dim = problem(
        "batch", "seqlen_q", "heads", "head_dim", "heads_k", "head_dim_v"
    )
    packed = "cu_seqlens" in problem
    sequences = problem.extents["sequences"] if packed else batch
    group, dtype, gpu = heads // kv_heads, DTYPES[problem.dtype], machine(problem.device)
    rows, vector_bytes = tokens * group, problem.bytes_at_once(*TILES)
    product, product_args = _select_product(problem)
    window, key_args, visible = _select_window(problem, options, max_keys)
    key_args |= append.length_args
    bias = PrefetchedBias(is_last=options.score is None, in_units_of_one=True) if "bias" in problem else None
    spec = build_variant(
        options.scale,
        options.scores._replace(causal=False, left=None, right=None),  # the KeyWindow masks keys
        alibi="alibi" in problem,
        bias=bias,
        mask=options.mask,
        score=options.score and TokenHeadScoreMod(options.score),
        extra_parts=norms.rows,
    )._replace(aux=options.aux)
    variant, unit = Variant() if spec.variant is FULL else spec.variant, spec.unit
    sink, sink_args = Variant(), {}
    if "sink" in problem:
        sink, sink_args = Sink(), {"sinks": problem["sink"], "per_sink": 1 / unit}
    pdl, final = gpu.target.has_early_launch, FinalOutput(dtype, vector_bytes)
    keeps_sums = variant.allows_low_scores
    seq_layout, partial, seq_rows = (
        (PackedRows, PackedPartialOutput(dtype, vector_bytes, keeps_sums), -(-rows // sequences))
        if packed
        else (UniformRows, PartialOutput(dtype, vector_bytes, keeps_sums), rows)
    )

    by_hopper = type(product) is SameDtypeProducts and not packed and not norms.rows and not norms.keys.prepares_queries
    if family == HOPPER_FAMILY and not by_hopper:
        raise ValueError(
            "family: 'sm_90' serves few query tokens only with a cache of q's dtype, without cu_seqlens and without norms: "
            f"{family=} (the default, None, serves these)"
        )
    is_hopper_kernel = uses_hopper_kernels(problem, family, problem.by_tma and by_hopper)
    is_hopper_kernel = is_hopper_kernel and (family == HOPPER_FAMILY or seq_rows > decode_ampere.TALL_ROWS)
    kernels, kv_source = (decode_hopper, _select_tma_source(problem, options)) if is_hopper_kernel else (decode_ampere, None)

    def config_for(window: KeyWindow, split: type[FixedSplits], result: Any, few_keys: bool = False) -> Any:
        row_sink = Variant() if result is partial else sink
        if is_hopper_kernel:
            return decode_hopper.config_for(
                head_dim, value_dim, dtype, variant, window, kv_source, result, row_sink, split, spec.axes
            )
        kind = variant, window, cache, result, row_sink, split, pdl
        shape = seq_rows > decode_ampere.TILE_ROWS, gpu.shared_bytes, seq_layout, spec.axes, norms.keys
        return decode_ampere.config_for(head_dim, value_dim, product, *kind, *shape, few_keys)

    config, stream_k = config_for(window, FixedSplits, final), "lengths" in problem and not packed and batch > 1
    row_tiles = rows // config.tile_rows + sequences if packed else -(-rows // config.tile_rows)
    many_blocks = batch * kv_heads * row_tiles >= MANY_BLOCKS * gpu.processors
    few_keys = splits is None and stream_k and not is_hopper_kernel and visible <= FEW_KEYS and many_blocks
    if splits is not None:
        count, stream_k = splits, False
    elif few_keys:
        count, stream_k = 1, False
    elif stream_k:
        window = GrowingKeyWindow(window.left, window.right, window.padded) if "k_new" in problem else window
        config = config_for(window, StreamKSplits, FinalOrPartialOutput(final, partial))
        count = choose_share_count(kv_heads * row_tiles, config.ctas_per_sm * gpu.processors)
    else:
        count = choose_split_count(batch * kv_heads * row_tiles, -(-visible // config.kv), gpu.processors)
    args: dict[str, Any] = {"heads": kv_heads, "group": group, "scale": unit * LOG2_E}
    args |= {"sequences": batch, "tokens": tokens, "splits": count}
    out_args = {"out": _group_heads(out, 2, group), "lse": lse and _group_heads(lse, 1, group), **sink_args}
    steps, scratch, blocks = [], append.scratch, batch * count
    if count == 1:
        config = config_for(window, FixedSplits, final, few_keys)
    else:
        combined, parts, split_args, split = batch, (count, batch), {}, FixedSplits()
        if stream_k:
            blocks, parts, split_args, split = count, (count + batch, 1), key_args, StreamKSplits(window, config.kv)
            combined = batch if batch <= count else count - 1
        else:
            config = config_for(window, FixedSplits, partial)
        partial_args, scratch = allocate_partials(problem, (*parts, kv_heads, rows), value_dim, keeps_sums, scratch)
        last = decode_combine.Config(dtype, sink, split, pdl, keeps_sums)
        combine_args = partial_args | args | out_args | split_args
        steps.append(combine_partials(problem, last, combined * kv_heads, rows, value_dim, combine_args))
        out_args = partial_args | (out_args if stream_k else {})
    args |= cache_args | product_args | key_args | variant_arguments(problem, spec) | spec.aux_args | out_args
    args |= norms.key_args
    args |= {"ends": problem["cu_seqlens"]} if packed else {}
    args |= {"page_size": problem.extents["seqlen_k"]} if kv_source is not None and kv_source.paged else {}
    args["gQ"] = _group_heads(append.queries, 2, group) if is_hopper_kernel else order_by_rows(append.queries, group)
    first = kernel_for(kernels, config, problem.device).bind(
        blocks * kv_heads * row_tiles,
        gK=problem["k"],
        gV=problem["v"],
        row_tiles=row_tiles,
        slack=SLACK / (unit * LOG2_E),
        **args,
    )
    return Plan([*append.steps, first, *steps], scratch)


def allocate_partials(
    problem: Problem, rows: tuple[int, ...], columns: int, sums: bool, scratch: Sequence[tuple[tuple[int, ...], str]] = ()
) -> tuple[dict[str, Any], list]:
    """(the kernel's arguments for partial outputs, the scratch memory with theirs). rows: (split, batch, head, row). sums: are
    there row sums, too?"""
    shapes = {"out_partial": (*rows, columns), "lse_partial": rows} | ({"sum_partial": rows} if sums else {})
    args = {name: problem.scratch(n, shape, "float32") for n, (name, shape) in enumerate(shapes.items(), len(scratch))}
    return args, [*scratch, *[(shape, "float32") for shape in shapes.values()]]


def combine_partials(
    problem: Problem, config: decode_combine.Config, heads: int, rows: int, columns: int, args: dict[str, Any]
) -> Step:
    """The launch that combines partial outputs, of so many heads of all sequences."""
    slabs = -(-columns // decode_combine.COLUMNS)
    kernel = kernel_for(decode_combine, config, problem.device)
    return kernel.bind(heads * rows * slabs, rows=rows, slabs=slabs, **args)


def select_loader(problem: Problem, vector_bytes: int, name: str = "k") -> tuple[DenseLoader, int, dict[str, Operand]]:
    """(how keys and values are loaded, the most keys that a sequence can have, the kernel's arguments for it). name: of the
    cache. ValueError: pages and batch_index are both passed; or neither, and the cache's batch is not the number of
    sequences."""
    batches, rows = problem("batch_cache", "seqlen_k")
    batch = problem.extents.get("sequences", problem.extents["batch"])
    if "pages" in problem:
        if "batch_index" in problem:
            raise ValueError("batch_index: must be None where pages is passed, which says already where a sequence's keys are")
        return PagedLoader(vector_bytes), rows * problem.extents["pages_per_seq"] if batches else 0, {"pages": problem["pages"]}
    if "batch_index" in problem:
        return IndexedLoader(vector_bytes), rows if batches else 0, {"batch_index": problem["batch_index"]}
    if batches != batch:
        if "cu_seqlens" in problem:
            rule = f"batch must equal the number of sequences, {batch}, unless pages or batch_index is passed"
            raise problem.error(name, rule, name)
        raise problem.error(name, "batch must equal q's unless pages or batch_index is passed", name, "q")
    return DenseLoader(vector_bytes), rows, {}


def check_bias(problem: Problem, max_keys: int) -> None:
    """ValueError: there is a bias, and it has not a column for each key that a sequence may have, or too many."""
    if "bias" not in problem:
        return
    keys, value_names = problem.extents["bias_keys"], ("bias", "k", *(("pages",) if "pages" in problem else ()))
    if keys < max_keys:
        rule = f"must have a column for each key that a sequence may have, {max_keys}; pad it, with anything"
        raise problem.error("bias", rule, *value_names)
    if max(max_keys, problem.extents["seqlen_q"]) >= INDICES:  # of a TokenHeadContext
        raise problem.error(
            "bias", "is read by float32 indices: there must be fewer than 2**24 queries and keys", "q", *value_names
        )


def _select_tma_source(problem: Problem, options: DecodeOptions) -> OneBuffer | None:
    """Where TMA finds keys; None if it cannot, because tiles may begin anywhere in a page, or span several pages."""
    if "pages" in problem:
        begins_at_a_page = "leftpad" not in problem and options.scores.left is None
        return PagedKeys(1) if begins_at_a_page and problem.extents["seqlen_k"] % decode_hopper.KV == 0 else None
    return IndexedCache() if "batch_index" in problem else OneBuffer()


def _select_product(problem: Problem) -> tuple[SameDtypeProducts, dict[str, Any]]:
    """(the products for the cache's dtype and descales, the kernel's arguments for them). TypeError, ValueError: these do not
    fit."""
    cache_dtype, dtype, gpu = problem["k"].form.dtype, DTYPES[problem.dtype], machine(problem.device)
    for name in ("k", "v"):
        form = problem[name].form
        if form.dtype not in (problem.dtype, *QUANTIZED) or form.dtype != cache_dtype:
            must_match, values = (", as k's", f"k.dtype={cache_dtype!r}, ") if name == "v" else ("", "")
            values = f"{name}.dtype={form.dtype!r}, {values}q.dtype={problem.dtype!r}"
            raise TypeError(f"{name}: dtype must be q's, float8_e4m3fn or int8{must_match}: {values}")
        if form.strides[-1] != form.itemsize and form.shape[-1] > 1:
            raise problem.error(name, f"last axis must be contiguous: {name}.strides={form.strides} bytes", name)
    names = "k_descale", "v_descale"
    per_key = has_descale_per_key(problem)
    args = {name: problem[name] if per_key else expand_axes(problem, name, ("sequences", "heads_k")) for name in names}
    missing = [name for name, descale in args.items() if descale is None]
    if len(missing) == 1:
        (other,) = set(names) - set(missing)
        raise ValueError(f"{missing[0]}: must be passed together with {other}: {missing[0]}=None")
    if cache_dtype not in QUANTIZED:
        if not missing:
            raise ValueError(f"k_descale: must be None unless the cache is float8_e4m3fn or int8: k.dtype={cache_dtype!r}")
        return SameDtypeProducts(dtype), {}
    if cache_dtype == "float8_e4m3fn" and not gpu.target.has_fp8:
        raise ValueError(f"k: a cache of float8_e4m3fn needs a GPU of compute capability 8.9 or later, and is on {gpu}")
    if problem.bytes_at_once("k", "v") < MIN_VECTOR_BYTES:
        raise ValueError(f"k: addresses and strides of {cache_dtype} must be multiples of {MIN_VECTOR_BYTES} bytes")
    if per_key:
        pages, rows, max_pages = *problem("batch_cache", "seqlen_k"), problem.extents.get("pages_per_seq", 1)
        if max(pages, rows * max_pages) >= INDICES:
            limit = "of each key and head needs a pool of fewer than 2**24 pages, and fewer than 2**24 keys of a sequence"
            raise problem.error("k_descale", limit, "k_descale")
        return KeyScaledProducts(dtype, DTYPES[cache_dtype], True), args
    return QuantizedProducts(dtype, DTYPES[cache_dtype], not missing), {} if missing else args


def _select_window(problem: Problem, options: DecodeOptions, max_keys: int) -> tuple[KeyWindow, dict[str, Any], int]:
    """(which keys tokens see, the kernel's arguments for it, the most keys that the rows of a tile see). A single token is at
    the last key, so its window has no right end."""
    tokens, scores = problem.extents["seqlen_q"], options.scores
    left, right = scores.left, 0 if scores.causal else scores.right
    if tokens == 1 and "cu_seqlens" not in problem:
        right = None
    args: dict[str, Any] = {name: end for name, end in (("left", left), ("right", right)) if end is not None}
    args |= {"leftpad": problem["leftpad"]} if "leftpad" in problem else {}
    visible = max_keys if left is None else min(max_keys, left + tokens + (right or 0))
    kind = KeyWindow if "lengths" in problem else WholeCacheWindow
    return kind(left is not None, right is not None, "leftpad" in problem), args, visible


def _group_heads(operand: Operand, axis: int, group: int) -> Operand:
    """The operand with its axis of heads as two: key heads, and the `group` query heads of each."""
    form = operand.form
    shape, strides = form.shape, form.strides
    shape = (*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    strides = (*strides[:axis], strides[axis] * group, *strides[axis:])
    return operand._replace(form=form._replace(shape=shape, strides=strides))


def order_by_rows(q: Operand, group: int) -> Operand:
    """Queries as (token, query head of the group, sequence, key head, column)."""
    q = _group_heads(q, 2, group)
    order = operator.itemgetter(1, 3, 0, 2, 4)
    return q._replace(form=q.form._replace(shape=order(q.form.shape), strides=order(q.form.strides)))
