"""The sums of features of older chunks for Hedgehog's gradients on Hopper, and in reverse their gradients, from those of each
chunk (hedgehog_chunks.py has the equations):

    z before chunk c, over the chunks before c - 1          dz after it, over those after c + 1

A warp has 16 features of a head."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import col_sum, cumsum, divmod, load, store, truncate, zeros
from tiles import fp32, inlined, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.hedgehog_chunks import FEATURES
from ...parts.recurrent.tokens import CHUNK

TILE = rt(CHUNK, 16, fp32, "col")  # numbers of 64 chunks and 16 features
STRIPS = FEATURES // TILE.cols
SKIPPED = 2  # a chunk itself, and the one before it or after it, are no part of its sum


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. reverse: do sums begin with the last chunk?"""

    reverse: bool = False
    threads = LANES

    def __str__(self):
        return "Hedgehog's sums of features" + ", reverse" * self.reverse


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, of both directions."""
    if target.has_wgmma:
        yield from (Config(False), Config(True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    REVERSE = config.reverse

    @inlined
    def sum_parts(gParts, chunk, head, col):
        """The numbers of 64 chunks, over all parts of each."""
        total = zeros(TILE)
        for part in range(gParts.shape[2]):
            total = total + load(gParts, TILE, (chunk, head, int32(part), col), 0, 3)
        return total

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_up(gParts: array(4), gSums: array(3), chunks: INT, heads: INT):
        """gParts: parts of the sum of each chunk, of `chunks` in a sequence. gSums: the sums of other chunks."""
        index, strip = divmod(cuda.blockIdx.x, STRIPS)
        sequence, head = divmod(index, heads)
        first, col = int32(sequence * chunks), int32(TILE.cols * strip)
        end, total = int32(first + chunks), zeros(TILE.row_vec)
        tiles = int32((chunks + CHUNK - 1) // CHUNK)
        parts, sums = truncate(gParts, 0, end), truncate(gSums, 0, end)
        if REVERSE:
            for j in range(tiles):
                chunk = int32(first + CHUNK * (tiles - 1 - j))
                x = sum_parts(parts, int32(chunk + SKIPPED), head, col)
                total = total + col_sum(x)
                store(sums, x - cumsum(x) + total, (chunk, head, col), 0, 2)
        else:
            store(truncate(gSums, 0, min(end, int32(first + SKIPPED))), zeros(TILE), (first, head, col), 0, 2)
            for j in range(tiles):
                chunk = int32(first + CHUNK * j)
                x = sum_parts(parts, chunk, head, col)
                store(sums, cumsum(x) + total, (int32(chunk + SKIPPED), head, col), 0, 2)
                total = total + col_sum(x)

    return add_up, None
