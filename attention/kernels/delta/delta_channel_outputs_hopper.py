"""The delta rule's outputs in training, for Hopper, where each channel of the keys has a decay
(parts/delta/delta_channel_recurrences.py has the recurrence): from what delta_channel_inverse_hopper.py stores of each
chunk, O, and for the gradients S before each chunk and its E."""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array

from ...parts.delta.delta_channel_recurrences import PRODUCER, ChunkOutputRing, RecurrenceConfig, StateRecurrence
from ...parts.recurrent.tokens import COLUMNS


@dataclass(frozen=True)
class Config(RecurrenceConfig):
    """A kernel's configuration, whose fields are those of RecurrenceConfig."""

    label = "outputs and states"


space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    recurrence, spans = StateRecurrence(*config.fields, outputs=ChunkOutputRing()), config.spans
    FACTORS, SPANS, (VALUES, CHUNK_VALUES, STATES) = recurrence.factors(), spans.params(), recurrence.results()
    smem = shared(**recurrence.rings())

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        factors: FACTORS, gV: VALUES, gInitialState: array(4), gO: VALUES, gErrors: CHUNK_VALUES, gStates: STATES,
        gFinalState: array(4), gTailV: VALUES, gTailO: VALUES, gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT,
        scale: FLOAT, span_args: SPANS,
    ):  # fmt: skip
        """A block has 64 columns of a head of a sequence, which is `blocks` blocks of columns wide. gErrors, gStates: E and S
        of each chunk and head, S transposed, as gInitialState and gFinalState are. gTailV, gTailO: see packed_tails.py.
        span_args: see segment_spans.py."""
        rings = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, segment = spans.split(index, span_args)
        sequence, head = divmod(index, heads)
        span = recurrence.locate(gCuSeqlens, sequence, length, index, segment, span_args)
        if warpgroup.id() == PRODUCER:
            results = gErrors, gStates, (gO, gTailO)
            recurrence.load_and_store(rings, span, length, factors, (gV, gTailV), results, sequence, head, block)
        else:
            at = sequence, head, int32(COLUMNS * block), 0
            spans.store_state(gFinalState, recurrence.scan(rings, span, gInitialState, at, scale), at, span)

    return walk, smem
