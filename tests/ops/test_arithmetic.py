"""ops/elementwise/arithmetic.py: arithmetic between tiles, vectors and numbers."""

import operator

import numpy as np
import pytest
from numba import cuda

from ops import exp2, fma, full, load, maximum, minimum, product, store, where
from tiles import bf16, fp16, fp32, rt
from tiles.testing import EPS, blank, close, pairs, wide

FACES = {
    "add": (operator.add, np.add, 1),
    "sub": (operator.sub, np.subtract, 1),
    "mul": (operator.mul, np.multiply, 1),
    "truediv": (operator.truediv, np.divide, 2.5),  # PTX's bound of 2 counts from the rounded quotient
    "maximum": (maximum, np.maximum, 0),
    "minimum": (minimum, np.minimum, 0),
    "product": (product, np.multiply, 1),
}
SHAPES = [(16, 16), (32, 16), (16, 64), (48, 32)]
DTYPES = [fp32, bf16, fp16]


SIDES = ["row", "col", "row", "row", "col"]


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "side"), pairs(list(FACES) * 2, SHAPES + SHAPES[:1], [*DTYPES, fp32], SIDES)
)
def test_every_combination(run, sample, name, shape, dtype, side):
    op_function, reference, ulp = FACES[name]
    T = rt(*shape, dtype, side)

    @cuda.jit
    def body(x, y, c, r, number, xy, xc, cx, xr, rx, xn, nx, cc, cn, rr):
        a, b = load(x, T, (0, 0)), load(y, T, (0, 0))
        col, row = load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        store(xy, op_function(a, b), (0, 0))
        store(xc, op_function(a, col), (0, 0))
        store(cx, op_function(col, a), (0, 0))
        store(xr, op_function(a, row), (0, 0))
        store(rx, op_function(row, a), (0, 0))
        store(xn, op_function(a, number), (0, 0))
        store(nx, op_function(1.5, a), (0, 0))
        store(cc, op_function(col, col * 2), (0,))
        store(cn, op_function(col, 3), (0,))
        store(rr, op_function(row * 2.0, row), (0,))

    x, y, c, r = sample(shape, dtype), sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    outs = [blank(shape, dtype) for _ in range(7)] + [blank(n, dtype) for n in (shape[0], shape[0], shape[1])]
    run(body, x, y, c, r, 0.7, *outs)
    X, Y, C, R = wide(x), wide(y), wide(c)[:, None], wide(r)
    number = np.float32(0.7)
    inputs = [(X, Y), (X, C), (C, X), (X, R), (R, X), (X, number), (1.5, X), (C[:, 0], C[:, 0] * 2), (C[:, 0], 3), (R * 2, R)]
    for out, args in zip(outs, inputs, strict=True):
        close(out, reference(*args), ulp=max(ulp, 0.5 if dtype is not fp32 or name in ("maximum", "minimum") else 1))


def test_in_place_forms_rebind(run, sample):
    T = rt(16, 32, fp32)

    @cuda.jit
    def body(x, out):
        a = load(x, T, (0, 0))
        b = a
        a += 1.0
        a -= b * 0.5
        a *= a
        a /= 2.0
        store(out, a - b, (0, 0))
        store(out, -b, (16, 0))

    x, out = sample((16, 32)), blank((32, 32))
    run(body, x, out)
    X = wide(x)
    close(out[:16], (X + 1 - X * 0.5) ** 2 / 2 - X, atol=4e-6 * np.abs(X).max() ** 2)
    assert (out[16:] == -x).all()


def test_nan_loses_against_a_number_in_maximum_and_minimum(run, sample):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, y, high, low):
        a, b = load(x, T, (0, 0)), load(y, T, (0, 0))
        store(high, maximum(a, b), (0, 0))
        store(low, minimum(a, b), (0, 0))

    x, y = sample((16, 16)), sample((16, 16))
    x[::2], y[:, ::2] = np.nan, np.nan
    x[1, 1], y[1, 1] = np.inf, -np.inf
    high, low = blank((16, 16)), blank((16, 16))
    run(body, x, y, high, low)
    close(high, np.fmax(x, y))
    close(low, np.fmin(x, y))
    assert np.isnan(high[0, 0])


def test_numbers_alone(run):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(n, out):
        store(out, full(T, maximum(n, 2)) * exp2(n) + minimum(0.5, n), (0, 0))

    out = blank((16, 16))
    run(body, 3.0, out)
    close(out, np.full((16, 16), 3 * 8 + 0.5), ulp=4)  # ex2.approx may miss 8


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 16), (32, 48)], [fp32, bf16], ["row", "col"]))
def test_fma_rounds_once(run, sample, shape, dtype, side):
    T = rt(*shape, dtype, side)

    @cuda.jit
    def body(x, y, c, r, n, tiles, broadcast, vectors):
        a, b, col, row = load(x, T, (0, 0)), load(y, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        store(tiles, fma(a, a, b), (0, 0))
        store(broadcast, fma(col, a, row), (0, 0))
        store(vectors, fma(row, n, fma(n, n, -4.0)), (0,))

    x, c, r = sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    y = (-(wide(x) ** 2)).astype(dtype.np)  # what is left is the rounding of the square: gone, if that is rounded too
    outs = [blank(shape, dtype), blank(shape, dtype), blank(shape[1], dtype)]
    run(body, x, y, c, r, 2.0, *outs)
    for out, want in zip(outs, (wide(x) ** 2 + wide(y), wide(c)[:, None] * wide(x) + wide(r), wide(r) * 2), strict=True):
        assert (out == want.astype(np.float32).astype(dtype.np)).mean() > 0.999
        close(out, want, ulp=0.51)


def test_a_product_is_rounded_for_itself(run, sample):
    """The bits are those of three separate operations, where an fma would save one rounding."""
    T = rt(16, 32, fp32)

    @cuda.jit
    def body(x, y, c, n, turned, less):
        a, b, row = load(x, T, (0, 0)), load(y, T, (0, 0)), load(c, T.row_vec, (0,))
        store(turned, product(a, row) - product(b, n), (0, 0))
        store(less, a - product(b, b), (0, 0))

    x, y, c = sample((16, 32)), sample((16, 32)), sample(32)
    turned, less = blank((16, 32)), blank((16, 32))
    run(body, x, y, c, 0.7, turned, less)
    assert (turned == x * c - y * np.float32(0.7)).all() and (less == x - y * y).all()


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_two_byte_elements_are_rounded_once(run, sample, dtype):
    """x * y + 1 in two ops rounds twice; one op is the fp32 result rounded to nearest even."""
    T = rt(16, 32, dtype)

    @cuda.jit
    def body(x, y, product, power, quotient):
        a, b = load(x, T, (0, 0)), load(y, T, (0, 0))
        store(product, a * b, (0, 0))
        store(power, exp2(a), (0, 0))
        store(quotient, a / b, (0, 0))

    x, y = sample((16, 32), dtype), sample((16, 32), dtype)
    product, power, quotient = (blank((16, 32), dtype) for _ in range(3))
    run(body, x, y, product, power, quotient)
    assert (product == (wide(x) * wide(y)).astype(dtype.np)).all()
    close(power, np.exp2(wide(x)), ulp=0.5 + 4 * EPS[fp32] / EPS[dtype])
    close(quotient, wide(x) / wide(y), ulp=0.5 + 4 * EPS[fp32] / EPS[dtype])


def test_minus_0(run):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, out):
        store(out, -load(x, T, (0, 0)), (0, 0))

    x, out = np.zeros((16, 16), np.float32), blank((16, 16))
    x[:, ::2] = -0.0
    run(body, x, out)
    assert (np.signbit(out) == ~np.signbit(x)).all()


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_products_of_two_byte_tiles_are_rounded_once(run, sample, dtype):
    """The bits of the rounded exact product, where it is infinite or below the least normal number, too."""
    T = rt(16, 32, dtype)

    @cuda.jit
    def body(x, y, out):
        store(out, load(x, T, (0, 0)) * load(y, T, (0, 0)), (0, 0))

    x, y, out = sample((16, 32), dtype), sample((16, 32), dtype), blank((16, 32), dtype)
    x[0, :8], y[0, :8] = 30000, 3  # infinite in fp16
    x[1], y[1] = 2.0**-12, wide(sample(32)) * 2.0**-4  # some subnormal in fp16
    x[2, 0] = np.nan
    run(body, x, y, out)
    want = dtype.round(wide(x) * wide(y))
    assert np.array_equal(wide(out), want, equal_nan=True)


def test_integers_outside_kernels_stay_integers_and_index_arrays():
    i = np.arange(4)
    for out, ref in (minimum(i, 2), [0, 1, 2, 2]), (maximum(2, i), [2, 2, 2, 3]), (where(i > 1, i, 7), [7, 7, 2, 3]):
        assert out.dtype.kind == "i" and out.tolist() == ref and i[minimum(out, 3)].shape == (4,)
    assert minimum(i, 2.5).dtype == minimum(i.astype(np.float32), 2).dtype == np.float32
