"""Partial dK and dV: the work on one block of keys, split over several thread blocks, and the kernel that combines the results.

A thread block has a block of keys and goes through all queries that see it, of all query heads that share its key head. So dK
and dV are summed in registers. With few key heads or few keys there are then few thread blocks: 32 for two sequences of 2048
keys and one head; 16 for cross-attention from two images of any size to two texts of 77 tokens, with 8 heads. So several thread
blocks may have the same keys: each takes one group of the query heads, and one part of their query tiles. Each stores a partial
dK and dV in the inputs' dtype, and one more kernel sums these, in float32 and in a fixed order."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

ROWS, COLUMNS = 16, 64  # keys and columns that a warp sums at once
WARPS = 4  # warps of a thread block


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that combines. partials: of each key head. head_dim, value_dim: columns of dK and of dV,
    padded. vector_bytes: the bytes that addresses and strides are multiples of. overlaps_previous: does the kernel begin while
    the grid before it ends (programmatic dependent launch, PDL)?"""

    partials: int
    head_dim: int
    value_dim: int
    dtype: dtype
    vector_bytes: int
    overlaps_previous: bool
    threads = LANES * WARPS

    def __str__(self):
        dims = f"D {self.head_dim}/{self.value_dim} {self.dtype}"
        copies = f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)
        return f"{self.partials} partials, {dims}{copies}" + " PDL" * self.overlaps_previous


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    for input_dtype, partials in itertools.product((bf16, fp16) if everything else (bf16,), (2, 8)):
        yield Config(partials, 128, 128, input_dtype, 16, target.has_wgmma)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PARTIALS, OUT, VECTOR_BYTES, PDL = config.partials, config.dtype, config.vector_bytes, config.overlaps_previous
    X = rt(ROWS, COLUMNS, config.dtype)
    K_PANELS, V_PANELS = config.head_dim // COLUMNS, config.value_dim // COLUMNS

    @inlined
    def combine_panel(gPartial, gOut, batch, row, head, column):
        """gOut = the sum of gPartial over the partials of a key head, for ROWS keys and COLUMNS columns."""
        total = zeros(rt(ROWS, COLUMNS, fp32))
        for n in range(PARTIALS):
            total = total + fp32(load(gPartial, X, (batch, row, int32(PARTIALS * head + n), column), 1, 3, True))
        store(gOut, OUT(total), (batch, row, head, column), 1, 3, VECTOR_BYTES)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        gPartialDK: array(4, OUT), gPartialDV: array(4, OUT), gDK: array(4, OUT), gDV: array(4, OUT), tiles: INT, heads: INT,
    ):  # fmt: skip
        """dK and dV of ROWS keys, one of the `tiles` of a batch's key head, from those of the head's partials. The first warps
        begin with dK, the last ones with dV."""
        if PDL:
            grid.wait()
        batch_head, tile = divmod(cuda.blockIdx.x, tiles)
        batch, head = divmod(batch_head, heads)
        row, warp = int32(ROWS * tile), cuda.threadIdx.x // LANES
        for panel in range(warp, K_PANELS, WARPS):
            combine_panel(gPartialDK, gDK, batch, row, head, int32(COLUMNS * panel))
        for panel in range(WARPS - 1 - warp, V_PANELS, WARPS):
            combine_panel(gPartialDV, gDV, batch, row, head, int32(COLUMNS * panel))

    return combine, None
