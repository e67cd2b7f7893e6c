"""ops/elementwise/functions.py: functions of one tile, vector or number, and `map`."""

import math

import numpy as np
import pytest
from numba import cuda

import ops
from ops import exp2, full, load, sigmoid, store
from tiles import bf16, fp16, fp32, inlined, rt
from tiles.testing import EPS, blank, close, meaning, ptx, wide

ERF = np.vectorize(math.erf, otypes=[np.float64])
ABOUT_X = 1.2  # ulp of exp(x) for each 1 of |x|: the error of x * log2(e)


def tanh_form(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# name: reference in float64, ulp and absolute error at x
FUNCTIONS = {
    "exp2": (np.exp2, lambda x: 2, 0),
    "exp": (np.exp, lambda x: 2 + ABOUT_X * x, 0),
    "log2": (np.log2, lambda x: 2, lambda x: 2.0**-21.5),
    "log": (np.log, lambda x: 3, lambda x: 2.0**-21.5),
    "abs": (np.abs, lambda x: 0, 0),
    "relu": (lambda x: np.fmax(x, 0), lambda x: 0, 0),
    "sqrt": (np.sqrt, lambda x: 1, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: 2, 0),
    "reciprocal": (lambda x: 1 / x, lambda x: 1, 0),
    "tanh": (np.tanh, lambda x: 0, lambda x: np.minimum(x, 1) * 2.0**-11),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: 4 + ABOUT_X * x, 0),
    "silu": (lambda x: x / (1 + np.exp(-x)), lambda x: 5 + ABOUT_X * x, 0),
    "softplus": (lambda x: np.logaddexp(0, x), lambda x: 2, lambda x: 2.0**-21),
    "gelu": (lambda x: x / 2 * (1 + ERF(x / math.sqrt(2))), lambda x: 2, lambda x: x * 2.0**-22),
    "gelu_tanh": (tanh_form, lambda x: 2, lambda x: x * 2.0**-11),
}
POSITIVE = ("log", "log2", "sqrt", "rsqrt")
EXTREMES = [-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 127.0, -126.0, 128.5, -1000.0, 1e38, 2.0**-126, 0.5, 88.0, -87.0]
NAMES = list(FUNCTIONS)


@pytest.mark.parametrize("names", [NAMES[:5], NAMES[5:10], NAMES[10:]], ids=" ".join)
def test_functions_of_one_tile(run, sample, names):
    T, V = rt(16, 32, fp32), rt(16, 64, fp32, "col").row_vec
    f, g, h, i, j = (getattr(ops, name) for name in names)

    @cuda.jit
    def body(x, r, out, vector):
        a, row = load(x, T, (0, 0)), load(r, V, (0,))
        store(out, f(a), (0, 0, 0), 1, 2)
        store(vector, f(row), (0, 0))
        store(out, g(a), (1, 0, 0), 1, 2)
        store(vector, g(row), (1, 0))
        store(out, h(a), (2, 0, 0), 1, 2)
        store(vector, h(row), (2, 0))
        store(out, i(a), (3, 0, 0), 1, 2)
        store(vector, i(row), (3, 0))
        store(out, j(a), (4, 0, 0), 1, 2)
        store(vector, j(row), (4, 0))

    x, r = sample((16, 32)) * np.float32(4), sample(64)
    x[0, :16] = EXTREMES
    x[1:4] = np.abs(x[1:4])
    x[4] = np.exp2(x[4] * 5)
    out, vector = blank((5, 16, 32)), blank((5, 64))
    run(body, x, r, out, vector)
    with np.errstate(all="ignore"):
        for k, name in enumerate(names):
            reference, ulp, error = FUNCTIONS[name]
            for actual, X in ((out[k], wide(x)), (vector[k], wide(r))):
                size = np.where(np.isfinite(X), np.abs(X), 0)
                close(actual, reference(X), ulp=ulp(size), atol=error(size) if error else 0)


def test_exponentials_are_never_subnormal(run):
    """0 below 2 ** -126, by meaning as on a GPU. A product of two factors may be in range where one of them is not."""
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, out):
        a = load(x, T, (0, 0))
        store(out, exp2(a), (0, 0, 0), 1, 2)
        store(out, ops.exp(a), (1, 0, 0), 1, 2)

    x = np.full((16, 16), -126, np.float32)
    x[0, :4] = -126.5, -130, -149, -1000
    out = blank((2, 16, 16))
    run(body, x, out)
    np.testing.assert_array_equal(out[0, 0, :4], 0)
    np.testing.assert_array_equal(out[0, 1:], np.float32(2.0**-126))
    np.testing.assert_array_equal(out[1], 0)


def test_gelu_cubic():
    """The meaning's tanh is exact, and a digit of the form's constant shows, which tanh.approx would hide."""

    @cuda.jit
    def body(x, y):
        store(y, ops.gelu_tanh(load(x, rt(16, 64, fp32), (0, 0))), (0, 0))

    x, y = np.linspace(-4, 4, 1024, dtype=np.float32).reshape(16, 64), blank((16, 64))
    meaning(body, x, y)
    close(y, tanh_form(wide(x)), atol=2.0**-16)


def test_every_function_is_in_the_table():
    assert [op_function.__name__ for op_function in ops.elementwise.functions.FUNCTIONS] == NAMES


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_two_byte_elements_are_rounded_once(run, sample, dtype):
    T = rt(32, 16, dtype)

    @cuda.jit
    def body(x, n, out, vector):
        a = load(x, T, (0, 0))
        store(out, ops.silu(a), (0, 0))
        store(vector, full(T.col_vec, ops.sqrt(n)), (0,))

    x, out, vector = sample((32, 16), dtype), blank((32, 16), dtype), blank(32, dtype)
    run(body, x, 2.0, out, vector)
    close(out, wide(x) / (1 + np.exp(-wide(x))), ulp=0.5 + 12 * EPS[fp32] / EPS[dtype])
    close(vector, np.full(32, math.sqrt(2)), ulp=0.51)


@inlined
def leaky(x):
    if x > 0:
        return x
    return x * np.float32(0.25)


@cuda.jit(device=True)
def halved(x):
    return math.floor(x) * 0.5


def test_map_takes_a_function_of_ones_own(run, sample):
    """A plain function, a device function that ends in float64, one of Numba's, and an op."""
    T, B = rt(16, 32, fp32), rt(16, 32, bf16, "col")

    @cuda.jit
    def body(x, y, out, half, sine, col):
        a = load(x, T, (0, 0))
        store(out, ops.map(a, leaky), (0, 0))
        store(half, ops.map(load(y, B, (0, 0)), halved), (0, 0))
        store(sine, ops.map(a, math.floor), (0, 0))
        store(col, ops.map(load(x, T.col_vec, (0, 0), 1, 0), sigmoid), (0,))

    x, y = sample((16, 32)), sample((16, 32), bf16)
    out, half, sine, col = blank((16, 32)), blank((16, 32), bf16), blank((16, 32)), blank(16)
    run(body, x, y, out, half, sine, col)
    X = wide(x)
    assert (out == np.where(X > 0, X, X / 4)).all()
    assert (half == np.floor(wide(y)) * 0.5).all() and (sine == np.floor(X)).all()
    close(col, 1 / (1 + np.exp(-X[:, 0])), ulp=8)


@inlined
def leaky_by(x, slope):
    if x > 0:
        return x
    return x * slope


@inlined
def between(x, low, high):
    return min(max(x, low), high)


def test_map_of_several(run, sample):
    """A number that is known at run time only, and tiles and vectors that broadcast."""
    T, B = rt(16, 32, fp32), rt(32, 32, bf16, "col")

    @cuda.jit
    def body(x, y, slope, out, vector, clamped, narrow):
        a, b = load(x, T, (0, 0)), load(y, B, (0, 0))
        store(out, ops.map(a, leaky_by, slope), (0, 0))
        store(vector, ops.map(ops.row_max(a), leaky_by, 2.0), (0,))
        store(clamped, ops.map(a, between, -1.0, ops.col_max(a)), (0, 0))
        store(narrow, ops.map(ops.row_max(b), between, b, 2), (0, 0))

    x, y = sample((16, 32)), sample((32, 32), bf16)
    x[3] = -np.abs(x[3])
    out, vector, clamped, narrow = blank((16, 32)), blank(16), blank((16, 32)), blank((32, 32), bf16)
    run(body, x, y, 0.25, out, vector, clamped, narrow)
    assert (out == np.where(x > 0, x, x / 4)).all()
    most = x.max(axis=1)
    assert (vector == np.where(most > 0, most, 2 * most)).all()
    assert (clamped == np.minimum(np.maximum(x, -1), x.max(axis=0))).all()
    assert (narrow == np.minimum(wide(y).max(axis=1, keepdims=True), 2)).all()


def test_a_function_may_be_inlined_twice(run):
    @cuda.jit
    def body(y):
        store(y, ops.map(full(rt(16, 16, fp32), -1.0), leaky), (0, 0))

    assert inlined(leaky) is leaky
    y = blank((16, 16))
    run(body, y)
    assert (y == -0.25).all()


@pytest.mark.parametrize("op_function", [ops.abs, ops.relu, abs])
def test_integers_outside_kernels_stay_integers(op_function):
    """Those that a mask in Python computes with."""
    y = op_function(np.array([3, 7]))
    assert y.dtype.kind == "i" and (y == [3, 7]).all() and ops.sqrt(np.array([4])).dtype == np.float32


def test_map_by_a_function_of_fewer():
    @cuda.jit
    def body(x):
        ops.map(load(x, rt(16, 16, fp32), (0, 0)), leaky, 1.0)

    with pytest.raises(TypeError, match="map: the function does not take 2 numbers: .*too many positional arguments"):
        ptx(body, blank((16, 16)))
    with pytest.raises(TypeError, match=r"leaky\(\) takes 1 positional argument but 2 were given"):
        meaning(body, np.zeros((16, 16), np.float32))


def test_map_by_a_function_of_no_number():
    @inlined
    def both(x):
        return x, x

    @cuda.jit
    def body(x):
        ops.map(load(x, rt(16, 16, fp32), (0, 0)), both)

    with pytest.raises(TypeError, match="map: the function must return a number, got UniTuple"):
        ptx(body, blank((16, 16)))


def test_abs_of_python(run, sample):
    """Of tiles it is ops.abs, of numbers Numba's."""
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, out):
        store(out, abs(load(x, T, (0, 0))) * abs(-2.0), (0, 0))

    x, out = sample((16, 16)), blank((16, 16))
    run(body, x, out)
    close(out, 2 * np.abs(wide(x)), atol=0)


def test_functions_chain_in_registers(run, sample):
    """Ops of ops under @inlined are ops: here softplus."""
    T = rt(16, 16, fp32)

    @inlined
    def softplus(x):
        return ops.log(ops.exp(x) + 1.0)

    @cuda.jit
    def body(x, out):
        store(out, softplus(load(x, T, (0, 0))) - exp2(0.0), (0, 0))

    x, out = sample((16, 16)), blank((16, 16))
    run(body, x, out)
    close(out, np.log1p(np.exp(wide(x))) - 1, atol=2.0**-20)
