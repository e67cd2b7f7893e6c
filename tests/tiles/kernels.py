"""Kernels that several tests launch."""

import functools

from numba import cuda

from ops import load, store, warpgroup
from tiles import fp32, ring, rt, shared


@functools.cache
def copies(tile, rank, rows, stages=1):
    """(kernel, plan): block (i, j, k) copies tile i along axis `rows`, j along the last, k over the others, through each
    of `stages` slots of shared memory."""
    smem = shared(buffer=ring(tile, stages))
    place = {
        (2, 0): lambda i, j, k, n, m: (i, j),
        (3, 1): lambda i, j, k, n, m: (k, i, j),
        (3, 0): lambda i, j, k, n, m: (i, k, j),
        (4, 1): lambda i, j, k, n, m: (k // n, i, k % n, j),
        (5, 2): lambda i, j, k, n, m: (k // (n * m), k // m % n, i, k % m, j),
    }[rank, rows]
    at = cuda.jit(device=True, forceinline=True)(place)

    @cuda.jit
    def copy(source, target, n, m):
        (buffer,) = smem.open()
        where = at(cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, n, m)
        for s in range(stages):
            buffer.fill(s, source, where)
        for s in range(stages):
            warpgroup.tma_store(target, where, buffer.wait(s))
        warpgroup.store_wait()

    return copy, smem


TILE = rt(16, 16, fp32)


@cuda.jit
def scale(source, target, factor):
    """target = factor * source, one 16 x 16 tile a block."""
    i, j = 16 * cuda.blockIdx.x, 16 * cuda.blockIdx.y
    store(target, load(source, TILE, (i, j)) * factor, (i, j))
