"""ops/make.py: tiles from nothing."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, pairs

from ops import full, store, zeros
from tiles import bf16, fp16, fp32, rt


@pytest.mark.parametrize(("shape", "dtype"), pairs([(16, 16), (32, 48)], [fp32, bf16, fp16]))
def test_full_and_zeros(run, shape, dtype):
    T = rt(*shape, dtype)

    @cuda.jit
    def body(x, n, full_tile, zero_tile, col, row, zero_col, zero_row):
        store(full_tile, full(T, x), (0, 0))
        store(zero_tile, zeros(T), (0, 0))
        store(col, full(T.col_vec, 3), (0,))
        store(row, full(T.row_vec, n), (0,))
        store(zero_col, zeros(T.col_vec), (0,))
        store(zero_row, zeros(T.row_vec), (0,))

    sizes = [shape, shape, shape[0], shape[1], shape[0], shape[1]]
    outs = [blank(s, dtype) for s in sizes]
    run(body, 0.1, -7, *outs)
    for out, value in zip(outs, (np.array(np.float32(0.1)).astype(dtype.np), 0, 3, -7, 0, 0), strict=True):
        close(out, np.full(out.shape, value))


def test_infinities_and_nan(run):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, out):
        store(out, full(T, -np.inf), (0, 0))
        store(out, full(T, x), (16, 0))

    out = np.zeros((32, 16), np.float32)
    run(body, float("nan"), out)
    assert (out[:16] == -np.inf).all() and np.isnan(out[16:]).all()
