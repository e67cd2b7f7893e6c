"""The plans of the delta rule's gradients on GPUs since Ampere, chunk by chunk (parts/delta/delta_chunks.py): four kernels
for chunks, and small ones that sum the gradients of gates and those of shared heads; and token by token
(delta_gradient_token_loop.py). The plans for Hopper are in delta_gradient_walk.py and delta_channel_gradients.py."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.targets import LARGE, MEDIUM

from ...kernels.delta import (
    delta_channel_gradients_ampere,
    delta_gradient_token_loop,
    delta_gradients_ampere,
    delta_state_gradients_ampere,
    delta_walk_ampere,
)
from ...parts.delta.delta_gradient_config import VALUES
from ...parts.recurrent.state_panels import PANEL
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.raw_inputs import by_tma
from ..recurrent.recurrent_checks import has_channel_decay, is_varlen
from ..recurrent.recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator
from ..recurrent.recurrent_gradients import partial_gradients, plan_gate_sums, spread_to_tokens, sum_heads
from ..recurrent.token_loop import check_grid, decay_kind
from ..recurrent.token_loop_gradients import launch_walk, sum_gates_by_token
from ..recurrent.value_parts import plan_value_parts, serves_value_parts
from .delta_channel_gradients import plan_delta_channel_gradients
from .delta_chunks import DeltaChunks, serves_delta_chunks, swap_axes
from .delta_gradient_walk import plan_delta_gradient_walk


def plan_delta_gradients(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, on_hopper: bool, record: Arrays
) -> list[Step]:
    """The launches for the gradients of the delta rule. arrays: those of delta_rule_backward by their names, None for a
    gradient that is not wanted. on_hopper: may kernels for Hopper serve the call? record: what forward stored, by field
    (delta_records.py); those kernels alone read it."""
    if not serves_delta_gradients(problem):
        return plan_delta_token_loop(problem, arrays, scale, scratch)
    plan = plan_delta_channel_gradients if has_channel_decay(problem) else plan_delta_gradient_walk
    if on_hopper and serves_hopper(problem):
        return plan(problem, arrays, scale, scratch, record)
    if on_hopper and serves_value_parts(problem, arrays):  # forward stores nothing for these
        return plan_value_parts(problem, arrays, scratch, lambda part, x: plan(part, x, scale, scratch, record))
    return plan_delta_chunk_gradients(problem, arrays, scale, scratch)


def serves_delta_gradients(problem: Problem) -> bool:
    """Do chunk kernels serve such a call?"""
    fits_shared_memory = not has_channel_decay(problem) or machine(problem.device).shared_bytes >= MEDIUM
    return serves_delta_chunks(problem) and fits_shared_memory


def serves_hopper(problem: Problem) -> bool:
    """Do the chunk kernels for Hopper serve a call that chunk kernels serve? TMA loads and stores decays of channels, and keys
    take the place of those of 16 bits."""
    if problem.extents["value_dim"] > VALUES:
        return False
    if not has_channel_decay(problem):
        return True
    has_dtype = problem.forms["decay"].dtype in ("float32", problem.dtype)
    return has_dtype and by_tma(problem, "decay") and by_tma(problem, "ddecay")


def plan_delta_chunk_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches of chunk kernels since Ampere. arrays: as in plan_delta_gradients."""
    wants_gates, unrounded = arrays["ddecay"] is not None, problem.extents["heads"] > problem.extents["heads_k"]
    inputs = {"gQ": "q", "gK": "k", "gV": "v", "gBeta": "beta", "gGates": "decay", "gInitialState": "initial_state"}
    chunks = DeltaChunks(problem, {name: arrays[x] for name, x in inputs.items()}, scratch, problem.extents["value_dim"])
    by_channel, width, columns = chunks.by_channel, chunks.width, chunks.width * COLUMNS
    outputs = {name: partial_gradients(problem, scratch) if unrounded else arrays[name] for name in ("dq", "dk")}
    buffers = {"gDOut": arrays["dout"], "gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"]}
    buffers |= {"gDBeta": arrays["dbeta"], "gDGates": arrays["ddecay"]}
    buffers |= {"gForward": chunks.chunk_scratch(2 * CHUNK, CHUNK), "gReverse": chunks.chunk_scratch(3 * CHUNK, CHUNK)}
    buffers |= {
        "gErrors": chunks.chunk_scratch(2 * CHUNK, columns),
        "gStates": chunks.chunk_scratch(2 * columns, chunks.config_fields[0]),
    }
    buffers |= {"gLastState": swap_axes(arrays["dstate"]), "gFirstState": swap_axes(arrays["dinitial_state"])}
    finish: list[Step] = []
    if wants_gates and not by_channel:
        halves, warps = delta_gradients_ampere.HALVES, delta_gradients_ampere.WARPS
        dots, finish = plan_gate_sums(problem, arrays, scratch, carried_parts=warps, state_parts=warps, row_parts=halves)
        buffers |= dots
    if unrounded:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]
    chunks.buffers |= buffers
    stages = 2 if machine(problem.device).shared_bytes >= (LARGE if by_channel else MEDIUM) else 1
    gradients, fields = (
        delta_channel_gradients_ampere if by_channel else delta_gradients_ampere,
        (unrounded, wants_gates, stages),
    )
    return [
        chunks.invert(True, scale),
        chunks.launch(delta_walk_ampere, (by_channel,), width, blocks=width),
        chunks.launch(delta_state_gradients_ampere, (by_channel,), width, blocks=width, scale=scale),
        chunks.launch(gradients, fields, chunks.parts, parts=chunks.parts, panels=columns // PANEL, scale=scale),
        *finish,
    ]


def plan_delta_token_loop(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches of walks token by token. arrays: as in plan_delta_gradients."""
    batch, length, heads, value_dim, key_dim, sequences = problem(
        "batch", "seqlen", "heads", "value_dim", "key_dim", "sequences"
    )
    check_grid(problem)
    wants_gates = arrays["ddecay"] is not None
    errors, du = (scratch(batch, length, heads, value_dim) for _ in range(2))
    partial: Arrays = {"dq": partial_gradients(problem, scratch), "dk": scratch(batch, length, 2 * heads, key_dim)}
    states = {name: arrays[name] for name in ("initial_state", "dstate", "dinitial_state")}
    swapped = {name: x and x.permuted(SWAP_STATE_AXES) for name, x in states.items()}
    last_state = scratch(sequences, heads, value_dim, key_dim) if wants_gates and arrays["dstate"] else None
    inputs = {"gQ": arrays["q"], "gK": arrays["k"], "gV": arrays["v"], "gDOut": arrays["dout"], "gBeta": arrays["beta"]}
    inputs |= {"gErrors": errors, "gDU": du, "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    inputs |= {"gDQ": partial["dq"], "gDK": partial["dk"]}
    ends = {  # of the states of each walk
        "errors": (states["initial_state"], None),
        "values": (states["dstate"], states["dinitial_state"]),
        "queries": (swapped["initial_state"], last_state),
        "keys": (swapped["dstate"], None),
    }
    steps = [
        _walk(problem, walk, scale, inputs | {"gInitialState": first, "gFinalState": last}, arrays)
        for walk, (first, last) in ends.items()
        if sequences
    ]
    if wants_gates:
        steps += sum_gates_by_token(problem, arrays, partial, last_state, swapped["dstate"], delta=True)
    steps += sum_heads(problem, partial["dq"], arrays["dq"])
    return [*steps, *sum_heads(problem, partial["dk"], arrays["dk"])]


def _walk(problem: Problem, walk: str, scale: float, inputs: Arrays, arrays: Arrays) -> Step:
    """The launch of one of the four walks. inputs: its arrays by the names of the kernel's parameters, without the decays."""
    rows, columns = problem("key_dim", "value_dim")
    if walk in ("queries", "keys"):
        rows, columns = columns, rows
    decay, decays = arrays["decay"], decay_kind(arrays["decay"])
    decay = decay and spread_to_tokens(problem, decay)
    config = delta_gradient_token_loop.Config(walk, rows, decays, is_varlen(problem))
    parts = -(-columns // delta_gradient_token_loop.WARP_COLUMNS)
    return launch_walk(problem, delta_gradient_token_loop, config, parts, decay, scale, inputs)
