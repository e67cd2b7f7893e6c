"""Tiles of an array, cut at places inside it, across its edges and outside."""

import numpy as np

from tiles import bf16, fp16, fp32

DTYPES = [fp32, bf16, fp16]
WIDTHS = [128, 64, 32]
PLACES = [(0, 0), (3, 5), (-7, 2), (4, -9), (30, 33), (-16, 0), (0, 45), (-100, 1000)]  # of an array of 37 x 45


def cut(array, at, shape):
    """The tile of `shape` at `at` of a 2-d array, zeros outside it."""
    out = np.zeros(shape, array.dtype)
    rows, cols = (np.arange(size) + start for size, start in zip(shape, at, strict=True))
    inside = np.ix_((rows >= 0) & (rows < array.shape[0]), (cols >= 0) & (cols < array.shape[1]))
    out[inside] = array[np.ix_(rows[(rows >= 0) & (rows < array.shape[0])], cols[(cols >= 0) & (cols < array.shape[1])])]
    return out
