"""Comparison of fused kernels with their definitions in float64."""

import numpy as np

from fuse.language.evaluate import NumPyArithmetic, evaluate
from tiles.testing import assert_close


def compare(kernel, arrays, outputs, factor=2):
    """The error rule: the error may be `factor` times that of the definition with each step rounded to the arrays' dtype."""
    arrays = kernel._arguments(tuple(arrays))
    actual, shapes = kernel.trace(arrays), kernel._shapes(arrays)
    inputs = {name: x.T if s.transposed else x for name, x, s in zip(kernel.names, arrays, shapes)}
    dtype = next(x.dtype for x in arrays if hasattr(x, "dtype"))
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    ref, low = evaluate(actual.roots, wide, NumPyArithmetic(np.float64)), evaluate(actual.roots, inputs, NumPyArithmetic(dtype))
    for y, r, d in zip(outputs if isinstance(outputs, tuple) else (outputs,), ref, low, strict=True):
        assert_close(y, r, d, factor=factor)
