"""Norms of each head's rows, before the scores.

The attention kernels normalise a query tile in shared memory. Keys, which every query tile reads, are normalised once before
attention, by the kernel here, into scratch memory. (Multiplying scores by 1 / rms of their keys instead would save writing K,
and cost a product for each score; a layer norm's bias would also need row sums.)"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.launching.arguments import INT, array, record
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.norms import LayerNorm, RmsNorm
from .forward_hopper_shapes import SHAPES

WARPS, ROWS = 8, 16  # of a CTA; rows of a warp


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that normalises keys. head_dim: columns of a row, padded. aligned: do rows begin at
    multiples of 16 bytes?"""

    norm: RmsNorm
    head_dim: int
    dtype: dtype
    aligned: bool

    @property
    def threads(self):
        """The number of threads of a CTA."""
        return LANES * WARPS

    @property
    def rows(self):
        """The number of rows that a CTA normalises."""
        return ROWS * WARPS

    def __str__(self):
        return f"{self.norm} keys, D {self.head_dim} {self.dtype}" + ", by elements" * (not self.aligned)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, which are the same for all GPUs."""
    for input_dtype, norm, head_dim in itertools.product(
        (bf16, fp16) if everything else (bf16,), (RmsNorm(), LayerNorm()), SHAPES
    ):
        yield Config(norm, head_dim, input_dtype, True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, X, ALIGNED = config.dtype, rt(ROWS, config.head_dim, fp32), config.aligned
    PART = rt(ROWS, 32, fp32)
    norm, PARAMS = config.norm, record(**config.norm.params)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def normalise(gX: array(4, INPUT), gOut: array(4, INPUT), params: PARAMS, blocks: INT, heads: INT):
        """Out = norm(X), row by row. X: (batch, row, head, column)."""
        batch_head, block = divmod(cuda.blockIdx.x, blocks)
        batch, head = divmod(batch_head, heads)
        row = ROWS * (WARPS * block + int32(cuda.threadIdx.x // LANES))
        of_rows = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
        for col in range(0, X.cols, PART.cols):  # reloaded from cache: all columns at once would need too many registers
            at = batch, row, head, col
            store(gOut, INPUT(norm.part(load(gX, PART, at, 1, 3, ALIGNED), of_rows, head, col, params)), at, 1, 3, True)

    return normalise, None
