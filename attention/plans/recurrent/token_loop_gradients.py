"""The plan of linear attention's gradients token by token (linear_token_loop.py, gate_gradient_token_loop.py), for problems
whose tiles do not fit the registers or shared memory of chunk kernels. Three walks; the gradients of queries and keys stay
float32 until those of the gates have been computed from them."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import gate_gradient_token_loop, linear_token_loop
from ...kernels.recurrent.linear_token_loop import WARPS
from .aligned_inputs import TILES, copy_misaligned, ignore_alignment
from .channel_gradient_walk import plan_channel_walk, serves_channel_walk
from .channel_gradients import plan_channel_gradients, serves_channel_gradients
from .linear_gradient_walk import plan_gradient_walk, serves_pairs, serves_walk
from .raw_inputs import by_tma
from .recurrent_checks import has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator
from .recurrent_gradients import (
    partial_gradients,
    plan_chunk_gradients,
    serves_gradients,
    spread_to_tokens,
    sum_heads,
    wants_value_heads,
)
from .shared_heads_gradients import plan_linear_shared_heads, serves_linear_shared_heads
from .token_loop import check_grid
from .value_parts import divide_values, plan_value_parts, serves_linear_value_parts

STORED_STATES = "chunk_states", "local_state", "total_decay"  # of heads, not of their parts


def plan_linear_gradients(
    problem: Problem, arrays: Arrays, scale: float, vector_bytes: int, scratch: ScratchAllocator
) -> list[Step]:
    """The launches for the gradients of linear attention, of chunk kernels if they serve such a call. The arguments are those
    of plan_chunk_gradients."""
    if serves_pairs(problem, arrays, vector_bytes):
        return plan_gradient_walk(problem, arrays, scale, scratch)
    if serves_linear_shared_heads(problem, arrays, vector_bytes):
        return plan_linear_shared_heads(problem, arrays, scale, scratch)
    if serves_walk(problem, arrays, vector_bytes):
        return plan_gradient_walk(problem, arrays, scale, scratch)
    if serves_channel_walk(problem, arrays, vector_bytes):
        return plan_channel_walk(problem, arrays, scale, scratch)
    if serves_channel_gradients(problem):
        return plan_channel_gradients(problem, arrays, scale, scratch)
    if serves_gradients(problem, arrays, vector_bytes):
        return plan_chunk_gradients(problem, arrays, scale, vector_bytes, scratch)
    if names := [name for name in TILES if has_channel_decay(problem) and not by_tma(problem, name)]:
        aligned = ignore_alignment(problem, names)
        if serves_channel_gradients(aligned):
            copied, steps = copy_misaligned(problem, names, arrays, scratch)
            return [*steps, *plan_channel_gradients(aligned, copied, scale, scratch)]
    if serves_parts(problem, arrays):
        part_arrays = arrays | dict.fromkeys(STORED_STATES)
        return plan_value_parts(
            problem, part_arrays, scratch, lambda part, x: plan_linear_gradients(part, x, scale, vector_bytes, scratch)
        )
    return plan_token_loop_gradients(problem, arrays, scale, scratch)


def serves_parts(problem: Problem, arrays: Arrays) -> bool:
    """Do chunk kernels that do not serve a call serve the parts of its heads' values? arrays: as in plan_chunk_gradients."""
    batch, length = problem("batch", "seqlen")
    if not (batch * length and serves_linear_value_parts(problem, arrays)):
        return False
    return not has_channel_decay(problem) or serves_channel_gradients(divide_values(problem))


def plan_token_loop_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches for the gradients of linear attention. arrays: as in plan_chunk_gradients."""
    heads, key_heads, key_dim, value_dim, sequences = problem("heads", "heads_k", "key_dim", "value_dim", "sequences")
    check_grid(problem)
    decay, wants_gates = arrays["decay"], arrays["ddecay"] is not None
    sums_heads = (wants_gates or heads > key_heads) and not wants_value_heads(arrays)
    dout, q, k, v = (arrays[name] for name in ("dout", "q", "k", "v"))
    partial = {name: partial_gradients(problem, scratch) if sums_heads else arrays[name] for name in ("dq", "dk")}
    states = {name: arrays[name] for name in ("initial_state", "dstate", "dinitial_state")}
    swapped = {name: x and x.permuted(SWAP_STATE_AXES) for name, x in states.items()}
    last_state = None
    if wants_gates and arrays["dstate"]:
        last_state = scratch(sequences, heads, value_dim, key_dim)
    query_arrays = _walk_arrays(dout, v, k, partial["dq"], swapped["initial_state"], last_state)
    key_arrays = _walk_arrays(v, dout, q, partial["dk"], swapped["dstate"], swapped["dinitial_state"])
    value_arrays = _walk_arrays(k, q, dout, arrays["dv"], arrays["dstate"], None)
    steps = []
    if sequences:
        steps = [
            _walk(problem, decay, scale, query_arrays, value_dim, key_dim, reverse=False, groups_queries=True),
            _walk(problem, decay, scale, key_arrays, value_dim, key_dim, reverse=True, groups_queries=True),
            _walk(problem, decay, scale, value_arrays, key_dim, value_dim, reverse=True, groups_queries=False),
        ]
    if wants_gates:
        steps += sum_gates_by_token(problem, arrays, partial, last_state, swapped["dstate"])
    if sums_heads:
        steps += [step for name in ("dq", "dk") for step in sum_heads(problem, partial[name], arrays[name])]
    return steps


def _walk_arrays(
    q: Operand | None,
    k: Operand | None,
    v: Operand | None,
    out: Operand | None,
    initial_state: Operand | None,
    final_state: Operand | None,
) -> Arrays:
    """The arrays of a walk by the names of the kernel's parameters."""
    return {"gQ": q, "gK": k, "gV": v, "gOut": out, "gInitialState": initial_state, "gFinalState": final_state}


def _walk(
    problem: Problem,
    decay: Operand | None,
    scale: float,
    arrays: Arrays,
    rows: int,
    columns: int,
    reverse: bool,
    groups_queries: bool,
) -> Step:
    """The launch of a walk with states of this many rows and columns. groups_queries: see linear_token_loop.Config; the
    channels of the keys, which decay, are then the columns."""
    decays = ""
    if decay is not None:
        by_channel = len(decay.form.shape) == 4
        decays = "channel" if by_channel and not groups_queries else "token"  # which reads a number for each column
        decay = decay if by_channel else spread_to_tokens(problem, decay).spread(3, max(rows, columns))
    config = linear_token_loop.Config(rows, decays, varlen=is_varlen(problem), reversed=reverse, groups_queries=groups_queries)
    return launch_walk(problem, linear_token_loop, config, -(-columns // config.columns), decay, scale, arrays)


def launch_walk(
    problem: Problem, module: Any, config: Any, parts: int, decay: Operand | None, scale: float, arrays: Arrays
) -> Step:
    """The launch of a walk token by token, of all heads of all sequences. parts: of the columns of a state, one for each warp,
    or for each thread block if the configuration splits rows among warps."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    blocks = parts if config.splits_rows else -(-parts // WARPS)
    return kernel_for(module, config, problem.device).bind(
        (blocks, heads, sequences),
        parts=parts,
        group=heads // key_heads,
        length=length,
        scale=scale,
        gDecay=decay,
        gCuSeqlens=problem["cu_seqlens"],
        **arrays,
    )


def sum_gates_by_token(
    problem: Problem, arrays: Arrays, partial: Arrays, last_state: Operand | None, d_last: Operand | None, delta: bool = False
) -> list[Step]:
    """The launch that computes the decay's gradient, if that has elements: of no sequences a head's is 0. partial: the
    gradients of queries and keys for each value head. last_state: the state after the last token, d_last its gradient, both
    transposed. delta: see gate_gradient_token_loop.Config."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    key_dim, value_dim = problem("key_dim", "value_dim")
    decay, gradient = arrays["decay"], arrays["ddecay"]
    assert decay is not None and gradient is not None
    if 0 in gradient.form.shape:
        return []
    kind = {1: "head", 3: "token", 4: "channel"}[len(decay.form.shape)]
    if kind == "head":
        gradient = gradient.spread(0, 1).spread(0, 1)
    if kind != "channel":
        decay, gradient = spread_to_tokens(problem, decay).spread(3, 1), gradient.spread(3, 1)
    by_parts = kind == "channel" or delta
    channels = gate_gradient_token_loop.CHANNELS if by_parts else pad_key_dim(key_dim, gate_gradient_token_loop.PADDED)
    blocks = -(-key_dim // channels) if kind == "channel" else 1
    config = gate_gradient_token_loop.Config(kind, channels, last_state is not None, is_varlen(problem), delta)
    step = kernel_for(gate_gradient_token_loop, config, problem.device).bind(
        (1 if kind == "head" else sequences) * heads * blocks,
        gQ=arrays["q"],
        gK=arrays["k"],
        gDQ=partial["dq"],
        gDK=partial["dk"],
        gDecay=decay,
        gState=last_state,
        gDState=d_last if last_state is not None else None,
        gGradient=gradient,
        gCuSeqlens=problem["cu_seqlens"],
        length=length,
        sequences=sequences,
        heads=heads,
        group=heads // key_heads,
        blocks=blocks,
        columns=value_dim,
    )
    return [step]
