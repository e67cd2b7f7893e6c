"""C = A B on the tensor cores: TMA brings tiles of A and B, wgmma multiplies them, fp32 adds up.

A block owns BLOCK_M x BLOCK_N of C. Its producer warpgroup walks along k and keeps the rings full; two consumer warpgroups
own 64 rows each and share the tiles of B. Ragged edges need no code: TMA loads zeros from outside A and B, and `store`
leaves out what lies outside C. The kernel is the same for a C of fp32 or bf16; only bf16 rounds.
"""

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st

CONSUMERS, STAGES = 2, 4
PRODUCER = CONSUMERS
A, B, C = st(64, 64, bf16), st(64, 128, bf16), rt(16, 128, fp32)
BLOCK_M, BLOCK_N, BLOCK_K = CONSUMERS * A.rows, B.cols, A.cols
THREADS = warpgroup.THREADS * (CONSUMERS + 1)
smem = shared(
    a=ring(A, CONSUMERS * STAGES, readers=warpgroup.WARPGROUP),
    b=ring(B, STAGES, readers=CONSUMERS * warpgroup.WARPGROUP),
)


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm(gA, gB, gC, steps):
    """One block of C = A B; `steps` tiles along k."""
    a, b = smem.open()
    row, col = cuda.blockIdx.y, cuda.blockIdx.x
    wg = warpgroup.id()
    if wg == PRODUCER:
        warpgroup.release_registers(40)
        for j in range(steps):
            for c in range(CONSUMERS):
                a.fill(CONSUMERS * j + c, gA, (CONSUMERS * row + c, j))
            b.fill(j, gB, (j, col))
    else:
        warpgroup.claim_registers(232)
        acc = zeros(C)
        for j in range(steps):
            i = CONSUMERS * j + wg
            acc = warpgroup.wait(warpgroup.mma_AB(acc, a.wait(i), b.wait(j)))
            a.release(i)
            b.release(j)
        warpgroup.store(gC, acc, (BLOCK_M * row + A.rows * wg, BLOCK_N * col))


def matmul(a, b, c):
    """c = a @ b for a (M, K), b (K, N) of bf16, K and N multiples of 8 (TMA's strides), and c (M, N) of fp32 or bf16."""
    (m, k), n = a.shape, b.shape[1]
    grid = -(-n // BLOCK_N), -(-m // BLOCK_M)
    tiles.launch(gemm, grid, THREADS, shared=smem)(tiles.tensor(a, A), tiles.tensor(b, B), c, -(-k // BLOCK_K))


def main(to_device=to_device, m=200, n=168, k=328):
    """Multiply matrices whose sides are no multiples of the tiles'."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32).astype(bf16.np) for shape in ((m, k), (k, n)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for dtype, error in ((fp32, 1e-5), (bf16, 2**-8)):  # of sums in fp32; of one rounding to bf16
        c = to_device(np.full((m, n), np.nan, dtype.np))
        matmul(to_device(a), to_device(b), c)
        np.testing.assert_allclose(to_host(c), exact, rtol=error, atol=error * k**0.5)
    print(f"({m} x {k}) @ ({k} x {n}): agrees with NumPy, in fp32 and bf16")


if __name__ == "__main__":
    main()
