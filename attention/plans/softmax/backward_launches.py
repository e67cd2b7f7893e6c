"""The launches of attention.backward: the arguments that kernels are bound to. backward_choice.py says which kernels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tiles.calls.plan import Fill, Plan, return_none
from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.softmax import (
    backward_convert_dq,
    backward_preprocess,
    backward_wide_hopper,
    backward_wide_queries_hopper,
    sink_gradient,
)
from ...parts.backward.config import BackwardConfig
from ...parts.backward.dq_order import UNORDERED, AscendingAdds, LastBlockStores, OrderedAdds, UnorderedAdds
from ...parts.backward.gradient_outputs import float32_output
from ...parts.backward.recomputed_scores import BiasRead
from ...parts.backward.slope_gradient import NO_SLOPE_GRADIENT
from .backward_choice import choose_kernel
from .forward_launches import DTYPES, LOG2_E, PreparationSteps, broadcast, choose_layout, describe_call, variant_arguments
from .prepared_lists import check_call
from .query_lists import launch_query_lists
from .query_split import QuerySplit, choose_split, partial_arguments
from .score_gradients import ScoreGradients
from .variant_spec import VariantSpec

SHORT, SHORT_SMS_PER_HEAD = 2048, 8  # up to so many keys, so many multiprocessors work on one head at a time, unordered
FULL_SMS_PER_HEAD = 16  # in order, where no query sees more keys than others


def plan_launches(
    problem: Problem,
    spec: VariantSpec,
    scale: float,
    deterministic: bool,
    family: str | None,
    reads: Mapping[str, Sequence[BiasRead]] = MappingProxyType({}),
    dsink: bool = False,
) -> Plan:
    """The launches of the gradients of the variant `spec`, whose scores were `scale` q k^T at first. deterministic: dQ is
    summed in a fixed order. reads: by the name of a gradient, how scores read the array that it belongs to. dsink: is the
    gradient of the sinks wanted?"""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem(
        "batch", "seqlen_q", "heads", "head_dim", "seqlen_k", "heads_k", "head_dim_v"
    )
    gradients = [problem[name] for name in ("dq", "dk", "dv", *["dsink"] * dsink, *reads)]
    accumulate = problem.schema.arguments["dq"].role == "updated"
    outputs = return_none if accumulate else None
    if any(0 in problem[name].form.shape for name in ("q", "k")):  # no query sees a key
        return Plan([] if accumulate else [Fill(x, 0.0) for x in gradients if 0 not in x.form.shape], (), outputs)
    (seq_layout, seq_args), gpu = choose_layout(problem), machine(problem.device)
    module, config, plain = choose_kernel(problem, spec, deterministic, family, reads)
    if module is backward_wide_hopper:
        return plan_wide_launches(problem, spec, scale, config, deterministic, dsink)
    slope_gradient, listing = config.slope_gradient, spec.listing
    parts, split = config.parts, QuerySplit()
    if seq_layout.packed:  # see sequences.PackedLayout: each sequence begins a tile of its own
        ends = problem.extents["ends"]
        tiles, blocks = q_len // config.rows + ends - 1, kv_len // config.kv + ends - 1
    else:
        tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    before_main = PreparationSteps(problem)
    if not (accumulate or listing):
        longest_first = spec.variant.monotonic and not isinstance(config.order, LastBlockStores)
        split = choose_split(problem, blocks, tiles, deterministic, longest_first, gpu.processors)
    if slope_gradient is not NO_SLOPE_GRADIENT:  # splits of a head group would store to the same rows of slope_sums
        split = split._replace(splits=1)
    after_main = PreparationSteps(problem, before_main.scratch)
    partial_args = partial_arguments(before_main, after_main, config, split)
    config = replace(config, splits_queries=split.splits > 1)
    lse_delta = before_main.allocate((batch, heads, 2 * tiles * config.rows), "float32")
    if config.adds_dq:
        dq_accum = before_main.allocate((batch * heads, tiles * parts.sum_rows, parts.sum_columns), "float32")
    else:
        dq_accum = problem["dq"]
    order_args = dict(seq_args)
    if isinstance(config.order, OrderedAdds):
        semaphores = config.order.semaphores * tiles
        order_args["dq_semaphores"] = before_main.allocate((batch * heads, semaphores), "int32")
    variant_args = variant_arguments(problem, spec)
    if listing and listing.block_mask:
        marks = problem["marks"] or before_main.classify_blocks(listing.block_mask)
        variant_args["marks"] = broadcast(marks, (*problem("sequences", "heads"), *marks.form.shape[2:]))
    list_args, survey_args = {}, {}
    if listing and config.by_list:
        if listing.prepared_for:
            check_call(listing.prepared_for, describe_call(problem, config, listing), ignored="tiles")
        lists = launch_query_lists(before_main, spec, config, seq_args | variant_args)
        survey_args = {"classes": broadcast(classes := lists.pop("classes"), (batch, heads, *classes.form.shape[2:]))}
        list_args = {name: broadcast(x, (batch, kv_heads, *x.form.shape[2:])) for name, x in lists.items()}
    slope_args: dict[str, Any] = {}
    if slope_gradient is not NO_SLOPE_GRADIENT:
        rows = config.slope_warps * blocks * (1 if seq_layout.packed else batch)
        size = math.prod(problem["dalibi"].form.shape)
        slope_args["slope_sums"] = before_main.allocate((rows, size), "float32")
        before_main.steps.append(Fill(slope_args["slope_sums"], 0.0))
    variant_args |= spec.aux_args
    rasters = choose_raster_group(spec.variant.monotonic, config.order, gpu.processors, kv_len if plain else math.inf)
    numbers = {"blocks": blocks, "raster_group": rasters, "scale": spec.unit * LOG2_E, "unit": scale}
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDO": problem["dout"], "gLseDelta": lse_delta}
    args = arrays | numbers | partial_args | order_args | variant_args | list_args | slope_args
    main = kernel_for(module, config, problem.device).bind(partial_args["batch_heads"] * blocks, gDQAccum=dq_accum, **args)
    zeroed = dq_accum if config.adds_dq else lse_delta  # if dQ is not summed there is nothing to clear
    preparation = _bind_prepare(problem, config, lse_delta, zeroed, tiles, order_args)
    steps = [*before_main.steps, preparation, main]
    if config.adds_dq:
        finishing = kernel_for(backward_convert_dq, backward_convert_dq.config_of(config), problem.device)
        finish_args = {"blocks": tiles, "heads": heads, "unit": scale} | seq_args
        steps.append(finishing.bind(batch * heads * tiles, gDQAccum=dq_accum, gDQ=problem["dq"], **finish_args))
    if dsink:
        steps.append(_bind_sinks(problem, config, lse_delta, batch, tiles))
    score_args = arrays | seq_args | variant_args | survey_args
    score_gradients = ScoreGradients(problem, spec, config, after_main, score_args, gpu.processors)
    for name, reads_of_array in reads.items():
        if name == "dalibi" and slope_args:
            score_gradients.launch_sum(name, slope_args["slope_sums"])
        else:
            score_gradients.launch(name, reads_of_array)
    return Plan([*steps, *after_main.steps], before_main.scratch, outputs)


def choose_raster_group(monotonic: bool, order: UnorderedAdds, processors: int, keys: float = math.inf) -> int:
    """How many pairs of batch and head are worked on at once: see parts/tiling.py. keys: of a sequence. Thread blocks that
    add to dQ in a fixed order wait for one another when they begin, the longer the more of one head begin at once."""
    deterministic = isinstance(order, AscendingAdds)
    sms_per_head = SHORT_SMS_PER_HEAD if keys <= SHORT and not deterministic else order.sms_per_head
    if monotonic:
        return max(1, processors // sms_per_head)
    return max(1, processors // FULL_SMS_PER_HEAD) if deterministic else 1


def plan_wide_launches(
    problem: Problem, spec: VariantSpec, scale: float, by_keys: backward_wide_hopper.Config, deterministic: bool, dsink: bool
) -> Plan:
    """The launches of the gradients of wide heads: a kernel for dK and dV, and one for dQ, which sums nothing in global
    memory."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem(
        "batch", "seqlen_q", "heads", "head_dim", "seqlen_k", "heads_k", "head_dim_v"
    )
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    by_queries = backward_wide_queries_hopper.config_for(head_dim, dtype, spec.variant, value_dim)
    (_, seq_args), before_main, tiles = choose_layout(problem), PreparationSteps(problem), -(-q_len // by_keys.rows)
    blocks, group, after_main = -(-kv_len // by_keys.kv), heads // kv_heads, PreparationSteps(problem, before_main.scratch)
    split = choose_split(problem, blocks, tiles, deterministic, spec.variant.monotonic, gpu.processors)
    partial_args = partial_arguments(before_main, after_main, by_keys, split)
    by_keys = replace(by_keys, splits_queries=split.splits > 1)
    lse_delta = before_main.allocate((batch, heads, 2 * tiles * by_keys.rows), "float32")
    preparation = _bind_prepare(problem, by_keys, lse_delta, lse_delta, tiles, seq_args)
    dq_args = {"heads": heads, "batch_heads": batch * heads, "group": group, "gDQ": problem["dq"]}
    rasters = choose_raster_group(spec.variant.monotonic, UNORDERED, gpu.processors)
    args = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDO": problem["dout"], "gLseDelta": lse_delta}
    args |= {"raster_group": rasters, "scale": spec.unit * LOG2_E, "unit": scale}
    args |= seq_args | variant_arguments(problem, spec)
    steps = [preparation]
    for module, config, count, sizes in [
        (backward_wide_hopper, by_keys, blocks, partial_args),
        (backward_wide_queries_hopper, by_queries, -(-q_len // by_queries.rows), dq_args),
    ]:
        kernel = kernel_for(module, config, problem.device)
        steps.append(kernel.bind(sizes["batch_heads"] * count, blocks=count, **sizes, **args))
    if dsink:
        steps.append(_bind_sinks(problem, by_keys, lse_delta, batch, tiles))
    return Plan([*steps, *after_main.steps], before_main.scratch)


def _bind_prepare(
    problem: Problem, main: BackwardConfig, lse_delta: Any, dq_accum: Any, tiles: int, args: Mapping[str, Any]
) -> Any:
    """The launch that computes lse and delta of each query, and clears the sums of dQ, before this main kernel."""
    batch, heads = problem("batch", "heads")
    dlse = {} if (x := problem["dlse"]) is None else {"dlse": x}
    config = replace(backward_preprocess.config_of(main), has_dlse=bool(dlse))
    return kernel_for(backward_preprocess, config, problem.device).bind(
        batch * heads * tiles,
        gO=problem["out"],
        gDO=problem["dout"],
        gLse=problem["lse"],
        gLseDelta=lse_delta,
        gDQAccum=dq_accum,
        blocks=tiles,
        heads=heads,
        **dlse,
        **args,
    )


def _bind_sinks(problem: Problem, main: BackwardConfig, lse_delta: Any, batches: int, tiles: int) -> Any:
    """The launch that computes the gradients of the sinks, for query tiles of this main kernel."""
    heads, config = problem.extents["heads"], sink_gradient.Config(main.rows, float32_output(main.accumulate))
    return kernel_for(sink_gradient, config, problem.device).bind(
        -(-heads // sink_gradient.HEADS),
        gLseDelta=lse_delta,
        gSink=problem["sink"],
        gDSink=problem["dsink"],
        batches=batches,
        tiles=tiles,
    )
