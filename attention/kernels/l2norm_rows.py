"""Queries and keys divided by their lengths, for kernels that take them so: y = x / sqrt(sum(x^2) + 1e-6), a row x at a time.

A warp has 16 tokens of a head; heads of queries come first, those of keys behind them."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, row_sum, rsqrt, store, warp_index
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.recurrent.gate_formulas import L2NORM_EPSILON

WARPS, ROWS = 8, 16  # of a block; tokens that a warp has
LARGEST_KEY_DIMS = 128, 256  # with one block an SM from 144 on: if these do not spill, none do


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the columns of a row."""

    key_dim: int
    dtype: dtype
    threads = LANES * WARPS

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks the registers of an SM allow."""
        return 2 if self.key_dim <= LARGEST_KEY_DIMS[0] else 1

    def __str__(self):
        return f"Dk {self.key_dim} {self.dtype}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that take the most registers; fp16 with `everything` only."""
    yield from itertools.starmap(Config, itertools.product(LARGEST_KEY_DIMS, (bf16, fp16) if everything else (bf16,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, X = config.dtype, rt(ROWS, config.key_dim, fp32)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm))
    def normalize_rows(
        gQ: array(4, INPUT), gK: array(4, INPUT), gOutQ: array(4, INPUT), gOutK: array(4, INPUT), tiles: INT, cuts: INT,
        heads: INT,
    ):  # fmt: skip
        """The rows of `heads` heads of queries and as many of keys. A block has a tile of tokens and one of the `cuts` groups
        of heads."""
        rest, cut = divmod(cuda.blockIdx.x, cuts)
        batch, tile = divmod(rest, tiles)
        row, head = int32(ROWS * tile), int32(WARPS * cut + warp_index())
        if head < 2 * heads:
            gX, gOut = gQ, gOutQ
            if head >= heads:
                gX, gOut, head = gK, gOutK, int32(head - heads)
            x = load(gX, X, (batch, row, head, 0), 1, 3)
            store(gOut, INPUT(x * rsqrt(row_sum(x * x) + L2NORM_EPSILON)), (batch, row, head, 0), 1, 3, True)

    return normalize_rows, None
