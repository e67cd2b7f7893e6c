"""The delta rule's outputs in training, for Hopper, where each channel of the keys has a decay
(parts/recurrent/delta_channel_recurrences.py has the recurrence): from what delta_channel_inverse_hopper.py stores of each
chunk, O, and for the gradients S before each chunk and its E."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ..parts.recurrent.delta_channel_recurrences import (
    LOADER,
    OUTPUT_SENDER,
    PRODUCER,
    SENDER,
    STATE_SENDER,
    ChunkFactors,
    ChunkOutputRing,
    RecurrenceConfig,
    StateRecurrence,
    recurrence_configs,
)
from ..parts.recurrent.tokens import COLUMNS, ChunkPlace, send_tile


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "outputs and states"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of all sizes."""
    if target.has_wgmma:
        yield from recurrence_configs(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    recurrence = StateRecurrence(*config.fields, outputs=ChunkOutputRing())
    layout, spans, STATE = recurrence.layout, config.spans, recurrence.state
    SPANS = spans.params()
    KEYS, DECAYS, BETAS, SCORES, SOLUTIONS, VALUES, CHUNK_VALUES, STATES = recurrence.arguments()
    smem = shared(**recurrence.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gDecayedQ: KEYS, gReadKeys: KEYS, gWriteKeys: KEYS, gB: DECAYS, gChunkBeta: BETAS, gV: VALUES, gScores: SCORES,
        gSolutions: SOLUTIONS, gInitialState: array(4), gO: VALUES, gErrors: CHUNK_VALUES, gStates: STATES,
        gFinalState: array(4), gTailV: VALUES, gTailO: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT,
        scale: FLOAT, span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of a head of a sequence, which is `blocks` blocks of columns wide. gDecayedQ .. gChunkBeta,
        gScores, gSolutions: see ChunkFactors. gErrors, gStates: E and S of each chunk and head, S transposed, as gInitialState
        and gFinalState are. gTailV, gTailO: see packed_tails.py. span_args: see segment_cuts.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        sequence, head = divmod(index, heads)
        span_of = gCuSeqlens, sequence, length, index, segment, span_args
        span = spans.forward_span(layout, *span_of)
        seq, n = span.seq, span.seq.num_chunks()
        if warpgroup.id() == PRODUCER:
            rank, first_chunk = warpgroup.rank(), layout.chunk_index(seq.start, sequence, length)
            factors = ChunkFactors(gDecayedQ, gReadKeys, gWriteKeys, gB, gChunkBeta, gScores, gSolutions)
            for j in range(n):
                place = ChunkPlace(int32(first_chunk + j), head, sequence, seq.chunk_start(j), seq)
                if rank == LOADER:
                    recurrence.fill(rings, j, factors, (gV, gTailV), place, block)
                elif spans.is_overlap(span, j):
                    recurrence.drop(rings, j, rank)
                    recurrence.outputs.drop(rings, j, rank)
                elif rank == SENDER:
                    send_tile(rings.out, j, gErrors, (place.chunk, head, 0, block))
                elif rank == STATE_SENDER:
                    send_tile(rings.states, j, gStates, (place.chunk, head, block))
                elif rank == OUTPUT_SENDER:
                    layout.send_chunk(rings.outputs, j, gO, gTailO, place, block)
        else:
            state_coord = sequence, head, int32(COLUMNS * block), 0
            s_t = spans.load_state(gInitialState, STATE, state_coord, span)
            for j in range(n):
                s_t = recurrence.advance(s_t, j, rings, scale)
            spans.store_state(gFinalState, s_t, state_coord, span)

    return walk, smem
