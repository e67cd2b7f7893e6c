"""Level 4, two consumers share a tile of B. Each multiplies its 64 rows of A with it, and one multiplies while the other waits.

Each byte of B that is fetched does twice the work. The producer gives up registers that it does not need, and the consumers
claim them.

On an H200: 544 and 524 TFLOPS at 4096^3 and 8192^3, 0.82 and 0.80 of cuBLAS (bench/test_gemm.py).
"""

from functools import partial

from ladder import check
from numba import cuda

import tiles
from ops import subtile, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st

CONSUMERS, STAGES = 2, 4
PRODUCER, ROWS = CONSUMERS, 64
THREADS = (CONSUMERS + 1) * warpgroup.THREADS
A, B, C = st(CONSUMERS * ROWS, 64, bf16), st(128, 64, bf16), rt(16, 128, fp32)
READERS = CONSUMERS * warpgroup.WARPGROUP
smem = shared(a=ring(A, STAGES, READERS), b=ring(B, STAGES, READERS))


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm(gA, gB, gC, steps):
    """One tile of C = A B^T; `steps` tiles along k."""
    a, b = smem.open()
    row, col = cuda.blockIdx.y, cuda.blockIdx.x
    wg = warpgroup.id()
    if wg == PRODUCER:
        warpgroup.release_registers(40)
        for j in range(steps):
            a.fill(j, gA, (row, j))
            b.fill(j, gB, (col, j))
    else:
        warpgroup.claim_registers(232)
        acc = zeros(C)
        for j in range(steps):
            rows = subtile(a.wait(j), ROWS, wg)
            acc = warpgroup.wait(warpgroup.mma_ABt(acc, rows, b.wait(j)))
            a.release(j)
            b.release(j)
        warpgroup.store(gC, acc, (A.rows * row + ROWS * wg, B.rows * col))


def matmul(a, b, c):
    """c = a @ b.T"""
    (m, k), n = a.shape, b.shape[0]
    grid = -(-n // B.rows), -(-m // A.rows)
    tiles.launch(gemm, grid, THREADS, shared=smem)(tiles.tensor(a, A), tiles.tensor(b, B), c, -(-k // A.cols))


main = partial(check, matmul)

if __name__ == "__main__":
    main()
