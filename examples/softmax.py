"""Softmax of every row of a matrix, however long: y[i, j] = exp(x[i, j]) / sum_k exp(x[i, k]).

The first pass keeps each row's maximum so far and the sum of exponentials relative to it (Milakov and Gimelshein, 2018);
attention does the same. Four warps take 64 rows together: a warpgroup's `load` gives each warp its 16.
"""

import math

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import exp2, full, maximum, right_fill, row_max, row_sum, warpgroup, zeros
from tiles import fp32, rt

TILE = rt(16, 64, fp32)
LOG2_E = math.log2(math.e)  # exp(x) = exp2(x * LOG2_E)
LOWEST = -1e30  # a maximum to begin with, below every number


@cuda.jit(fastmath=True)
def softmax(x, y):
    """y = softmax of the rows of x, a warpgroup's rows a block."""
    row, cols = warpgroup.ROWS * cuda.blockIdx.x, x.shape[1]
    m = full(TILE.col_vec, LOWEST)
    l = zeros(TILE.col_vec)
    for col in range(0, cols, TILE.cols):
        s = warpgroup.load(x, TILE, (row, col)) * LOG2_E
        s = right_fill(s, cols - col, -math.inf)  # past the end of the row
        m_new = maximum(m, row_max(s))
        l = l * exp2(m - m_new) + row_sum(exp2(s - m_new))
        m = m_new
    for col in range(0, cols, TILE.cols):
        s = warpgroup.load(x, TILE, (row, col)) * LOG2_E
        warpgroup.store(y, exp2(s - m) / l, (row, col))


def main(to_device=to_device, rows=100, cols=300):
    """Softmax of a matrix whose sides are no multiples of the tile's."""
    x = 3 * np.random.default_rng(0).standard_normal((rows, cols), np.float32)
    y = to_device(np.full_like(x, np.nan))
    tiles.launch(softmax, grid=-(-rows // warpgroup.ROWS), block=warpgroup.THREADS)(to_device(x), y)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(to_host(y), e / e.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)
    print(f"softmax of {rows} rows of {cols}: agrees with NumPy")


if __name__ == "__main__":
    main()
