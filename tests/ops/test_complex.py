"""ops/complex.py: pairs of tiles that multiply as complex numbers do."""

import numpy as np
import pytest
from numba import cuda

from ops import complex, load, zeros
from ops import store as store_tile
from ops.matmul.supported import TRANSPOSED
from tiles import bf16, fp16, fp32, rt, shared, st
from tiles.testing import blank, close, pairs


def numbers(array):
    """The complex numbers of a real array with a last axis of two, in double precision."""
    return np.asarray(array, np.float64) @ np.array([1, 1j])


def close_to(actual, want, atol):
    close(actual, np.stack([want.real, want.imag], axis=-1), atol=atol)


@pytest.mark.parametrize(("shape", "side"), pairs([(16, 32), (32, 16)], ["row", "col"]))
def test_element_by_element(run, sample, shape, side):
    T = rt(*shape, fp32, side)

    @cuda.jit
    def body(x, y, v, sums, products, scaled):
        a, b = complex.load(x, T, 0, 0), complex.load(y, T, 0, 0)
        complex.store(sums, complex.sub(complex.add(a, complex.add(b, b)), b), 0, 0)
        complex.store(products, complex.mul(complex.conj(a), b), 0, 0)
        vector = complex.Complex(load(v, T.row_vec, (0, 0)), load(v, T.row_vec, (1, 0)))
        for _ in range(2):  # a complex tile is carried by a loop
            a = complex.mul(a, vector)
        complex.store(scaled, complex.mul(a, complex.Complex(0.0, 1.0)), 0, 0)

    x, y, v = sample((*shape, 2)), sample((*shape, 2)), sample((2, shape[1]))
    sums, products, scaled = (blank((*shape, 2)) for _ in range(3))
    run(body, x, y, v, sums, products, scaled)
    X, Y, V = numbers(x), numbers(y), v[0].astype(np.float64) + 1j * v[1]
    close_to(sums, X + Y, 1e-5)
    close_to(products, X.conj() * Y, 1e-5)
    close_to(scaled, 1j * X * V * V, 1e-4)


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_products(run, sample, dtype):
    """From registers and from shared memory, where a complex tile is two real ones."""
    A, B, C = rt(16, 32, dtype), st(32, 16, dtype), rt(16, 16, fp32)
    T, K = rt(32, 16, dtype), rt(16, 32, dtype)
    plan = shared(re=B, im=B)

    @cuda.jit
    def body(x, y, ab, abt):
        re, im = plan.open()
        b = complex.load(y, T, 0, 0)
        store_tile(re, b.re)
        store_tile(im, b.im)
        cuda.syncthreads()
        a, zero = complex.load(x, A, 0, 0), complex.Complex(zeros(C), zeros(C))
        complex.store(ab, complex.mma_AB(complex.mma_AB(zero, a, complex.Complex(re, im)), a, complex.Complex(re, im)), 0, 0)
        complex.store(abt, complex.mma_ABt(zero, a, complex.load(x, K, 0, 0)), 0, 0)

    x, y = sample((16, 32, 2), dtype), sample((32, 16, 2), dtype)
    ab, abt = blank((16, 16, 2)), blank((16, 16, 2))
    run(body, x, y, ab, abt, shared=plan)
    close_to(ab, 2 * numbers(x) @ numbers(y), 1e-3)
    close_to(abt, numbers(x) @ numbers(x).T, 1e-3)


@pytest.mark.parametrize("form", TRANSPOSED)
def test_every_form_of_products(run, sample, form):
    product, (left, right) = getattr(complex, f"mma_{form}"), TRANSPOSED[form].layouts
    shapes = [(16, 32)[:: -1 if TRANSPOSED[form].left else 1], (32, 48)[:: -1 if TRANSPOSED[form].right else 1]]
    A, B, C = rt(*shapes[0], bf16, left), rt(*shapes[1], bf16, right), rt(16, 48, fp32)

    @cuda.jit
    def body(x, y, z):
        zero = complex.Complex(zeros(C), zeros(C))
        complex.store(z, product(zero, complex.load(x, A, 0, 0), complex.load(y, B, 0, 0)), 0, 0)

    x, y, z = (*(sample((*shape, 2), bf16) for shape in shapes), blank((16, 48, 2)))
    run(body, x, y, z)
    a, b = (numbers(v).T if turned else numbers(v) for v, turned in zip((x, y), TRANSPOSED[form], strict=True))
    close_to(z, a @ b, 1e-3)
