"""The launches of attention.backward: what kernels are bound to (choice.py says which)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tiles import fp32
from tiles.arrays import Operand
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, nothing
from tiles.schema import Problem

from ..assembled import VariantSpec
from ..launches import DTYPES, LOG2_E, Before, made_for, sequences_of, spread, variant_arrays
from ..prepared_lists import Listing, check
from . import finish, hopper_wide, hopper_wide_queries, prepare, shares, sinks, slopes
from .choice import choose_kernel
from .dq_order import UNORDERED, AscendingAdds, LastBlockStores, OrderedAdds, UnorderedAdds
from .query_lists import launch_query_lists
from .recomputed_scores import BiasRead
from .results import StoreGradient
from .score_gradients import ScoreGradients

CLOSE, SHORT = 8, 2048  # multiprocessors that work on one pair at a time, causal, up to how many keys
IN_LINE = 16  # multiprocessors that work on one pair at a time in order, where no query sees more keys than others


def plan_launches(
    problem: Problem,
    spec: VariantSpec,
    scale: float,
    deterministic: bool,
    family: str | None,
    aux: Sequence[Operand] = (),
    listing: Listing | None = None,
    reads: Mapping[str, Sequence[BiasRead]] = MappingProxyType({}),
    sunk: bool = False,
) -> Plan:
    """The launches of the gradients of an assembled variant of scores that were `scale` q k^T at first. ordered: dQ is summed
    in a fixed order. aux: the arrays that its functions read. listing: how it is listed which tiles of queries see a block of
    keys; None: there is no need to. reads: by the name of a gradient what reads the array that it belongs to. sunk: is the
    sinks' gradient asked for?"""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    gradients = [problem[name] for name in ("dq", "dk", "dv", *["dsink"] * sunk, *reads)]
    accumulate = problem.schema.arguments["dq"].role == "updated"
    give = nothing if accumulate else None
    if any(0 in problem[name].form.shape for name in ("q", "k")):  # no query sees a key
        return Plan([] if accumulate else [Fill(x, 0.0) for x in gradients if 0 not in x.form.shape], (), give)
    (lie, where), gpu = sequences_of(problem), machine(problem.device)
    module, config, plain = choose_kernel(problem, spec, deterministic, family, aux, listing, reads)
    if module is hopper_wide:
        return plan_wide_launches(problem, spec, scale, config, deterministic, sunk)
    slope_gradient, by_list = config.slope_gradient, config.by_list
    parts, split = config.parts, shares.QuerySplit()
    if lie.packed:  # see there, how many blocks that takes
        (ends,) = problem("E")
        tiles, blocks = q_len // config.rows + ends - 1, kv_len // config.kv + ends - 1
    else:
        tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    early = Before(problem)
    if not (accumulate or listing):
        longest_first = spec.variant.monotonic and not isinstance(config.order, LastBlockStores)
        split = shares.choose_split(problem, blocks, tiles, deterministic, longest_first, gpu.processors)
    if slope_gradient is not slopes.NO_SLOPE_GRADIENT:  # all spans of a subgroup would have the same places
        split = split._replace(splits=1)
    late = Before(problem, early.scratch)
    of_keys, config = shares.arguments(early, late, config, split), replace(config, splits_queries=split.splits > 1)
    lse_delta = early.memory((batch, heads, 2 * tiles * config.rows), "float32")
    dq_accum = problem["dq"] if config.single_block else early.memory((batch * heads, tiles * parts.sum_rows, parts.sum_columns), "float32")
    turns = {}
    if isinstance(config.order, OrderedAdds):
        turns["turns"] = early.memory((batch * heads, config.order.lines * tiles), "int32")
    told = where | turns
    given = spec.numbers | {name: x for name, x in variant_arrays(problem).items() if name in spec.variant.params}
    read = {f"aux{n}": x for n, x in enumerate(aux)}
    if listing and listing.blocked:
        marks = problem["marks"] or early.classes(listing.blocked)
        given["marks"] = spread(marks, (*problem("NH"), *marks.form.shape[2:]))
    listed_by, surveyed = {}, {}
    if listing and by_list:
        if listing.ready_for:
            check(listing.ready_for, made_for(problem, config, listing), but="tiles")
        found = launch_query_lists(early, spec, listing.varies, config, where | given, read)
        surveyed = {"classes": spread(classes := found.pop("classes"), (batch, heads, *classes.form.shape[2:]))}
        listed_by = {name: spread(x, (batch, kv_heads, *x.form.shape[2:])) for name, x in found.items()}
    learnt: dict[str, Any] = {}
    if slope_gradient is not slopes.NO_SLOPE_GRADIENT:
        rows = config.slope_warps * blocks * (1 if lie.packed else batch)
        size = math.prod(problem["dalibi"].form.shape)
        learnt["found"] = early.memory((rows, size), "float32")
        early.steps.append(Fill(learnt["found"], 0.0))
    main = kernel_for(module, config, problem.device).bind(
        of_keys["pairs"] * blocks,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gDO=problem["dout"],
        gLseDelta=lse_delta,
        gDQAccum=dq_accum,
        blocks=blocks,
        raster_group=choose_raster_group(spec.variant.monotonic, config.order, gpu.processors, kv_len if plain else math.inf),
        scale=spec.unit * LOG2_E,
        unit=scale,
        **of_keys,
        **told,
        **given,
        **listed_by,
        **read,
        **learnt,
    )
    before = _bind_prepare(problem, prepare.config_of(config), lse_delta, lse_delta if config.single_block else dq_accum, tiles, told)
    steps = [*early.steps, before, main]
    if not config.single_block:
        after = kernel_for(finish, finish.config_of(config), problem.device)
        told = {"blocks": tiles, "heads": heads, "unit": scale} | where
        steps.append(after.bind(batch * heads * tiles, gDQAccum=dq_accum, gDQ=problem["dq"], **told))
    if sunk:
        steps.append(_bind_sinks(problem, sinks.config_of(config), lse_delta, batch, tiles))
    arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDO": problem["dout"], "gSums": lse_delta}
    score_gradients = ScoreGradients(problem, spec, config, late, arrays | where | given | surveyed | read, gpu.processors)
    for name, readers in reads.items():
        if name == "dalibi" and learnt:
            score_gradients.launch_sum(name, learnt["found"])
        else:
            score_gradients.launch(name, readers)
    return Plan([*steps, *late.steps], early.scratch, give)


def choose_raster_group(rising: bool, order: UnorderedAdds, processors: int, keys: float = math.inf) -> int:
    """How many pairs of share and batch are gone through at once: see tiling.band_of. keys: of a sequence. Blocks that add
    to dQ in order wait for each other when they begin, the longer the more of a pair begin at once."""
    deterministic = isinstance(order, AscendingAdds)
    sms_per_head = CLOSE if keys <= SHORT and not deterministic else order.sms_per_head
    return max(1, processors // sms_per_head) if rising else max(1, processors // IN_LINE) if deterministic else 1


def plan_wide_launches(
    problem: Problem, spec: VariantSpec, scale: float, by_keys: hopper_wide.Config, deterministic: bool, sunk: bool
) -> Plan:
    """The launches of the gradients of wide heads: dK and dV, and dQ by itself. Of dQ nothing is summed in memory."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    by_queries = hopper_wide_queries.config_for(head_dim, dtype, spec.variant, value_dim)
    (_, where), early, tiles = sequences_of(problem), Before(problem), -(-q_len // by_keys.rows)
    blocks, group, late = -(-kv_len // by_keys.kv), heads // kv_heads, Before(problem, early.scratch)
    split = shares.choose_split(problem, blocks, tiles, deterministic, spec.variant.monotonic, gpu.processors)
    of_keys, by_keys = shares.arguments(early, late, by_keys, split), replace(by_keys, splits_queries=split.splits > 1)
    lse_delta = early.memory((batch, heads, 2 * tiles * by_keys.rows), "float32")
    before = _bind_prepare(problem, prepare.without_sums(by_keys), lse_delta, lse_delta, tiles, where)  # there are none to clear
    of_queries = {"heads": heads, "pairs": batch * heads, "group": group, "gDQ": problem["dq"]}
    steps = [before]
    for module, config, count, own in [
        (hopper_wide, by_keys, blocks, of_keys),
        (hopper_wide_queries, by_queries, -(-q_len // by_queries.rows), of_queries),
    ]:
        steps.append(
            kernel_for(module, config, problem.device).bind(
                own["pairs"] * count,
                gQ=problem["q"],
                gK=problem["k"],
                gV=problem["v"],
                gDO=problem["dout"],
                gLseDelta=lse_delta,
                blocks=count,
                raster_group=choose_raster_group(spec.variant.monotonic, UNORDERED, gpu.processors),
                scale=spec.unit * LOG2_E,
                unit=scale,
                **where,
                **own,
                **spec.numbers,
                **{name: x for name, x in variant_arrays(problem).items() if name in spec.variant.params},
            )
        )
    if sunk:
        steps.append(_bind_sinks(problem, sinks.Config(by_keys.rows, StoreGradient(fp32)), lse_delta, batch, tiles))
    return Plan([*steps, *late.steps], early.scratch)


def _bind_prepare(problem: Problem, config: prepare.Config, lse_delta: Any, dq_accum: Any, tiles: int, told: Mapping[str, Any]) -> Any:
    """The launch that finds two numbers of each query, and clears the sums."""
    batch, heads = problem("BH")
    dlse = {} if (x := problem["dlse"]) is None else {"dlse": x}
    return kernel_for(prepare, replace(config, has_dlse=bool(dlse)), problem.device).bind(
        batch * heads * tiles,
        gO=problem["out"],
        gDO=problem["dout"],
        gLse=problem["lse"],
        gLseDelta=lse_delta,
        gDQAccum=dq_accum,
        blocks=tiles,
        heads=heads,
        **dlse,
        **told,
    )


def _bind_sinks(problem: Problem, config: sinks.Config, lse_delta: Any, batches: int, tiles: int) -> Any:
    """The launch that finds the sinks' gradients."""
    (heads,) = problem("H")
    return kernel_for(sinks, config, problem.device).bind(
        -(-heads // sinks.HEADS), gLseDelta=lse_delta, gSink=problem["sink"], gDSink=problem["dsink"], batches=batches, tiles=tiles
    )
