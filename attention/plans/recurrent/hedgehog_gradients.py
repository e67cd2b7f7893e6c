"""The plan of Hedgehog's gradients where hedgehog_gradient_chunks.py does not serve them. The launches compute: features, and
their sums over older chunks; the gradients of queries; in reverse, the gradients of the sums; the gradients of keys and values;
and from the gradients of features those of q, k and the maps."""

from typing import Any

from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import hedgehog_states
from ...kernels.recurrent.hedgehog_feature_gradients import HedgehogFeatureGradients, HedgehogFeatures
from ...kernels.recurrent.hedgehog_gradients import HedgehogKeyGradients, HedgehogQueryGradients
from ...parts.recurrent.hedgehog_chunks import FEATURES, HALF, HEAD_DIMS
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..partial_sums import sum_partials
from .hedgehog_gradient_chunks import plan_on_hopper, serves_hopper, sum_maps
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices

WARPS = 4  # of a block of the kernels of chunks: each has a part of the sums of a head
SPLITS = 32  # blocks at most that sum the gradient of a head's map
SIDES = "q", "k"
GRADIENTS = "dq", "dk", "dv", "dq_map", "dk_map", "dalphas", "dbetas"


def plan_hedgehog_gradients(problem: Problem, scale: float) -> Plan:
    """The Plan of a call of hedgehog_backward. scale: what scores of the window are multiplied by."""
    batch, length, heads, key_heads, key_dim, value_dim, sequences = problem(
        "batch", "seqlen", "heads", "heads_k", "key_dim", "value_dim", "sequences"
    )
    if not batch * length * heads:
        return Plan([Fill(x, 0.0) for x in map(problem.__getitem__, GRADIENTS) if 0 not in x.form.shape])
    scratch, dtype, chunks = ScratchAllocator(problem), problem.dtype, count_chunk_indices(problem)
    if serves_hopper(problem):
        return Plan(plan_on_hopper(problem, scale, scratch), scratch.shapes)
    config_fields = pad_key_dim(max(key_dim, value_dim), HEAD_DIMS), DTYPES[dtype], is_varlen(problem), problem.bytes_at_once()
    tiles, parts, width = -(-length // CHUNK), -(-chunks // sequences), -(-value_dim // COLUMNS)
    splits, group = min(SPLITS, batch * tiles), heads // key_heads
    features = {x: scratch(batch, length, key_heads, FEATURES, dtype=dtype) for x in SIDES}
    dfeatures = {x: scratch(batch, length, heads, FEATURES) for x in SIDES}
    window_dx = {x: scratch(batch, length, heads, key_dim) for x in SIDES}
    states = {x: scratch(chunks, heads, FEATURES, value_dim, dtype=dtype) for x in SIDES}  # dS of q, S of k
    sums = {x: scratch(chunks, heads, FEATURES) for x in SIDES}
    window: Arrays = {name: scratch(batch, length, heads, 2 * CHUNK, dtype=dtype) for name in ("gWeights", "gDScores")}
    window["gDNumerators"] = scratch(batch, length, heads, value_dim, dtype=dtype)
    warp_partials = {x: scratch(sequences * parts * WARPS, heads) for x in ("gDAlphas", "gDBetas")}
    dnormalizers = scratch(batch, length, heads)

    def launch(config: Any, grid: int, **arguments: Operand | float | None) -> Step:
        kernel = kernel_for(hedgehog_states if isinstance(config, hedgehog_states.Config) else config, config, problem.device)
        return kernel.bind(grid, gCuSeqlens=problem["cu_seqlens"], length=length, **arguments)

    def scan(x: str, values: Operand | None, weights: Operand | None, reverse: bool) -> Step:
        config = intern_value(hedgehog_states.Config, HEAD_DIMS[0], *config_fields[1:], reverse)
        arrays: Arrays = {"gFeatures": features[x], "gValues": values, "gWeights": weights}
        arrays |= {"gStates": states[x], "gZ": sums[x]}
        return launch(config, sequences * heads * width, blocks=width, heads=heads, group=group, **arrays)

    def launch_chunks(kernel_class: Any, x: str, state_side: str, names: str, **arguments: Operand | float | None) -> Step:
        arrays: Arrays = {"g" + name: problem[name.lower()] for name in names.split()}
        arrays |= {"gFeatures": features[x], "gStates": states[state_side], "gZ": sums[state_side]}
        arrays |= {"gWindowDX": window_dx[x], "gDFeatures": dfeatures[x]}
        sizes = {"parts": parts, "heads": heads, "group": group}
        return launch(
            intern_value(kernel_class, *config_fields), sequences * heads * parts, **window, **arrays, **sizes, **arguments
        )

    def plan_feature_gradients(x: str) -> list[Step]:
        dmap = scratch(1, key_dim, key_heads * splits, HALF)
        arrays: Arrays = {
            "gX": problem[x],
            "gMap": problem[f"{x}_map"],
            "gWindowDX": window_dx[x],
            "gDFeatures": dfeatures[x],
        }
        arrays |= {"gDX": problem["d" + x], "gDMap": dmap}
        sizes = {"batches": batch, "tiles": tiles, "splits": splits, "group": group}
        config = intern_value(HedgehogFeatureGradients, *config_fields)
        return [launch(config, key_heads * splits, **arrays, **sizes), sum_maps(problem, dmap, problem[f"d{x}_map"])]

    steps = []
    for x in SIDES:
        arrays: Arrays = {"gX": problem[x], "gMap": problem[f"{x}_map"], "gFeatures": features[x]}
        config = intern_value(HedgehogFeatures, *config_fields)
        steps.append(launch(config, batch * key_heads * tiles, **arrays, tiles=tiles, heads=key_heads))
    steps.append(scan("k", problem["v"], None, reverse=False))
    query_partials: Arrays = {"gDNormalizers": dnormalizers, **warp_partials}
    steps.append(launch_chunks(HedgehogQueryGradients, "q", "k", "Q K V DOut Alphas Betas", scale=scale, **query_partials))
    steps.append(scan("q", window["gDNumerators"], dnormalizers, reverse=True))
    steps.append(launch_chunks(HedgehogKeyGradients, "k", "q", "Q V Alphas DV"))
    for x in SIDES:
        steps += plan_feature_gradients(x)
    for name, partial in warp_partials.items():
        total = problem[name[1:].lower()]
        assert total is not None
        steps.append(sum_partials(problem, partial, total))
    return Plan(steps, scratch.shapes)
