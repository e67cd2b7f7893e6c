"""What fused kernels give, against their definitions in float64."""

import numpy as np

from fuse.evaluate import NumPyArithmetic, evaluate
from tiles.testing import assert_close


def compare(kernel, arrays, got, factor=2):
    """By the error rule: as wrong as the definition, each step rounded to the dtype of the arrays, may be, times `factor`."""
    arrays = kernel._arguments(tuple(arrays))
    found, shapes = kernel.trace(arrays), kernel._shapes(arrays)
    given = {name: x.T if s.transposed else x for name, x, s in zip(kernel.names, arrays, shapes)}
    dtype = next(x.dtype for x in arrays if hasattr(x, "dtype"))
    wide = {name: np.asarray(x, np.float64) for name, x in given.items()}
    ref, low = evaluate(found.roots, wide, NumPyArithmetic(np.float64)), evaluate(found.roots, given, NumPyArithmetic(dtype))
    for y, r, d in zip(got if isinstance(got, tuple) else (got,), ref, low, strict=True):
        assert_close(y, r, d, factor=factor)
