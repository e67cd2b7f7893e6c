"""Operators in plausible combinations that no other test has, against float64, by kernels and not by parts.

Arguments, by letters: x rows and columns, p rows and the inner extent, w weights from there to the columns, g and h of the
columns, c of the rows, i a column for each row, m a mask to be added, e weights of fp8, 0 a number, 1 an array of one."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from references import compare

import fuse
from fuse import exp, gelu, log, maximum, mean, minimum, pick, rsqrt, sigmoid, silu, softmax, sqrt, tanh, var, where
from fuse import max as greatest
from fuse import sum as total
from tiles import bf16, fp16, fp32

BF16 = ml_dtypes.bfloat16


def rms(x, g):
    return x * rsqrt(mean(x * x) + 1e-5) * g


def log_sum(x):
    return log(total(exp(x - greatest(x)))) + greatest(x)


def share(x, y):
    p = softmax(x)
    return total(p * ((x - log_sum(x)) - (y - log_sum(y))))


def adam(p, g, m, rate):
    m = 0.9 * m + 0.1 * g
    return p - rate * m / (sqrt(m * m) + 1e-8), m


def standing_apart(x, g):
    centred = x - mean(x)
    y = centred * rsqrt(mean(centred * centred) + 1e-5) * g
    return y, rms(y, g) + x


FUNCTIONS = {
    "a softmax over masked rows": ("xm", lambda x, m: softmax(x * 0.3 + m)),
    "a softmax where": ("xx", lambda x, y: softmax(where(y > -1.0, x, -1e9))),
    "its logarithm": ("x", lambda x: x - log_sum(x)),
    "softer": ("x0", lambda x, t: softmax(x / t)),
    "two norms": ("xgh", lambda x, g, h: rms(rms(x, g), h)),
    "norm, add, norm": ("xg", standing_apart),
    "a norm and a gate": ("xxg", lambda x, z, g: rms(x, g) * silu(z)),
    "a gate and a norm": ("xxg", lambda x, z, g: rms(x * silu(z), g)),
    "by the length": ("x", lambda x: x / maximum(sqrt(total(x * x)), 1e-6)),
    "standardised": ("x", lambda x: (x - mean(x)) / sqrt(var(x) + 1e-5)),
    "between ends": ("x", lambda x: (x + greatest(-x)) / (greatest(x) + greatest(-x) + 1e-6)),
    "above the mean": ("x", lambda x: greatest(x) - mean(x)),
    "columns and rows": ("xcg", lambda x, c, g: (x - c) * g + c),
    "an outer product": ("cgx", lambda c, g, x: x + c * g),
    "numbers of rows": ("xc", lambda x, c: (total(x) * c, greatest(x) + c)),
    "of two rows": ("xx", lambda x, y: total(x * y) * rsqrt(total(x * x) + 1e-8) * rsqrt(total(y * y) + 1e-8)),
    "a divergence": ("xx", share),
    "smoothed labels": ("xi", lambda x, i: 0.9 * (log_sum(x) - pick(x, i)) + 0.1 * (log_sum(x) - mean(x))),
    "a loss of its size": ("x", lambda x: log_sum(x) * log_sum(x)),
    "chosen by chosen": ("xx", lambda x, y: where(x > y, x - y, where(x < -y, x + y, 0.0))),
    "an approximate gelu": ("x", lambda x: 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x**3)))),
    "hard": ("x", lambda x: x * minimum(maximum(x + 3.0, 0.0), 6.0) / 6.0),
    "a step": ("xxx0", adam),
    "some of another": ("xxg", lambda x, y, g: x + (y - x) * g),
    "a scale of one number": ("1xx", lambda s, x, y: s * x + y),
    "GeGLU with biases": ("pwwgh", lambda p, w, v, g, h: gelu(p @ w + g) * (p @ v + h)),
    "three projections with biases": ("pwwwggh", lambda p, w, v, u, g, h, k: (p @ w + g, p @ v + h, p @ u + k)),
    "a residual and a product": ("pwgx", lambda p, w, g, x: x + p @ w + g),
    "a product's rows": ("pwx", lambda p, w, x: total((p @ w) * x)),
    "a router": ("pwg", lambda p, w, g: (sigmoid(p @ w), sigmoid(p @ w) + g)),
    "a bias inside a soft cap": ("pwg", lambda p, w, g: 30.0 * tanh((p @ w + g) / 30.0)),
    "weights of fp8 with scales": ("peg", lambda p, e, g: silu((p @ e) * g)),
    "a loss of a product": ("pwi", lambda p, w, i: log_sum(p @ w) - pick(p @ w, i) + 1e-4 * log_sum(p @ w) * log_sum(p @ w)),
}


def sample(kinds, rows, columns, dtype, inner=72):
    """An argument for each letter."""
    rng, actual = np.random.default_rng(rows), []
    for kind in kinds:
        shape = {"x": (rows, columns), "m": (rows, columns), "p": (rows, inner), "w": (inner, columns), "e": (inner, columns)}
        shape |= {"g": (columns,), "h": (columns,), "c": (rows, 1), "1": (1,), "0": ()}
        if kind == "i":
            actual.append(rng.integers(0, columns, rows))
            continue
        x = rng.standard_normal(shape[kind]).astype(np.float32)
        if kind == "m":
            x = np.where(x > 1, -np.inf, 0)
            x[:, 0] = 0
        x = x / inner**0.5 if kind in "we" else x
        actual.append(0.7 if kind == "0" else x.astype(ml_dtypes.float8_e4m3fn if kind == "e" else dtype.np))
    return actual


PROBLEMS = [(17, 136, bf16), (1, 96, fp16), (70, 1056, bf16), (5, 704, fp32)]
CASES = [  # two problems for each function, in turn; no template multiplies matrices of float32
    pytest.param(case, *problem, marks=[] if (n + m) % 4 < 2 else [pytest.mark.release])
    for n, (case, (kinds, _)) in enumerate(FUNCTIONS.items())
    for m, problem in enumerate(PROBLEMS[: 3 if {*kinds} & {*"pwe"} else 4])
]


@pytest.mark.parametrize(("case", "rows", "columns", "dtype"), CASES)
def test_plausible(case, rows, columns, dtype, monkeypatch):
    kinds, definition = FUNCTIONS[case]
    monkeypatch.setenv("TILES_CHECK", "0")  # test_as_compiled.py has the templates compiled
    kernel, arrays = fuse.kernel(definition), sample(kinds, rows, columns, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*it runs by parts")
        compare(kernel, arrays, kernel.run(*arrays))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("columns", [72, 96, 704, 17440])
def test_dtypes_in_any_order(order, columns):
    """The result has the first array's dtype."""
    arrays = [
        np.random.default_rng(n).standard_normal((3, columns)).astype(t) for n, t in enumerate((np.float32, BF16, np.float16))
    ]
    kernel = fuse.kernel(lambda x, y, z: (x - mean(y)) * z + greatest(x))
    inputs = [arrays[n] for n in order]
    outputs = kernel.run(*inputs)
    assert outputs.dtype == inputs[0].dtype
    want = kernel.definition(*[x.astype(np.float64) for x in inputs])
    error = np.abs(outputs.astype(np.float64) - want).max()
    bits = 20 if outputs.dtype == np.float32 else 10 if outputs.dtype == np.float16 else 7
    assert error <= 2.0**-bits * np.abs(want).max()
