"""What the tests of tiles.inspect look at: a kernel with a helper, and another version of it."""

from numba import cuda

from ops import exp, load, row_sum, store, warpgroup
from tiles import bf16, fp32, inlined, rt, shared, st
from tiles.launching.arguments import array

T = rt(16, 16, fp32)
plan = shared(a=st(64, 64, bf16), b=st(64, 64, bf16))


@inlined
def normalized(t):
    return t / row_sum(t)


@cuda.jit
def plain(x, y):
    """Each of sixteen rows is divided by its sum."""
    t = load(x, T, (0, 0))
    store(y, normalized(t), (0, 0))


@cuda.jit
def other(x, y):
    """Each of sixteen rows is divided by its sum."""
    t = exp(load(x, T, (0, 0)))
    store(y, normalized(t), (0, 0))


@cuda.jit
def product(x: array(2)):
    a, b = plan.open()
    store(x, warpgroup.wait(warpgroup.mm_AB(a, b)), (0, 0))
