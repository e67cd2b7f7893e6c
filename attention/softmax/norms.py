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

from ops import divmod, load, right_fill, row_sum, rsqrt, store
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
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are. norm_weights: (head, column). columns: of a row."""
        return {"norm_weights": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def scaled(self, x, head, given):
        """A tile of rows of a head, whose columns from given.columns on are 0, divided by their root mean squares."""
        weights = load(given.norm_weights, x.row_vec, (head, 0), 0, 1, True)
        return x * rsqrt(row_sum(x * x) / given.columns + given.norm_eps) * weights

    @inlined
    def rows(self, x, head, given):
        """The norm of such a tile."""
        return self.scaled(x, head, given)


class Layer(Rms):
    """The same of x - mean(x), plus a bias."""

    @property
    def given(self) -> dict[str, Any]:
        """See Rms. norm_bias: (head, column)."""
        return {"norm_weights": array(2), "norm_bias": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def rows(self, x, head, given):
        """See Rms."""
        centred = right_fill(x - row_sum(x) / given.columns, given.columns, 0.0)
        return self.scaled(centred, head, given) + load(given.norm_bias, x.row_vec, (head, 0), 0, 1, True)


@static
class Normed(Variant):
    """Of queries by `norm`."""

    norm: Rms

    def __str__(self):
        return f"{self.norm} queries"

    @property
    def given(self) -> dict[str, Any]:
        """See Variant."""
        return self.norm.given

    @property
    def plain(self) -> bool:
        """See Variant."""
        return True

    @property
    def prepares(self) -> bool:
        """See Variant."""
        return True

    @inlined
    def queries(self, x, at):
        """See Variant."""
        return self.norm.rows(x, at.head, at.given)


@dataclass(frozen=True)
class Config:
    """Of the kernel: the norm, the columns of a row as padded, whether rows begin at multiples of 16 bytes."""

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
    """What keys are normalised with: of any GPU alike."""
    for of, norm, head_dim in itertools.product((bf16, fp16) if everything else (bf16,), (Rms(), Layer()), SHAPES):
        yield Config(norm, head_dim, of, True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, X, ALIGNED = config.dtype, rt(ROWS, config.head_dim, fp32), config.aligned
    norm, GIVEN = config.norm, record(**config.norm.given)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def normalise(gX: array(4, INPUT), gOut: array(4, INPUT), given: GIVEN, blocks: INT, heads: INT):
        """The norm of every row of X (batch, row, head, column)."""
        pair, block = divmod(cuda.blockIdx.x, blocks)
        batch, head = divmod(pair, heads)
        at = batch, ROWS * (WARPS * block + int32(cuda.threadIdx.x // LANES)), head, 0
        store(gOut, INPUT(norm.rows(load(gX, X, at, 1, 3, ALIGNED), head, given)), at, 1, 3, True)

    return normalise, None
