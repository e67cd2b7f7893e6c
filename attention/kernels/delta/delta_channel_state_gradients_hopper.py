"""The gradients of states under the delta rule, for Hopper, where each channel of the keys has a decay
(parts/delta/delta_channel_recurrences.py has the recurrence): dS after each chunk and dV, from what
delta_channel_inverse_hopper.py stored of each chunk in forward. delta_channel_gradients_hopper.py reads dS."""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array

from ...parts.delta.delta_channel_recurrences import PRODUCER, RecurrenceConfig, StateGradientRecurrence
from ...parts.recurrent.tokens import COLUMNS


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "gradients of states"


space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    recurrence, spans = StateGradientRecurrence(*config.fields), config.spans
    FACTORS, SPANS, (VALUES, _, STATES) = recurrence.factors(), spans.params(), recurrence.results()
    smem = shared(**recurrence.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        factors: FACTORS, gDOut: VALUES, gStateGradients: STATES, gDV: VALUES, gLastState: array(4), gFirstState: array(4),
        gTailDOut: VALUES, gTailDV: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT, scale: FLOAT,
        span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of a head of a sequence, which is `blocks` blocks of columns wide. gStateGradients: dS of each
        chunk and head, transposed, as gLastState and gFirstState are, the gradients of the states after and before the
        sequence. gTailDOut, gTailDV: see packed_tails.py. span_args: see segment_spans.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        sequence, head = divmod(index, heads)
        span = recurrence.locate(gCuSeqlens, sequence, length, index, segment, span_args)
        if warpgroup.id() == PRODUCER:
            results = gDV, gTailDV, gStateGradients
            recurrence.load_and_store(rings, span, length, factors, (gDOut, gTailDOut), results, sequence, head, block)
        else:
            at = sequence, head, int32(COLUMNS * block), 0
            spans.store_state(gFirstState, recurrence.scan(rings, span, gLastState, at, scale), at, span)

    return walk, smem
