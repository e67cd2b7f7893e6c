"""The state before each segment of a sequence of linear attention, from the local states and total decays of the segments.

    S_0 = the initial state        S_(p+1) = exp2(total_p) S_p + local_p        total: a number, or one for each channel of the
    keys

A warp computes one tile of a head's state, transposed, segment after segment. Only the latency of loads takes time, so those of
several segments are in flight at once."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, exp2, load, store
from tiles import fp32, inlined, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

TILE = rt(16, 16, fp32)
PREFETCHED = 4  # segments whose loads are in flight


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. per_channel: does each channel have a decay of its own? decays: is there any?"""

    per_channel: bool
    decays: bool = True
    threads = LANES

    def __str__(self):
        return f"starts{', decays of channels' * self.per_channel}{', no decays' * (not self.decays)}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, for one decay of all channels, for a decay of each, and for none."""
    yield from (Config(False), Config(True), Config(False, decays=False))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PER_CHANNEL, DECAYS, ROW_VEC = config.per_channel, config.decays, TILE.row_vec

    @inlined
    def load_segment(gLocalStates, gTotalDecays, sequence, head, n, row, col):
        """(the decay of segment n, its local state)"""
        local = load(gLocalStates, TILE, (sequence, head, n, row, col), aligned=True)
        if PER_CHANNEL:
            return exp2(load(gTotalDecays, ROW_VEC, (sequence, head, n, col))), local
        elif DECAYS:
            return exp2(gTotalDecays[sequence, head, n, 0]), local
        else:
            return float32(1.0), local

    @inlined
    def advance(state, segment, gSegmentStates, n, last, first, head, row, col):
        """The state after segment n, stored as the state before the next one, if there is a next one. segment: the result of
        load_segment for segment n."""
        decay, local = segment
        if n < last:
            state = state * decay + local
            store(gSegmentStates, state, (first + n + 1, head, row, col), aligned=True)
        return state

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(
        gLocalStates: array(5), gTotalDecays: array(4), gInitialState: array(4), gSegmentStates: array(4),
        heads: INT, segments: INT, rows: INT, cols: INT,
    ):  # fmt: skip
        """Compute one of the `rows` x `cols` tiles of the states before the `segments` of a head."""
        batch_head, tile = divmod(cuda.blockIdx.x, rows * cols)
        sequence, head = divmod(batch_head, heads)
        row, col = divmod(tile, cols)
        row, col, last = int32(TILE.rows * row), int32(TILE.cols * col), int32(segments - 1)
        first = sequence * segments
        state = load(gInitialState, TILE, (sequence, head, row, col))
        store(gSegmentStates, state, (first, head, row, col), aligned=True)
        for n in range(0, last, PREFETCHED):  # after the last segment, that one is loaded again
            a = load_segment(gLocalStates, gTotalDecays, sequence, head, n, row, col)
            b = load_segment(gLocalStates, gTotalDecays, sequence, head, min(int32(n + 1), last - 1), row, col)
            c = load_segment(gLocalStates, gTotalDecays, sequence, head, min(int32(n + 2), last - 1), row, col)
            d = load_segment(gLocalStates, gTotalDecays, sequence, head, min(int32(n + 3), last - 1), row, col)
            state = advance(state, a, gSegmentStates, n, last, first, head, row, col)
            state = advance(state, b, gSegmentStates, n + 1, last, first, head, row, col)
            state = advance(state, c, gSegmentStates, n + 2, last, first, head, row, col)
            state = advance(state, d, gSegmentStates, n + 3, last, first, head, row, col)

    return add_up, None
