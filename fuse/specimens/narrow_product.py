"""y = x @ a for a narrow a, of rank 16 (or fewer, a multiple of 8): x (M, K), a (K, 16), y (M, 16), for many rows.

All that counts is that x comes at memory speed: a block has 32 rows, and eight warps, each with 16 rows and a quarter of every
tile's columns, whose sums meet at the end. (M / 32 blocks: 4096 rows fill 128 multiprocessors.)"""

from numba import cuda

import tiles
from ops import load, mma_AB, store, subtile, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st

CONSUMERS, STAGES, RANK = 2, 6, 16
PRODUCER, WARPS = CONSUMERS, CONSUMERS * warpgroup.WARPGROUP
THREADS = (CONSUMERS + 1) * warpgroup.THREADS
X, A = st(32, 256, bf16), st(256, RANK, bf16)
BANDS = X.rows // 16
PARTS, PART = WARPS // BANDS, X.cols * BANDS // WARPS
LEFT, RIGHT, ACC = rt(16, PART, bf16), rt(PART, RANK, bf16, "col"), rt(16, RANK, fp32)
smem = shared(x=ring(X, STAGES, WARPS), a=ring(A, STAGES, WARPS), sums=st(16 * WARPS, RANK, fp32))


@cuda.jit(launch_bounds=(THREADS, 1))
def narrow(gX, gA, gY, steps):
    x, a, sums = smem.open()
    row, me = cuda.blockIdx.x, warpgroup.id()
    if me == PRODUCER:
        for i in range(steps):
            x.fill(i, gX, (row, i))
            a.fill(i, gA, (i, 0))
        cuda.syncthreads()
    else:
        warp = me * warpgroup.WARPGROUP + warpgroup.rank()
        band, part = warp % BANDS, warp // BANDS
        acc = zeros(ACC)
        for i in range(steps):
            left = load(subtile(x.wait(i), 16, band, PART, part), LEFT)
            acc = mma_AB(acc, left, load(subtile(a.wait(i), PART, part), RIGHT))
            x.release(i)
            a.release(i)
        store(subtile(sums, 16, warp), acc)
        cuda.syncthreads()
        if warp < BANDS:
            for other in range(1, PARTS):
                acc += load(subtile(sums, 16, other * BANDS + warp), ACC)
            store(gY, acc, (row * X.rows + 16 * warp, 0))


def narrow_product(x, a, y):
    """y = x @ a"""
    m, k = x.shape
    tiles.launch(narrow, -(-m // X.rows), THREADS, shared=smem)(tiles.tensor(x, X), tiles.tensor(a, A), y, -(-k // X.cols))
