"""Where an example runs: on this machine's Hopper GPU if it has one, else in the interpreter, on NumPy arrays."""

import numpy as np
from numba import cuda


def hopper():
    """Is there a GPU of compute capability 9.0?"""
    return cuda.is_available() and tuple(cuda.get_current_device().compute_capability) == (9, 0)


def bits(dtype):
    """The unsigned integers of a dtype's size: Numba's copies know no bf16, so its bits travel."""
    return np.dtype(f"u{dtype.itemsize}")


def on_gpu(array):
    """A copy of a NumPy array in the GPU's memory, as a Numba array."""
    return cuda.to_device(array.view(bits(array.dtype))).view(array.dtype)


def to_device(array):
    """A NumPy array, moved to where kernels run: itself where there is no Hopper GPU."""
    return on_gpu(array) if hopper() else array


def to_host(array):
    """Back again, as float32, to compare with NumPy."""
    if not isinstance(array, np.ndarray):
        array = array.view(bits(array.dtype)).copy_to_host().view(array.dtype)
    return array.astype(np.float32)
