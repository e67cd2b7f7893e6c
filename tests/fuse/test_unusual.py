"""Functions and lengths of users that no other test has: each once raised an error, or had a proof that did not hold."""

import warnings

import numpy as np
import pytest
from references import compare
from test_row_map import rms_norm

import fuse
from tiles import bf16, fp8e4m3, fp16, fp32

RNG = np.random.default_rng(0)


def normal(*shape, dtype=bf16):
    return RNG.standard_normal(shape).astype(dtype.np)


def form(kernel, *arrays):
    """The form of the row map that serves these arrays."""
    (one,) = kernel.candidates(*arrays)[0].plan.kernels
    return getattr(one, "inner", one).form.__name__


@fuse.kernel
def affine(x, scale, shift):
    return x * scale + shift


def test_the_gradient_of_a_vector_with_an_axis_for_rows():
    """(1, N) broadcasts along the rows, which is known before lengths are."""
    x, scale, shift, dy = normal(3, 5120), normal(3, 1), normal(1, 5120), normal(3, 5120)
    dx, dscale, dshift = affine.gradient.run(x, scale, shift, dy)
    assert dshift.shape == (1, 5120) and np.allclose(dshift.astype(float), dy.astype(float).sum(0), atol=0.05)
    assert dx.shape == x.shape and dscale.shape == (3, 1)


@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_the_proof_of_rows_that_one_warp_folds(dtype):
    """The proof runs at no length that the block has too few warps for."""
    x, g = normal(5, 1024, dtype=dtype), normal(1024, dtype=dtype)
    assert form(rms_norm, x, g) == "FoldedRows" and rms_norm.proof(x, g).holds
    dropped = fuse.kernel(lambda x, seed: fuse.dropout(x, 0.5, seed) * fuse.rsqrt(fuse.mean(x * x)))
    assert dropped.proof(normal(5, 1024), np.array([7])).holds


@fuse.kernel
def loss_with_z(x, w, target):
    scores = x @ w
    greatest = fuse.max(scores)
    lse = fuse.log(fuse.sum(fuse.exp(scores - greatest))) + greatest
    return lse - fuse.pick(scores, target) + 1e-4 * lse * lse


def test_one_row_and_its_index():
    arrays = normal(1, 72), normal(72, 264) / bf16.np.type(8), np.array([263])
    compare(loss_with_z, arrays, loss_with_z.run(*arrays))
    assert loss_with_z.proof(*arrays).holds


def test_the_gradient_of_a_product_of_one_row_and_one_column():
    x, w, dy = normal(1, 72), normal(72, 1), normal(1, 1)
    with pytest.warns(RuntimeWarning, match="it runs by parts"):
        dx, dw = fuse.kernel(lambda x, w: x @ w * 2.0).gradient.run(x, w, dy)
    for actual, want in ((dx, w.T), (dw, x.T)):
        assert np.allclose(actual.astype(float), 2 * float(dy[0, 0]) * want.astype(float), rtol=0.02)


# ---- forms of row maps -----------------------------------------------------------------------------------------------
@fuse.kernel
def two_norms(x, residual, g, h):
    y = residual + x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g
    return y, y * fuse.rsqrt(fuse.mean(y * y) + 1e-5) * h


@fuse.kernel
def smoothed(x, index, number):
    """Cross entropy with label smoothing, of scores that are scaled row by row."""
    scores = x * number
    greatest = fuse.max(scores)
    lse = fuse.log(fuse.sum(fuse.exp(scores - greatest))) + greatest
    return 0.9 * (lse - fuse.pick(scores, index)) + 0.1 * (lse - fuse.mean(scores))


@fuse.kernel
def quantised(x):
    scale = fuse.max(fuse.abs(x)) / 448.0
    return fuse.cast(x / scale, fp8e4m3), fuse.cast(scale, fp32)


@pytest.mark.parametrize(
    ("columns", "expected", "dtype"),
    [
        (32, "ShortRows", bf16), (96, "ShortRows", fp16), (128, "ShortRows", fp32), (128, "ShortRows", bf16),
        (16416, "LongRows", fp32), (17440, "LongRows", bf16),
        pytest.param(17440, "LongRows", fp16, marks=pytest.mark.release),
    ],
)  # fmt: skip
def test_short_and_long_rows(columns, expected, dtype):
    """Rows that one warp holds, and rows that a block reads tile by tile."""
    rows = 70 if columns < 1000 else 3
    index = np.arange(rows, dtype=np.int32) * 7 % columns
    index[0], index[-1] = columns - 1, -1
    x, g = normal(rows, columns, dtype=dtype), normal(columns, dtype=dtype)
    cases = {
        two_norms: (x, normal(rows, columns, dtype=dtype), g, g),
        smoothed: (x, index, normal(rows, 1, dtype=dtype)),
        quantised: (x,),
    }
    for kernel, arrays in cases.items():
        assert form(kernel, *arrays) == expected
        compare(kernel, arrays, kernel.run(*arrays))
    assert smoothed.proof(*cases[smoothed]).holds


# ---- halves ----------------------------------------------------------------------------------------------------------
def gated_halves(x):
    gate, up = fuse.halves(x)
    return fuse.silu(gate) * up


def rotary_of_whole_angles(x, cos, sin):
    """transformers' form: cos and sin have as many columns as x."""
    first, second = fuse.halves(x)
    return x * cos + fuse.concatenate([-second, first]) * sin


HALVES = {
    "a gate and what it gates, side by side": (gated_halves, (5, 128)),
    "with leading axes": (gated_halves, (2, 3, 5, 128)),
    "made by one product of few rows": (lambda x, w: gated_halves(x @ w), (5, 72), (72, 128)),
    "of many rows": (lambda x, w, c: gated_halves(x @ w + c), (150, 72), (72, 128), (128,)),
    "whole angles": (rotary_of_whole_angles, (2, 3, 20, 128), (20, 128), (20, 128)),
    "whole angles, heads last": (rotary_of_whole_angles, (2, 20, 3, 64), (20, 1, 64), (20, 1, 64)),
    "whole angles of rows": (rotary_of_whole_angles, (40, 64), (40, 64), (40, 64)),
}


@pytest.mark.parametrize("case", HALVES)
def test_halves(case):
    """Results with half as many columns, and halves combined with whole rows: by kernels, not by parts."""
    definition, *shapes = HALVES[case]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = kernel.run(*arrays)
    wide = arrays[0].shape[-1] if len(arrays) == 1 else arrays[1].shape[-1]
    assert actual.shape == (*arrays[0].shape[:-1], wide if definition is rotary_of_whole_angles else wide // 2)
    (flat, lead), columns = kernel._flatten_leading(arrays), actual.shape[-1]
    compare(kernel, flat, actual.reshape(*lead.passed, columns) if lead else actual)
    assert kernel.proof(*arrays).holds


def test_the_gradient_of_halves():
    x, dy = normal(5, 128), normal(5, 64)
    gradient = fuse.kernel(gated_halves).gradient
    (dx,) = gradient.run(x, dy)
    compare(gradient, (x, dy), (dx,))
    with pytest.raises(ValueError, match=r"dy: must have the shape of the result, \(5, 64\)"):
        gradient.run(x, x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(70, 96), (300, 128), (3, 17440), (8, 128256), (130, 32000), (40, 2880), (5, 768)]
)
def test_rows_on_the_card(rows, columns):
    """Every form of row map, by clusters of blocks where rows are few and long; and scales of one number."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    index = np.arange(rows, dtype=np.int32) * 7 % columns
    index[0], index[-1] = columns - 1, -1
    x, g = normal(rows, columns), normal(columns)
    cases = {
        two_norms: (x, normal(rows, columns), g, g),
        smoothed: (x, index, normal(rows, 1)),
        fuse.kernel(lambda x, s: fuse.softmax(x * s)): (x, normal(1)),
        fuse.kernel(lambda x, y, s: x + (y - x) * s): (x, normal(rows, columns), normal(1)),
        fuse.kernel(gated_halves): (x,),
    }
    for kernel, arrays in cases.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing runs by parts
            actual = kernel(*map(to_torch, arrays))
        torch.cuda.synchronize()
        compare(kernel, arrays, tuple(map(to_numpy, actual)) if isinstance(actual, tuple) else to_numpy(actual))
