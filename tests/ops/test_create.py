"""ops/elementwise/create.py: tiles of constants and indices."""

import re

import numpy as np
import pytest
from numba import cuda

import ops
from ops import col_index, full, load, neg_infty, ones, pos_infty, row_index, store, warpgroup, zeros
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, close, pairs, ptx


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


@pytest.mark.parametrize("dtype", [fp32, fp16])
def test_ones_infinities_and_nan(run, dtype):
    T = rt(16, 16, dtype)

    @cuda.jit
    def body(x, out, col):
        store(out, full(T, -np.inf), (0, 0))
        store(out, full(T, x), (16, 0))
        store(out, neg_infty(T), (32, 0))
        store(out, pos_infty(T), (48, 0))
        store(out, ones(T), (64, 0))
        store(col, ops.maximum(neg_infty(T.col_vec), ones(T.col_vec)), (0,))

    out, col = np.zeros((80, 16), dtype.np), blank(16, dtype)
    run(body, float("nan"), out, col)
    assert np.isnan(out[16:32]).all() and (col == 1).all()
    for first, value in {0: -np.inf, 32: -np.inf, 48: np.inf, 64: 1}.items():
        assert (out[first : first + 16] == value).all()


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 32), (48, 16)], [fp32, bf16, fp16], ["row", "col"]))
def test_indices(run, shape, dtype, side):
    T = rt(*shape, dtype, side)

    @cuda.jit
    def body(rows, cols, col, row):
        store(rows, row_index(T), (0, 0))
        store(cols, col_index(T), (0, 0))
        store(col, row_index(T.col_vec), (0,))
        store(row, col_index(T.row_vec), (0,))

    rows, cols, col, row = blank(shape, dtype), blank(shape, dtype), blank(shape[0], dtype), blank(shape[1], dtype)
    run(body, rows, cols, col, row)
    want = np.indices(shape)
    assert (rows == want[0]).all() and (cols == want[1]).all()
    assert (col == np.arange(shape[0])).all() and (row == np.arange(shape[1])).all()


def test_row_indices_count_through_the_warpgroup(run):
    T = rt(32, 16, fp32)

    @cuda.jit
    def body(rows, col):
        warpgroup.store(rows, warpgroup.row_index(T), (0, 0))
        warpgroup.store(col, warpgroup.row_index(T.col_vec), (0,), 0, 0)

    rows, col = blank((128, 16)), blank(128)
    run(body, rows, col, warps=4)
    assert (rows == np.arange(128)[:, None]).all() and (col == np.arange(128)).all()


def test_types_made_in_the_kernel(run, sample):
    """A tile type may be made of all that is known at compile time: numbers, globals, dtypes, and parts of other types."""
    N, D = 48, bf16

    @cuda.jit
    def body(x, y, col):
        T = rt(16, N, fp32)
        tile = load(x, T, (0, 0)) + zeros(rt(16, cols=N, dtype=fp32))
        store(y, D(tile), (0, 0))
        store(col, ops.row_sum(tile, full(T.col_vec, 1.0)), (0,))
        store(y, zeros(rt(N, 16, D, layout="col")), (16, 0))

    x, y, col = sample((16, N)), blank((64, N), bf16), blank(16)
    run(body, x, y, col)
    assert (y[:16] == x.astype(bf16.np)).all() and (y[16:, :16] == 0).all() and np.isnan(y[16:, 16:]).all()
    close(col, x.sum(axis=1, dtype=np.float64) + 1, atol=1e-4)


def computed_size(x):
    zeros(rt(16, x.shape[1], fp32))


def odd_size(x):
    zeros(rt(16, 17, fp32))


def numpys_dtype(x):
    zeros(rt(16, 16, np.float32))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (computed_size, "rt: cols must be known when the kernel is compiled, got int"),
        (odd_size, "rt: rows and cols must be positive multiples of 16, got 16 x 17"),
        (numpys_dtype, "rt: dtype must be one of (fp32, fp16, bf16"),
    ],
)
def test_mistakes_in_a_type_made_in_the_kernel(mistake, words):
    """Plain TypeErrors with the kernel's line."""
    with pytest.raises(TypeError, match=re.escape(words)) as error:
        ptx(cuda.jit(mistake), np.zeros((16, 16), np.float32))
    assert mistake.__name__ in str(error.value)
