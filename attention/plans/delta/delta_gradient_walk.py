"""The plan of the delta rule's gradients on Hopper: a pass that computes S and E of all chunks, a walk in reverse that computes
all gradients, and small kernels that sum those of gates and of shared heads.

Where heads are too few to fill the GPU, there are three launches instead. The first computes everything that depends on no
state, for all chunks at once. The second runs two recurrences, which give S, E and dV of all chunks, and dS after each segment.
The third walks through all segments at once.

What forward stored (delta_records.py) is not computed again: one walk is all there is, or with few heads the recurrence of dS
and the walk through all segments."""

import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.delta import (
    delta_chains_hopper,
    delta_chunk_states_hopper,
    delta_gradients_hopper,
    delta_inverse_hopper,
    delta_segment_gradients_hopper,
)
from ...parts.delta.delta_chunks import KEY_DIMS, ChunkVectors
from ...parts.delta.delta_gate_sums import GATE_DOTS, GATE_GRADIENTS, NO_GATE_SUMS
from ...parts.delta.delta_gradient_config import OUTPUTS, VALUES
from ...parts.delta.delta_recurrences import BOTH, GRADIENTS_ALONE
from ...parts.recurrent.tokens import CHUNK
from ..recurrent.packed_tails import GRADIENTS, INPUTS, plan_tails
from ..recurrent.recurrent_checks import DTYPES, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import (
    BLOCK_CHUNKS,
    MIN_SEGMENT_CHUNKS,
    SWAP_STATE_AXES,
    Arrays,
    ScratchAllocator,
    intern_value,
)
from ..recurrent.recurrent_gradients import count_chunk_indices, plan_gate_sums, spread_to_tokens, sum_heads
from .delta_records import ONE_WALK, record_buffers

# Microseconds on an H200 for a chunk of a head: in the walk, in the pass before it, in a step of a recurrence; for one more
# launch; and for a thread block of delta_inverse_hopper.py, by its value heads
WALK, PASS, STEP, LAUNCH = 5.6, 3.5, 1.35, 6.0
INVERSES = {1: 7.0, 2: 12.1}
MAX_ADDED_HEADS = 4  # the most value heads of a key head that add their gradients to its output, which rounds each sum
CHAINS = delta_chains_hopper.BLOCKS * BOTH.count  # thread blocks of a head's recurrences


@watched_function
def choose_segments(head_sequences: int, chunks: int, processors: int) -> int:
    """The number of segments with which the gradients take the shortest time; 1: the pass and one walk. head_sequences: the
    number of sequences times heads. chunks: of each sequence. processors: the GPU's multiprocessors."""
    best = choose_walked_segments(head_sequences, chunks, processors)
    recurrences = math.ceil(CHAINS * head_sequences / processors) * chunks * STEP
    walk = _time_walk(head_sequences, chunks, processors, best)
    inverses = head_sequences * chunks / (processors * delta_inverse_hopper.CTAS_PER_SM) * INVERSES[1]
    segmented_time = LAUNCH + inverses + recurrences + walk
    unsegmented_time = math.ceil(head_sequences / processors) * (chunks + BLOCK_CHUNKS) * (WALK + PASS)
    return best if chunks >= 2 * MIN_SEGMENT_CHUNKS and segmented_time < unsegmented_time else 1


@watched_function
def choose_walked_segments(head_sequences: int, chunks: int, processors: int) -> int:
    """The number of segments, two or more, with which the walk takes the shortest time. The arguments are those of
    choose_segments."""
    most = max(2, min(chunks // MIN_SEGMENT_CHUNKS, processors // head_sequences))
    return min(range(2, most + 1), key=lambda segments: _time_walk(head_sequences, chunks, processors, segments))


def _time_walk(head_sequences: int, chunks: int, processors: int, segments: int) -> float:
    return math.ceil(head_sequences * segments / processors) * (math.ceil(chunks / segments) + BLOCK_CHUNKS) * WALK


@watched_function
def choose_value_heads(head_chunks: int, key_dim: int, group: int, processors: int) -> int:
    """How many value heads a thread block of the inverses has, so that they take the shortest time: a block of two does with
    less work, but one of one is done sooner where all run at once. head_chunks: the chunks of all heads and sequences."""
    at_once = processors * delta_inverse_hopper.CTAS_PER_SM

    def time(value_heads: int) -> float:
        return math.ceil(head_chunks / value_heads / at_once) * INVERSES[value_heads]

    return min(delta_inverse_hopper.possible_value_heads(key_dim, group), key=time)


def plan_inverses(problem: Problem, buffers: Arrays, padded_keys: int, gated: bool, scale: float) -> Step:
    """The launch that computes everything that depends on no state, for all chunks at once."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    module, chunks, group = delta_inverse_hopper, -(-length // CHUNK), heads // key_heads
    processors = machine(problem.device).processors
    value_heads = int(choose_value_heads(sequences * heads * chunks, padded_keys, group, processors))
    config = intern_value(module.Config, padded_keys, DTYPES[problem.dtype], gated, value_heads)
    kernel = kernel_for(module, config, problem.device)
    blocks = sequences * (heads // value_heads) * chunks
    return kernel.bind_declared(blocks, buffers, length=length, chunks=chunks, heads=heads, group=group, scale=scale)


def count_segments(problem: Problem, stored: Arrays) -> int:
    """The number of segments of each sequence that are walked through at once; 1: one walk along the whole. stored: what
    forward stored, by the names of kernels' parameters, with scores if it is for segments."""
    length, heads, sequences = problem("seqlen", "heads", "sequences")
    sizes = sequences * heads, -(-length // CHUNK), machine(problem.device).processors
    if stored:
        return choose_walked_segments(*sizes) if "gScores" in stored else 1
    return 1 if is_varlen(problem) else choose_segments(*sizes)


def plan_delta_gradient_walk(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, record: Arrays
) -> list[Step]:
    """The launches. arrays, record: as in delta_gradients.plan_delta_gradients."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    chunks = count_chunk_indices(problem)
    padded_keys, gated = pad_key_dim(key_dim, KEY_DIMS), arrays["decay"] is not None
    varlen, stored = is_varlen(problem), record_buffers(record, ONE_WALK)
    segments = count_segments(problem, stored)
    by_segments = segments > 1

    def chunk_scratch(*extents: int) -> Operand:
        return scratch(chunks, heads, *extents, dtype=problem.dtype)

    buffers: Arrays = {
        name: arrays[x] for name, x in {"gQ": "q", "gK": "k", "gV": "v", "gDOut": "dout", "gBeta": "beta"}.items()
    }
    if stored:
        buffers |= stored
    else:
        buffers |= {"gErrors": chunk_scratch(CHUNK, VALUES), "gSolutions": chunk_scratch(2 * CHUNK, CHUNK)}
        buffers["gStates"] = chunk_scratch(VALUES, padded_keys)
        buffers["gVectors"] = scratch(chunks, heads, ChunkVectors(gated).spec.length)
    end_states = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    buffers |= {name: x and x.permuted(SWAP_STATE_AXES) for name, end in end_states.items() for x in [arrays[end]]}
    buffers["gGates"] = arrays["decay"] and spread_to_tokens(problem, arrays["decay"])
    head_extents = problem("batch", "seqlen", "heads", "key_dim")
    adds_heads = by_segments and 1 < heads // key_heads <= MAX_ADDED_HEADS
    shares_keys = heads > key_heads and not adds_heads
    outputs = {x: scratch(*head_extents, dtype=problem.dtype) if shares_keys else arrays[x] for x in ("dq", "dk")}
    buffers |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    buffers["gCuSeqlens"] = problem["cu_seqlens"]
    copy_tails, finish = plan_tails(problem, buffers, scratch, INPUTS, GRADIENTS, beta_gradient=arrays["dbeta"])
    gates, gate_gradients = NO_GATE_SUMS, arrays["ddecay"]
    if gate_gradients and len(gate_gradients.shape) > 1:
        gates, buffers["gDGates"] = GATE_GRADIENTS, gate_gradients
    elif gate_gradients:
        dots, sums = plan_gate_sums(problem, arrays, scratch, carried_parts=1, state_parts=1, subtracts_key_dots=True)
        gates, finish = GATE_DOTS, [*finish, *sums]
        buffers |= dots | {"gDots": dots["gQueryDots"]}
    if shares_keys:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]

    def launch(module: Any, blocks: int, *flags: Any, **numbers: float) -> Step:
        config = intern_value(module.Config, padded_keys, DTYPES[problem.dtype], gated, *flags)
        kernel, group = kernel_for(module, config, problem.device), heads // key_heads
        return kernel.bind_declared(sequences * heads * blocks, buffers, length=length, heads=heads, group=group, **numbers)

    if not by_segments:
        steps = [] if stored else [launch(delta_chunk_states_hopper, 1, varlen)]
        steps.append(launch(delta_gradients_hopper, 1, gates, varlen, segments=1, scale=scale))
    else:
        buffers["gSegmentStates"] = scratch(sequences * segments, heads, VALUES, padded_keys)
        buffers["gCounts"] = scratch(chunks, key_heads * OUTPUTS, dtype="int32")
        numbers = {"segments": segments, "scale": scale}
        if stored:
            steps = [launch(delta_chains_hopper, delta_chains_hopper.BLOCKS, GRADIENTS_ALONE, sequences=sequences, **numbers)]
        else:
            buffers["gScores"] = chunk_scratch(CHUNK, CHUNK)
            steps = [
                plan_inverses(problem, buffers, padded_keys, gated, scale),
                launch(delta_chains_hopper, CHAINS, sequences=sequences, **numbers),
            ]
        steps.append(launch(delta_segment_gradients_hopper, segments, gates, adds_heads, **numbers))
    return [*copy_tails, *steps, *finish]
