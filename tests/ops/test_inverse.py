"""ops/inverse.py: the inverse of a unit lower triangular 64 x 64 matrix."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, wide

import tiles
from ops import inverse, warpgroup
from tiles import fp32, rt

PLAN = tiles.shared(high=inverse.TRIANGLE, low=inverse.TRIANGLE, inverse_high=inverse.DIAGONAL, inverse_low=inverse.DIAGONAL)
ROWS = rt(16, 64, fp32)


@cuda.jit
def invert(x, y):
    high, low, inverse_high, inverse_low = PLAN.open()
    for j in range(2):  # twice, as a chunk follows another
        a = warpgroup.load(x, ROWS, (j, 0, 0))
        warpgroup.store(y, inverse.inverse_transposed(a, high, low, inverse_high, inverse_low), (j, 0, 0))


@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_inverse_transposed(run, sample, scale):
    """What stands on and above the diagonal does not matter."""
    x, y = scale * sample((2, 64, 64)), blank((2, 64, 64))
    run(invert, x, y, warps=4, shared=PLAN)
    want = np.linalg.inv(np.eye(64) + np.tril(wide(x), -1)).transpose(0, 2, 1)
    close(y, want, atol=2.0**-13 * np.abs(want).max())


def test_of_all_ones(run):
    """It has powers as large as 64 over 32, and an inverse of nothing but 1 and -1."""
    x, y = np.ones((2, 64, 64), np.float32), blank((2, 64, 64))
    run(invert, x, y, warps=4, shared=PLAN)
    close(y, np.broadcast_to(np.eye(64) - np.eye(64, k=1), (2, 64, 64)), atol=2.0**-13)
