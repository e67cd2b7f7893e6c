"""tiles/compiling/constants.py: what is known when a kernel is compiled, and what is not."""

from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.cuda.compiler import run_frontend

from ops import columns, load, store, zeros
from tiles import fp32, rt
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.constants import FoldConstants
from tiles.launching.arguments import parameter

STAGES, ZERO, HALF, T = 3, 0, 0.5, rt(16, 96, fp32)


def folded(function):
    """The numbers that take the places of expressions."""
    ir, values = run_frontend(function), []
    for block in ir.blocks.values():
        fold = FoldConstants(SimpleNamespace(args=[None] * ir.arg_count))
        if fold.match(ir, block, None, None):
            values += fold.constants.values()
            fold.apply().verify()
    return sorted(values)


def test_names_from_outside():
    inner = 7

    def body(x):
        return x[STAGES - 2, T.cols // 2, T.rows * 3 + inner, 1 << STAGES, 100 % inner, inner >> 1]

    assert folded(body) == sorted([1, 48, 48, 55, 8, 2, 3])


def test_what_is_not_known():
    def body(x, n):
        k = 0
        for _ in range(STAGES):
            k = k + 1 if n else k + STAGES  # k has several definitions
        m = n + STAGES
        return x[k - 1, m * 2, STAGES + HALF, x.ndim - 1, STAGES // ZERO, STAGES % ZERO, True + STAGES, STAGES / 3]

    assert folded(body) == []


def test_ops_take_them():
    """Parts of a tile, the dtype's own size, in the kernel and in what it calls."""

    @cuda.jit
    def kernel(x):
        half = T.cols // 2
        t = load(x, rt(T.rows, half * 2, fp32), (0, 0))
        store(x, columns(t, half, STAGES - 2) + zeros(rt(16, T.cols - half, fp32)), (0, 0))

    array = parameter("x", np.zeros((16, 96), np.float32)).type
    code = compile_kernel(kernel, (array,), "sm_90a")
    assert code.spill_bytes == code.local_bytes == 0
