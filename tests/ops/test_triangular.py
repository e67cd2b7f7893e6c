"""ops/triangular.py: inverses of small triangular tiles."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, wide

from ops import inverse_unit_lower, load, store
from tiles import fp32, rt

BLOCK, ROWS = rt(16, 16, fp32), rt(16, 64, fp32)


@cuda.jit
def invert(x, y):
    store(y, inverse_unit_lower(load(x, BLOCK, (0, 0))), (0, 0))


def test_inverse_unit_lower(run, sample):
    """(I + L)^-1, whatever stands on and above the diagonal."""
    x, y = 0.3 * sample((16, 16)), blank((16, 16))
    x[np.triu_indices(16)] = np.nan
    run(invert, x, y)
    close(y, np.linalg.inv(np.eye(16) + np.tril(np.nan_to_num(wide(x)), -1)), atol=1e-5)


def test_inverse_of_all_ones(run):
    """Whose powers are as large as binomials, and whose inverse has nothing but 1 and -1: it is exact."""
    x, y = np.ones((16, 16), np.float32), blank((16, 16))
    run(invert, x, y)
    assert (y == np.eye(16) - np.eye(16, k=-1)).all()


def test_inverse_of_a_block_that_grows(run):
    """Entries up to 2^14: the relative error stays that of a few roundings."""
    x, y = np.full((16, 16), -1, np.float32), blank((16, 16))
    run(invert, x, y)
    close(y, np.linalg.inv(np.eye(16) - np.tril(np.ones((16, 16)), -1)), ulp=1)


def test_rule(run):
    @cuda.jit
    def wide_tile(x):
        inverse_unit_lower(load(x, ROWS, (0, 0)))

    x = np.zeros((64, 64), np.float32)
    with pytest.raises(TypeError, match=r"inverse_unit_lower: takes rt\(16, 16, fp32\), got rt\(16, 64, fp32\)"):
        run(wide_tile, x)
