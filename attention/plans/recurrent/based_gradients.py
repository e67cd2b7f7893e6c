"""The plan of Based's gradients: on Hopper two walks (based_gradients_hopper.py), whose sequences are cut into segments if they
are few and long; elsewhere, and for values of more than 64 columns, those of linear attention with its 160 features as queries
and keys, between the two kernels of based_gradients.py."""

from typing import Any

from ops.for_attention.taylor_features import FEATURES
from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent.based_gradients import TOKENS, BasedFeatureGradients, BasedFeatures
from ...kernels.recurrent.based_gradients_hopper import BasedKeyGradients, BasedQueryGradients
from ...parts.recurrent.based_segments import VECTORS
from ...parts.recurrent.tokens import COLUMNS
from .based_chunks import BasedSegments, count_segments
from .normalizer_gradients import plan_normalized_gradients
from .recurrent_checks import DTYPES, is_varlen
from .recurrent_chunks import Arrays, Costs, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, partial_gradients, sum_heads
from .token_loop_gradients import plan_linear_gradients

GRADIENT_COSTS = Costs(two_consumers=1, first_pass=0.4, compose=0.3, extra_launches=3)
SQUARES = {"q": 1.0, "k": 0.5}  # what squares among features are multiplied by


def plan_based_gradients(problem: Problem, scale: float, normalize: bool, wants_state: bool, vector_bytes: int) -> Plan:
    """The Plan of a call of based_backward. wants_state: are the gradients of the initial state computed? vector_bytes: how
    many bytes a cp.async copies, 0 for TMA."""
    batch, length, heads, key_heads = problem("batch", "seqlen", "heads", "heads_k")
    names = ["dq", "dk", "dv", *["dinitial_state"] * wants_state, *["dinitial_z"] * (wants_state and normalize)]
    if not batch * length * heads:
        return Plan([Fill(x, 0.0) for x in map(problem.__getitem__, names) if 0 not in x.form.shape])
    scratch, dtype = ScratchAllocator(problem), DTYPES[problem.dtype]
    if not vector_bytes and problem.extents["value_dim"] <= COLUMNS:
        results = {name: problem[name] if name in names else None for name in ("dinitial_state", "dinitial_z")}
        return Plan(_plan_walks(problem, scale, normalize, results, scratch), scratch.shapes)
    features, gradients = (
        {x: scratch(batch, length, key_heads, FEATURES, dtype=problem.dtype) for x in SQUARES} for _ in range(2)
    )
    arrays: Arrays = {"decay": None, "ddecay": None} | features
    arrays |= {name: problem[name] for name in ("dout", "v", "dv", "initial_state", "dstate", "initial_z")}
    arrays |= {name: problem[name] if name in names else None for name in ("dinitial_state", "dinitial_z")}
    arrays |= {"dq": gradients["q"], "dk": gradients["k"], "dfinal_z": problem["dz"]}
    # the same call, of linear attention
    linear_problem = Problem(
        problem.schema, problem.forms, problem.extents | {"key_dim": FEATURES}, problem.bits, problem.layout
    )
    plan = plan_normalized_gradients if normalize else plan_linear_gradients
    tiles = -(-length // TOKENS)
    steps: list[Step] = []

    def launch(config, x: str, **arguments: Operand | int | None) -> Step:
        sizes = {"tiles": tiles, "heads": key_heads, "scale": scale if x == "q" else 1.0, "squares": SQUARES[x]}
        kernel = kernel_for(config, config, problem.device)
        return kernel.bind(batch * key_heads * tiles, gX=problem[x], **sizes, **arguments)

    steps += [launch(intern_value(BasedFeatures, dtype), x, gFeatures=features[x]) for x in SQUARES]
    steps += plan(linear_problem, arrays, 1.0, vector_bytes, scratch)
    gradient_kernel = intern_value(BasedFeatureGradients, dtype, is_varlen(problem))
    for x in SQUARES:
        outputs = {"gDFeatures": gradients[x], "gDX": problem["d" + x], "gCuSeqlens": problem["cu_seqlens"]}
        steps.append(launch(gradient_kernel, x, length=length, **outputs))
    return Plan(steps, scratch.shapes)


def _plan_walks(problem: Problem, scale: float, normalize: bool, results: Arrays, scratch: ScratchAllocator) -> list[Step]:
    """The launches of both walks. results: the gradients of the initial state, None where they are not wanted."""
    heads, key_heads, sequences = problem("heads", "heads_k", "sequences")
    sums_heads = heads > key_heads
    fields = DTYPES[problem.dtype], normalize, sums_heads, is_varlen(problem)
    outputs = {name: partial_gradients(problem, scratch) if sums_heads else problem[name] for name in ("dq", "dk")}
    arrays: Arrays = {"gQ": problem["q"], "gK": problem["k"], "gV": problem["v"], "gDOut": problem["dout"]}
    vectors = scratch(count_chunk_indices(problem), heads, VECTORS.length) if normalize else None
    arrays |= {"gVectors": vectors, "gCuSeqlens": problem["cu_seqlens"]}
    segments = count_segments(problem, 1, GRADIENT_COSTS)
    states = BasedSegments(problem, normalize, segments, scratch)
    sizes = {"length": problem.extents["seqlen"], "segments": segments, "heads": heads, "group": heads // key_heads}
    steps: list[Step] = []

    def launch(walk: Any, own_arrays: Arrays) -> Step:
        config = intern_value(walk, *fields)
        kernel = kernel_for(config, config, problem.device)
        return kernel.bind(sequences * heads * segments, **sizes, scale=scale, **arrays, **own_arrays)

    keys: Arrays = {"gX": problem["k"], "gV": problem["v"]}
    new_steps, state, z = states.find_states(problem["initial_state"], problem["initial_z"], False, 1.0, **keys)
    starts = {"gDQ": outputs["dq"], "gInitialState": state, "gInitialZ": z}
    steps += [*new_steps, launch(BasedQueryGradients, starts)]
    queries: Arrays = {"gX": problem["q"], "gV": problem["dout"], "gVectors": vectors}
    new_steps, state, z = states.find_states(problem["dstate"], problem["dz"], True, scale, **queries)
    ends = {"gDK": outputs["dk"], "gDV": problem["dv"], "gDState": state, "gDZ": z}
    ends |= {"gDInitialState": results["dinitial_state"], "gDInitialZ": results["dinitial_z"]}
    steps += [*new_steps, launch(BasedKeyGradients, ends)]
    return steps + [step for name in outputs if sums_heads for step in sum_heads(problem, outputs[name], problem[name])]
