"""The gradients of states under the delta rule, for Hopper, where each channel of the keys has a decay
(parts/recurrent/delta_channel_recurrences.py has the recurrence): dS after each chunk and dV, from what
delta_channel_inverse_hopper.py stored of each chunk in forward. delta_channel_gradients_hopper.py reads dS."""

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
    PRODUCER,
    SENDER,
    STATE_SENDER,
    ChunkFactors,
    RecurrenceConfig,
    StateGradientRecurrence,
    recurrence_configs,
)
from ..parts.recurrent.tokens import COLUMNS, ChunkPlace, send_tile


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "gradients of states"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of all sizes."""
    if target.has_wgmma:
        yield from recurrence_configs(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    recurrence = StateGradientRecurrence(*config.fields)
    layout, spans, STATE = recurrence.reverse_layout, config.spans, recurrence.state
    SPANS = spans.params()
    KEYS, DECAYS, BETAS, SCORES, SOLUTIONS, VALUES, _, STATES = recurrence.arguments()
    smem = shared(**recurrence.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gDecayedQ: KEYS, gReadKeys: KEYS, gWriteKeys: KEYS, gB: DECAYS, gChunkBeta: BETAS, gDOut: VALUES, gScores: SCORES,
        gSolutions: SOLUTIONS, gStateGradients: STATES, gDV: VALUES, gLastState: array(4), gFirstState: array(4),
        gTailDOut: VALUES, gTailDV: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT, scale: FLOAT,
        span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of a head of a sequence, which is `blocks` blocks of columns wide. gDecayedQ .. gChunkBeta,
        gScores, gSolutions: see ChunkFactors. gStateGradients: dS of each chunk and head, transposed, as gLastState and
        gFirstState are, the gradients of the states after and before the sequence. gTailDOut, gTailDV: see packed_tails.py.
        span_args: see segment_cuts.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        sequence, head = divmod(index, heads)
        span_of = gCuSeqlens, sequence, length, index, segment, span_args
        span = spans.reverse_span(layout, *span_of)
        seq, n = span.seq, span.seq.num_chunks()
        if warpgroup.id() == PRODUCER:
            rank, first_chunk = warpgroup.rank(), layout.chunk_index(seq.start, sequence, length)
            factors = ChunkFactors(gDecayedQ, gReadKeys, gWriteKeys, gB, gChunkBeta, gScores, gSolutions)
            for j in range(n):
                place = ChunkPlace(int32(first_chunk + seq.chunk_number(j)), head, sequence, seq.chunk_start(j), seq)
                if rank == LOADER:
                    recurrence.fill(rings, j, factors, (gDOut, gTailDOut), place, block)
                elif spans.is_overlap(span, j):
                    recurrence.drop(rings, j, rank)
                elif rank == SENDER:
                    layout.send_chunk(rings.out, j, gDV, gTailDV, place, block)
                elif rank == STATE_SENDER:
                    send_tile(rings.states, j, gStateGradients, (place.chunk, head, block))
        else:
            state_coord = sequence, head, int32(COLUMNS * block), 0
            ds_t = spans.load_state(gLastState, STATE, state_coord, span)
            if n > 0:
                from_outputs = recurrence.multiply_first_outputs(rings)
                for j in range(n):
                    ds_t, from_outputs = recurrence.advance(ds_t, from_outputs, j, int32(n - 1), rings, scale)
            spans.store_state(gFirstState, ds_t, state_coord, span)

    return walk, smem
