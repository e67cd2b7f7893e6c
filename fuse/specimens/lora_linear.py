"""y = x @ w + (x @ a) @ b, for few rows: x (M, K) with M up to ROWS, w (K, N), a (K, RANK), b (RANK, N), y (M, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each, of x @ a
too, and add up what they have. The warps that share x @ a lay their parts side by side, against as many copies of b. Weights
are on their way before the grid before this one is done: it must not write them.
"""

from numba import cuda

import tiles
from ops import cluster, grid, load, mma_AB, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum
from tiles import barrier, bf16, fp32, ring, rt, shared, st

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES, AHEAD = 16, 64, 128, 2, 8, 8
RANK, CONSUMERS, BANDS = 16, COLUMNS // 64, ROWS // 16
PREPARER, FETCHER, PRODUCER, WARPS, TURNS = CONSUMERS, CONSUMERS + 1, CONSUMERS + 2, 4 * CONSUMERS, 4 // BANDS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, W, BAND = st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, DEPTH, bf16)
A, B, XA = st(DEPTH, RANK, bf16), st(TURNS * RANK, COLUMNS, bf16), st(ROWS, TURNS * RANK, bf16, width=2 * RANK)
total = ClusterSum(BLOCKS, WARPS, rt(16, ROWS, fp32))
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, AHEAD, WARPS + BANDS), a=ring(A, AHEAD, BANDS),
    b=ring(B, 1, WARPS), xa=ring(XA, 1, WARPS, writers=4), parts=total.parts, full=barrier(total.finishers),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def lora_linear(gX, gW, gA, gB, y, steps):
    """A cluster has COLUMNS of y, a block `steps` of DEPTH along its part of K."""
    w, x, a, b, xa, parts, full = smem.open()
    me, col, first = warpgroup.id(), cuda.blockIdx.x // BLOCKS, cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(steps):
            w.fill(i, gW, (first + i, col))
        cluster.wait()
    elif me == FETCHER:
        grid.wait()
        grid.release()
        for i in range(steps):
            x.fill(i, gX, (0, first + i))
            a.fill(i, gA, (first + i, 0))
        for part in range(TURNS):
            b.fill(0, gB, (0, col), part, TURNS)
        cluster.wait()
    elif me == PREPARER:
        band, turn = warpgroup.rank() % BANDS, warpgroup.rank() // BANDS  # the warps of a band take turns along k
        narrow = zeros(rt(16, RANK, fp32))
        for i in range(turn, steps, TURNS):
            narrow = mma_AB(narrow, load(subtile(x.wait(i), 16, band), BAND), load(a.wait(i), rt(DEPTH, RANK, bf16, "col")))
            x.release(i)
            a.release(i)
        store(subtile(xa.claim(0), 16, band, RANK, turn), narrow)
        xa.publish(0)
        cluster.wait()
    else:
        acc = warpgroup.mm_AtBt(subtile(w.wait(0), DEPTH, 0, 64, me), x.wait(0))
        for i in range(1, steps):
            acc = warpgroup.mma_AtBt(acc, subtile(w.wait(i), DEPTH, 0, 64, me), x.wait(i))
            warpgroup.wait(newer=1)
            w.release(i - 1)
            x.release(i - 1)
        acc = warpgroup.mma_AtBt(acc, subtile(b.wait(0), TURNS * RANK, 0, 64, me), xa.wait(0))
        acc = warpgroup.wait(acc)
        x.release(steps - 1)
        cluster.wait()
        total.send(acc, parts, full)
        if total.mine():
            acc = total.receive(acc, parts, full)
            store(y, transpose(bf16(acc)), (0, COLUMNS * col + 16 * total.warp()))


def launch(x, w, a, b, y):
    """y = x @ w + (x @ a) @ b"""
    k, n = w.shape
    blocks, steps = -(-n // COLUMNS) * BLOCKS, -(-k // (BLOCKS * DEPTH))
    run = tiles.launch(lora_linear, blocks, THREADS, shared=smem, cluster=BLOCKS, early=True)
    run(tiles.tensor(x, X), tiles.tensor(w, W), tiles.tensor(a, A), tiles.tensor(b, st(RANK, COLUMNS, bf16)), y, steps)
