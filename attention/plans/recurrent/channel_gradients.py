"""The plan of linear attention's gradients by chunks where each channel of the keys has a decay
(parts/recurrent/channel_chunks.py): queries and keys decayed to the ends of their chunks, scans of the states and of their
gradients, and all gradients of each chunk."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import channel_decayed_keys_ampere, channel_gradients_ampere, channel_states_ampere
from ...parts.recurrent.channel_chunks import KEY_DIMS, VALUE_DIMS
from ...parts.recurrent.state_panels import PANEL
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from .recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from .recurrent_chunks import (
    SWAP_STATE_AXES,
    Arrays,
    Costs,
    ScratchAllocator,
    allocate_local_states,
    choose_segments,
    compose_segments,
    intern_value,
)
from .recurrent_gradients import count_chunk_indices, partial_gradients, sum_heads, wants_value_heads

STATES = "initial_state", "dstate", "dinitial_state"
SCAN_COSTS = Costs(two_consumers=1, first_pass=0.8, compose=0.5, extra_launches=6)


def serves_channel_gradients(problem: Problem) -> bool:
    """Do chunk kernels serve such a call?"""
    batch, length, key_dim, value_dim = problem("batch", "seqlen", "key_dim", "value_dim")
    if not batch * length or not has_channel_decay(problem) or key_dim > KEY_DIMS[-1]:
        return False
    padded = pad_key_dim(key_dim, KEY_DIMS), pad_key_dim(value_dim, VALUE_DIMS)
    return channel_gradients_ampere.serves_shape(*padded, problem.bytes_at_once(), machine(problem.device).shared_bytes)


def plan_channel_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches for chunks of 64 tokens, by mma.sync. arrays: as in recurrent_gradients.plan_chunk_gradients."""
    length, heads, key_heads, value_dim, sequences = problem("seqlen", "heads", "heads_k", "value_dim", "sequences")
    chunks, width, vector_bytes = count_chunk_indices(problem), -(-value_dim // COLUMNS), problem.bytes_at_once()
    sums_heads = heads > key_heads and not wants_value_heads(arrays)
    padded = pad_key_dim(problem.extents["key_dim"], KEY_DIMS)
    config_fields = padded, DTYPES[problem.dtype], is_varlen(problem), vector_bytes
    names = "dq", "dk"
    outputs = {name: partial_gradients(problem, scratch) if sums_heads else arrays[name] for name in names}
    decayed_q, decayed_k = (scratch(chunks, heads, CHUNK, padded, dtype=problem.dtype) for _ in names)
    states = scratch(chunks, heads, 2 * width * COLUMNS, padded, dtype=problem.dtype)
    assert arrays["dv"] is not None
    buffers: Arrays = {"gQ": arrays["q"], "gK": arrays["k"], "gV": arrays["v"], "gDOut": arrays["dout"]}
    buffers |= {"gGates": arrays["decay"], "gCuSeqlens": problem["cu_seqlens"], "gStates": states}
    buffers |= {"gDecayedQ": decayed_q, "gDecayedK": decayed_k, "gDecays": scratch(chunks, heads, padded)}
    buffers |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDGates": arrays["ddecay"]}
    end_states = {name: x and x.permuted(SWAP_STATE_AXES) for name in STATES for x in [arrays[name]]}
    buffers |= {
        "gInitialState": end_states["initial_state"],
        "gDState": end_states["dstate"],
        "gDInitialState": end_states["dinitial_state"],
    }
    parts = -(-chunks // sequences)  # thread blocks for a head of a sequence: one a chunk if all sequences are equally long

    def launch(module: Any, config: Any, grid: int, names: str, **numbers: float) -> Step:
        return kernel_for(module, config, problem.device).bind(
            sequences * heads * grid,
            length=length,
            heads=heads,
            **numbers,
            **{name: buffers[name] for name in (*names.split(), "gCuSeqlens")},
        )

    def launch_chunks(module: Any, names: str, *fields: Any, **numbers: float) -> Step:
        config, group = intern_value(module.Config, *config_fields, *fields), heads // key_heads
        return launch(module, config, parts, names, parts=parts, group=group, scale=scale, **numbers)

    unrounded = sums_heads or wants_value_heads(arrays)
    fields = arrays["ddecay"] is not None, unrounded, arrays["dv"].form.dtype == "float32"
    gradients = "gQ gK gV gDOut gGates gStates gDQ gDK gDV gDGates"
    steps = [launch_chunks(channel_decayed_keys_ampere, "gQ gK gGates gDecayedQ gDecayedK gDecays")]
    inputs = "gDecayedQ gDecayedK gV gDOut gDecays"

    def scan(local: bool, scanned_segments: int, names: str) -> Step:
        config = intern_value(channel_states_ampere.Config, *config_fields, local)
        numbers = {"blocks": width, "segments": segments, "scanned_segments": scanned_segments}
        return launch(channel_states_ampere, config, 2 * width * scanned_segments, f"{inputs} {names}", **numbers)

    resident_ctas = channel_states_ampere.Config(*config_fields).ctas_per_sm * machine(problem.device).processors
    segments = choose_segments(2 * sequences * heads * width, 1, 1, parts, resident_ctas, SCAN_COSTS)
    if segments > 1:
        state = value_dim, problem.extents["key_dim"]
        forward, reverse = (allocate_local_states(problem, scratch, segments - 1, state, state[1]) for _ in range(2))
        buffers |= {"gLocalStates": forward["gLocalStates"], "gStateDecays": forward["gTotalDecays"]}
        buffers |= {"gLocalGradients": reverse["gLocalStates"], "gGradientDecays": reverse["gTotalDecays"]}
        steps.append(scan(True, segments - 1, "gLocalStates gStateDecays gLocalGradients gGradientDecays"))
        for name, local_states in (("gInitialState", forward), ("gDState", reverse)):
            step, buffers[name] = compose_segments(problem, segments, local_states, buffers[name], scratch)
            steps.append(step)
    steps.append(scan(False, segments, "gInitialState gDState gDInitialState gStates"))
    stages = channel_gradients_ampere.stages_for(machine(problem.device).shared_bytes)
    sizes = pad_key_dim(value_dim, VALUE_DIMS), *fields, stages
    steps.append(launch_chunks(channel_gradients_ampere, gradients, *sizes, panels=width * COLUMNS // PANEL))
    if sums_heads:
        steps += [step for name in names for step in sum_heads(problem, outputs[name], arrays[name])]
    return steps
