"""The plans of the delta rule's gradients, chunk by chunk (parts/recurrent/delta_chunks.py) and token by token
(delta_gradient_token_loop.py): four kernels of chunks, and small ones for gates and for what is added up. On Hopper
delta_gradient_walk.py and delta_channel_gradients.py have the plans."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.targets import LARGE, MEDIUM

from ..kernels import (
    delta_channel_gradients_ampere,
    delta_channel_inverse_ampere,
    delta_gradient_token_loop,
    delta_gradients_ampere,
    delta_gradients_hopper,
    delta_inverse_ampere,
    delta_state_gradients_ampere,
    delta_states_ampere,
)
from ..kernels.linear_token_loop import WARPS
from ..parts.recurrent.delta_chunks import KEY_DIMS, PANEL
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from .delta_channel_gradients import plan_delta_channel_gradients
from .delta_gradient_walk import plan_delta_gradient_walk
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import (
    count_chunk_indices,
    partial_gradients,
    plan_gate_sums,
    spread_to_tokens,
    sum_heads,
)
from .token_loop import check_grid, decay_kind
from .token_loop_gradients import sum_gates_by_token

# The kernels of chunks before and after the walks, each with the arrays that it has beside those of both kinds: with decays of
# tokens or none, and of channels.
KERNELS_OF_CHUNKS = {
    False: ((delta_inverse_ampere, ""), (delta_gradients_ampere, "gB gQueryDots gKeyDots gCarriedDots gStateDots")),
    True: (
        (delta_channel_inverse_ampere, "gDecayedQ gReadKeys gWriteKeys"),
        (delta_channel_gradients_ampere, "gGates gDGates"),
    ),
}


def plan_delta_gradients(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, on_hopper: bool = False
) -> list[Step]:
    """The launches for the gradients of the delta rule. arrays: those of delta_rule_backward by their names, None for a
    gradient that is not wanted. on_hopper: may kernels for Hopper serve the call?"""
    if not serves_delta_gradients(problem):
        return plan_delta_token_loop(problem, arrays, scale, scratch)
    plan = plan_delta_chunks
    if on_hopper and serves_hopper(problem):
        plan = plan_delta_channel_gradients if has_channel_decay(problem) else plan_delta_gradient_walk
    return plan(problem, arrays, scale, scratch)


def serves_delta_gradients(problem: Problem) -> bool:
    """Do chunk kernels serve such a call?"""
    batch, length, key_dim = problem("batch", "seqlen", "key_dim")
    holds = not has_channel_decay(problem) or machine(problem.device).shared_bytes >= MEDIUM
    return bool(batch * length) and key_dim <= max(KEY_DIMS) and holds


def serves_hopper(problem: Problem) -> bool:
    """Do the chunk kernels for Hopper serve a call that chunk kernels serve?"""
    return problem.extents["value_dim"] <= delta_gradients_hopper.VALUES


def plan_delta_chunks(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches of chunk kernels. arrays: as in plan_delta_gradients."""
    length, heads, key_heads, value_dim, sequences = problem("seqlen", "heads", "heads_k", "value_dim", "sequences")
    chunks, width, vector_bytes = count_chunk_indices(problem), -(-value_dim // COLUMNS), problem.bytes_at_once()
    wants_gates, gated, unrounded = arrays["ddecay"] is not None, arrays["decay"] is not None, heads > key_heads
    by_channel, shared_bytes = has_channel_decay(problem), machine(problem.device).shared_bytes
    form = pad_key_dim(problem.extents["key_dim"], KEY_DIMS), DTYPES[problem.dtype], gated, is_varlen(problem), vector_bytes
    padded_keys, columns = form[0], width * COLUMNS

    def of_chunks(rows: int, cols: int) -> Operand:
        return scratch(chunks, heads, rows, cols, dtype=problem.dtype)

    outputs = {name: partial_gradients(problem, scratch) if unrounded else arrays[name] for name in ("dq", "dk")}
    known = {"gQ": arrays["q"], "gK": arrays["k"], "gV": arrays["v"], "gDOut": arrays["dout"], "gBeta": arrays["beta"]}
    known |= {"gDecayedQ": arrays["q"], "gReadKeys": arrays["k"], "gWriteKeys": arrays["k"]}
    if by_channel:  # by chunk, token, head and channel, so that the tokens of a head lie side by side
        names = "gDecayedQ", "gReadKeys", "gWriteKeys"
        known |= {name: of_chunks(CHUNK, padded_keys).permuted((0, 2, 1, 3)) for name in names}
    known |= {"gGates": arrays["decay"] and spread_to_tokens(problem, arrays["decay"]), "gCuSeqlens": problem["cu_seqlens"]}
    known |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    known |= {"gB": scratch(chunks, heads, padded_keys if by_channel else CHUNK) if gated else None}
    known |= {"gChunkBeta": scratch(chunks, heads, CHUNK), "gDGates": arrays["ddecay"]}
    known |= {"gForward": of_chunks(2 * CHUNK, CHUNK), "gReverse": of_chunks(3 * CHUNK, CHUNK)}
    known |= {"gErrors": of_chunks(2 * CHUNK, columns), "gStates": of_chunks(2 * columns, padded_keys)}
    ends = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    known |= {name: x and x.permuted(SWAP_STATE_AXES) for name, end in ends.items() for x in [arrays[end]]}
    finish: list[Step] = []
    if wants_gates and not by_channel:
        halves, warps = delta_gradients_ampere.HALVES, delta_gradients_ampere.WARPS
        dots, finish = plan_gate_sums(problem, arrays, scratch, carried=warps, states=warps, parts=halves)
        known |= dots
    if unrounded:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]
    parts = -(-chunks // sequences)  # of a head of a sequence: thread blocks with a chunk each, if all have as many
    stages = 2 if shared_bytes >= (LARGE if by_channel else MEDIUM) else 1

    def launch(module: Any, fields: tuple, grid: int, names: str, **numbers: float) -> Step:
        return kernel_for(module, intern_value(module.Config, *form, *fields), problem.device).bind(
            sequences * heads * grid,
            length=length,
            heads=heads,
            group=heads // key_heads,
            **numbers,
            **{name: known.get(name) for name in (*names.split(), "gChunkBeta", "gCuSeqlens")},
        )

    (inverses, of_inverses), (gradients, of_gradients) = KERNELS_OF_CHUNKS[by_channel]
    fields = unrounded, wants_gates, stages
    of_states = "gReadKeys gWriteKeys gB gV gForward gInitialState gErrors gStates"
    of_state_gradients = "gDecayedQ gReadKeys gWriteKeys gB gDOut gReverse gErrors gStates gDV gLastState gFirstState"
    return [
        launch(inverses, (), parts, f"{of_inverses} gQ gK gB gBeta gGates gForward gReverse", parts=parts, scale=scale),
        launch(delta_states_ampere, (by_channel,), width, of_states, blocks=width),
        launch(
            delta_state_gradients_ampere,
            (by_channel,),
            width,
            f"{of_state_gradients} gDQ gDK gDBeta",
            blocks=width,
            scale=scale,
        ),
        launch(
            gradients,
            fields,
            parts,
            f"{of_gradients} gQ gK gDOut gErrors gStates gDQ gDK gDBeta",
            parts=parts,
            panels=columns // PANEL,
            scale=scale,
        ),
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
    ]
    if wants_gates:
        steps.append(sum_gates_by_token(problem, arrays, partial, last_state, swapped["dstate"], delta=True))
    steps += sum_heads(problem, partial["dq"], arrays["dq"])
    return [*steps, *sum_heads(problem, partial["dk"], arrays["dk"], parts=2)]


def _walk(problem: Problem, walk: str, scale: float, inputs: Arrays, arrays: Arrays) -> Step:
    """The launch of one of the four walks. inputs: its arrays by the names of the kernel's parameters, without the decays."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    rows, columns = problem("key_dim", "value_dim")
    if walk in ("queries", "keys"):
        rows, columns = columns, rows
    decay, kind = arrays["decay"], decay_kind(arrays["decay"])
    decay = decay and spread_to_tokens(problem, decay)
    config = delta_gradient_token_loop.Config(walk, rows, kind, is_varlen(problem))
    parts = -(-columns // delta_gradient_token_loop.WARP_COLUMNS)
    blocks = parts if config.splits_rows else -(-parts // WARPS)
    return kernel_for(delta_gradient_token_loop, config, problem.device).bind(
        (blocks, heads, sequences),
        parts=parts,
        group=heads // key_heads,
        length=length,
        scale=scale,
        gDecay=decay,
        gCuSeqlens=problem["cu_seqlens"],
        **inputs,
    )
