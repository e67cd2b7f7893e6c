"""What cp.async brings of a global array, and whether it can."""

import numpy as np


def misaligned(array, at, cols, piece):
    """What keeps an array from being copied in pieces of `piece` bytes from index `at` on, or None."""
    steps = [stride for axis, stride in enumerate(array.strides) if axis != cols and array.shape[axis] > 1]
    if array.strides[cols] != array.itemsize or any(step % piece for step in steps) or array.ctypes.data % piece:
        return f"the array (strides {array.strides}, address {array.ctypes.data:#x}) is not aligned to {piece} bytes"
    if at[cols] * array.itemsize % piece:
        return f"column {at[cols]} does not begin at a multiple of {piece} bytes"
    return None


def cut(array, at, shape, rows, cols):
    """The elements of the tile of `shape` at `at`, along two axes of an array, zeros outside it."""
    out, index, inside = np.zeros(shape, array.dtype), list(at), {}
    for axis, extent in ((rows, shape[0]), (cols, shape[1])):
        low, high = (min(max(x, 0), array.shape[axis]) for x in (at[axis], at[axis] + extent))
        index[axis], inside[axis] = slice(low, high), slice(low - at[axis], high - at[axis])
    part = array[tuple(index)]
    out[inside[rows], inside[cols]] = part if rows < cols else part.T
    return out
