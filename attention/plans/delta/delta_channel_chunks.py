"""ChannelChunks, the launches for chunks of the delta rule on Hopper in training where each channel of the keys has a decay,
and the plan of forward there. Forward has two launches: one computes everything that depends on no state, for all chunks at
once; one runs the recurrence of S, which gives S, E and O of all chunks. Gradients read what both store
(delta_channel_gradients.py)."""

import math
from typing import Any

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for
from tiles.launching.lengths import watched_function

from ...kernels.delta import delta_channel_cuts_hopper, delta_channel_inverse_hopper, delta_channel_outputs_hopper
from ...parts.delta.delta_chunks import KEY_DIMS
from ...parts.recurrent.segment_spans import OverlappingSegments
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from ..recurrent.chunk_schedule import count_parts
from ..recurrent.packed_tails import plan_tails
from ..recurrent.recurrent_checks import DTYPES, is_varlen, pad_key_dim
from ..recurrent.recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator, intern_value
from ..recurrent.recurrent_gradients import count_chunk_indices

FACTORS = "gDecayedQ gReadKeys gWriteKeys gB gChunkBeta gScores gSolutions"  # what depends on no state
STATES = "gErrors gStates"  # E and S
INPUTS_WITH_TAILS, OUTPUTS_WITH_TAILS = (("gQ", "gK"), ("gV",), ("gGates",)), (("gO",),)
MIN_CUT_CHUNKS, MIN_SEGMENT_CHUNKS = 64, 16  # the least chunks of a sequence that is cut into segments, and of a segment
MIN_CUT_DIRECTIONS = 2  # the least recurrences side by side of which sequences are cut: one alone is not timed yet
PART_CHUNKS = 8  # the least chunks of a packed sequence of average length for each of its thread blocks


@watched_function
def count_packed_parts(sequences: int, heads: int, chunks: int, resident_ctas: int) -> int:
    """The number of thread blocks for the chunks of each head of each packed sequence. chunks: of all sequences. resident_ctas:
    how many blocks the GPU runs at once; there may be more, as some sequences are longer than others."""
    return max(1, min(resident_ctas // (sequences * heads), chunks), math.ceil(chunks / sequences / PART_CHUNKS))


@watched_function
def choose_cuts(blocks: int, chunks: int, processors: int) -> int:
    """The number of segments of each sequence: as many as fill the GPU. blocks: of whole sequences. chunks: of a sequence."""
    segments = min(processors // blocks, chunks // MIN_SEGMENT_CHUNKS)
    if segments < 2 or chunks < MIN_CUT_CHUNKS:
        return 1
    return -(-chunks // -(-chunks // segments))


class ChannelChunks:
    """The launches of a call by chunks, and their arrays. buffers: arrays by the names of kernels' parameters, of which each
    launch takes those that its kernel declares; a plan adds further ones. key_dim, columns: of a state, as padded; blocks: of
    64 columns. walks: sequences times heads."""

    def __init__(self, problem: Problem, arrays: Arrays, scratch: ScratchAllocator):
        """arrays: those of the call by the names of parameters, states as the call has them. What they lack of FACTORS and
        STATES is scratch memory."""
        heads, key_heads, sequences, key_dim, value_dim = problem("heads", "heads_k", "sequences", "key_dim", "value_dim")
        self.problem, self.scratch, self.varlen = problem, scratch, is_varlen(problem)
        self.key_dim, self.blocks = pad_key_dim(key_dim, KEY_DIMS), -(-value_dim // COLUMNS)
        self.columns, self.walks, self.group = COLUMNS * self.blocks, sequences * heads, heads // key_heads
        gates, self.chunks = arrays["gGates"], count_chunk_indices(problem)
        assert gates is not None
        self.dtype, self.gates_dtype = DTYPES[problem.dtype], DTYPES[gates.form.dtype]
        self.buffers: Arrays = arrays | {"gCuSeqlens": problem["cu_seqlens"]}
        self.buffers |= {"gKeyRows": arrays["gK"], "gGateRows": gates}
        for name in ("gInitialState", "gFinalState", "gLastState", "gFirstState"):
            state = arrays.get(name)
            self.buffers[name] = state and state.permuted(SWAP_STATE_AXES)
        for name, (shape, dtype) in self.stored_shapes().items():
            if name not in self.buffers:
                self.buffers[name] = self.chunk_scratch(*shape, dtype=dtype)

    def stored_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of what is stored of each chunk and head, by the names of FACTORS and STATES."""
        keys, dtype = (CHUNK, self.key_dim), self.problem.dtype
        shapes: dict[str, tuple[tuple[int, ...], str]] = {name: (keys, dtype) for name in FACTORS.split()[:3]}
        shapes |= {"gB": ((self.key_dim,), "float32"), "gChunkBeta": ((CHUNK,), "float32")}
        shapes |= {"gScores": ((CHUNK, CHUNK), dtype), "gSolutions": ((2 * CHUNK, CHUNK), dtype)}
        return shapes | {"gErrors": ((CHUNK, self.columns), dtype), "gStates": ((self.columns, self.key_dim), dtype)}

    def chunk_scratch(self, *extents: int, dtype: str = "float32") -> Operand:
        """Scratch memory for something of each chunk and head."""
        return self.scratch(self.chunks, self.problem.extents["heads"], *extents, dtype=dtype)

    def launch(self, module: Any, fields: tuple, grid: int, **numbers: float) -> Step:
        """A launch of `grid` thread blocks. fields: of the configuration."""
        kernel = kernel_for(module, intern_value(module.Config, *fields), self.problem.device)
        return kernel.bind_declared(grid, self.buffers, length=self.problem.extents["seqlen"], **numbers)

    def invert(self) -> Step:
        """The launch that computes FACTORS."""
        sequences, heads, key_heads, length = self.problem("sequences", "heads", "heads_k", "seqlen")
        chunks = -(-length // CHUNK)
        resident_ctas = delta_channel_inverse_hopper.Config.ctas_per_sm * machine(self.problem.device).processors
        if self.varlen:
            parts = count_packed_parts(sequences, heads, chunks, resident_ctas)
        else:
            parts = count_parts(self.walks, chunks, resident_ctas)
        fields = self.key_dim, 0, self.gates_dtype, self.dtype, self.varlen
        numbers = {"parts": parts, "heads": key_heads, "group": self.group}
        return self.launch(delta_channel_inverse_hopper, fields, self.walks * parts, **numbers)

    def run_recurrences(self, module: Any, scale: float, directions: int = 1, **numbers: float) -> list[Step]:
        """The launches of a recurrence, or of two in as many `directions`; of segments of sequences where there are few."""
        heads, length = self.problem("heads", "seqlen")
        fields, blocks = (self.key_dim, self.dtype, self.varlen), directions * self.walks * self.blocks
        numbers |= {"blocks": self.blocks, "heads": heads, "scale": scale}
        segments = 1
        if not self.varlen and directions >= MIN_CUT_DIRECTIONS:
            segments = choose_cuts(blocks, -(-length // CHUNK), machine(self.problem.device).processors)
        if segments == 1:
            return [self.launch(module, fields, blocks, **numbers)]
        self.buffers["gOverlaps"] = self.scratch(delta_channel_cuts_hopper.DIRECTIONS, self.walks, segments)
        cuts = self.launch(
            delta_channel_cuts_hopper,
            (self.key_dim, 0, self.gates_dtype, self.dtype, False, delta_channel_cuts_hopper.DIRECTIONS),
            delta_channel_cuts_hopper.DIRECTIONS * self.walks * (segments - 1),
            segments=segments,
            heads=self.problem.extents["heads_k"],
            group=self.group,
        )
        cut_fields = *fields, OverlappingSegments()
        return [cuts, self.launch(module, cut_fields, segments * blocks, segments=segments, **numbers)]


def plan_channel_outputs(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches of forward in training. arrays: those of kda_hopper.py's kernel, and FACTORS and STATES, which are
    stored."""
    chunks = ChannelChunks(problem, arrays, scratch)
    copy_tails, copy_back = plan_tails(problem, chunks.buffers, scratch, INPUTS_WITH_TAILS, OUTPUTS_WITH_TAILS)
    outputs = chunks.run_recurrences(delta_channel_outputs_hopper, scale)
    return [*copy_tails, chunks.invert(), *outputs, *copy_back]
