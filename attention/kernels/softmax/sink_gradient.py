"""The gradient of sinks. A sink is a key without a value:

    dsink[head] = -sum over batches and rows of exp(sink[head] - lse[row]) delta[row]

The order of the sum is fixed: the same bits every time."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numpy import int32

from ops import block, divmod, exp2, finish_sum, lane_sum, load, zeros
from tiles import fp32, rt, shared, sv
from tiles.launching.arguments import INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.backward.gradient_outputs import StoreGradient

WARPS, HEADS, QUERIES = 16, 16, 32  # warps and heads of a thread block; queries of each head that a warp takes at once
TILES = 32, 64, 128  # queries of the main kernels' tiles
LOG2_E = np.float32(np.log2(np.e))


@dataclass(frozen=True)
class Config:
    """The kernel's configuration. rows: queries of the main kernel's tiles, in which `prepare` stores lse and delta. result:
    how the gradient is stored."""

    rows: int
    result: StoreGradient
    threads = LANES * WARPS

    def __str__(self):
        return f"sinks, {self.rows} queries, {type(self.result).__name__.lower()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture: for each height of the main kernels' query tiles."""
    for rows in TILES:
        yield Config(rows, StoreGradient(fp32))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, X, PARTS, result = config.rows, rt(HEADS, QUERIES, fp32), config.rows // QUERIES, config.result
    smem = shared(scratch=sv(HEADS * WARPS, fp32))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sinks(gLseDelta: array(3), gSink: array(1), gDSink: array(1), batches: INT, tiles: INT):
        """The gradients of the sinks of HEADS heads. gLseDelta is (batch, head, row): of each query tile lse of all rows, then
        delta of all rows."""
        (scratch,) = smem.open()
        head, warp = int32(HEADS * cuda.blockIdx.x), int32(cuda.threadIdx.x // LANES)
        sink = load(gSink, X.col_vec, (head,)) * LOG2_E
        total = lane_sum(zeros(X))
        for n in range(warp, batches * tiles * PARTS, WARPS):
            batch, rest = divmod(int32(n), tiles * PARTS)
            tile, part = divmod(rest, PARTS)
            at = int32(2 * ROWS * tile + QUERIES * part)
            lse = load(gLseDelta, X, (batch, head, at), 1, 2, True)
            delta = load(gLseDelta, X, (batch, head, int32(at + ROWS)), 1, 2, True)
            total = total + lane_sum(exp2(sink - lse) * delta)
        total = block.reduce_sum(finish_sum(total), scratch)
        if warp == 0:
            result.store_vector(gDSink, -total, X.col_vec, (head,))

    return sinks, smem
