"""Where an example runs: on this machine's Hopper GPU if it has one, else in the interpreter, on NumPy arrays."""

import numpy as np
from numba import cuda


def hopper():
    """Is there a GPU of compute capability 9.0?"""
    return cuda.is_available() and tuple(cuda.get_current_device().compute_capability) == (9, 0)


def to_device(array):
    """A NumPy array, moved to where kernels run: itself where there is no Hopper GPU."""
    return cuda.to_device(array) if hopper() else array


def to_host(array):
    """Back again, as float32, to compare with NumPy."""
    return (array if isinstance(array, np.ndarray) else array.copy_to_host()).astype(np.float32)
