"""ops/reductions/numbers.py: one number of an array, of any dtype."""

import numpy as np
import pytest
from numba import cuda

from ops import load_number, store, zeros
from tiles import bf16, fp8e4m3, fp16, fp32, rt
from tiles.testing import blank


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp8e4m3], ids=str)
def test_one_number(run, dtype):
    """Every lane gets the number of an array with one element, and of one with one per row."""

    TILE = rt(16, 16, fp32)

    @cuda.jit
    def body(x, rows, y):
        store(y, zeros(TILE) + load_number(x, (0,)), (0, 0))
        store(y, zeros(TILE) + load_number(rows, (2, 0)), (16, 0))

    x, rows, y = np.array([-2.5], dtype.np), np.array([[1], [2], [-7], [4]], dtype.np), blank((32, 16))
    run(body, x, rows, y)
    assert (y[:16] == -2.5).all() and (y[16:] == -7).all()
