"""y = x @ w + (x @ a) @ b, for few rows: x (M, K) with M up to 64, w (K, N), a (K, R), b (R, N), y (M, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each, of x @ a
too, and add up what they have. Four warps take turns along k with x @ a: their parts lie side by side, and meet b four times.
"""

from numba import cuda

import tiles
from ops import cluster, grid, load, mma_AtBt, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum
from tiles import barrier, bf16, fp32, ring, rt, shared, st

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES = 16, 64, 64, 2, 8
RANK, CONSUMERS = 16, COLUMNS // 64
SIDE, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, 4 * CONSUMERS
AHEAD = -(-STAGES // 4) * 4  # x's slots: each is always read by the same warps
THREADS = PRODUCER * warpgroup.THREADS + 32
X, W, ACC = st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, ROWS, fp32)
A, XA, B = st(DEPTH, RANK, bf16), rt(RANK, ROWS, fp32), st(RANK, COLUMNS, bf16)
A_HELD, X_HELD = rt(DEPTH, RANK, bf16, "col"), rt(ROWS, DEPTH, bf16)
total = ClusterSum(BLOCKS, WARPS, ACC)
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, AHEAD, WARPS + 1), a=ring(A, AHEAD, 1),
    b=ring(st(4 * RANK, COLUMNS, bf16), 1, WARPS), xa=ring(st(4 * RANK, ROWS, bf16), 1, WARPS, writers=4),
    parts=total.parts, full=barrier(total.finishers),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def lora_linear(gX, gW, gA, gB, y, steps):
    """A cluster has COLUMNS of y, a block `steps` of DEPTH along its part of K."""
    w, x, a, b, xa, parts, full = smem.open()
    me, col, first = warpgroup.id(), cuda.blockIdx.x // BLOCKS, cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(min(steps, STAGES)):
            w.fill(i, gW, (first + i, col))
        grid.wait()
        grid.release()
        for i in range(steps):
            x.fill(i, gX, (0, first + i))
            a.fill(i, gA, (first + i, 0))
            if i >= STAGES:
                w.fill(i, gW, (first + i, col))
        for part in range(4):
            b.fill(0, gB, (0, col), part, 4)
        cluster.wait()
    elif me == SIDE:
        narrow = zeros(XA)
        for i in range(warpgroup.rank(), steps, 4):  # its warps take turns
            narrow = mma_AtBt(narrow, load(a.wait(i), A_HELD), load(x.wait(i), X_HELD))
            a.release(i)
            x.release(i)
        store(subtile(xa.claim(0), RANK, warpgroup.rank()), narrow)
        xa.publish(0)
        cluster.wait()
    else:
        acc = warpgroup.mm_AtBt(subtile(w.wait(0), DEPTH, 0, 64, me), x.wait(0))
        for i in range(1, steps):
            acc = warpgroup.mma_AtBt(acc, subtile(w.wait(i), DEPTH, 0, 64, me), x.wait(i))
            warpgroup.wait(newer=1)
            w.release(i - 1)
            x.release(i - 1)
        acc = warpgroup.mma_AtB(acc, subtile(b.wait(0), 4 * RANK, 0, 64, me), xa.wait(0))
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
    operands = tiles.tensor(x, X), tiles.tensor(w, W), tiles.tensor(a, A), tiles.tensor(b, B)
    run = tiles.launch(lora_linear, blocks, THREADS, shared=smem, cluster=BLOCKS, early=True)
    run(*operands, y, steps)
