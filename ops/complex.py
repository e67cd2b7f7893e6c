"""Complex tiles: pairs of tiles, and a few functions of ops. For use as `from ops import complex`.

    z = complex.mul(x, y)
    acc = complex.mma_AB(acc, a, b)               four real products

An array of complex64 is passed as its real view with a last axis of two: `z.view(np.float32).reshape(*z.shape, 2)`. In shared
memory a complex tile is two real ones. (x + y would be Python's sum of two tuples: use add.)
"""

from typing import Any, NamedTuple

from tiles.op import inlined

from .matmul import mma
from .memory import load_store


class Complex(NamedTuple):
    """re + i im: two tiles or vectors of one type, or numbers."""

    re: Any
    im: Any


@inlined
def add(x, y):
    return Complex(x.re + y.re, x.im + y.im)


@inlined
def sub(x, y):
    """x - y, of complex numbers given as (real, imaginary) tiles."""
    return Complex(x.re - y.re, x.im - y.im)


@inlined
def mul(x, y):
    """x y, element by element; one of them may be a complex vector or number."""
    return Complex(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)


@inlined
def conj(x):
    """The conjugate of x: re - i im."""
    return Complex(x.re, -x.im)


@inlined
def load(source, spec, row, col):
    """Two tiles of type `spec` that begin at (row, col) of an array of shape (rows, cols, 2)."""
    return Complex(load_store.load(source, spec, (row, col, 0), 0, 1), load_store.load(source, spec, (row, col, 1), 0, 1))


@inlined
def store(target, value, row, col):
    """target[...] = value, from (row, col) on, for an array of shape (rows, cols, 2)."""
    load_store.store(target, value.re, (row, col, 0), 0, 1)
    load_store.store(target, value.im, (row, col, 1), 0, 1)


@inlined
def _product(real, acc, a, b):
    """acc + a b, where `real` does the same with real tiles."""
    return Complex(real(real(acc.re, a.re, b.re), -a.im, b.im), real(real(acc.im, a.re, b.im), a.im, b.re))


@inlined
def mma_AB(acc, a, b):
    """acc + a b, by one warp; a in registers, b there or in shared memory."""
    return _product(mma.mma_AB, acc, a, b)


@inlined
def mma_ABt(acc, a, b):
    """acc + a bᵀ, which is not conjugated, by one warp; a in registers, b there or in shared memory."""
    return _product(mma.mma_ABt, acc, a, b)


@inlined
def mma_AtB(acc, a, b):
    """acc + aᵀ b, which is not conjugated, by one warp; a in registers, b there or in shared memory."""
    return _product(mma.mma_AtB, acc, a, b)


@inlined
def mma_AtBt(acc, a, b):
    """acc + aᵀ bᵀ, which is not conjugated, by one warp; a in registers, b there or in shared memory."""
    return _product(mma.mma_AtBt, acc, a, b)
