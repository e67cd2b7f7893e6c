"""ops/memory/numbers.py: one number of an array, of any dtype."""

import numpy as np
import pytest
from numba import cuda

from ops import load_number, store, zeros
from tiles import Hazard, bf16, fp8e4m3, fp16, fp32, rt
from tiles.testing import blank, meaning


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp8e4m3], ids=str)
def test_one_number(run, dtype):
    """Every lane gets the number of an array with one element, and of one with several per row."""
    TILE = rt(16, 16, fp32)

    @cuda.jit
    def body(x, rows, y):
        store(y, zeros(TILE) + load_number(x, (0,)), (0, 0))
        store(y, zeros(TILE) + load_number(rows, (2, 1)), (16, 0))

    x, rows, y = np.array([-2.5], dtype.np), np.array([[1, 2], [2, 3], [5, -7], [4, 6]], dtype.np), blank((32, 16))
    run(body, x, rows, y)
    assert (y[:16] == -2.5).all() and (y[16:] == -7).all()


def test_no_number_outside_the_array():
    @cuda.jit
    def body(x, y):
        store(y, zeros(rt(16, 16, fp32)) + load_number(x, (1, 2)), (0, 0))

    with pytest.raises(Hazard, match=r"index \(1, 2\) is out of range for an array of shape \(3, 2\)"):
        meaning(body, np.zeros((3, 2), np.float32), blank((16, 16)))
