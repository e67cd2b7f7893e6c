"""Both recurrences of the delta rule's gradients at once, for Hopper, where each channel of the keys has a decay
(parts/recurrent/delta_channel_recurrences.py has their equations and steps): S forward in time and dS in reverse, for gradients
of which forward stored nothing (delta_channel_outputs_hopper.py does, for delta_channel_state_gradients_hopper.py). S, E, dS
and dV of every chunk are stored, and delta_channel_gradients_hopper.py reads them."""

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
    StateRecurrence,
    recurrence_configs,
)
from ..parts.recurrent.tokens import COLUMNS, ChunkPlace, send_tile

REVERSE, DIRECTIONS = 0, 2  # the reverse recurrence, whose blocks come first because it takes longer; number of recurrences


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "recurrences"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of all sizes."""
    if target.has_wgmma:
        yield from recurrence_configs(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    recurrence, reverse = StateRecurrence(*config.fields), StateGradientRecurrence(*config.fields)
    layout, backward, spans, STATE = recurrence.layout, reverse.reverse_layout, config.spans, recurrence.state
    SPANS = spans.params()
    KEYS, DECAYS, BETAS, SCORES, SOLUTIONS, VALUES, CHUNK_VALUES, STATES = recurrence.arguments()
    smem = shared(**recurrence.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gDecayedQ: KEYS, gReadKeys: KEYS, gWriteKeys: KEYS, gB: DECAYS, gChunkBeta: BETAS, gV: VALUES, gDOut: VALUES,
        gScores: SCORES, gSolutions: SOLUTIONS, gInitialState: array(4), gErrors: CHUNK_VALUES, gStates: STATES,
        gStateGradients: STATES, gDV: VALUES, gLastState: array(4), gFirstState: array(4), gTailV: VALUES, gTailDOut: VALUES,
        gTailDV: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, sequences: INT, heads: INT, scale: FLOAT,
        span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence, which is `blocks` blocks of columns wide. gDecayedQ ..
        gChunkBeta, gScores, gSolutions: see ChunkFactors. gErrors: E. gStates, gStateGradients: S and dS of each chunk and
        head, transposed. gLastState, gFirstState: the gradients of the states after and before the sequence, transposed. gTailV
        .. gTailDV: see packed_tails.py. span_args: see segment_cuts.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        span_of = gCuSeqlens, sequence, length, int32(sequence * heads + head), segment, span_args
        if warpgroup.id() == PRODUCER:
            rank = warpgroup.rank()
            factors = ChunkFactors(gDecayedQ, gReadKeys, gWriteKeys, gB, gChunkBeta, gScores, gSolutions)
            if direction == REVERSE:
                span = spans.reverse_span(layout, *span_of)
                seq, first_chunk = span.seq, layout.chunk_index(span.seq.start, sequence, length)
                for j in range(seq.num_chunks()):
                    place = ChunkPlace(int32(first_chunk + seq.chunk_number(j)), head, sequence, seq.chunk_start(j), seq)
                    if rank == LOADER:
                        reverse.fill(rings, j, factors, (gDOut, gTailDOut), place, block)
                    elif spans.is_overlap(span, j):
                        recurrence.drop(rings, j, rank)
                    elif rank == SENDER:
                        backward.send_chunk(rings.out, j, gDV, gTailDV, place, block)
                    elif rank == STATE_SENDER:
                        send_tile(rings.states, j, gStateGradients, (place.chunk, head, block))
            else:
                span = spans.forward_span(layout, *span_of)
                seq, first_chunk = span.seq, layout.chunk_index(span.seq.start, sequence, length)
                for j in range(seq.num_chunks()):
                    place = ChunkPlace(int32(first_chunk + j), head, sequence, seq.chunk_start(j), seq)
                    if rank == LOADER:
                        recurrence.fill(rings, j, factors, (gV, gTailV), place, block)
                    elif spans.is_overlap(span, j):
                        recurrence.drop(rings, j, rank)
                    elif rank == SENDER:
                        send_tile(rings.out, j, gErrors, (place.chunk, head, 0, block))
                    elif rank == STATE_SENDER:
                        send_tile(rings.states, j, gStates, (place.chunk, head, block))
        else:
            state_coord = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                span = spans.reverse_span(layout, *span_of)
                ds_t, n = spans.load_state(gLastState, STATE, state_coord, span), span.seq.num_chunks()
                if n > 0:
                    from_outputs = reverse.multiply_first_outputs(rings)
                    for j in range(n):
                        ds_t, from_outputs = reverse.advance(ds_t, from_outputs, j, int32(n - 1), rings, scale)
                spans.store_state(gFirstState, ds_t, state_coord, span)
            else:
                span = spans.forward_span(layout, *span_of)
                s_t = spans.load_state(gInitialState, STATE, state_coord, span)
                for j in range(span.seq.num_chunks()):
                    s_t = recurrence.advance(s_t, j, rings, scale)

    return walk, smem
