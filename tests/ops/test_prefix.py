"""ops/prefix.py: running sums."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, wide

from ops import cumsum, load, store
from tiles import fp32, rt


@pytest.mark.parametrize("length", [16, 64, 128])
def test_cumsum(run, sample, length):
    V = rt(16, length, fp32).row_vec

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, V, (0,))), (0,))

    x, y = sample(length), blank(length)
    run(body, x, y)
    close(y, np.cumsum(wide(x)), atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (32, 48)])
def test_cumsum_down_columns(run, sample, shape):
    T = rt(*shape, fp32, "col")

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, T, (0, 0))), (0, 0))

    x, y = sample(shape), blank(shape)
    run(body, x, y)
    close(y, np.cumsum(wide(x), axis=0), atol=1e-5)
