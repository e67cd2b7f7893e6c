"""The plan of the delta rule's gradients on Hopper: S and E of all chunks, the walk in reverse, and small kernels for what
several value heads share and for gates.

S and E come from a pass over the tokens. Where heads are too few for the GPU, the walk is cut into segments, and what depends
on no state is computed of all chunks at once; then two recurrences give S and E of all chunks, and dS after each segment."""

import math
from collections.abc import Sequence
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import follows

from ..kernels import delta_chains_hopper, delta_chunk_states_hopper, delta_gradients_hopper, delta_inverse_hopper, packed_tails
from ..parts.recurrent.delta_chunks import KEY_DIMS, ChunkVectors
from ..parts.recurrent.tokens import CHUNK
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import BLOCK_CHUNKS, MIN_SEGMENT_CHUNKS, SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, plan_gate_sums, spread_to_tokens, sum_heads

# Microseconds of a chunk of a head on an H200: in the walk, in the pass before it, in a step of a recurrence; as a part of what
# a multiprocessor does, to compute what depends on no state; of one more launch
WALK, PASS, STEP, INVERSE, LAUNCH = 5.6, 3.5, 1.35, 2.3, 6.0
CHAINS = delta_chains_hopper.BLOCKS * delta_chains_hopper.DIRECTIONS  # thread blocks of a head's recurrences


PACKED = ("gQ", "gK"), ("gV", "gDOut"), ("gDQ", "gDK"), ("gDV",)  # see plan_tails


@follows
def choose_segments(items: int, chunks: int, processors: int) -> int:
    """The number of segments of a walk that takes the shortest time, 1 for one after the pass. items: the number of sequences
    times heads. chunks: of each sequence. processors: the GPU's multiprocessors."""

    def cut(segments: int) -> float:
        recurrences = math.ceil(CHAINS * items / processors) * chunks * STEP
        walk = math.ceil(items * segments / processors) * (math.ceil(chunks / segments) + BLOCK_CHUNKS) * WALK
        return LAUNCH + items * chunks / processors * INVERSE + recurrences + walk

    uncut = math.ceil(items / processors) * (chunks + BLOCK_CHUNKS) * (WALK + PASS)
    best = min(range(2, max(2, min(chunks // MIN_SEGMENT_CHUNKS, processors // items)) + 1), key=cut)
    return best if chunks >= 2 * MIN_SEGMENT_CHUNKS and cut(best) < uncut else 1


def plan_delta_gradient_walk(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in delta_gradients.plan_delta_gradients."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    chunks, shares_keys, wants_gates = count_chunk_indices(problem), heads > key_heads, arrays["ddecay"] is not None
    padded_keys, gated = pad_key_dim(key_dim, KEY_DIMS), arrays["decay"] is not None
    varlen, each = is_varlen(problem), -(-length // CHUNK)
    segments = 1 if varlen else choose_segments(sequences * heads, each, machine(problem.device).processors)

    def of_chunks(*extents: int) -> Operand:
        return scratch(chunks, heads, *extents, dtype=problem.dtype)

    known: Arrays = {name: arrays[x] for name, x in {"gQ": "q", "gK": "k", "gV": "v", "gDOut": "dout", "gBeta": "beta"}.items()}
    known |= {"gErrors": of_chunks(CHUNK, delta_gradients_hopper.VALUES), "gSolutions": of_chunks(2 * CHUNK, CHUNK)}
    known["gStates"] = of_chunks(delta_gradients_hopper.VALUES, padded_keys)
    known["gVectors"] = scratch(chunks, heads, ChunkVectors(gated).spec.length)
    ends = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    known |= {name: x and x.permuted(SWAP_STATE_AXES) for name, end in ends.items() for x in [arrays[end]]}
    known["gGates"] = arrays["decay"] and spread_to_tokens(problem, arrays["decay"])
    of_heads = problem("batch", "seqlen", "heads", "key_dim")
    outputs = {x: scratch(*of_heads, dtype=problem.dtype) if shares_keys else arrays[x] for x in ("dq", "dk")}
    known |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    known["gCuSeqlens"] = problem["cu_seqlens"]
    first, finish = plan_tails(problem, known, scratch, PACKED) if varlen else ([], [])
    if wants_gates:
        dots, of_gates = plan_gate_sums(problem, arrays, scratch, carried=1, states=1, subtracted=True)
        finish += of_gates
        known |= dots | {"gDots": dots["gQueryDots"]}
    if shares_keys:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]

    def launch(module: Any, blocks: int, names: str, *more: bool, **numbers: float) -> Step:
        config = intern_value(module.Config, padded_keys, DTYPES[problem.dtype], gated, *more)
        return kernel_for(module, config, problem.device).bind(
            sequences * heads * blocks,
            length=length,
            heads=heads,
            group=heads // key_heads,
            **numbers,
            **{name: known.get(name) for name in names.split()},
        )

    if segments == 1:
        names = "gK gV gBeta gGates gInitialState gErrors gStates gSolutions gVectors gTailK gTailV gCuSeqlens"
        steps = [launch(delta_chunk_states_hopper, 1, names, varlen)]
    else:
        known |= {"gForward": of_chunks(2 * CHUNK, CHUNK), "gReverse": known["gSolutions"], "gScores": of_chunks(CHUNK, CHUNK)}
        known["gSegmentStates"] = scratch(sequences * segments, heads, delta_gradients_hopper.VALUES, key_dim)
        of_inverse = "gQ gK gBeta gGates gForward gReverse gScores gVectors"
        of_chains = "gQ gK gV gDOut gForward gReverse gScores gVectors gInitialState gErrors gStates gLastState gSegmentStates"
        numbers = {"segments": segments, "sequences": sequences, "scale": scale}
        steps = [
            launch(delta_inverse_hopper, each, of_inverse, chunks=each, scale=scale),
            launch(delta_chains_hopper, CHAINS, of_chains + " gFirstState", **numbers),
        ]
        known |= {"gLastState": known["gSegmentStates"], "gFirstState": None}
    names = (
        "gQ gK gDOut gErrors gStates gSolutions gVectors gLastState gFirstState gDQ gDK gDV gDBeta gDots gCarriedDots "
        "gStateDots gTailQ gTailK gTailDOut gTailDQ gTailDK gTailDV gCuSeqlens"
    )
    walk = launch(delta_gradients_hopper, segments, names, wants_gates, varlen, segments=segments, scale=scale)
    return [*first, *steps, walk, *finish]


def plan_tails(
    problem: Problem, arrays: Arrays, scratch: ScratchAllocator, packed: Sequence[tuple[str, ...]]
) -> tuple[list[Step], list[Step]]:
    """(launches before, and after those that read and write the tails of packed sequences). arrays: of tokens, by the names of
    parameters; those of their tails come to them. packed: names of one array or of two of the same shape, copied at once."""
    sequences = problem.extents["sequences"]
    steps: dict[bool, list[Step]] = {False: [], True: []}
    for names in packed:
        each = {name: x for name in names for x in [arrays[name]] if x}
        if not each:
            continue
        form, back, all_of = each[names[0]].form, names[0].startswith("gD") and names[0] != "gDOut", list(each.values())
        length, heads, columns = form.shape[1:]
        tails = [scratch(sequences, CHUNK, heads, columns, dtype=form.dtype) for _ in each]
        arrays |= {f"gTail{name[1:]}": x for name, x in zip(each, tails, strict=True)}
        config = intern_value(packed_tails.Config, pad_key_dim(columns, packed_tails.COLUMNS), DTYPES[form.dtype], back)
        all_heads = heads * len(each)
        head_blocks = -(-all_heads // packed_tails.WARPS)
        step = kernel_for(packed_tails, config, problem.device).bind(
            sequences * packed_tails.PARTS * head_blocks,
            gX=all_of[0],
            gY=all_of[-1],
            gTailX=tails[0],
            gTailY=tails[-1],
            gTokens=arrays["gDBeta"] if names[0] == "gDV" else None,
            gCuSeqlens=arrays["gCuSeqlens"],
            length=length,
            head_blocks=head_blocks,
            heads=heads,
            all_heads=all_heads,
        )
        steps[back].append(step)
    return steps[False], steps[True]
