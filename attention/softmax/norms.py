"""Norms of each head's rows, before the scores.

Queries are normalised where a kernel of attention has them, in shared memory, once a tile. Keys, which every tile of queries
reads, are normalised once before it, by the kernel here, into scratch memory. (To multiply the scores by 1 / rms of their keys
would save writing K, and cost every score a product; a layer norm's bias would take sums over rows besides.)"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, load, right_fill, row_sum, rsqrt, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES

from .hopper import SHAPES
from .variants import Variant

WARPS, ROWS = 8, 16  # of a thread block of the kernel; rows of each


@static
class Rms:
    """x / sqrt(mean(x^2) + eps) * weights."""

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are. norm_weights: (head, column). columns: of a row."""
        return {"norm_weights": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def of_rows(self, x, params):
        """(mean, 1 / deviation) of the rows of a tile; the mean is 0 for this norm. The tile's columns from params.columns on
        are 0."""
        return zeros(x.col_vec), rsqrt(row_sum(x * x) / params.columns + params.norm_eps)

    @inlined
    def part(self, x, of_rows, head, col, params):
        """Some columns of these rows, normalised: those of a head from column `col` on."""
        _, scale = of_rows
        return x * scale * self.columns(params.norm_weights, x, head, col)

    @inlined
    def columns(self, of, x, head, col):
        """The elements of an array (head, column) for these columns."""
        return load(of, x.row_vec, (head, col), 0, 1, True)


class Layer(Rms):
    """The same of x - mean(x), plus a bias."""

    @property
    def params(self) -> dict[str, Any]:
        """See Rms. norm_bias: (head, column)."""
        return {"norm_weights": array(2), "norm_bias": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def of_rows(self, x, params):
        mean = row_sum(x) / params.columns
        centred = right_fill(x - mean, params.columns, 0.0)
        return mean, rsqrt(row_sum(centred * centred) / params.columns + params.norm_eps)

    @inlined
    def part(self, x, of_rows, head, col, params):
        mean, scale = of_rows
        weights = self.columns(params.norm_weights, x, head, col)
        return (x - mean) * scale * weights + self.columns(params.norm_bias, x, head, col)


@static
class Normed(Variant):
    """A variant whose queries are normalised by `norm`."""

    cheap_mask = True
    prepares_queries = True

    norm: Rms

    def __str__(self):
        return f"{self.norm} queries"

    @property
    def params(self) -> dict[str, Any]:
        return self.norm.params

    @inlined
    def query_stats(self, x, ctx):
        return self.norm.of_rows(x, ctx.params)

    @inlined
    def prepare_queries(self, x, of_queries, ctx, col):
        return self.norm.part(x, of_queries, ctx.head, col, ctx.params)


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that normalises keys. norm: which. head_dim: columns of a row, padded. aligned: do rows
    begin at multiples of 16 bytes?"""

    norm: Rms
    head_dim: int
    dtype: dtype
    aligned: bool

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * WARPS

    @property
    def rows(self):
        """Rows of a block."""
        return ROWS * WARPS

    def __str__(self):
        return f"{self.norm} keys, D {self.head_dim} {self.dtype}" + ", by elements" * (not self.aligned)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations, the same for all GPUs."""
    for of, norm, head_dim in itertools.product((bf16, fp16) if everything else (bf16,), (Rms(), Layer()), SHAPES):
        yield Config(norm, head_dim, of, True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, X, ALIGNED = config.dtype, rt(ROWS, config.head_dim, fp32), config.aligned
    PART = rt(ROWS, 32, fp32)
    norm, PARAMS = config.norm, record(**config.norm.params)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def normalise(gX: array(4, INPUT), gOut: array(4, INPUT), params: PARAMS, blocks: INT, heads: INT):
        """The norm of every row of X (batch, row, head, column)."""
        batch_head, block = divmod(cuda.blockIdx.x, blocks)
        batch, head = divmod(batch_head, heads)
        row = ROWS * (WARPS * block + int32(cuda.threadIdx.x // LANES))
        of_rows = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
        for col in range(0, X.cols, PART.cols):  # again, from near: all at once would take too many registers
            at = batch, row, head, col
            store(gOut, INPUT(norm.part(load(gX, PART, at, 1, 3, ALIGNED), of_rows, head, col, params)), at, 1, 3, True)

    return normalise, None
