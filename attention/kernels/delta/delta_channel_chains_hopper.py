"""Both recurrences of the delta rule's gradients at once, for Hopper, where each channel of the keys has a decay
(parts/delta/delta_channel_recurrences.py has their equations and steps): S forward in time and dS in reverse, for gradients
of which forward stored nothing (delta_channel_outputs_hopper.py does, for delta_channel_state_gradients_hopper.py). S, E, dS
and dV of every chunk are stored, and delta_channel_gradients_hopper.py reads them."""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array

from ...parts.delta.delta_channel_recurrences import PRODUCER, RecurrenceConfig, StateGradientRecurrence, StateRecurrence
from ...parts.recurrent.tokens import COLUMNS

REVERSE, DIRECTIONS = 0, 2  # the reverse recurrence, whose blocks come first because it takes longer; number of recurrences


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "recurrences"


space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    forward, reverse, spans = StateRecurrence(*config.fields), StateGradientRecurrence(*config.fields), config.spans
    FACTORS, SPANS, (VALUES, CHUNK_VALUES, STATES) = forward.factors(), spans.params(), forward.results()
    smem = shared(**forward.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        factors: FACTORS, gV: VALUES, gDOut: VALUES, gInitialState: array(4), gErrors: CHUNK_VALUES, gStates: STATES,
        gStateGradients: STATES, gDV: VALUES, gLastState: array(4), gFirstState: array(4), gTailV: VALUES, gTailDOut: VALUES,
        gTailDV: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, sequences: INT, heads: INT, scale: FLOAT, span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence, which is `blocks` blocks of columns wide. gErrors: E.
        gStates, gStateGradients: S and dS of each chunk and head, transposed. gLastState, gFirstState: the gradients of the
        states after and before the sequence, transposed. gTailV .. gTailDV: see packed_tails.py. span_args: see
        segment_spans.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        span_of = gCuSeqlens, sequence, length, int32(sequence * heads + head), segment, span_args
        if warpgroup.id() == PRODUCER:
            place = sequence, head, block
            if direction == REVERSE:
                inputs, results = (gDOut, gTailDOut), (gDV, gTailDV, gStateGradients)
                reverse.load_and_store(rings, reverse.locate(*span_of), length, factors, inputs, results, *place)
            else:
                inputs, results = (gV, gTailV), (gErrors, gStates, ())
                forward.load_and_store(rings, forward.locate(*span_of), length, factors, inputs, results, *place)
        else:
            at = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                span = reverse.locate(*span_of)
                spans.store_state(gFirstState, reverse.scan(rings, span, gLastState, at, scale), at, span)
            else:
                forward.scan(rings, forward.locate(*span_of), gInitialState, at, scale)

    return walk, smem
