"""Level 3, a pipeline: a producer warpgroup fills a ring of four slots, so that copies run while a consumer multiplies.

`fill` waits until its slot is free, `wait` until its tile is there; producer and consumer no longer take turns. By itself
this gains nothing: four slots leave room for two blocks a multiprocessor instead of five, and one block with a consumer is
no better than five that take turns. But now *one* block can keep a multiprocessor busy, and the larger tiles from here on
depend on that.

On an H200: 412 and 271 TFLOPS at 4096^3 and 8192^3, 0.60 and 0.43 of cuBLAS (bench/test_gemm.py).
"""

from functools import partial

from ladder import check
from numba import cuda

import tiles
from ops import warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st

STAGES = 4
CONSUMER, PRODUCER = 0, 1
THREADS = 2 * warpgroup.THREADS
A, B, C = st(64, 64, bf16), st(128, 64, bf16), rt(16, 128, fp32)
smem = shared(a=ring(A, STAGES), b=ring(B, STAGES))


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm(gA, gB, gC, steps):
    """One tile of C = A B^T; `steps` tiles along k."""
    a, b = smem.open()
    row, col = cuda.blockIdx.y, cuda.blockIdx.x
    if warpgroup.id() == PRODUCER:
        for j in range(steps):
            a.fill(j, gA, (row, j))
            b.fill(j, gB, (col, j))
    else:
        acc = zeros(C)
        for j in range(steps):
            acc = warpgroup.wait(warpgroup.mma_ABt(acc, a.wait(j), b.wait(j)))
            a.release(j)
            b.release(j)
        warpgroup.store(gC, acc, (A.rows * row, B.rows * col))


def matmul(a, b, c):
    """c = a @ b.T"""
    (m, k), n = a.shape, b.shape[0]
    grid = -(-n // B.rows), -(-m // A.rows)
    tiles.launch(gemm, grid, THREADS, shared=smem)(tiles.tensor(a, A), tiles.tensor(b, B), c, -(-k // A.cols))


main = partial(check, matmul)

if __name__ == "__main__":
    main()
