"""The plan of the delta rule by chunks on GPUs since Ampere, and DeltaChunks, which it shares with the plan of the gradients
there (delta_gradients.py). A first kernel computes everything that depends on no state, for all chunks at once
(delta_inverse_ampere.py, delta_channel_inverse_ampere.py), a second walks along each sequence (delta_walk_ampere.py)."""

from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.delta import delta_channel_inverse_ampere, delta_inverse_ampere, delta_walk_ampere
from ...parts.delta.delta_chunks import KEY_DIMS
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.raw_inputs import NOT_RAW, RawOptions, formula_arrays, prepare_rows
from ..recurrent.recurrent_checks import DTYPES, has_channel_decay, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from ..recurrent.recurrent_gradients import count_chunk_indices, spread_to_tokens

DECAYED = "gDecayedQ", "gReadKeys", "gWriteKeys"  # queries, and keys that read and write states, multiplied by their decays


def serves_delta_chunks(problem: Problem) -> bool:
    """Do chunk kernels serve such a call of delta_rule?"""
    batch, length, key_dim = problem("batch", "seqlen", "key_dim")
    return bool(batch * length) and key_dim <= max(KEY_DIMS)


class DeltaChunks:
    """The launches of a call by chunks, and their arrays. buffers: arrays by the names of kernels' parameters, of which each
    launch takes those that its kernel declares; a plan adds further ones. width: the blocks of columns of a head. parts: the
    thread blocks for the chunks of a head of a sequence, one a chunk if all sequences are equally long."""

    def __init__(self, problem: Problem, arrays: Arrays, scratch: ScratchAllocator, columns: int):
        """arrays: gQ, gK, gV, gBeta, gGates, gInitialState as the call has them. columns: of a state."""
        heads, sequences = problem("heads", "sequences")
        gates, chunks, by_channel = arrays["gGates"], count_chunk_indices(problem), has_channel_decay(problem)
        padded = pad_key_dim(problem.extents["key_dim"], KEY_DIMS)
        self.problem, self.scratch, self.chunks, self.by_channel = problem, scratch, chunks, by_channel
        self.config_fields = padded, DTYPES[problem.dtype], gates is not None, is_varlen(problem), problem.bytes_at_once()
        self.width, self.parts = -(-columns // COLUMNS), -(-chunks // sequences)
        buffers = arrays | {"gGates": gates and spread_to_tokens(problem, gates), "gCuSeqlens": problem["cu_seqlens"]}
        buffers |= {"gDecayedQ": arrays["gQ"], "gReadKeys": arrays["gK"], "gWriteKeys": arrays["gK"]}
        if by_channel:  # by chunk, token, head and channel, so that the tokens of a head lie side by side
            buffers |= {name: self.chunk_scratch(CHUNK, padded).permuted((0, 2, 1, 3)) for name in DECAYED}
        buffers |= {"gB": scratch(chunks, heads, padded if by_channel else CHUNK) if gates else None}
        buffers |= {"gChunkBeta": scratch(chunks, heads, CHUNK), "gInitialState": swap_axes(arrays["gInitialState"])}
        self.buffers: Arrays = buffers

    def chunk_scratch(self, rows: int, cols: int) -> Operand:
        """Scratch memory for a matrix of each chunk and head."""
        return self.scratch(self.chunks, self.problem.extents["heads"], rows, cols, dtype=self.problem.dtype)

    def launch(self, module: Any, fields: tuple, grid: int, raw: RawOptions | None = None, **arguments: Any) -> Step:
        """A launch of `grid` thread blocks for each head of a sequence. fields: of the configuration, after `config_fields`.
        raw: the formulas that it applies to raw inputs, if it takes any."""
        length, heads, key_heads, sequences = self.problem("seqlen", "heads", "heads_k", "sequences")
        formulas = {} if raw is None else {"formula": raw.gate, "beta": raw.beta}
        config = intern_value(module.Config, *self.config_fields, *fields, **formulas)
        kernel, sizes = kernel_for(module, config, self.problem.device), {"heads": heads, "group": heads // key_heads}
        return kernel.bind_declared(sequences * heads * grid, self.buffers, length=length, **sizes, **arguments)

    def invert(self, for_gradients: bool, scale: float, raw: RawOptions = NOT_RAW) -> Step:
        """The launch of the first kernel: it computes gForward, the inverse for E, and with channel decays decayed queries and
        keys. for_gradients: gReverse, too, the inverse for Z."""
        module: Any = delta_channel_inverse_ampere if self.by_channel else delta_inverse_ampere
        numbers = {"parts": self.parts, "scale": scale}
        return self.launch(module, (for_gradients,), self.parts, raw, **numbers, **formula_arrays(self.problem))


def swap_axes(state: Operand | None) -> Operand | None:
    """A state, transposed, as chunk kernels have it."""
    return state and state.permuted(SWAP_STATE_AXES)


def plan_delta_chunks(
    problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, raw: RawOptions = NOT_RAW, columns: int = 0
) -> list[Step]:
    """The launches of delta_rule. arrays: gQ, gK, gV, gBeta, gGates, gO, gInitialState, gFinalState; gQ and gO may be None if
    only the state is wanted. raw: the formulas for raw inputs. columns: those of a state, if it has more of them than v."""
    steps, copies = prepare_rows(problem, scratch, raw.l2norm, needs_tma=False)
    chunks = DeltaChunks(problem, arrays | copies, scratch, columns or problem.extents["value_dim"])
    matrices = chunks.chunk_scratch(3 * CHUNK, CHUNK)
    chunks.buffers |= {"gForward": matrices, "gReverse": matrices, "gFinalState": swap_axes(arrays["gFinalState"])}
    fields = chunks.by_channel, True
    walk = chunks.launch(delta_walk_ampere, fields, chunks.width, blocks=chunks.width, scale=scale)
    return [*steps, chunks.invert(False, scale, raw), walk]
