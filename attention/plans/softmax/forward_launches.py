"""From a VariantSpec to the launches of forward: which kernels and configurations serve a problem, and with which arguments."""

import math
from typing import Any

from tiles.calls.plan import Fill, Plan, Step, return_none
from tiles.calls.schema import Problem
from tiles.dtypes import bf16, fp8e4m3, fp16, int8
from tiles.launching.arrays import ALIGNMENT, Number, Operand
from tiles.launching.devices import machine, persistent
from tiles.launching.launch import kernel_for

from ...families import FamilyAndBlock, choose_family, family_block_kv, require_hopper, uses_hopper_kernels
from ...kernels.decode import cache_quantize
from ...kernels.softmax import forward_ampere, forward_fp8_hopper, forward_hopper, key_block_lists, key_norms, transpose_values
from ...parts import block_masks
from ...parts.block_masks import BlockSparseMask
from ...parts.descales import BLOCK, BlockDescales, HeadDescales
from ...parts.norms import LayerNorm, RmsNorm
from ...parts.online_softmax import LOG2_E, SLACK
from ...parts.scores import ScoreBias, TmaBias
from ...parts.sequences import BatchedLayout, PackedLayout, PackedSeqUsedLayout, QueryPartsLayout, SeqUsedLayout
from ...parts.tiling import balance_raster_groups, choose_raster_group
from ...parts.variant import CombinedVariant, Variant
from .fp8_checks import block_descale_names
from .prepared_lists import BlockListPlan, check_call, return_block_lists
from .variant_spec import VariantSpec

DTYPES = {"bfloat16": bf16, "float16": fp16, "float8_e4m3fn": fp8e4m3, "int8": int8}
MAY_BE_1 = "", "alibi_batch", "bias_batch", "bias_heads", "bias_seqlen"  # axes that broadcast; "": one that is missing
BIAS_ITEM = 2  # bytes of an element of a bias that TMA loads
Shape = forward_hopper.Config | forward_ampere.Config | forward_fp8_hopper.Config
KERNELS = {
    forward_hopper.Config: forward_hopper,
    forward_ampere.Config: forward_ampere,
    forward_fp8_hopper.Config: forward_fp8_hopper,
}


class PreparationSteps:
    """The launches before (or after) that of attention, and the scratch memory for their results. scratch: the memory that is
    already reserved."""

    def __init__(self, problem: Problem, scratch: list[tuple[tuple[int, ...], str]] | None = None):
        self.problem = problem
        self.steps: list[Step] = []
        self.scratch = [] if scratch is None else scratch

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Operand:
        """Reserve scratch memory of this shape and dtype."""
        self.scratch.append((shape, dtype))
        return self.problem.scratch(len(self.scratch) - 1, shape, dtype)

    def launch(self, module: Any, config: Any, grid: int | tuple[int, int, int], **arguments: Any) -> None:
        """Add a launch of a module's kernel to the steps."""
        self.steps.append(kernel_for(module, config, self.problem.device).bind(grid, **arguments))

    def dequantize(self, name: str, unit: float) -> Operand:
        """Keys or values of fp8, converted to q's dtype by a launch, and multiplied by their descale and `unit`. Those that are
        not fp8 are returned as they are."""
        problem, array = self.problem, self.problem[name]
        if array.form.dtype != "float8_e4m3fn" or problem.dtype == array.form.dtype:
            return array
        if not machine(problem.device).target.has_fp8:
            raise ValueError(
                f"{name}: float8_e4m3fn needs a GPU of compute capability 8.9 or later; it is on {machine(problem.device)}"
            )
        batch, rows, heads, columns = array.form.shape
        result, count = self.allocate((batch, rows, heads, columns), problem.dtype), -(-rows // cache_quantize.ROWS)
        grid = -(-batch * heads * count // cache_quantize.WARPS), -(-columns // cache_quantize.COLUMNS), 1
        config = cache_quantize.Config("dequantize", DTYPES[problem.dtype], False)
        descale = expand_axes(problem, f"{name}_descale", ("batch", "heads_k"))
        args = {"gX": array, "gOut": result, "gDescale": descale, "unit": unit, "count": count, "heads": heads}
        self.launch(cache_quantize, config, grid, **args)
        return result

    def transpose_v(self, values: Operand) -> Operand:
        """V of fp8, transposed by a launch (transpose_values.py)."""
        batch, rows, heads, columns = values.form.shape
        blocks = -(-rows // transpose_values.KEYS)
        result = self.allocate((batch, heads, columns, transpose_values.KEYS * blocks), values.form.dtype)
        config = transpose_values.Config(forward_fp8_hopper.padded_dim(columns))
        self.launch(transpose_values, config, batch * heads * blocks, gV=values, gTransposed=result, blocks=blocks, heads=heads)
        return result

    def normalize_keys(self, keys: Operand, norm: RmsNorm, padded: int, eps: float) -> Operand:
        """The keys, normalised by a launch (key_norms.py)."""
        problem = self.problem
        shape = batch, rows, heads, columns = problem("batch", "seqlen_k", "heads_k", "head_dim")
        config = key_norms.Config(
            norm, padded, DTYPES[problem.dtype], keys.source != problem["k"].source or problem.bytes_at_once("k") == ALIGNMENT
        )
        result, blocks = self.allocate(shape, problem.dtype), -(-rows // config.rows)
        numbers = {"norm_eps": eps, "columns": columns}
        arrays = {"gX": keys, "gOut": result, **norm_arrays(problem, "k_norm", ("heads_k", "head_dim"))}
        self.launch(key_norms, config, batch * heads * blocks, blocks=blocks, heads=heads, **numbers, **arrays)
        return result

    def classify_blocks(self, block_mask: BlockSparseMask) -> Operand:
        """The map of a BlockMask, written by a launch (block_masks.py). ValueError: its lists do not fit the call."""
        problem = self.problem
        batch, heads, rows = problem("list_batch", "list_heads", "list_rows")
        q_len, kv_len, sequences, all_heads = problem("seqlen_q", "seqlen_k", "sequences", "heads")
        if batch not in (1, sequences) or heads not in (1, all_heads):
            message = f"must have a batch of {sequences} or 1, and {all_heads} or 1 heads"
            raise problem.error("kv_num_blocks", message, "kv_num_blocks", "q")
        if "cu_seqlens" not in problem and rows * block_mask.rows < q_len:
            raise problem.error(
                "kv_num_blocks", f"must have all rows of blocks of {block_mask.rows} queries", "kv_num_blocks", "q"
            )
        shape = batch, heads, rows, -(-kv_len // block_mask.cols)
        result = self.allocate(shape, "int8")
        lists = {name: problem[name] for name in block_masks.FIELDS if name in problem}
        grid = batch * heads * -(-rows // block_masks.WARPS)
        numbers = {"rows": rows, "cols": shape[3], "heads": heads}
        self.launch(block_masks, block_masks.Config(), grid, marks=result, **numbers, **lists)
        return result

    def list_key_blocks(self, spec: VariantSpec, config: Any, blocks: int, args: dict[str, Any]) -> Operand:
        """The lists of key blocks of `blocks` query tiles, written by two launches (key_block_lists.py). args: the kernel's
        arguments for the variant and the sequences."""
        (batch, heads, kv_len), (by_batch, by_head) = self.problem("batch", "heads", "seqlen_k"), spec.lists_vary
        grid_extents, keys = (batch if by_batch else 1, heads if by_head else 1), -(-kv_len // config.kv)
        block_lists = self.allocate((*grid_extents, blocks, key_block_lists.LIST_HEADER + keys), "int32")
        classes = self.allocate((*grid_extents, blocks, keys), "int8")
        unseen = self.allocate((*grid_extents, blocks, key_block_lists.COUNTS * keys), "int8")
        classify = key_block_lists.ClassifyBlocks(spec.variant, config.rows, config.kv, config.axes)
        build = key_block_lists.BuildKeyLists(spec.variant, config.rows, config.kv)
        tiles, groups = grid_extents[0] * grid_extents[1] * blocks, -(-keys // key_block_lists.WARPS)
        args |= {"classes": classes, "unseen": unseen, "blocks": blocks, "heads": grid_extents[1]}
        self.launch(classify, classify, tiles * groups, groups=groups, **args, **spec.aux_args)
        self.launch(build, build, tiles, lists=block_lists, **args)
        return block_lists


def plan_forward(
    problem: Problem,
    spec: VariantSpec,
    return_lse: bool,
    family: str | FamilyAndBlock | None,
    norm_eps: float = 0.0,
    units: tuple[float, float] = (1.0, 1.0),
) -> Plan:
    """The Plan of a VariantSpec. Launches before attention normalise keys, convert or transpose fp8, and write the map of a
    BlockMask; if the variant is data-dependent, and each sequence has a batch of its own, launches also write lists of key
    blocks. If the schema has no results, the Plan only writes the lists, and returns them as BlockLists."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem(
        "batch", "seqlen_q", "heads", "head_dim", "seqlen_k", "heads_k", "head_dim_v"
    )
    only_lists = not problem.schema.written
    accumulates = not only_lists and problem.schema.arguments["out"].role == "updated"
    out, lse = problem["out"], problem["lse"] if return_lse or accumulates else None
    make_result = return_none if accumulates else None
    empty = 0 in (batch, q_len, heads)
    if only_lists and (empty or kv_len == 0):
        raise problem.error("q" if empty else "k", "must not be empty where lists of its blocks are made", "q", "k")
    if empty or kv_len == 0:  # there is no score
        if "sink" in problem and not empty:
            raise problem.error("k", "must have at least one key where there is a sink", "k")
        choose_family(problem, family, tma=True)  # raises the same errors as for other calls; nothing is read
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x and not accumulates], (), make_result)
    layout_args, by_list, listing = choose_layout(problem)[1], uses_block_lists(problem, spec), spec.listing
    if only_lists and listing is None:
        raise ValueError("mask: lists of key blocks need a mask or blocks: mask=None, blocks=None")
    if (only_lists or "lists" in problem) and not by_list:
        name = "lengths_k" if "lengths_k" in problem else "cu_seqlens"
        raise problem.error(name, "must be None with lists of key blocks", name)
    variant_args = variant_arguments(problem, spec)
    spec, config = choose_config(problem, spec, family)
    blocks = count_tiles(problem, config)[0]
    preparation, key_norm = PreparationSteps(problem), choose_norm(problem, "k_norm")
    if listing and listing.block_mask:
        marks = problem["marks"] or preparation.classify_blocks(listing.block_mask)
        variant_args["marks"] = broadcast(marks, (*problem("sequences", "heads"), *marks.form.shape[2:]))
    if listing and by_list:
        if listing.prepared_for:
            check_call(listing.prepared_for, describe_call(problem, config, listing))
        scores_args = {name: x for name, x in variant_args.items() if name in spec.variant.params}
        block_lists = problem["lists"] or preparation.list_key_blocks(spec, config, blocks, layout_args | scores_args)
        if only_lists:
            block_map = (marks, listing.block_mask.rows, listing.block_mask.cols) if listing.block_mask else None
            return Plan(
                preparation.steps,
                preparation.scratch,
                return_block_lists(describe_call(problem, config, listing), block_lists, block_map),
            )
        variant_args["lists"] = broadcast(block_lists, (batch, heads, *block_lists.form.shape[2:]))
    keys, values = (preparation.dequantize(name, unit) for name, unit in zip("kv", units))
    if isinstance(config, forward_fp8_hopper.Config) and config.v_transpose.before:
        values = preparation.transpose_v(values)
    keys = keys if key_norm is None else preparation.normalize_keys(keys, key_norm, config.head_dim, norm_eps)
    args = {"gQ": problem["q"], "gK": keys, "gV": values, "gO": out, "gLse": lse}
    args |= layout_args | variant_args | spec.aux_args
    return Plan([*preparation.steps, bind_launch(problem, spec, config, kv_len, **args)], preparation.scratch, make_result)


def uses_block_lists(problem: Problem, spec: VariantSpec) -> bool:
    """Do lists say which key blocks a query tile reads?"""
    return spec.listing is not None and choose_layout(problem)[0] is BatchedLayout


def choose_config(problem: Problem, spec: VariantSpec, family: str | FamilyAndBlock | None) -> tuple[VariantSpec, Shape]:
    """(the VariantSpec as the kernel takes it, the kernel's configuration), for a problem that has queries and keys: see
    `plan_forward`."""
    (seq_layout, _), schema, axes = choose_layout(problem), problem.schema, spec.axes
    tma, by_list = uses_hopper_kernels(problem, family), uses_block_lists(problem, spec)
    if tma and problem.dtype != "float8_e4m3fn":
        spec = spec._replace(variant=load_bias_by_tma(problem, spec.variant))
    out = schema.arguments["out"] if schema.written else None
    outputs = {"float32_out": bool(out and out.holds == "float32"), "accumulates": bool(out and out.role == "updated")}
    fields = {"seq_layout": seq_layout, "axes": axes, "by_list": by_list} | {name: True for name, x in outputs.items() if x}
    if seq_layout is BatchedLayout and not (axes or by_list or outputs["float32_out"]):
        fields = {}
    if not tma and problem.dtype == "float8_e4m3fn":
        require_hopper(problem)
        raise ValueError(f"family: must be sm_90 for q of float8_e4m3fn: {family=}")
    return spec, config_for_problem(problem, spec, tma, problem.extents["seqlen_k"], family_block_kv(family), **fields)


def load_bias_by_tma(problem: Problem, variant: Variant) -> Variant:
    """The variant with its bias loaded in tiles by TMA, if possible: its dtype must have 2 bytes, and its keys must be
    contiguous."""
    if isinstance(variant, CombinedVariant):
        return CombinedVariant(load_bias_by_tma(problem, variant.one), load_bias_by_tma(problem, variant.other))
    if type(variant) is not ScoreBias:
        return variant
    form = problem["bias"].form
    adjacent = form.shape[-1] > 1 and form.strides[-1] == form.itemsize == BIAS_ITEM
    by_tma = adjacent and problem.bytes_at_once("bias") == ALIGNMENT
    return TmaBias(variant.is_last, variant.in_units_of_one, DTYPES[form.dtype]) if by_tma else variant


def config_for_problem(
    problem: Problem, spec: VariantSpec, tma: bool, kv_len: int, kv: int | None = None, **fields: Any
) -> Shape:
    """The configuration for a VariantSpec. tma: of a kernel for Hopper? kv: how many keys a block must have, None for any.
    fields: further fields of the Config."""
    if DTYPES[problem.dtype] is not fp8e4m3:
        return config_for_16_bits(problem, spec, tma, kv_len, kv, **fields)
    names = block_descale_names(problem)
    descales = BlockDescales("v_descale" in names, "k_descale" in problem) if names else forward_fp8_hopper.HEAD_DESCALES
    batch, q_len, heads, kv_heads, head_dim, value_dim = problem(
        "batch", "seqlen_q", "heads", "heads_k", "head_dim", "head_dim_v"
    )
    load = q_len, kv_len, batch * heads, heads // kv_heads, machine(problem.device).processors
    transposes_first = forward_fp8_hopper.pays_to_transpose(forward_fp8_hopper.padded_dim(head_dim, value_dim), *load)
    return forward_fp8_hopper.config_for(head_dim, spec.variant, value_dim, descales, kv_len, transposes_first, **fields)


def config_for_16_bits(
    problem: Problem, spec: VariantSpec, tma: bool, kv_len: int, kv: int | None = None, **fields: Any
) -> forward_hopper.Config | forward_ampere.Config:
    """`config_for_problem` where q is bfloat16 or float16."""
    head_dim, value_dim = problem("head_dim", "head_dim_v")
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    if tma:
        config = forward_hopper.config_for(head_dim, dtype, spec.variant, min(kv_len, spec.reach), value_dim, **fields)
        batch, queries, heads = problem("batch", "seqlen_q", "heads")
        sequences = problem.extents["ends"] - 1 if issubclass(config.seq_layout, PackedLayout) else batch
        mean_queries, batch_heads = batch * queries / sequences, sequences * heads
        fitted = forward_hopper.fit_to_load(config, mean_queries, kv_len, batch_heads, gpu.processors)
        if kv in (None, fitted.kv):
            return fitted
        return forward_hopper.fit_to_load(
            forward_hopper.with_kv(config, kv), mean_queries, kv_len, batch_heads, gpu.processors, kv
        )
    shared_limit, vector_bytes = gpu.shared_bytes, problem.bytes_at_once()
    sm80_config = forward_ampere.config_for(head_dim, dtype, spec.variant, shared_limit, vector_bytes, value_dim, **fields)
    return sm80_config if kv is None else forward_ampere.with_kv(sm80_config, kv, shared_limit)


def count_tiles(problem: Problem, config: Shape) -> tuple[int, int]:
    """(how many query tiles a pair of batch and head has, how many pairs there are)"""
    batch, q_len, heads = problem("batch", "seqlen_q", "heads")
    if issubclass(config.seq_layout, PackedLayout):
        ends = problem.extents["ends"]
        return q_len // config.rows + ends - 1, heads
    if config.seq_layout is QueryPartsLayout:
        parts = problem.extents["parts"]
        return parts * -(-(q_len // parts) // config.rows), batch * heads
    return -(-q_len // config.rows), batch * heads


def bind_launch(problem: Problem, spec: VariantSpec, config: Shape, most_keys: int, **args: Operand | Any) -> Step:
    """The launch of attention itself. most_keys: of a sequence. args: the kernel's other arguments, arrays and the arguments of
    the variant, the sequences' layout and the source of keys."""
    gpu, dtype, variant = machine(problem.device), DTYPES[problem.dtype], spec.variant
    q_len, heads, head_dim, kv_heads, value_dim = problem("seqlen_q", "heads", "head_dim", "heads_k", "head_dim_v")
    blocks, batch_heads = count_tiles(problem, config)
    group, grid = heads // kv_heads, batch_heads * blocks
    if config.persistent:
        grid = persistent(gpu, grid)
    nbytes = most_keys * (head_dim + value_dim) * dtype.itemsize / group
    equal_times = config.persistent and spec.reach < most_keys  # windows: all tiles but the first ones take as long
    unequal_times = not equal_times and (variant.monotonic or (config.persistent and q_len % config.rows > 0))
    if isinstance(config, forward_fp8_hopper.Config):
        args |= {f"g{name.upper()}Descale": descale_argument(problem, name, config.descales) for name in "qkv"}
    else:
        args["slack"] = SLACK / (spec.unit * LOG2_E)
    raster_group = choose_raster_group(grid, gpu.processors, nbytes, gpu.cache_bytes, unequal_times)
    if not config.persistent:
        raster_group = balance_raster_groups(raster_group, batch_heads, config.seq_layout is QueryPartsLayout)
    return kernel_for(KERNELS[type(config)], config, problem.device).bind(
        grid,
        blocks=blocks,
        heads=heads,
        batch_heads=batch_heads,
        raster_group=raster_group,
        group=group,
        scale=spec.unit * LOG2_E,
        **args,
    )


def descale_argument(problem: Problem, name: str, descales: HeadDescales) -> Operand | None:
    """The kernel's argument for the descale of q, k or v (descales.py)."""
    descale_name = f"{name}_descale"
    if descale_name not in problem or not descales.by_block or (name == "v" and len(problem.axes(descale_name)) < 3):
        return expand_axes(problem, descale_name, ("sequences", "heads_k"))
    batch, rows, kv_heads, heads = problem("sequences", "seqlen_q" if name == "q" else "seqlen_k", "heads_k", "heads")
    by_block, group = len(problem.axes(descale_name)) == 3, heads // kv_heads
    operand: Any = problem[descale_name] if by_block else expand_axes(problem, descale_name, ("sequences", "heads_k"))
    first, block, head = operand.form.strides if by_block else (operand.form.strides[0], 0, operand.form.strides[1])
    shape: tuple[int, ...] = (batch, -(-rows // BLOCK), kv_heads)
    strides: tuple[int, ...] = (first, block, head)
    if name == "q":  # one for each query head, or for each key head
        shape, strides = (*shape, group), (first, block, group * head, head) if by_block else (*strides, 0)
    return operand._replace(form=operand.form._replace(shape=shape, strides=strides))


def describe_call(problem: Problem, config: Any, listing: BlockListPlan) -> str:
    """The description of the calls that lists serve, for BlockLists.prepared_for."""
    batch, heads, queries, keys = map(int, problem("batch", "heads", "seqlen_q", "seqlen_k"))
    each = [f"{name}={n if differ else 'any'}" for name, n, differ in zip(("batch", "heads"), (batch, heads), listing.varies)]
    return "; ".join([f"{queries=}; {keys=}", *each, f"tiles={config.rows} x {config.kv}", listing.description])


def variant_arguments(problem: Problem, spec: VariantSpec) -> dict[str, Number | Operand | float]:
    """{argument of the kernel: number or array} of what a variant reads, without aux."""
    slopes = expand_axes(problem, "alibi", ("sequences", "heads"))
    if slopes is not None and "parts" in problem.extents:
        # each part is a sequence, and all have the same slopes: _query_parts_args refuses others
        batch, parts, heads = problem("batch", "parts", "heads")
        slopes = slopes._replace(form=slopes.form._replace(shape=(batch * parts, heads)))
    arrays = {"slopes": slopes, "sinks": problem["sink"], "bias": expand_bias(problem), "seeds": problem["seed"]}
    arrays |= norm_arrays(problem, "q_norm", ("heads", "head_dim")) if "norm_weights" in spec.variant.params else {}
    return spec.numbers | {name: x for name, x in arrays.items() if name in spec.variant.params}


def expand_bias(problem: Problem) -> Operand | None:
    """The bias as an operand (sequence, head, query, key); None if there is none."""
    keys = problem.axes("bias")[-1] if "bias" in problem else ""
    return expand_axes(problem, "bias", ("sequences", "heads", "seqlen_q", keys))


def choose_norm(problem: Problem, name: str) -> RmsNorm | None:
    """The norm object for the arguments of this name, None if there are none."""
    return None if name not in problem else LayerNorm() if f"{name}_bias" in problem else RmsNorm()


def norm_arrays(problem: Problem, name: str, axes: tuple[str, ...]) -> dict[str, Operand]:
    """{argument of the kernel: array} of a norm: its weights, and its bias if there is one. ValueError: their last axis is not
    contiguous."""
    arrays = {}
    for param, argument in (("norm_weights", name), ("norm_bias", f"{name}_bias")):
        operand = expand_axes(problem, argument, axes)
        if operand is not None:
            if operand.form.strides[-1] != operand.form.itemsize:
                raise ValueError(
                    f"{argument}: last axis must be contiguous: {argument}.strides={problem.forms[argument].strides}"
                )
            arrays[param] = operand
    return arrays


def choose_layout(problem: Problem) -> tuple[type[BatchedLayout], dict[str, Any]]:
    """(the layout of the sequences, the kernel's arguments for it). ValueError: arguments of sequences contradict each
    other."""
    q_len, kv_len = problem("seqlen_q", "seqlen_k")
    if "cu_seqlens_k" in problem and "cu_seqlens" not in problem:
        raise ValueError("cu_seqlens_k: needs cu_seqlens, which is None")
    if "cu_seqlens" in problem:
        if "cu_seqlens_k" not in problem and q_len != kv_len:
            raise problem.error("cu_seqlens_k", "is required if q and k have different numbers of rows", "q", "k")
        ends = problem["cu_seqlens"]
        args = {"ends": ends, "ends_k": problem["cu_seqlens_k"] or ends}
        if "lengths_k" in problem:
            return PackedSeqUsedLayout, args | {"lengths": problem["lengths_k"]}
        return PackedLayout, args
    if "lengths_k" in problem and "parts" in problem.extents:
        return QueryPartsLayout, _query_parts_args(problem)
    if "lengths_k" in problem:
        return SeqUsedLayout, {"q_len": q_len, "lengths": problem["lengths_k"]}
    return BatchedLayout, {"q_len": q_len, "kv_len": kv_len}


def _query_parts_args(problem: Problem) -> dict[str, Any]:
    """The kernel's arguments for QueryPartsLayout. ValueError, NotImplementedError: lengths_k does not fit, or another argument
    is not supported with it."""
    lengths, (q_len, parts, batch) = problem["lengths_k"], problem("seqlen_q", "parts", "batch")
    form = lengths.form
    if parts == 0 or q_len % parts:
        raise problem.error("lengths_k", "must have a number of parts that divides the queries", "lengths_k", "q")
    if form.strides != (parts * form.itemsize, form.itemsize):
        raise ValueError(f"lengths_k: must be contiguous: lengths_k.strides={form.strides}")
    unsupported = {
        "cu_seqlens": "cu_seqlens",
        "bias": "bias",
        "seed": "seed",
        "aux0": "aux",
        "kv_indices": "blocks",
        "lists": "blocks",
    }
    if "alibi" in problem and problem["alibi"].form.shape[:-1] > (1,):
        unsupported["alibi"] = "slopes of each batch in alibi"
    for name, reason in unsupported.items():
        if name in problem:
            raise NotImplementedError(f"lengths_k: of shape (B, C) is not supported with {reason}")
    flat = lengths._replace(form=form._replace(shape=(batch * parts,), strides=(form.itemsize,)))
    return {"q_len": q_len // parts, "parts": parts, "lengths": flat}


def expand_axes(problem: Problem, name: str, axes: tuple[str, ...]) -> Operand | None:
    """An argument as an operand with the extents of `axes`: axes of length 1, and a missing first axis, are broadcast. None if
    the argument is None. ValueError: it has another shape."""
    operand = problem[name]
    if operand is None:
        return None
    form = operand.form
    shape, strides, own_axes = form.shape, form.strides, problem.axes(name)
    if len(shape) < len(axes):
        shape, strides, own_axes = (1, *shape), (0, *strides), ("", *own_axes)
    extents = problem(*axes)
    if any(have not in (1, want) for have, want in zip(shape, extents)):
        shape_text = ", ".join(
            f"{want} or 1" if want > 1 and a in MAY_BE_1 else f"{want}" for a, want in zip(own_axes, extents)
        )
        raise ValueError(f"{name}: must have the shape ({shape_text}): {name}.shape={form.shape}")
    return broadcast(operand._replace(form=form._replace(shape=shape, strides=strides)), extents)


def broadcast(operand: Operand, extents: tuple[int, ...]) -> Operand:
    """The operand broadcast to these extents along its axes of length 1."""
    form = operand.form
    strides = tuple(0 if have == 1 else stride for have, stride in zip(form.shape, form.strides))
    return operand._replace(form=form._replace(shape=extents, strides=strides))
