"""y = x * rsqrt(mean(x * x, -1) + 1e-5) * g, row by row, for up to 4096 columns: x and y (M, K), g (K,), K a multiple of 8.

A row is a tile here, cut into 16 or 8 parts that lie one below the other, so that the four warps of a block share it and a lane
reads 16 bytes at a time. g stays in registers from one row to the next."""

from numba import cuda
from numpy import int32

import tiles
from ops import block, load, rsqrt, store, tile_sum
from tiles import bf16, fp32, rt, shared, sv
from tiles.device import machine
from tiles.frameworks import describe

WARPS, BLOCKS = 4, 8  # of a block, of a multiprocessor
THREADS = 32 * WARPS
X = rt(16, 64, fp32)
smem = shared(sums=sv(16, fp32))


@cuda.jit(launch_bounds=(THREADS, BLOCKS))
def normalise(gX, gG, gY, rows, scale):
    (sums,) = smem.open()
    row, col = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x // 32 * X.cols)
    g = load(gG, X, (0, col))
    while row < rows:
        x = load(gX, X, (row, 0, col))
        mean = block.reduce_sum(tile_sum(x * x), sums) * scale
        store(gY, bf16(x * rsqrt(mean + 1e-5) * g), (row, 0, col))
        row += int32(cuda.gridDim.x)


def normalise_rows(x, g, y):
    """y = x * rsqrt(mean(x * x, -1) + 1e-5) * g"""
    m, k = x.shape
    if k > WARPS * X.rows * X.cols or k % 8:
        raise ValueError(f"normalise_rows: a multiple of 8 up to {WARPS * X.rows * X.cols} columns, got {k}")
    parts = 16 if k % 16 == 0 else 8
    cut = parts, k // parts
    grid = min(m, BLOCKS * machine(describe(y, "y").device).processors)
    arrays = x.reshape(m, *cut), g.reshape(cut), y.reshape(m, *cut)
    tiles.launch(normalise, grid, THREADS, shared=smem)(*arrays, m, 1 / k)
