"""What the segments of a sequence leave of a state together: linear attention's state behind its last token.

    M = exp2(total_0 + total_1 + ..)        S = M begin + sum_p exp2(total_(p+1) + total_(p+2) + ..) local_p

A warp adds up one tile of a head's state, as if segments were tokens."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, exp2, load, store, zeros
from tiles import fp32, rt
from tiles.arguments import INT, array
from tiles.layout import LANES

TILE = rt(16, 64, fp32)


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. begun: is there a state to begin with?"""

    begun: bool
    threads = LANES

    def __str__(self):
        return "segments" + " begun" * self.begun


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations."""
    yield from (Config(False), Config(True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BEGUN = config.begun

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(
        gLocal: array(5), gTotal: array(4), gBegin: array(4), gM: array(3), gLeft: array(4),
        heads: INT, segments: INT, rows: INT, cols: INT,
    ):  # fmt: skip
        """Add up one of the `rows` x `cols` tiles of a state."""
        pair, tile = divmod(cuda.blockIdx.x, rows * cols)
        number, head = divmod(pair, heads)
        row, col = divmod(tile, cols)
        row, col, m = int32(TILE.rows * row), int32(TILE.cols * col), float32(1.0)
        if BEGUN:
            state = load(gBegin, TILE, (number, head, row, col))
        else:
            state = zeros(TILE)
        for n in range(segments):
            kept = exp2(gTotal[number, head, n, 0])
            state, m = state * kept + load(gLocal, TILE, (number, head, n, row, col)), m * kept
        store(gLeft, state, (number, head, row, col))
        if tile == 0:
            gM[number, head, 0] = m

    return add_up, None
