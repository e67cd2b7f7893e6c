"""The plan of Mamba-2's gradients: those of linear attention (recurrent_gradients.py) between two kernels of
mamba2_gradients.py; or, where value heads share B and C on Hopper, by a kernel that reads x and dt itself
(shared_heads_gradients.py), and of bf16 that are not packed computes dz. Elsewhere outputs before the gate silu(z) are computed
once more for dz."""

from collections.abc import Sequence

from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for
from tiles.layout import WARPGROUP

from ...kernels.recurrent.mamba2_gradients import (
    PART,
    TOKENS,
    WARPS,
    Mamba2GradientInputs,
    Mamba2GradientOutputs,
    Mamba2HeadSums,
    Mamba2OutputGate,
    Mamba2StepGradients,
)
from ...kernels.recurrent.shared_heads_gradients_hopper import COLUMNS, STATE_WARPS
from ...parts.recurrent.gates import Mamba2Gate
from ...parts.recurrent.gradients import HEADS
from ..partial_sums import sum_partials
from .recurrent_checks import DTYPES, DtOptions, is_varlen, repeat_head_numbers
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, choose_mamba2_gate, intern_value, plan_token_decay
from .recurrent_gradients import count_chunk_indices, gate_dots, split_row_parts
from .shared_heads_gradients import GateInputs, plan_shared_heads, serves_shared_heads
from .token_loop_gradients import plan_linear_gradients

STATES = {"initial_state": "initial_states", "dstate": "dstates", "dinitial_state": "dinitial_states"}  # linear's: Mamba-2's
GRADIENTS = "dx", "ddt", "dA", "dB", "dC"


def plan_mamba2_gradients(problem: Problem, dt_options: DtOptions, vector_bytes: int, requested: Sequence[str]) -> Plan:
    """The Plan of a call of mamba2_backward. vector_bytes: how many bytes a cp.async copies, 0 for TMA. requested: the
    gradients to compute besides GRADIENTS."""
    batch, length, heads, columns = problem("batch", "seqlen", "heads", "value_dim")
    outputs = {name: problem[name] for name in (*GRADIENTS, *requested)}
    if not batch * length:
        return Plan([Fill(x, 0.0) for x in outputs.values() if 0 not in x.form.shape])
    if serves_shared_heads(problem, vector_bytes):
        return _plan_shared_heads(problem, dt_options, outputs)
    scratch, dtype, dout, skip = ScratchAllocator(problem), DTYPES[problem.dtype], problem["dout"], problem["D"]
    tokens = batch, length, heads
    gate, has_z, has_dz = choose_mamba2_gate(dt_options), "z" in problem, "dz" in requested
    values, dvalues = (scratch(*tokens, columns, dtype=problem.dtype) for _ in range(2))
    dy = scratch(*tokens, columns, dtype=problem.dtype) if has_z else dout
    y = scratch(*tokens, columns, dtype=problem.dtype) if has_dz else None
    gates, dgates = scratch(*tokens), scratch(*tokens)
    sizes = {"tiles": -(-length // TOKENS), "panels": -(-columns // PART.cols), "heads": heads}
    inputs = {"gX": problem["x"], "gDt": problem["dt"], "gZ": problem["z"], "gDOut": dout}
    inputs |= {"gA": repeat_head_numbers(problem["A"]), "gDtBias": repeat_head_numbers(problem["dt_bias"])}
    blocks = batch * sizes["tiles"]
    input_kernel = intern_value(Mamba2GradientInputs, dtype, gate, has_z)
    arrays: Arrays = {"gValues": values, "gGates": gates, "gDY": dy}
    steps: list[Step] = [
        kernel_for(input_kernel, input_kernel, problem.device).bind(blocks * heads, **arrays, **inputs, **sizes)
    ]
    if y:
        steps += _plan_outputs(problem, y, dt_options, vector_bytes, scratch)
    linear_arrays = _linear_arrays(problem, outputs) | {"v": values, "decay": gates, "dout": dy, "dv": dvalues}
    linear_arrays["ddecay"] = dgates
    steps += plan_linear_gradients(problem, linear_arrays, 1.0, vector_bytes, scratch)
    skip_shape = "" if "dD" not in requested else "column" if len(skip.form.shape) == 2 else "head"
    output_kernel = intern_value(Mamba2GradientOutputs, dtype, gate, has_dz, skip_shape, is_varlen(problem))
    sums: Arrays = {"gRateSums": scratch(blocks, heads), "gBiasSums": scratch(blocks, heads)}
    sums["gSkipSums"] = scratch(blocks, heads) if skip_shape == "head" else None
    sums["gColumnSums"] = scratch(heads, blocks, columns) if skip_shape == "column" else None
    arrays = {"gY": y, "gDY": dy, "gDValues": dvalues, "gDGates": dgates, "gD": repeat_head_numbers(skip, columns)}
    arrays |= {"gDX": outputs["dx"], "gDDt": outputs["ddt"], "gDZ": outputs.get("dz"), "gCuSeqlens": problem["cu_seqlens"]}
    kernel = kernel_for(output_kernel, output_kernel, problem.device)
    steps.append(kernel.bind(blocks * heads, length=length, **arrays, **sums, **inputs, **sizes))
    steps += _sum_partials(problem, sums, outputs)
    return Plan(steps, scratch.shapes)


def _linear_arrays(problem: Problem, outputs: Arrays) -> Arrays:
    """The arrays of linear attention's gradients that are those of Mamba-2, by their names there."""
    arrays: Arrays = {"q": problem["C"], "k": problem["B"], "dq": outputs["dC"], "dk": outputs["dB"]}
    arrays["chunk_states"] = problem["chunk_states"]
    for name, own_name in STATES.items():
        state = outputs.get(own_name) if name == "dinitial_state" else problem[own_name]
        arrays[name] = state and state.permuted(SWAP_STATE_AXES)
    return arrays


def gates_outputs(problem: Problem) -> bool:
    """Does the kernel of shared heads compute dz, and dy where it reads dout?"""
    return "z" in problem and problem.dtype == "bfloat16" and not is_varlen(problem)


def _plan_shared_heads(problem: Problem, dt_options: DtOptions, outputs: Arrays) -> Plan:
    """The Plan where value heads share B and C. outputs: the gradients by their names."""
    batch, length, heads, columns = problem("batch", "seqlen", "heads", "value_dim")
    scratch, skip, width, chunks = ScratchAllocator(problem), problem["D"], -(-columns // COLUMNS), count_chunk_indices(problem)
    steps: list[Step] = []
    dy = problem["dout"]
    output_gate: Arrays = {}
    if gates_outputs(problem):
        dz = outputs.get("dz") or scratch(batch, length, heads, columns, dtype=problem.dtype)
        output_gate = {"gZ": problem["z"], "gDZ": dz}
    elif "z" in problem:
        y, dy = (scratch(batch, length, heads, columns, dtype=problem.dtype) if x else None for x in ("dz" in outputs, True))
        if y:
            steps += _plan_outputs(problem, y, dt_options, 0, scratch)
        steps.append(_differentiate_output_gate(problem, y, dy, outputs.get("dz")))
    arrays = _linear_arrays(problem, outputs) | {"v": problem["x"], "dout": dy, "dv": outputs["dx"]}
    raw: Arrays = {"gA": repeat_head_numbers(problem["A"]), "gDtBias": repeat_head_numbers(problem["dt_bias"])}
    gate = choose_mamba2_gate(dt_options)
    dots = gate_dots(problem, scratch, width, STATE_WARPS * width, width)
    skip_arrays: Arrays = {}
    if skip and len(skip.form.shape) == 1:
        skip_arrays = {"gSkipSums": scratch(chunks * width, heads)}
    elif skip:
        skip_arrays = {"gColumnSums": scratch(heads, chunks * WARPGROUP, columns)}
    if is_varlen(problem):
        steps += [Fill(sums, 0.0) for sums in skip_arrays.values() if sums]  # some indices of chunks belong to none
    gates = GateInputs(gate, raw | {"gGates": problem["dt"]})
    extra_arrays = dots | skip_arrays | output_gate | ({"gD": repeat_head_numbers(skip, columns)} if skip else {})
    steps += plan_shared_heads(problem, arrays, gates, 1.0, scratch, extra_arrays)
    step, sums = _differentiate_steps(problem, gate, raw, dots, scratch)
    steps += [step, *_sum_partials(problem, sums | skip_arrays, outputs)]
    return Plan(steps, scratch.shapes)


def _differentiate_output_gate(problem: Problem, y: Operand | None, dy: Operand | None, dz: Operand | None) -> Step:
    """The launch that computes dy and, if y is there, dz."""
    batch, length, heads, columns = problem("batch", "seqlen", "heads", "value_dim")
    config = intern_value(Mamba2OutputGate, DTYPES[problem.dtype], y is not None, is_varlen(problem))
    tiles = -(-length // TOKENS)
    return kernel_for(config, config, problem.device).bind(
        batch * tiles * heads,
        length=length,
        tiles=tiles,
        panels=-(-columns // PART.cols),
        heads=heads,
        gDOut=problem["dout"],
        gZ=problem["z"],
        gY=y,
        gDY=dy,
        gDZ=dz,
        gCuSeqlens=problem["cu_seqlens"],
    )


def _differentiate_steps(
    problem: Problem, gate: Mamba2Gate, raw: Arrays, dots: Arrays, scratch: ScratchAllocator
) -> tuple[Step, Arrays]:
    """(the launch for the gradients of dt, the parts of those of A and dt_bias). raw: A, dt_bias. dots: what the kernel before
    stored."""
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    splits, groups = -(-count_chunk_indices(problem) // sequences), -(-heads // HEADS)
    sums: Arrays = {name: scratch(sequences * splits, heads) for name in ("gRateSums", "gBiasSums")}
    config, warps = intern_value(Mamba2StepGradients, gate, is_varlen(problem)), sequences * splits * groups
    dots = split_row_parts(dots, -(-problem.extents["value_dim"] // COLUMNS))
    step = kernel_for(config, config, problem.device).bind(
        -(-warps // WARPS),
        length=length,
        splits=splits,
        groups=groups,
        warps=warps,
        gQueryDots=dots["gQueryDots"],
        gValueDots=dots["gKeyDots"],
        gCarriedDots=dots["gCarriedDots"],
        gStateDots=dots["gStateDots"],
        gDt=problem["dt"],
        gDDt=problem["ddt"],
        gCuSeqlens=problem["cu_seqlens"],
        **raw,
        **sums,
    )
    return step, sums


def _sum_partials(problem: Problem, sums: Arrays, outputs: Arrays) -> list[Step]:
    """The launches that add the parts of sums, of those that are among the outputs."""
    columns, skip, panels = sums.get("gColumnSums"), outputs.get("dD"), -(-problem.extents["heads"] // PART.cols)
    config = intern_value(Mamba2HeadSums)
    step = kernel_for(config, config, problem.device).bind(
        (3 if sums.get("gSkipSums") and skip else 2) * panels,
        panels=panels,
        gDRate=outputs["dA"],
        gDBias=outputs.get("ddt_bias"),
        gDSkip=None if columns else skip,
        **{name: sums.get(name) for name in ("gRateSums", "gBiasSums", "gSkipSums")},
    )
    return [step, sum_partials(problem, columns, skip)] if columns and skip else [step]


def _plan_outputs(
    problem: Problem, y: Operand, dt_options: DtOptions, vector_bytes: int, scratch: ScratchAllocator
) -> list[Step]:
    """The launches that compute y, the outputs before the gate silu(z)."""
    arrays = {"gQ": problem["C"], "gK": problem["B"], "gV": problem["x"], "gZ": None, "gGates": problem["dt"], "gO": y}
    arrays |= {"gA": problem["A"], "gDtBias": problem["dt_bias"], "gD": problem["D"], "gCuSeqlens": problem["cu_seqlens"]}
    arrays |= {"gInitialState": problem["initial_states"], "gFinalState": None}
    steps, _ = plan_token_decay(problem, arrays, 1.0, vector_bytes, dt_options, scratch=scratch)
    return steps
