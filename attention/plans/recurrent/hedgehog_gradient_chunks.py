"""The plan of Hedgehog's gradients on Hopper. The launches compute: features, and sums of those of each chunk; the sums of
older features, and the states before all chunks, by linear attention's scan; the gradients of queries; in reverse, the
gradients of both; the gradients of keys and values; and those of the maps, from parts of them."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...families import uses_hopper_kernels
from ...kernels.recurrent import (
    hedgehog_feature_sums,
    hedgehog_key_gradients_hopper,
    hedgehog_query_gradients_hopper,
    sum_head_groups,
)
from ...kernels.recurrent.hedgehog_feature_gradients import HedgehogFeatures
from ...parts.recurrent.gates import Gate
from ...parts.recurrent.gradients import ReversedGate
from ...parts.recurrent.hedgehog_chunks import FEATURES, HALF, HEAD_DIMS
from ...parts.recurrent.hedgehog_gradients import HEAD, STATS, WARPS
from ...parts.recurrent.tokens import CHUNK
from ..partial_sums import sum_groups, sum_partials
from . import recurrent_chunks
from .linear_gradient_walk import StateScan
from .recurrent_checks import DTYPES, is_varlen
from .recurrent_chunks import Arrays, Costs, ScratchAllocator, intern_value
from .recurrent_gradients import partial_gradients, sum_heads

COSTS = Costs(two_consumers=1, first_pass=0, compose=0, extra_launches=0)  # segments do not wait for one another
SIDES = "q", "k"


def serves_hopper(problem: Problem) -> bool:
    """Do these kernels serve such a call? Smaller heads they would pad."""
    key_dim, value_dim = problem("key_dim", "value_dim")
    return max(key_dim, value_dim) > HEAD_DIMS[0] and not is_varlen(problem) and uses_hopper_kernels(problem, None)


def plan_on_hopper(problem: Problem, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches of a call of hedgehog_backward that has tokens. scale: what scores of the window are multiplied by."""
    batch, length, heads, key_heads, key_dim, value_dim = problem("batch", "seqlen", "heads", "heads_k", "key_dim", "value_dim")
    dtype, tiles, group = problem.dtype, -(-length // CHUNK), heads // key_heads
    chunks, tokens = batch * tiles, (batch, length, heads)
    features = {x: scratch(batch, length, key_heads, FEATURES, dtype=dtype) for x in SIDES}
    feature_sums = {"k": scratch(chunks, key_heads, WARPS, FEATURES), "q": scratch(chunks, heads, 1, FEATURES)}
    sums = {"k": scratch(chunks, key_heads, FEATURES), "q": scratch(chunks, heads, FEATURES)}
    states = {x: scratch(chunks, heads, value_dim, FEATURES, dtype=dtype) for x in SIDES}
    stats, dnumerators = scratch(chunks, heads, STATS.length), scratch(*tokens, value_dim, dtype=dtype)
    gradients = {x: partial_gradients(problem, scratch) if group > 1 else problem["d" + x] for x in SIDES}
    segments = recurrent_chunks.choose_segments(batch * heads, 1, 1, tiles, machine(problem.device).processors, COSTS)
    dmaps = {x: scratch(key_dim, heads, batch * segments, HALF) for x in SIDES}
    warp_partials = {name: scratch(batch * segments * WARPS, heads) for name in ("dalphas", "dbetas")}
    feature_problem = Problem(
        problem.schema, problem.forms, problem.extents | {"key_dim": FEATURES}, problem.bits, problem.layout
    )

    def write_features(x: str, **params: Operand) -> Step:
        config = intern_value(HedgehogFeatures, HEAD, DTYPES[dtype], with_sums=bool(params))
        arrays: Arrays = {"gX": problem[x], "gMap": problem[f"{x}_map"], "gFeatures": features[x], "gCuSeqlens": None}
        grid = batch * key_heads * tiles
        return kernel_for(config, config, problem.device).bind(
            grid, **arrays, length=length, tiles=tiles, heads=key_heads, **params
        )

    def sum_features(x: str, reverse: bool) -> Step:
        kernel = kernel_for(hedgehog_feature_sums, intern_value(hedgehog_feature_sums.Config, reverse), problem.device)
        count = feature_sums[x].form.shape[1]
        grid = batch * count * hedgehog_feature_sums.STRIPS
        return kernel.bind(grid, gParts=feature_sums[x], gSums=sums[x], chunks=tiles, heads=count)

    def scan(x: str, gate: Gate, values: Operand | None) -> list[Step]:
        arrays: Arrays = {"gQ": features[x], "gK": features[x], "gV": values, "gGates": None, "gCuSeqlens": None}
        return StateScan(feature_problem, gate, arrays).store_states(states[x], {"gInitialState": None}, scratch)

    def differentiate(module: Any, x: str, state_side: str, **arrays: Operand | None) -> Step:
        config = intern_value(module.Config, DTYPES[dtype], group > 1)
        arrays |= {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDOut": problem["dout"]}
        arrays |= {"gFeatures": features[x], "gStates": states[state_side], "gZ": sums[state_side]}
        arrays |= {"gMap": problem[f"{x}_map"], "gAlphas": problem["alphas"], "gStats": stats}
        arrays |= {"gDX": gradients[x], "gDMap": dmaps[x]}
        sizes = {"length": length, "segments": segments, "heads": heads, "group": group}
        return kernel_for(module, config, problem.device).bind(batch * heads * segments, **arrays, **sizes, scale=scale)

    query_outputs: Arrays = {"gBetas": problem["betas"], "gDNumerators": dnumerators, "gDZ": feature_sums["q"]}
    query_outputs |= {"gDAlphas": warp_partials["dalphas"], "gDBetas": warp_partials["dbetas"]}
    steps = [write_features("q"), write_features("k", feature_sums=feature_sums["k"]), sum_features("k", reverse=False)]
    steps += scan("k", intern_value(Gate), problem["v"])
    steps.append(differentiate(hedgehog_query_gradients_hopper, "q", "k", **query_outputs))
    steps.append(sum_features("q", reverse=True))
    steps += scan("q", intern_value(ReversedGate, intern_value(Gate)), dnumerators)
    steps.append(differentiate(hedgehog_key_gradients_hopper, "k", "q", gDV=problem["dv"]))
    for x in SIDES:
        steps.append(sum_maps(problem, _merge_parts(dmaps[x]), problem[f"d{x}_map"]))
        if group > 1:
            steps += sum_heads(problem, gradients[x], problem["d" + x])
    for name, partial in warp_partials.items():
        total = problem[name]
        assert total is not None
        steps.append(sum_partials(problem, partial, total))
    return steps


def _merge_parts(dmaps: Operand) -> Operand:
    """The parts (row, head, part, column) of the gradient of a map as (1, row, head and part, column)."""
    rows, heads, parts, columns = dmaps.form.shape
    row_stride, _, *strides = dmaps.form.strides
    form = dmaps.form._replace(shape=(1, rows, heads * parts, columns), strides=(0, row_stride, *strides))
    return dmaps._replace(form=form)


def sum_maps(problem: Problem, partial: Operand, total: Operand | None) -> Step:
    """The launch that sums the parts (1, row, head and split, column) of the gradient of a map."""
    assert total is not None
    config = intern_value(sum_head_groups.Config, DTYPES[problem.dtype], problem.bytes_at_once())
    return sum_groups(problem, config, partial, total.swapaxes(0, 1).spread(0, 1))
