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
    """Of the kernel: does every channel decay by itself?"""

    channels: bool
    threads = LANES

    def __str__(self):
        return f"starts{', decays of channels' * self.channels}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    yield from (Config(False), Config(True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CHANNELS, ALONG = config.channels, TILE.row_vec

    @inlined
    def kept(gTotal, number, head, n, col):
        """What segment n multiplies a state with."""
        if CHANNELS:
            return exp2(load(gTotal, ALONG, (number, head, n, col)))
        else:
            return exp2(gTotal[number, head, n, 0])

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(
        gLocal: array(5), gTotal: array(4), gStart: array(4), gStarts: array(4),
        heads: INT, segments: INT, rows: INT, cols: INT,
    ):  # fmt: skip
        """One of `rows` x `cols` tiles of the states before the `segments` of a head."""
        pair, tile = divmod(cuda.blockIdx.x, rows * cols)
        number, head = divmod(pair, heads)
        row, col = divmod(tile, cols)
        row, col, last = int32(TILE.rows * row), int32(TILE.cols * col), int32(segments - 1)
        state = load(gStart, TILE, (number, head, row, col))
        store(gStarts, state, (number * segments, head, row, col), aligned=True)
        for n in range(0, last, AT_ONCE):
            a, b, c, d = n, min(int32(n + 1), last - 1), min(int32(n + 2), last - 1), min(int32(n + 3), last - 1)
            local_a, kept_a = load(gLocal, TILE, (number, head, a, row, col), aligned=True), kept(gTotal, number, head, a, col)
            local_b, kept_b = load(gLocal, TILE, (number, head, b, row, col), aligned=True), kept(gTotal, number, head, b, col)
            local_c, kept_c = load(gLocal, TILE, (number, head, c, row, col), aligned=True), kept(gTotal, number, head, c, col)
            local_d, kept_d = load(gLocal, TILE, (number, head, d, row, col), aligned=True), kept(gTotal, number, head, d, col)
            state = state * kept_a + local_a
            store(gStarts, state, (number * segments + n + 1, head, row, col), aligned=True)
            if n + 2 <= last:
                state = state * kept_b + local_b
                store(gStarts, state, (number * segments + n + 2, head, row, col), aligned=True)
            if n + 3 <= last:
                state = state * kept_c + local_c
                store(gStarts, state, (number * segments + n + 3, head, row, col), aligned=True)
            if n + 4 <= last:
                state = state * kept_d + local_d
                store(gStarts, state, (number * segments + n + 4, head, row, col), aligned=True)

    return add_up, None
