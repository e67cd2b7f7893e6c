"""y = silu(x @ gate) * (x @ up), for few rows: x (M, K) with M up to ROWS, gate, up (K, N), y (M, N) in bf16.

Weights stream through rings and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each, and add up
what they have. Weights are on their way before the grid before this one is done: it must not write them.
"""

from numba import cuda

import tiles
from ops import cluster, grid, silu, store, subtile, transpose, warpgroup
from ops.cluster_sum import ClusterSum
from tiles import barrier, bf16, fp32, ring, rt, shared, st

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES, AHEAD = 16, 64, 128, 2, 6, 6
CONSUMERS = COLUMNS // 64
FETCHER, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, 4 * CONSUMERS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, W = st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16)
total = ClusterSum(BLOCKS, WARPS, rt(16, ROWS, fp32))
smem = shared(
    gate=ring(W, STAGES, WARPS), up=ring(W, STAGES, WARPS), x=ring(X, AHEAD, WARPS),
    gates=total.parts, gates_full=barrier(total.finishers), ups=total.parts, ups_full=barrier(total.finishers),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def gated_mlp(gX, gGate, gUp, y, steps):
    """A cluster has COLUMNS of y, a block `steps` of DEPTH along its part of K."""
    gate, up, x, gates, gates_full, ups, ups_full = smem.open()
    me, col, first = warpgroup.id(), cuda.blockIdx.x // BLOCKS, cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(steps):
            gate.fill(i, gGate, (first + i, col))
            up.fill(i, gUp, (first + i, col))
        cluster.wait()
    elif me == FETCHER:
        grid.wait()
        grid.release()
        for i in range(steps):
            x.fill(i, gX, (0, first + i))
        cluster.wait()
    else:
        acc = warpgroup.mm_AtBt(subtile(gate.wait(0), DEPTH, 0, 64, me), x.wait(0))
        acc2 = warpgroup.mm_AtBt(subtile(up.wait(0), DEPTH, 0, 64, me), x.wait(0))
        for i in range(1, steps):
            acc = warpgroup.mma_AtBt(acc, subtile(gate.wait(i), DEPTH, 0, 64, me), x.wait(i))
            acc2 = warpgroup.mma_AtBt(acc2, subtile(up.wait(i), DEPTH, 0, 64, me), x.wait(i))
            warpgroup.wait(newer=2)
            gate.release(i - 1)
            up.release(i - 1)
            x.release(i - 1)
        acc, acc2 = warpgroup.wait(acc), warpgroup.wait(acc2)
        cluster.wait()
        total.send(acc, gates, gates_full)
        total.send(acc2, ups, ups_full)
        if total.mine():
            acc = silu(total.receive(acc, gates, gates_full)) * total.receive(acc2, ups, ups_full)
            store(y, transpose(bf16(acc)), (0, COLUMNS * col + 16 * total.warp()))


def launch(x, gate, up, y):
    """y = silu(x @ gate) * (x @ up)"""
    k, n = gate.shape
    blocks, steps = -(-n // COLUMNS) * BLOCKS, -(-k // (BLOCKS * DEPTH))
    run = tiles.launch(gated_mlp, blocks, THREADS, shared=smem, cluster=BLOCKS, early=True)
    run(tiles.tensor(x, X), tiles.tensor(gate, W), tiles.tensor(up, W), y, steps)
