"""Matrix products in the interpreter, by NumPy's BLAS: of both scopes, so that the same rows have the same bits in all."""

import numpy as np

from .supported import MULTIPLE

ONE_THREAD = 2**18  # multiplications up to which OpenBLAS starts no threads


def product(a, b):
    """a @ b, in parts of 16 rows that BLAS computes on one thread: more threads make a product this small up to 600 times
    slower when the cores are busy.

    Rows of `a` are BLAS's columns, which it takes 16 at a time: a row's bits do not depend on its place then, as on a GPU. As
    BLAS's rows they do where a processor has AVX2 and no more."""
    step = max(1, ONE_THREAD // (MULTIPLE * b.shape[1]))
    bands = [a[row : row + MULTIPLE] for row in range(0, a.shape[0], MULTIPLE)]
    found = [sum([(b[k : k + step].T @ band[:, k : k + step].T).T for k in range(0, a.shape[1], step)]) for band in bands]
    return found[0] if len(found) == 1 else np.concatenate(found)
