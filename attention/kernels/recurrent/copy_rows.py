"""Rows of queries, keys, values or gates, copied to memory that TMA reads; those of queries and keys are divided by their
lengths on the way, if they are to be: y = x / sqrt(sum(x^2) + 1e-6).

A warp has 16 tokens of a head. Two arrays of the same shape are copied at once, the heads of the second behind those of the
first."""

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

from ...parts.recurrent.l2norm import L2NORM_EPSILON

WARPS, ROWS = 8, 16  # of a block; tokens that a warp has
LARGEST_COLUMNS = 128, 256  # with one block an SM from 144 on: if these do not spill, none do


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. columns: of a row. l2norm: are rows divided by their L2 norms?"""

    columns: int
    dtype: dtype
    l2norm: bool
    threads = LANES * WARPS

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks the registers of an SM allow."""
        return 2 if self.columns <= LARGEST_COLUMNS[0] else 1

    def __str__(self):
        return f"copied rows, {self.columns} columns {self.dtype}{', l2norm' * self.l2norm}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that take the most registers; fp16 with `everything` only."""
    dtypes = (bf16, fp16, fp32) if everything else (bf16, fp32)
    for columns, input_dtype, l2norm in itertools.product(LARGEST_COLUMNS, dtypes, (False, True)):
        if input_dtype is not fp32 or not l2norm:
            yield Config(columns, input_dtype, l2norm)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, X, L2NORM = config.dtype, rt(ROWS, config.columns, fp32), config.l2norm

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm))
    def copy_rows(
        gX: array(4, INPUT), gY: array(4, INPUT), gCopiedX: array(4, INPUT), gCopiedY: array(4, INPUT), tiles: INT,
        head_blocks: INT, heads: INT, all_heads: INT,
    ):  # fmt: skip
        """`heads` heads of X, and of Y as many as are left of `all_heads`. A block has one of the `tiles` of tokens and one of
        the `head_blocks` of WARPS heads each."""
        rest, head_block = divmod(cuda.blockIdx.x, head_blocks)
        batch, tile = divmod(rest, tiles)
        row, head = int32(ROWS * tile), int32(WARPS * head_block + warp_index())
        if head < all_heads:
            gFrom, gTo = gX, gCopiedX
            if head >= heads:
                gFrom, gTo, head = gY, gCopiedY, int32(head - heads)
            x = load(gFrom, X, (batch, row, head, 0), 1, 3)
            if L2NORM:
                x = x * rsqrt(row_sum(x * x) + L2NORM_EPSILON)
            store(gTo, INPUT(x), (batch, row, head, 0), 1, 3, True)

    return copy_rows, None
