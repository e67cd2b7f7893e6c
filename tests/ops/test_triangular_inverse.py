"""ops/for_attention/triangular_inverse.py: inverses of unit lower triangular matrices, 16 x 16 and 64 x 64."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import inverse_unit_lower, load, store, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE, inverse_transposed
from tiles import fp32, rt
from tiles.testing import blank, close, wide

PLAN = tiles.shared(
    high=TRIANGLE,
    low=TRIANGLE,
)
BLOCK, ROWS = rt(16, 16, fp32), rt(16, 64, fp32)


@cuda.jit
def invert_block(x, y):
    store(y, inverse_unit_lower(load(x, BLOCK, (0, 0))), (0, 0))


def test_a_block(run, sample):
    """(I + L)^-1, whatever is on and above the diagonal."""
    x, y = 0.3 * sample((16, 16)), blank((16, 16))
    x[np.triu_indices(16)] = np.nan
    run(invert_block, x, y)
    close(y, np.linalg.inv(np.eye(16) + np.tril(np.nan_to_num(wide(x)), -1)), atol=1e-5)


def test_a_block_of_all_ones(run):
    """Its powers are as large as binomials, and its inverse has only 1 and -1: the result is exact."""
    x, y = np.ones((16, 16), np.float32), blank((16, 16))
    run(invert_block, x, y)
    assert (y == np.eye(16) - np.eye(16, k=-1)).all()


def test_a_block_that_grows(run):
    """Entries up to 2^14: the relative error stays that of a few roundings."""
    x, y = np.full((16, 16), -1, np.float32), blank((16, 16))
    run(invert_block, x, y)
    close(y, np.linalg.inv(np.eye(16) - np.tril(np.ones((16, 16)), -1)), ulp=1)


def test_what_is_no_block(run):
    @cuda.jit
    def wide_tile(x):
        inverse_unit_lower(load(x, ROWS, (0, 0)))

    x = np.zeros((64, 64), np.float32)
    with pytest.raises(TypeError, match=r"inverse_unit_lower: takes rt\(16, 16, fp32\), got rt\(16, 64, fp32\)"):
        run(wide_tile, x)


@cuda.jit
def invert(x, y):
    high, low = PLAN.open()
    for j in range(2):  # twice, as a chunk follows another
        a = warpgroup.load(x, ROWS, (j, 0, 0))
        warpgroup.store(y, inverse_transposed(a, high, low), (j, 0, 0))


@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_inverse_transposed(run, sample, scale):
    """Elements on and above the diagonal do not matter."""
    x, y = scale * sample((2, 64, 64)), blank((2, 64, 64))
    run(invert, x, y, warps=4, shared=PLAN)
    want = np.linalg.inv(np.eye(64) + np.tril(wide(x), -1)).transpose(0, 2, 1)
    close(y, want, atol=2.0**-13 * np.abs(want).max())


def test_of_all_ones(run):
    """Its powers are as large as 64 over 32, and its inverse has only 1 and -1."""
    x, y = np.ones((2, 64, 64), np.float32), blank((2, 64, 64))
    run(invert, x, y, warps=4, shared=PLAN)
    close(y, np.broadcast_to(np.eye(64) - np.eye(64, k=1), (2, 64, 64)), atol=2.0**-13)
