"""Arrays of one number, as scales and gates are, of any dtype, in the interpreter and as compiled.

Numba reads an element of a 16-bit array as an integer; a kernel must not."""

import ml_dtypes
import numpy as np
import pytest
from references import compare

import fuse
from tiles.testing import pairs, ptx

BF16 = ml_dtypes.bfloat16


def matrix(*shape):
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / shape[0] ** 0.25).astype(BF16)


def scaled(x, s):
    return x * s + fuse.max(x) * s


def gated(x, s):
    return x * fuse.tanh(s)


def behind_a_product(x, s, w):
    return fuse.relu(x @ w) * s + s


CASES = {
    "in pieces": (gated, (3, 512), 0),
    "a row of a warp": (scaled, (3, 64), 0),
    "rows in registers": (scaled, (3, 72), 0),
    "rows folded": (scaled, (3, 1088), 0),
    "rows too long": (scaled, (2, 17440), 0),
    "rows read again": (scaled, (2, 2056), 1),  # a number a row, which is no row's vector
    "a row's number, in pieces": (gated, (3, 512), 1),
    "few rows": (behind_a_product, (3, 64), 0),
    "many rows": (behind_a_product, (70, 64), 0),
}


@pytest.mark.parametrize(("case", "dtype"), pairs([*CASES] * 2, [BF16, np.float16, np.float32, np.float16, np.float32, BF16]))
def test_one_number(case, dtype):
    definition, shape, of_rows = CASES[case]
    kernel = fuse.kernel(definition)
    s = np.linspace(0.3, 0.9, shape[0] if of_rows else 1).astype(dtype).reshape((-1, 1) if of_rows else (1,))
    arrays = [matrix(*shape), s, *([matrix(shape[1], 40)] if definition is behind_a_product else [])]
    compare(kernel, arrays, kernel.run(*arrays))
    if shape[1] < 4096 and dtype != np.float32:
        compare(kernel, arrays, ptx(kernel.run, *arrays))


def test_a_number_of_each_of_a_batch():
    arrays = matrix(3, 5, 64), matrix(3, 1, 1), matrix(3, 64, 40)
    kernel = fuse.kernel(behind_a_product)
    for actual in (kernel.run(*arrays), ptx(kernel.run, *arrays)):
        compare(kernel, arrays, actual)
