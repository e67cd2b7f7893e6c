"""Level 8, clusters: two blocks, one below the other in C, work at the same time and share the tiles of B. Each fetches half of
a tile, and TMA multicasts it to both: a third less comes from the L2 cache for the same products.

A ring with `blocks=2` knows which block fetches which half, and waits for the readers of both blocks before it refills a
slot. The kernel shows this only in its last line, where each block waits for the other: a peer may still give slots back
when one block is done. Level 7 was not short of L2 bandwidth, and both levels run into the card's power limit: the gain is 0
to 1 % at 8192^3, and 4096^3 loses as much.

On an H200: 656 and 659 TFLOPS at 4096^3 and 8192^3, 0.97 and 0.97 of cuBLAS (bench/test_gemm.py).
"""

from functools import partial

from ladder import check
from numba import cuda
from numpy import int32

import tiles
from ops import cluster, columns, persistent_tile, rasterize, subtile, warpgroup
from tiles import bf16, inlined, ring, shared, st

CONSUMERS, STAGES, GROUP, BLOCKS = 2, 4, 8, 2
PRODUCER, ROWS = CONSUMERS, 64
THREADS = (CONSUMERS + 1) * warpgroup.THREADS
A, B = st(CONSUMERS * ROWS, 64, bf16), st(256, 64, bf16)
HALF = B.rows // 2  # of C's columns at a time: for all of them, the ring would have to give a slot away
C = st(CONSUMERS * ROWS, HALF, bf16)
PART = st(ROWS, HALF, bf16)
READERS = CONSUMERS * warpgroup.WARPGROUP
smem = shared(a=ring(A, STAGES, READERS), b=ring(B, STAGES, READERS, blocks=BLOCKS), c=C)
B_PART = smem.items["b"].part


@inlined
def send(gC, row, col, shared_tile, tile):
    """gC[row, col] = tile, by way of the shared tile, as soon as what was there before has left."""
    warpgroup.store_wait()
    warpgroup.sync()
    warpgroup.store(shared_tile, tile)
    warpgroup.tma_store(gC, (row, col), shared_tile)


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm(gA, gB, gC, rows, cols, steps):
    """C = A B^T, of rows x cols pairs of tiles; `steps` tiles along k."""
    a, b, c = smem.open()
    wg, rank = warpgroup.id(), cluster.rank()
    r = j = int32(0)  # tiles of C and steps along k so far
    if wg == PRODUCER:
        warpgroup.release_registers(40)
        while persistent_tile(r, BLOCKS) < rows * cols:
            pair, col = rasterize(persistent_tile(r, BLOCKS), rows, cols, GROUP)
            row = BLOCKS * pair + rank
            for i in range(steps):
                a.fill(j + i, gA, (row, i))
                b.fill(j + i, gB, (col, i))
            r, j = int32(r + 1), int32(j + steps)
    else:
        warpgroup.claim_registers(232)
        c_rows = subtile(c, ROWS, wg)
        while persistent_tile(r, BLOCKS) < rows * cols:
            pair, col = rasterize(persistent_tile(r, BLOCKS), rows, cols, GROUP)
            row = BLOCKS * pair + rank
            acc = warpgroup.mm_ABt(subtile(a.wait(j), ROWS, wg), b.wait(j))
            for i in range(int32(j + 1), int32(j + steps)):
                acc = warpgroup.mma_ABt(acc, subtile(a.wait(i), ROWS, wg), b.wait(i))
                warpgroup.wait(newer=1)
                a.release(i - 1)
                b.release(i - 1)
            acc = warpgroup.wait(acc)
            r, j = int32(r + 1), int32(j + steps)
            a.release(j - 1)
            b.release(j - 1)
            send(gC, CONSUMERS * row + wg, 2 * col, c_rows, columns(acc, HALF, 0))
            send(gC, CONSUMERS * row + wg, 2 * col + 1, c_rows, columns(acc, HALF, 1))
        warpgroup.store_wait()
    cluster.sync()


def matmul(a, b, c):
    """c = a @ b.T"""
    (m, k), n = a.shape, b.shape[0]
    rows, cols, steps = -(-m // (BLOCKS * A.rows)), -(-n // B.rows), -(-k // A.cols)
    grid = BLOCKS * min(rows * cols, tiles.processors(c) // BLOCKS)
    operands = tiles.tensor(a, A), tiles.tensor(b, B_PART), tiles.tensor(c, PART)
    tiles.launch(gemm, grid, THREADS, shared=smem, cluster=BLOCKS)(*operands, rows, cols, steps)


main = partial(check, matmul)

if __name__ == "__main__":
    main()
