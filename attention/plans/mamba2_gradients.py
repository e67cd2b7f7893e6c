"""The plan of Mamba-2's gradients: those of linear attention (recurrent_gradients.py) between the two kernels of
mamba2_gradients.py. For the gradient of z, outputs before the gate silu(z) are computed once more."""

from collections.abc import Sequence

from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ..kernels.mamba2_gradients import PART, TOKENS, Mamba2GradientInputs, Mamba2GradientOutputs
from .partial_sums import sum_partials
from .recurrent_checks import DTYPES, StepOptions, is_varlen
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, choose_mamba2_gate, intern_value, plan_token_decay
from .token_loop_gradients import plan_linear_gradients

STATES = {"initial_state": "initial_states", "dstate": "dstates", "dinitial_state": "dinitial_states"}  # linear's: Mamba-2's
GRADIENTS = "dx", "ddt", "dA", "dB", "dC"


def plan_mamba2_gradients(problem: Problem, steps_of_time: StepOptions, vector_bytes: int, requested: Sequence[str]) -> Plan:
    """The Plan of a call of mamba2_backward. vector_bytes: how many bytes a cp.async copies, 0 for TMA. requested: the
    gradients to compute besides GRADIENTS."""
    batch, length, heads, columns = problem("batch", "seqlen", "heads", "value_dim")
    outputs = {name: problem[name] for name in (*GRADIENTS, *requested)}
    if not batch * length:
        return Plan([Fill(x, 0.0) for x in outputs.values() if 0 not in x.form.shape])
    scratch, dtype, dout, skip = ScratchAllocator(problem), DTYPES[problem.dtype], problem["dout"], problem["D"]
    tokens = batch, length, heads
    gate, has_z, has_dz = choose_mamba2_gate(steps_of_time), "z" in problem, "dz" in requested
    values, dvalues = (scratch(*tokens, columns, dtype=problem.dtype) for _ in range(2))
    dy = scratch(*tokens, columns, dtype=problem.dtype) if has_z else dout
    y = scratch(*tokens, columns, dtype=problem.dtype) if has_dz else None
    gates, dgates = scratch(*tokens), scratch(*tokens)
    sizes = {"tiles": -(-length // TOKENS), "panels": -(-columns // PART.cols), "heads": heads}
    inputs = {"gX": problem["x"], "gDt": problem["dt"], "gZ": problem["z"], "gDOut": dout}
    inputs |= {"gA": _spread(problem["A"], PART.rows), "gDtBias": _spread(problem["dt_bias"], PART.rows)}
    blocks = batch * sizes["tiles"]
    before = intern_value(Mamba2GradientInputs, dtype, gate, has_z)
    arrays: Arrays = {"gValues": values, "gGates": gates, "gDY": dy}
    steps: list[Step] = [kernel_for(before, before, problem.device).bind(blocks * heads, **arrays, **inputs, **sizes)]
    if y:
        steps += _plan_outputs(problem, y, steps_of_time, vector_bytes, scratch)
    linear_arrays: Arrays = {"q": problem["C"], "k": problem["B"], "v": values, "decay": gates, "dout": dy}
    linear_arrays |= {"dq": problem["dC"], "dk": problem["dB"], "dv": dvalues, "ddecay": dgates}
    for name, own_name in STATES.items():
        state = outputs.get(own_name) if name == "dinitial_state" else problem[own_name]
        linear_arrays[name] = state and state.permuted(SWAP_STATE_AXES)
    steps += plan_linear_gradients(problem, linear_arrays, 1.0, vector_bytes, scratch)
    kind = "" if "dD" not in requested else "column" if len(skip.form.shape) == 2 else "head"
    after = intern_value(Mamba2GradientOutputs, dtype, gate, has_dz, kind, is_varlen(problem))
    sums: Arrays = {"gRateSums": scratch(blocks, heads), "gBiasSums": scratch(blocks, heads)}
    sums["gSkipSums"] = scratch(blocks, heads) if kind == "head" else None
    sums["gColumnSums"] = scratch(heads, blocks, columns) if kind == "column" else None
    arrays = {"gY": y, "gDY": dy, "gDValues": dvalues, "gDGates": dgates, "gD": _spread(skip, columns)}
    arrays |= {"gDX": outputs["dx"], "gDDt": outputs["ddt"], "gDZ": outputs.get("dz"), "gCuSeqlens": problem["cu_seqlens"]}
    kernel = kernel_for(after, after, problem.device)
    steps.append(kernel.bind(blocks * heads, length=length, **arrays, **sums, **inputs, **sizes))
    names = {"gRateSums": "dA", "gBiasSums": "ddt_bias", "gSkipSums": "dD", "gColumnSums": "dD"}
    for name, partials in sums.items():
        if partials and names[name] in outputs:
            steps.append(sum_partials(problem, partials, outputs[names[name]]))
    return Plan(steps, scratch.shapes)


def _spread(x: Operand | None, extent: int) -> Operand | None:
    """An array of heads, as one of heads and columns that are the same."""
    return x.spread(1, extent) if x and len(x.form.shape) == 1 else x


def _plan_outputs(
    problem: Problem, y: Operand, steps_of_time: StepOptions, vector_bytes: int, scratch: ScratchAllocator
) -> list[Step]:
    """The launches that compute y, the outputs before the gate silu(z)."""
    arrays = {"gQ": problem["C"], "gK": problem["B"], "gV": problem["x"], "gZ": None, "gGates": problem["dt"], "gO": y}
    arrays |= {"gA": problem["A"], "gDtBias": problem["dt_bias"], "gD": problem["D"], "gCuSeqlens": problem["cu_seqlens"]}
    arrays |= {"gInitialState": problem["initial_states"], "gFinalState": None}
    steps, _ = plan_token_decay(problem, arrays, 1.0, vector_bytes, steps_of_time, scratch=scratch)
    return steps
