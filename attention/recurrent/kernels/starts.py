"""The state before each segment of a sequence of linear attention: what those before it leave, added up.

    S_0 = the sequence's first        S_(p+1) = exp2(total_p) S_p + local_p        total: a number, or one a channel of the keys

A warp adds up one tile of a head's state, transposed, as if segments were tokens. Nothing but their number takes time, so what
several segments left is on its way at once."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store
from tiles import fp32, inlined, rt
from tiles.arguments import INT, array
from tiles.layout import LANES

TILE = rt(16, 16, fp32)
AT_ONCE = 4  # segments


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. channels: does each channel have a decay of its own?"""

    channels: bool
    threads = LANES

    def __str__(self):
        return f"starts{', decays of channels' * self.channels}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations."""
    yield from (Config(False), Config(True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CHANNELS, ALONG = config.channels, TILE.row_vec

    @inlined
    def left(gLocal, gTotal, number, head, n, row, col):
        """(the factor by which segment n multiplies a state, what it adds to the state)"""
        local = load(gLocal, TILE, (number, head, n, row, col), aligned=True)
        if CHANNELS:
            return exp2(load(gTotal, ALONG, (number, head, n, col))), local
        else:
            return exp2(gTotal[number, head, n, 0]), local

    @inlined
    def behind(state, of, gStarts, n, last, first, head, row, col):
        """The state after segment n, stored as the state before the next one, if there is a next one. of: what `left` returned
        for segment n."""
        kept, local = of
        if n < last:
            state = state * kept + local
            store(gStarts, state, (first + n + 1, head, row, col), aligned=True)
        return state

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(
        gLocal: array(5), gTotal: array(4), gStart: array(4), gStarts: array(4),
        heads: INT, segments: INT, rows: INT, cols: INT,
    ):  # fmt: skip
        """Compute one of the `rows` x `cols` tiles of the states before the `segments` of a head."""
        pair, tile = divmod(cuda.blockIdx.x, rows * cols)
        number, head = divmod(pair, heads)
        row, col = divmod(tile, cols)
        row, col, last = int32(TILE.rows * row), int32(TILE.cols * col), int32(segments - 1)
        first = number * segments
        state = load(gStart, TILE, (number, head, row, col))
        store(gStarts, state, (first, head, row, col), aligned=True)
        for n in range(0, last, AT_ONCE):  # all are loaded before the first one is taken up; behind the last one, that again
            a = left(gLocal, gTotal, number, head, n, row, col)
            b = left(gLocal, gTotal, number, head, min(int32(n + 1), last - 1), row, col)
            c = left(gLocal, gTotal, number, head, min(int32(n + 2), last - 1), row, col)
            d = left(gLocal, gTotal, number, head, min(int32(n + 3), last - 1), row, col)
            state = behind(state, a, gStarts, n, last, first, head, row, col)
            state = behind(state, b, gStarts, n + 1, last, first, head, row, col)
            state = behind(state, c, gStarts, n + 2, last, first, head, row, col)
            state = behind(state, d, gStarts, n + 3, last, first, head, row, col)

    return add_up, None
