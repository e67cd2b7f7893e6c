"""The part of a global array that a cp.async copies, and whether it can copy it."""

import numpy as np

from ..cp_async import vector_sizes_of


def misaligned(array, at, cols, vector_bytes):
    """Why an array cannot be copied in pieces of `vector_bytes` bytes from index `at` on, or None."""
    if array.strides[cols] != array.itemsize or any(step % vector_bytes for step in _steps(array, cols)):
        return f"the array (strides {array.strides}, address {array.ctypes.data:#x}) is not aligned to {vector_bytes} bytes"
    if at[cols] * array.itemsize % vector_bytes:
        return f"column {at[cols]} does not begin at a multiple of {vector_bytes} bytes"
    return None


def _steps(array, cols):
    """What must be multiples of `vector_bytes`: the array's address, and its strides but for that along `cols`."""
    steps = [stride for axis, stride in enumerate(array.strides) if axis != cols and array.shape[axis] > 1]
    return [array.ctypes.data, *steps]


def remedy(array, at, cols):
    """The remedy for an array that is not aligned to the bytes in which it is to be copied."""
    fits = [n for n in vector_sizes_of(array.itemsize) if not misaligned(array, at, cols, n)]
    return f"vector_bytes={fits[0]} copies it" if fits else "load and store it"


def copy_box(array, at, shape, rows, cols):
    """The elements of the tile of `shape` at `at`, along two axes of an array, zeros outside it."""
    out = np.zeros(shape, array.dtype)
    part, where = inside(array, at, shape, rows, cols)
    out[where] = part
    return out


def inside(array, at, shape, rows, cols):
    """(the part of that tile that lies inside the array, as a view; which part of the tile it is)"""
    index, where = list(at), {}
    for axis, extent in ((rows, shape[0]), (cols, shape[1])):
        low, high = (min(max(x, 0), array.shape[axis]) for x in (at[axis], at[axis] + extent))
        index[axis], where[axis] = slice(low, high), slice(low - at[axis], high - at[axis])
    part = array[tuple(index)]
    return part if rows < cols else part.T, (where[rows], where[cols])
