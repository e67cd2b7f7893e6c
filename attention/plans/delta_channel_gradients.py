"""The plan of the delta rule's gradients on Hopper where each channel of the keys has a decay: what depends on no state of all
chunks at once, two recurrences that give S, E, dS and Z of all chunks, and the gradients of all chunks at once."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine, persistent
from tiles.launching.launch import kernel_for

from ..kernels import delta_channel_chains_hopper, delta_channel_gradients_hopper, delta_channel_inverse_hopper
from ..parts.recurrent.delta_chunks import KEY_DIMS
from ..parts.recurrent.tokens import CHUNK, COLUMNS
from .delta_walk import count_parts
from .recurrent_checks import DTYPES, pad_key_dim
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import sum_heads


def plan_delta_channel_gradients(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches. arrays: as in delta_gradients.plan_delta_gradients; sequences are not packed."""
    batch, length, heads, key_heads, key_dim = problem("batch", "seqlen", "heads", "heads_k", "key_dim")
    gates, device, of = arrays["decay"], machine(problem.device), DTYPES[problem.dtype]
    assert gates is not None
    of_gates, chunks, blocks = DTYPES[gates.form.dtype], -(-length // CHUNK), -(-problem.extents["value_dim"] // COLUMNS)
    padded_keys, columns, items = pad_key_dim(key_dim, KEY_DIMS), COLUMNS * blocks, batch * chunks * heads
    tokens: Arrays = {"gQ": arrays["q"], "gK": arrays["k"], "gGates": gates}

    def of_chunks(*extents: int) -> Operand:
        return scratch(batch * chunks, heads, *extents, dtype=problem.dtype)

    known: Arrays = {name: of_chunks(CHUNK, padded_keys) for name in ("gDecayedQ", "gReadKeys", "gWriteKeys")}
    known |= {"gB": scratch(batch * chunks, heads, padded_keys), "gChunkBeta": scratch(batch * chunks, heads, CHUNK)}
    known |= {"gScores": of_chunks(CHUNK, CHUNK), "gSolutions": of_chunks(2 * CHUNK, CHUNK)}
    of_states: Arrays = {"gErrors": of_chunks(2 * CHUNK, columns), "gStates": of_chunks(2 * columns, padded_keys)}
    ends = {"gInitialState": "initial_state", "gLastState": "dstate", "gFirstState": "dinitial_state"}
    outputs: Arrays = {name: arrays[name] for name in ("dq", "dk")}
    finish: list[Step] = []
    if heads > key_heads:
        outputs = {name: scratch(batch, length, heads, key_dim, dtype=problem.dtype) for name in outputs}
        finish = [step for name in ("dq", "dk") for step in sum_heads(problem, outputs[name], arrays[name])]

    def launch(module: Any, fields: tuple, grid: int, *some: Arrays, **more: Any) -> Step:
        config = intern_value(module.Config, padded_keys, *fields)
        named = {name: x for each in some for name, x in each.items()}
        return kernel_for(module, config, problem.device).bind(grid, length=length, **named, **more)

    parts = count_parts(batch * heads, chunks, delta_channel_inverse_hopper.Config.blocks_per_sm * device.processors)
    walks = delta_channel_chains_hopper.DIRECTIONS * batch * heads * blocks
    return [
        launch(
            delta_channel_inverse_hopper,
            (0, of_gates, of),
            batch * heads * parts,
            tokens,
            known,
            parts=parts,
            heads=key_heads,
            group=heads // key_heads,
            gBeta=arrays["beta"],
        ),
        launch(
            delta_channel_chains_hopper,
            (of,),
            walks,
            known,
            of_states,
            {name: x and x.permuted(SWAP_STATE_AXES) for name, end in ends.items() for x in [arrays[end]]},
            blocks=blocks,
            sequences=batch,
            heads=heads,
            scale=scale,
            gV=arrays["v"],
            gDOut=arrays["dout"],
            gDV=arrays["dv"],
        ),
        launch(
            delta_channel_gradients_hopper,
            (columns, of_gates, of, arrays["ddecay"] is not None),
            persistent(device, items),
            tokens,
            of_states,
            {"gQueryRows": arrays["q"], "gKeyRows": arrays["k"], "gGateRows": gates, "gChunkBeta": known["gChunkBeta"]},
            {"gDQ": outputs["dq"], "gDK": outputs["dk"], "gDBeta": arrays["dbeta"], "gDGates": arrays["ddecay"]},
            chunks=chunks,
            items=items,
            heads=heads,
            group=heads // key_heads,
            scale=scale,
            gDOut=arrays["dout"],
        ),
        *finish,
    ]
