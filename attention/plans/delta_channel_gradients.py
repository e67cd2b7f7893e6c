"""The plan of the delta rule's gradients on Hopper where each channel of the keys has a decay. Three launches: one computes
everything that depends on no state, for all chunks at once; one runs two recurrences, which give S, E, dS and dV of all chunks;
one computes the gradients of all chunks at once. For the largest tiles that is a kernel that takes a chunk as two blocks of
tokens; a fourth launch then computes those of strong chunks again, which decay too much for that."""

import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine, persistent
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ..kernels import (
    delta_channel_block_gradients_hopper,
    delta_channel_chains_hopper,
    delta_channel_gradients_hopper,
    delta_channel_inverse_hopper,
)
from ..parts.recurrent.delta_chunks import KEY_DIMS
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from .delta_walk import count_parts
from .packed_tails import INPUTS, KEY_GRADIENTS, VALUE_GRADIENTS, plan_tails
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import count_chunk_indices, sum_heads

INPUTS_WITH_TAILS = *INPUTS, ("gGates",)
RESULTS_WITH_TAILS = *KEY_GRADIENTS, ("gDGates",), *VALUE_GRADIENTS
PART_CHUNKS = 8  # the least chunks of a packed sequence of average length for each of its thread blocks


@watched_function
def count_packed_parts(sequences: int, heads: int, chunks: int, resident_ctas: int) -> int:
    """The number of thread blocks for the chunks of each head of each packed sequence. chunks: of all sequences. resident: how
    many blocks the GPU runs at once; there may be more, as some sequences are longer than others."""
    return max(1, min(resident_ctas // (sequences * heads), chunks), math.ceil(chunks / sequences / PART_CHUNKS))


def plan_delta_channel_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in delta_gradients.plan_delta_gradients."""
    length, heads, key_heads, sequences, key_dim = problem("seqlen", "heads", "heads_k", "sequences", "key_dim")
    gates, device, input_dtype, varlen = arrays["decay"], machine(problem.device), DTYPES[problem.dtype], is_varlen(problem)
    assert gates is not None
    gates_dtype, chunks, chunks_per_sequence = DTYPES[gates.form.dtype], count_chunk_indices(problem), -(-length // CHUNK)
    padded_keys, blocks = pad_key_dim(key_dim, KEY_DIMS), -(-problem.extents["value_dim"] // COLUMNS)
    columns = COLUMNS * blocks

    def chunk_scratch(*extents: int) -> Operand:
        return scratch(chunks, heads, *extents, dtype=problem.dtype)

    buffers: Arrays = {
        name: arrays[x] for name, x in {"gQ": "q", "gK": "k", "gV": "v", "gDOut": "dout", "gBeta": "beta"}.items()
    }
    buffers |= {"gGates": gates, "gCuSeqlens": problem["cu_seqlens"]}
    buffers |= {name: chunk_scratch(CHUNK, padded_keys) for name in ("gDecayedQ", "gReadKeys", "gWriteKeys")}
    buffers |= {"gB": scratch(chunks, heads, padded_keys), "gChunkBeta": scratch(chunks, heads, CHUNK)}
    buffers |= {"gScores": chunk_scratch(CHUNK, CHUNK), "gSolutions": chunk_scratch(2 * CHUNK, CHUNK)}
    buffers |= {"gErrors": chunk_scratch(CHUNK, columns), "gStates": chunk_scratch(2 * columns, padded_keys)}
    end_states = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    buffers |= {name: x and x.permuted(SWAP_STATE_AXES) for name, end in end_states.items() for x in [arrays[end]]}
    outputs: Arrays = {name: arrays[name] for name in ("dq", "dk")}
    if heads > key_heads:
        head_extents = problem("batch", "seqlen", "heads", "key_dim")
        outputs = {name: scratch(*head_extents, dtype=problem.dtype) for name in outputs}
    buffers |= {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    buffers |= {"gDGates": arrays["ddecay"], "gQueryRows": arrays["q"], "gKeyRows": arrays["k"], "gGateRows": gates}
    copy_tails, finish = plan_tails(
        problem, buffers, scratch, INPUTS_WITH_TAILS, RESULTS_WITH_TAILS, beta_gradient=arrays["dbeta"]
    )
    if heads > key_heads:
        finish += [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]

    def launch(module: Any, fields: tuple, grid: int, names: str, **numbers: float) -> Step:
        config = intern_value(module.Config, *fields)
        operands = {name: buffers.get(name) for name in f"{names} gCuSeqlens".split()}
        return kernel_for(module, config, problem.device).bind(grid, length=length, **numbers, **operands)

    inverse_names = (
        "gQ gK gBeta gGates gDecayedQ gReadKeys gWriteKeys gB gChunkBeta gScores gSolutions gTailQ gTailK gTailGates"
    )
    chain_names = (
        "gDecayedQ gReadKeys gWriteKeys gB gChunkBeta gV gDOut gScores gSolutions gInitialState gErrors gStates gDV gLastState "
        "gFirstState gTailV gTailDOut gTailDV"
    )
    gradient_names = (
        "gQ gK gDOut gGates gChunkBeta gErrors gDV gStates gDQ gDK gDBeta gDGates gTailQ gTailK "
        "gTailDOut gTailDV gTailGates gTailDQ gTailDK gTailDGates"
    )
    row_names, strong_names = "gQueryRows gKeyRows gGateRows", "gStrong gStrongBlocks"
    group, walks, items = heads // key_heads, sequences * heads, chunks * heads
    resident_ctas = delta_channel_inverse_hopper.Config.ctas_per_sm * device.processors
    if varlen:
        parts = count_packed_parts(sequences, heads, chunks_per_sequence, resident_ctas)
        chunks_or_parts = count_packed_parts(sequences, heads, chunks_per_sequence, device.processors)
        grid = walks * chunks_or_parts
    else:
        parts, grid = count_parts(walks, chunks_per_sequence, resident_ctas), persistent(device, items)
        chunks_or_parts = chunks_per_sequence
    takes_blocks = (padded_keys, columns) == delta_channel_block_gradients_hopper.SIZES
    numbers = {"chunks": chunks_or_parts, "items": items, "heads": heads, "group": group, "scale": scale}
    fields = gates_dtype, input_dtype, arrays["ddecay"] is not None, varlen
    gradient_steps = []
    if takes_blocks:
        buffers |= {"gStrong": scratch(chunks, heads), "gStrongBlocks": scratch(grid)}
        gradient_steps.append(
            launch(delta_channel_block_gradients_hopper, fields, grid, f"{gradient_names} {strong_names}", **numbers)
        )
    gradient_steps.append(
        launch(
            delta_channel_gradients_hopper,
            (padded_keys, columns, *fields),
            grid,
            f"{gradient_names} {row_names} {strong_names}",
            **numbers,
        )
    )
    return [
        *copy_tails,
        launch(
            delta_channel_inverse_hopper,
            (padded_keys, 0, gates_dtype, input_dtype, varlen),
            walks * parts,
            inverse_names,
            parts=parts,
            heads=key_heads,
            group=group,
        ),
        launch(
            delta_channel_chains_hopper,
            (padded_keys, input_dtype, varlen),
            delta_channel_chains_hopper.DIRECTIONS * walks * blocks,
            chain_names,
            blocks=blocks,
            sequences=sequences,
            heads=heads,
            scale=scale,
        ),
        *gradient_steps,
        *finish,
    ]
