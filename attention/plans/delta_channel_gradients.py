"""The plan of the delta rule's gradients on Hopper where each channel of the keys has a decay: what depends on no state of all
chunks at once, two recurrences that give S, E, dS and Z of all chunks, and the gradients of all chunks at once."""

import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine, persistent
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import follows

from ..kernels import delta_channel_chains_hopper, delta_channel_gradients_hopper, delta_channel_inverse_hopper
from ..parts.recurrent.delta_chunks import KEY_DIMS
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from .delta_gradient_walk import plan_tails
from .delta_walk import count_parts
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, sum_heads

PACKED = ("gQ", "gK"), ("gV", "gDOut"), ("gGates",), ("gDQ", "gDK"), ("gDV",), ("gDGates",)  # see plan_tails
PART_CHUNKS = 8  # of a packed sequence of average length, at least, for a thread block


@follows
def count_packed_parts(sequences: int, heads: int, chunks: int, resident: int) -> int:
    """The number of thread blocks for the chunks of each head of each packed sequence. chunks: of all sequences. resident: how
    many blocks the GPU runs at once; there may be more, as some sequences are longer than others."""
    return max(1, min(resident // (sequences * heads), chunks), math.ceil(chunks / sequences / PART_CHUNKS))


def plan_delta_channel_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in delta_gradients.plan_delta_gradients."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    gates, device, of, varlen = arrays["decay"], machine(problem.device), DTYPES[problem.dtype], is_varlen(problem)
    assert gates is not None
    of_gates, chunks, each = DTYPES[gates.form.dtype], count_chunk_indices(problem), -(-length // CHUNK)
    padded_keys, blocks = pad_key_dim(key_dim, KEY_DIMS), -(-problem.extents["value_dim"] // COLUMNS)
    columns = COLUMNS * blocks

    def of_chunks(*extents: int) -> Operand:
        return scratch(chunks, heads, *extents, dtype=problem.dtype)

    known: Arrays = {name: arrays[x] for name, x in {"gQ": "q", "gK": "k", "gV": "v", "gDOut": "dout", "gBeta": "beta"}.items()}
    known |= {"gGates": gates, "gCuSeqlens": problem["cu_seqlens"]}
    known |= {name: of_chunks(CHUNK, padded_keys) for name in ("gDecayedQ", "gReadKeys", "gWriteKeys")}
    known |= {"gB": scratch(chunks, heads, padded_keys), "gChunkBeta": scratch(chunks, heads, CHUNK)}
    known |= {"gScores": of_chunks(CHUNK, CHUNK), "gSolutions": of_chunks(2 * CHUNK, CHUNK)}
    known |= {"gErrors": of_chunks(2 * CHUNK, columns), "gStates": of_chunks(2 * columns, padded_keys)}
    ends = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    known |= {name: x and x.permuted(SWAP_STATE_AXES) for name, end in ends.items() for x in [arrays[end]]}
    outputs: Arrays = {name: arrays[name] for name in ("dq", "dk")}
    if heads > key_heads:
        of_heads = problem("batch", "seqlen", "heads", "key_dim")
        outputs = {name: scratch(*of_heads, dtype=problem.dtype) for name in outputs}
    known |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    known |= {"gDGates": arrays["ddecay"], "gQueryRows": arrays["q"], "gKeyRows": arrays["k"], "gGateRows": gates}
    first, finish = plan_tails(problem, known, scratch, PACKED) if varlen else ([], [])
    if heads > key_heads:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]

    def launch(module: Any, fields: tuple, grid: int, names: str, **numbers: float) -> Step:
        config = intern_value(module.Config, padded_keys, *fields)
        named = {name: known.get(name) for name in f"{names} gCuSeqlens".split()}
        return kernel_for(module, config, problem.device).bind(grid, length=length, **numbers, **named)

    of_inverse = "gQ gK gBeta gGates gDecayedQ gReadKeys gWriteKeys gB gChunkBeta gScores gSolutions gTailQ gTailK gTailGates"
    of_chains = (
        "gDecayedQ gReadKeys gWriteKeys gB gChunkBeta gV gDOut gScores gSolutions gInitialState gErrors gStates gDV gLastState "
        "gFirstState gTailV gTailDOut gTailDV"
    )
    of_gradients = (
        "gQ gK gDOut gGates gChunkBeta gErrors gStates gDQ gDK gDBeta gDGates gQueryRows gKeyRows gGateRows gTailQ gTailK "
        "gTailDOut gTailGates gTailDQ gTailDK gTailDGates"
    )
    group, walks, items = heads // key_heads, sequences * heads, chunks * heads
    resident = delta_channel_inverse_hopper.Config.blocks_per_sm * device.processors
    if varlen:
        parts = count_packed_parts(sequences, heads, each, resident)
        each = count_packed_parts(sequences, heads, each, device.processors)
        grid = walks * each
    else:
        parts, grid = count_parts(walks, each, resident), persistent(device, items)
    return [
        *first,
        launch(
            delta_channel_inverse_hopper,
            (0, of_gates, of, varlen),
            walks * parts,
            of_inverse,
            parts=parts,
            heads=key_heads,
            group=group,
        ),
        launch(
            delta_channel_chains_hopper,
            (of, varlen),
            delta_channel_chains_hopper.DIRECTIONS * walks * blocks,
            of_chains,
            blocks=blocks,
            sequences=sequences,
            heads=heads,
            scale=scale,
        ),
        launch(
            delta_channel_gradients_hopper,
            (columns, of_gates, of, arrays["ddecay"] is not None, varlen),
            grid,
            of_gradients,
            chunks=each,
            items=items,
            heads=heads,
            group=group,
            scale=scale,
        ),
        *finish,
    ]
