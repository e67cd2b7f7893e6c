"""What a product of two matrices means on arrays, for all scopes."""

import numpy as np

ONE_THREAD = 2**18  # multiplications up to which OpenBLAS starts no threads


def product(a, b):
    """a @ b in fp32, of int8 in int32: each element the sum of its row and column, rounded once. Added up in float64: BLAS
    adds in an order that depends on where in the tile a row lies, and so would a row's last bits, which on the GPU they do
    not. In parts that BLAS computes on one thread: more threads make a product this small up to 600 times slower when the
    cores are busy."""
    sums = np.int32 if a.dtype == b.dtype == np.int8 else np.float32
    a, b = a.astype(np.float64), b.astype(np.float64)
    step = max(1, ONE_THREAD // (a.shape[0] * b.shape[1]))
    total = a[:, :step] @ b[:step]
    for k in range(step, a.shape[1], step):
        total += a[:, k : k + step] @ b[k : k + step]
    return total.astype(sums)
