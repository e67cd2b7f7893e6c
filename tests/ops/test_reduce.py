"""ops/reduce.py: along rows, in one go or by lanes first."""

import numpy as np
import pytest
from numba import cuda
from sweep import EPS, blank, close, pairs, wide

from ops import lane_sum, load, row_max, row_sum, store, total
from tiles import bf16, fp16, fp32, rt


@pytest.mark.parametrize(
    ("shape", "dtype"), pairs([(16, 16), (32, 16), (16, 48), (48, 32), (16, 256), (64, 64)], [fp32, bf16, fp16])
)
def test_rows(run, sample, shape, dtype):
    T = rt(*shape, dtype)

    @cuda.jit
    def body(x, greatest, sums, lanes):
        a = load(x, T, (0, 0))
        store(greatest, row_max(a), (0,))
        store(sums, row_sum(a), (0,))
        store(lanes, total(lane_sum(a)), (0,))

    x = sample(shape, dtype)
    greatest, sums, lanes = (blank(shape[0], dtype) for _ in range(3))
    run(body, x, greatest, sums, lanes)
    X = wide(x)
    assert (greatest == x.max(axis=1)).all()
    rounding = np.abs(X).sum(axis=1) * EPS[fp32] * 4  # a sum of n numbers is as wrong as the n numbers are great
    close(sums, X.sum(axis=1), ulp=0.51 if dtype is not fp32 else 0, atol=rounding)
    shares = np.abs(X).sum(axis=1) * EPS[dtype] / 2 * (dtype is not fp32)  # every lane's share is rounded
    close(lanes, X.sum(axis=1), ulp=0.51 if dtype is not fp32 else 0, atol=rounding + shares)


def test_row_max_drops_nan_as_fmax_does(run, sample):
    T = rt(16, 64, fp32)

    @cuda.jit
    def body(x, greatest, sums):
        a = load(x, T, (0, 0))
        store(greatest, row_max(a), (0,))
        store(sums, row_sum(a), (0,))

    x = sample((16, 64))
    for row in range(16):
        x[row, row :: 3 + row] = np.nan
    x[1], x[2], x[3, 5] = np.nan, -np.inf, np.inf
    greatest, sums = blank(16), np.zeros(16, np.float32)
    run(body, x, greatest, sums)
    with np.errstate(all="ignore"):
        close(greatest, np.fmax.reduce(x, axis=1))
    assert np.isnan(greatest[1]) and greatest[2] == -np.inf and greatest[3] == np.inf
    assert np.isnan(sums[[0, 1, 4, 15]]).all() and sums[2] == -np.inf


def test_partial_sums_may_be_scaled_added_and_divided(run, sample):
    """The running sum of an online softmax: l = l * alpha + lane_sum(p), finished once."""
    T = rt(32, 32, fp32)

    @cuda.jit
    def body(x, c, out):
        partial = lane_sum(load(x, T, (0, 0)))
        alpha = load(c, T.col_vec, (0,))
        for _ in range(3):
            partial = partial * alpha + lane_sum(load(x, T, (32, 0)))
        partial *= 2.0
        store(out, total((partial - lane_sum(load(x, T, (0, 0)))) / 4.0), (0,))

    x, c, out = sample((64, 32)), sample(32), blank(32)
    run(body, x, c, out)
    first, second = wide(x)[:32].sum(axis=1), wide(x)[32:].sum(axis=1)
    want = first
    for _ in range(3):
        want = want * wide(c) + second
    size = np.abs(wide(x)).sum(axis=1).max() * (1 + np.abs(wide(c))) ** 3
    close(out, (2 * want - first) / 4, atol=size * EPS[fp32] * 8)
