"""ops/for_attention/online_softmax.py: the maximum is updated, and sums rescaled, only when it grows by more than a slack."""

import numpy as np
import pytest
from numba import cuda

from ops import lazy_maximum, load, rescale, store
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, pairs


def test_the_maximum_moves_only_by_more_than_the_slack(run, sample):
    T = rt(32, 16, fp32)

    @cuda.jit
    def body(old, new, slack, out):
        store(out, lazy_maximum(load(old, T.col_vec, (0,)), load(new, T.col_vec, (0,)), slack), (0,))

    old, new, out = sample(32), sample(32), blank(32)
    old[:6] = [-np.inf, -np.inf, 1.0, 1.0, 1.0, -1e30]
    new[:6] = [-np.inf, 3.0, 1.5, 1.501, np.nan, -np.inf]
    run(body, old, new, 0.5, out)
    with np.errstate(invalid="ignore"):
        assert (out == np.where(new - old > np.float32(0.5), new, old)).all()
    assert (out[:6] == np.array([-np.inf, 3.0, 1.0, 1.501, 1.0, -1e30], np.float32)).all()


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_the_growth_of_2_byte_vectors_is_not_rounded(run, dtype):
    """They grow by 201.5 (bf16) or 2001.5 (fp16), less than the slack; rounded to their dtype, it would be more."""
    V, size = rt(16, 16, dtype).col_vec, 100 if dtype is bf16 else 1000
    slack = 2 * size + 1.75

    @cuda.jit
    def body(old, new, slack, out):
        store(out, lazy_maximum(load(old, V, (0,)), load(new, V, (0,)), slack), (0,))

    old, new = np.full(16, -size - 1, dtype.np), np.full(16, size + 0.5, dtype.np)
    out = blank(16, dtype)
    growth = new.astype(np.float32) - old.astype(np.float32)
    assert (growth < slack).all() and ((new - old).astype(np.float32) > slack).all()
    run(body, old, new, slack, out)
    assert (out == old).all()


@pytest.mark.parametrize(("shape", "rows"), pairs([(16, 32), (48, 16)], [[], [0], [15, 8], range(16)]), ids=str)
def test_rescale_is_a_product(run, sample, shape, rows):
    """No row, one row or all rows have a factor other than 1; NaN and infinity are factors, too."""
    T = rt(*shape, fp32)

    @cuda.jit
    def body(x, alpha, out):
        store(out, rescale(load(x, T, (0, 0)), load(alpha, T.col_vec, (0,))), (0, 0))

    x, alpha, out = sample(shape), np.ones(shape[0], np.float32), blank(shape)
    alpha[list(rows)] = sample(len(rows))
    if len(rows) > 1:
        alpha[list(rows)[:2]] = np.nan, 0.0
    run(body, x, alpha, out)
    assert np.array_equal(out, x * alpha[:, None], equal_nan=True)


def test_a_factor_of_nan_is_no_1(run, sample):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, alpha, out):
        store(out, rescale(load(x, T, (0, 0)), load(alpha, T.col_vec, (0,))), (0, 0))

    for row in (3, 12):  # a lane's first one, its second one
        x, alpha, out = sample((16, 16)), np.ones(16, np.float32), blank((16, 16))
        alpha[row] = np.nan
        run(body, x, alpha, out)
        assert np.array_equal(out, x * alpha[:, None], equal_nan=True)
