"""Level 1, one warpgroup, one tile: wgmma multiplies what four warps carry to shared memory through their registers.

Everything waits for everything: loads, stores and products take turns, and every element passes through a register.

On an H200: 62 and 56 TFLOPS at 4096^3 and 8192^3, 0.08 and 0.07 of cuBLAS (bench/test_gemm.py).
"""

from functools import partial

from ladder import check
from numba import cuda

import tiles
from ops import warpgroup, zeros
from tiles import bf16, fp32, rt, shared, st

A, B, C = st(64, 64, bf16), st(128, 64, bf16), rt(16, 128, fp32)
CARRIED_A, CARRIED_B = rt(16, 64, bf16), rt(32, 64, bf16)  # one warp's quarter of A and B
smem = shared(a=A, b=B)


@cuda.jit(launch_bounds=(warpgroup.THREADS, 1))
def gemm(gA, gB, gC, steps):
    """One tile of C = A B^T; `steps` tiles along k."""
    a, b = smem.open()
    row, col = A.rows * cuda.blockIdx.y, B.rows * cuda.blockIdx.x
    acc = zeros(C)
    for j in range(steps):
        warpgroup.store(a, warpgroup.load(gA, CARRIED_A, (row, A.cols * j)))
        warpgroup.store(b, warpgroup.load(gB, CARRIED_B, (col, A.cols * j)))
        warpgroup.sync()
        acc = warpgroup.wait(warpgroup.mma_ABt(acc, a, b))
        warpgroup.sync()
    warpgroup.store(gC, acc, (row, col))


def matmul(a, b, c):
    """c = a @ b.T"""
    (m, k), n = a.shape, b.shape[0]
    grid = -(-n // B.rows), -(-m // A.rows)
    tiles.launch(gemm, grid, warpgroup.THREADS, shared=smem)(a, b, c, -(-k // A.cols))


main = partial(check, matmul)

if __name__ == "__main__":
    main()
