"""The launches of attention.decode: which kernels serve a problem, and with which arguments."""

import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from tiles.calls.plan import Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...families import HOPPER_FAMILY, uses_hopper_kernels
from ...kernels.decode import decode_ampere, decode_combine, decode_hopper
from ...options import ScoreOptions
from ...parts.cache_scales import QUANTIZED
from ...parts.decode.cache_loaders import DenseLoader, IndexedLoader, PagedLoader
from ...parts.decode.key_window import GrowingKeyWindow, KeyWindow, TokenHeadScoreMod, WholeCacheWindow
from ...parts.decode.outputs import FinalOrPartialOutput, FinalOutput, PackedPartialOutput, PartialOutput
from ...parts.decode.products import KeyScaledProducts, QuantizedProducts, SameDtypeProducts
from ...parts.decode.splits import FixedSplits, StreamKSplits, choose_share_count, choose_split_count, underfills_gpu
from ...parts.decode.token_rows import PackedRows, UniformRows
from ...parts.key_sources import IndexedCache, OneBuffer, PagedKeys
from ...parts.online_softmax import SLACK
from ...parts.scores import PrefetchedBias, ScoreMod, Sink
from ...parts.variant import Variant
from ...parts.visibility import FULL
from ..softmax.forward_launches import DTYPES, LOG2_E, expand_axes, variant_arguments
from ..softmax.planning import INDICES, bias_part
from ..softmax.variant_spec import VariantSpec, build_variant
from . import prefill_from_cache
from .cache_append import has_descale_per_key, launch_append, plan_append
from .decode_norms import DecodeNorms

TILES = "q", "k", "v", "out"
FEW_KEYS, MANY_BLOCKS = 1024, 8  # of a sequence; per multiprocessor: these hide each other's prologues and epilogues
MANY_TOKENS = 64  # query tokens of a sequence, from which on forward's kernels serve it (bench/notes/decode.md)
MIN_VECTOR_BYTES = 4  # cp.async copies so many bytes at least


class DecodeOptions(NamedTuple):
    """A call's options, with the functions in Python that they name, mask and score, which read aux."""

    scores: ScoreOptions
    scale: float
    mask: Callable | None = None
    score: Callable | None = None
    aux: Sequence[Operand] = ()
    splits: int | None = None
    family: str | None = None


class CacheAccess(NamedTuple):
    """How a kernel reads the cache. loader: loads keys and values. max_keys: the most keys that a sequence can have. args: the
    kernel's arguments for it."""

    loader: DenseLoader
    max_keys: int
    args: dict[str, Operand]


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
    step = prefill_from_cache.plan_launch(
        problem, spec._replace(aux=options.aux), options.family, append.queries, max_keys, args
    )
    return Plan([*append.steps, step], append.scratch)


def serves_prefill(problem: Problem, options: DecodeOptions, norms: DecodeNorms, max_keys: int) -> bool:
    """Do forward's kernels serve a call? They do if they can, there are many query tokens, and split-KV is not preferred."""
    tokens, sequences = problem("seqlen_q", "sequences")
    if tokens < MANY_TOKENS * (sequences if "cu_seqlens" in problem else 1) or options.splits not in (None, 1):
        return False
    # forward would count keys from leftpad on
    shifts_keys = "leftpad" in problem and (options.mask or options.score or "bias" in problem)
    other_dtype = problem["k"].form.dtype != problem.dtype
    if shifts_keys or norms.keys.prepares_queries or "lengths" not in problem or other_dtype:
        return False
    left, family = options.scores.left, options.family
    return options.splits == 1 or not prefers_split_kv(problem, tokens, max_keys, left, family)


def prefers_split_kv(problem: Problem, queries: int, keys: int, left: int | None = None, family: str | None = None) -> bool:
    """Should many queries, too, be served by split-KV? On Hopper they should if forward has too few tiles to fill the GPU."""
    gpu = machine(problem.device)
    if not (family is None and gpu.target.is_hopper and problem.by_tma):
        return False
    batch, heads = problem("batch", "heads")
    sequences = problem.extents["sequences"] if "cu_seqlens" in problem else batch
    visible = keys if left is None else min(keys, left + queries)
    return underfills_gpu(sequences, -(-batch * queries // sequences), heads, visible, gpu.processors)


class SplitKernel(NamedTuple):
    """The kernel that serves a call by split-KV, with what of its configuration does not depend on the split. gpu: it
    runs there. module: decode_ampere or decode_hopper. fields: of its config_for. final, partial: the outputs of blocks that
    read all keys of their rows, and a part of them. sink: what is added to a softmax."""

    gpu: Any
    module: ModuleType
    fields: dict[str, Any]
    final: FinalOutput
    partial: PartialOutput
    sink: Variant

    def config_for(self, split: type[FixedSplits], window: KeyWindow, result: Any, **fields: Any) -> Any:
        """The configuration with a split. fields: further ones of the kernel's config_for."""
        sink = Variant() if result is self.partial else self.sink  # of partial outputs decode_combine.py adds it
        return self.module.config_for(**self.fields, split=split, window=window, result=result, sink=sink, **fields)


class SplitChoice(NamedTuple):
    """How keys are split among thread blocks. count_per_head: the splits of each sequence, or with stream-K the shares of all
    sequences, for a head and a tile of rows. window: the keys that tokens see, as this split computes them. config: the
    kernel's."""

    split: type[FixedSplits]
    count_per_head: int
    window: KeyWindow
    config: Any


class PartialLayout(NamedTuple):
    """Where partial outputs lie. split: how decode_combine.py finds them. blocks: how many work on a head and a tile of rows.
    parts: the first two extents of the arrays. combined: how many outputs of a head are combined."""

    split: FixedSplits
    blocks: int
    parts: tuple[int, int]
    combined: int


def choose_split(
    problem: Problem, kernel: SplitKernel, splits: int | None, window: KeyWindow, visible: int, row_tiles: int, config: Any
) -> SplitChoice:
    """The SplitChoice of a call: by default stream-K, if there are several sequences of different lengths. splits: what the
    caller asks for. visible: the most keys that a tile of rows sees. config: for blocks that have all keys of a sequence."""
    batch, kv_heads = problem("batch", "heads_k")
    blocks, processors = batch * kv_heads * row_tiles, kernel.gpu.processors
    if splits is not None or "lengths" not in problem or "cu_seqlens" in problem or batch <= 1:
        count = choose_split_count(blocks, -(-visible // config.kv), processors) if splits is None else splits
        if count == 1:
            return SplitChoice(FixedSplits, 1, window, config)
        return SplitChoice(FixedSplits, count, window, kernel.config_for(FixedSplits, window, kernel.partial))
    if kernel.module is decode_ampere and visible <= FEW_KEYS and blocks >= MANY_BLOCKS * processors:
        config = kernel.config_for(FixedSplits, window, kernel.final, few_keys=True)
        return SplitChoice(FixedSplits, 1, window, config)
    if "k_new" in problem:
        window = GrowingKeyWindow(window.left, window.right, window.padded)
    config = kernel.config_for(StreamKSplits, window, FinalOrPartialOutput(kernel.final, kernel.partial))
    shares = choose_share_count(kv_heads * row_tiles, config.ctas_per_sm * processors)
    if shares == 1:
        return SplitChoice(FixedSplits, 1, window, kernel.config_for(FixedSplits, window, kernel.final))
    return SplitChoice(StreamKSplits, shares, window, config)


def plan_split_kv(
    problem: Problem,
    options: DecodeOptions,
    append: AppendPlan,
    norms: DecodeNorms,
    cache: CacheAccess,
    out: Operand,
    lse: Operand | None,
) -> Plan:
    """The Plan with decode_ampere.py's or decode_hopper.py's kernel, whose tiles have query tokens and the heads that share a
    key head as rows, over splits of the keys; and decode_combine.py's if there are several splits. ValueError: the family that
    the call asks for cannot serve it."""
    batch, tokens, heads, kv_heads, value_dim = problem("batch", "seqlen_q", "heads", "heads_k", "head_dim_v")
    packed, group = "cu_seqlens" in problem, heads // kv_heads
    rows, spec = tokens * group, _build_spec(problem, options, norms)
    product, product_args = _select_product(problem)
    window, key_args, visible = _select_window(problem, options, cache.max_keys)
    key_args |= append.length_args
    kernel = _select_kernel(problem, options, norms, cache, product, spec)
    use_hopper = kernel.module is decode_hopper

    config = kernel.config_for(FixedSplits, window, kernel.final)
    # packed: no two sequences share a tile, so each may add one
    row_tiles = rows // config.tile_rows + problem.extents["sequences"] if packed else -(-rows // config.tile_rows)
    choice = choose_split(problem, kernel, options.splits, window, visible, row_tiles, config)
    config = choice.config
    args: dict[str, Any] = {"heads": kv_heads, "group": group, "scale": spec.unit * LOG2_E}
    args |= {"sequences": batch, "tokens": tokens, "splits": choice.count_per_head}
    out_args: dict[str, Any] = {"out": _group_heads(out, 2, group), "lse": lse and _group_heads(lse, 1, group)}
    out_args |= {"sinks": problem["sink"], "per_sink": 1 / spec.unit} if "sink" in problem else {}
    steps: list[Step] = []
    scratch, blocks = append.scratch, batch
    if choice.count_per_head != 1:
        stream_k = choice.split is StreamKSplits
        split, blocks, parts, combined = _lay_out_partials(choice, batch)
        keeps_sums = kernel.partial.keeps_sums
        partial_args, scratch = allocate_partials(problem, (*parts, kv_heads, rows), value_dim, keeps_sums, scratch)
        pdl = kernel.gpu.target.has_early_launch
        last = decode_combine.Config(DTYPES[problem.dtype], kernel.sink, split, pdl, keeps_sums)
        combine_args = partial_args | args | out_args | (key_args if stream_k else {})
        steps.append(combine_partials(problem, last, combined * kv_heads, rows, value_dim, combine_args))
        out_args = partial_args | (out_args if stream_k else {})
    args |= cache.args | product_args | key_args | variant_arguments(problem, spec) | spec.aux_args | out_args
    args |= norms.key_args
    args |= {"ends": problem["cu_seqlens"]} if packed else {}
    kv_source = kernel.fields.get("kv_source")
    args |= {"page_size": problem.extents["seqlen_k"]} if kv_source is not None and kv_source.paged else {}
    args["gQ"] = _group_heads(append.queries, 2, group) if use_hopper else order_by_rows(append.queries, group)
    first = kernel_for(kernel.module, config, problem.device).bind(
        blocks * kv_heads * row_tiles,
        gK=problem["k"],
        gV=problem["v"],
        row_tiles=row_tiles,
        slack=SLACK / (spec.unit * LOG2_E),
        **args,
    )
    return Plan([*append.steps, first, *steps], scratch)


def _build_spec(problem: Problem, options: DecodeOptions, norms: DecodeNorms) -> VariantSpec:
    """What a call does to scores, apart from the KeyWindow and the sink."""
    return build_variant(
        options.scale,
        options.scores._replace(causal=False, left=None, right=None),  # the KeyWindow masks keys
        alibi="alibi" in problem,
        bias=PrefetchedBias(is_last=options.score is None, in_units_of_one=True) if "bias" in problem else None,
        mask=options.mask,
        score=options.score and TokenHeadScoreMod(options.score),
        extra_parts=norms.rows,
    )._replace(aux=options.aux)


def _select_kernel(
    problem: Problem,
    options: DecodeOptions,
    norms: DecodeNorms,
    cache: CacheAccess,
    product: SameDtypeProducts,
    spec: VariantSpec,
) -> SplitKernel:
    """The kernel of a call. By default decode_hopper.py's serves what would take more than one of decode_ampere.py's tiles.
    ValueError: it cannot serve the call, and the call asks for it."""
    tokens, heads, kv_heads, head_dim, value_dim = problem("seqlen_q", "heads", "heads_k", "head_dim", "head_dim_v")
    packed, dtype, gpu = "cu_seqlens" in problem, DTYPES[problem.dtype], machine(problem.device)
    rows, family, vector_bytes = tokens * (heads // kv_heads), options.family, problem.bytes_at_once(*TILES)
    hopper_can = type(product) is SameDtypeProducts and not packed and not norms.rows and not norms.keys.prepares_queries
    if family == HOPPER_FAMILY and not hopper_can:
        raise ValueError(
            "family: 'sm_90' serves few query tokens only with a cache of q's dtype, without cu_seqlens and without norms: "
            f"{family=} (the default, None, serves these)"
        )
    use_hopper = uses_hopper_kernels(problem, family, problem.by_tma and hopper_can) and (
        family == HOPPER_FAMILY or rows > decode_ampere.TALL_ROWS
    )
    variant = Variant() if spec.variant is FULL else spec.variant
    fields: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim, "variant": variant, "axes": spec.axes}
    if use_hopper:
        fields |= {"input_dtype": dtype, "kv_source": _select_tma_source(problem, options)}
    else:
        sequence_rows = -(-rows // problem.extents["sequences"]) if packed else rows
        fields |= {"product": product, "cache": cache.loader, "keys_norm": norms.keys, "shared_limit": gpu.shared_bytes}
        fields |= {"seq_layout": PackedRows if packed else UniformRows, "tall": sequence_rows > decode_ampere.TILE_ROWS}
        fields |= {"pdl": gpu.target.has_early_launch}
    partial = (PackedPartialOutput if packed else PartialOutput)(dtype, vector_bytes, variant.allows_low_scores)
    sink = Sink() if "sink" in problem else Variant()
    module, final = decode_hopper if use_hopper else decode_ampere, FinalOutput(dtype, vector_bytes)
    return SplitKernel(gpu, module, fields, final, partial, sink)


def _lay_out_partials(choice: SplitChoice, batch: int) -> PartialLayout:
    """The PartialLayout of a call with several splits or shares."""
    count = choice.count_per_head
    if choice.split is not StreamKSplits:
        return PartialLayout(FixedSplits(), batch * count, (count, batch), batch)
    # see StreamKSplits.parts_of: one for each sequence, or for each end of a share but the last
    combined = batch if batch <= count else count - 1
    return PartialLayout(StreamKSplits(choice.window, choice.config.kv), count, (count + batch, 1), combined)


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


def select_loader(problem: Problem, vector_bytes: int, name: str = "k") -> CacheAccess:
    """How a kernel reads the cache, which has this name. ValueError: pages and batch_index are both passed; or neither, and the
    cache's batch is not the number of sequences."""
    batches, rows = problem("batch_cache", "seqlen_k")
    batch = problem.extents.get("sequences", problem.extents["batch"])
    if "pages" in problem:
        if "batch_index" in problem:
            raise ValueError("batch_index: must be None where pages is passed, which says already where a sequence's keys are")
        max_keys = rows * problem.extents["pages_per_seq"] if batches else 0
        return CacheAccess(PagedLoader(vector_bytes), max_keys, {"pages": problem["pages"]})
    if "batch_index" in problem:
        return CacheAccess(IndexedLoader(vector_bytes), rows if batches else 0, {"batch_index": problem["batch_index"]})
    if batches != batch:
        if "cu_seqlens" in problem:
            rule = f"batch must equal the number of sequences, {batch}, unless pages or batch_index is passed"
            raise problem.error(name, rule, name)
        raise problem.error(name, "batch must equal q's unless pages or batch_index is passed", name, "q")
    return CacheAccess(DenseLoader(vector_bytes), rows, {})


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
