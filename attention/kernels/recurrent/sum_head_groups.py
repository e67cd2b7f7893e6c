"""The gradients of queries and keys that several value heads share: the sum over these, in float32 and in a fixed order.

dx[b, t, g] = sum_(i < group) partial[b, t, g group + i]

in the inputs' dtype. An array in float32 may have any strides; with `accumulate` as much is added to what it holds."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store, zeros
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

X = rt(16, 64, fp32)  # tokens and columns that a warp sums at once
WARPS = 4  # of a block


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of the gradient; float32: addresses and strides are any. vector_bytes: the bytes that
    its address and strides are multiples of. accumulate: is the sum added to the gradient, which is float32?"""

    dtype: dtype
    vector_bytes: int = 16
    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        sizes = f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)
        return f"sums of heads, {self.dtype}" + sizes + ", accumulates" * self.accumulate


FLOAT32, ACCUMULATE = Config(fp32), Config(fp32, accumulate=True)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations; others than those of float32, and of bf16 and 16 bytes, with `everything` only."""
    yield FLOAT32
    yield ACCUMULATE
    yield from itertools.starmap(
        Config, itertools.product((bf16, fp16), VECTOR_SIZES) if everything else ((bf16, VECTOR_SIZES[0]),)
    )


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    OUT, ACCUMULATES = config.dtype, config.accumulate
    ALIGNED, VECTOR_BYTES = (False, False) if OUT is fp32 else (True, config.vector_bytes)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_heads(gPartial: array(4), gOut: array(4, OUT), tiles: INT, panels: INT, heads: INT, group: INT):
        """A warp has 16 tokens of a head, one of the `tiles` of its batch, and goes through the `panels` of 64 columns."""
        batch_head, tile = divmod(int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // LANES), tiles)
        batch, head = divmod(batch_head, heads)
        if batch < gOut.shape[0]:
            for panel in range(panels):
                token, col = int32(X.rows * tile), int32(X.cols * panel)
                total = load(gOut, X, (batch, token, head, col), 1, 3, ALIGNED) if ACCUMULATES else zeros(X)
                for i in range(group):
                    total = total + load(gPartial, X, (batch, token, int32(head * group + i), col), 1, 3, ALIGNED)
                store(gOut, OUT(total), (batch, token, head, col), 1, 3, VECTOR_BYTES)

    return sum_heads, None
