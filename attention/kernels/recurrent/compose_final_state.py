"""The state of linear attention after all segments of a sequence, and their decay, from local states and total decays.

    M = exp2(total_0 + total_1 + ..)        S = M initial + sum_p exp2(total_(p+1) + total_(p+2) + ..) local_p

A warp computes one tile of a head's state, segment after segment."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, exp2, load, store, zeros
from tiles import fp32, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

TILE = rt(16, 64, fp32)


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. has_initial_state: is an initial state passed? If not, it is 0."""

    has_initial_state: bool
    threads = LANES

    def __str__(self):
        return "segments" + " begun" * self.has_initial_state


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, without and with an initial state."""
    yield from (Config(False), Config(True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    HAS_INITIAL_STATE = config.has_initial_state

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(
        gLocalStates: array(5), gTotalDecays: array(4), gInitialState: array(4), gDecay: array(3), gFinalState: array(4),
        heads: INT, segments: INT, rows: INT, cols: INT,
    ):  # fmt: skip
        """Compute one of the `rows` x `cols` tiles of a state, and with the first of them the decay."""
        batch_head, tile = divmod(cuda.blockIdx.x, rows * cols)
        sequence, head = divmod(batch_head, heads)
        row, col = divmod(tile, cols)
        row, col, m = int32(TILE.rows * row), int32(TILE.cols * col), float32(1.0)
        if HAS_INITIAL_STATE:
            state = load(gInitialState, TILE, (sequence, head, row, col))
        else:
            state = zeros(TILE)
        for p in range(segments):
            decay = exp2(gTotalDecays[sequence, head, p, 0])
            state, m = state * decay + load(gLocalStates, TILE, (sequence, head, p, row, col)), m * decay
        store(gFinalState, state, (sequence, head, row, col))
        if tile == 0:
            gDecay[sequence, head, 0] = m

    return add_up, None
