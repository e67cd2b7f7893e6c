"""y = silu(x @ gate) * (x @ up), for few rows: x (M, K) with M up to 64, gate, up (K, N), y (M, N) in bf16.

Weights stream through rings and stand on the left of y.T = w.T @ x.T; both share what is loaded of x. The blocks of a cluster
take a part of K each, and add up what they have.
"""

from numba import cuda
from numpy import int32

import tiles
from ops import cluster, divmod, persistent_tile, silu, store, subtile, transpose, warpgroup
from ops.cluster_sum import ClusterSum
from tiles import barrier, bf16, fp32, ring, rt, shared, st
from tiles.device import machine
from tiles.frameworks import describe

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES = 16, 64, 128, 4, 5
CONSUMERS = COLUMNS // 64
PRODUCER, WARPS = CONSUMERS, 4 * CONSUMERS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, W, ACC = st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, ROWS, fp32)
total = ClusterSum(BLOCKS, WARPS, ACC)
smem = shared(
    gate=ring(W, STAGES, WARPS), up=ring(W, STAGES, WARPS), x=ring(X, STAGES, WARPS),
    gates=total.parts, gates_full=barrier(total.finishers), gates_free=barrier(total.senders),
    ups=total.parts, ups_full=barrier(total.finishers), ups_free=barrier(total.senders),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def gated_mlp(gX, gGate, gUp, y, rounds, steps):
    """A cluster takes `rounds` tiles of y, a block `steps` of DEPTH along its part of K."""
    gate, up, x, gates, gates_full, gates_free, ups, ups_full, ups_free = smem.open()
    me, first = warpgroup.id(), cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(rounds * steps):
            r, step = divmod(i, steps)
            x.fill(i, gX, (0, first + step))
            gate.fill(i, gGate, (first + step, persistent_tile(r, BLOCKS)))
            up.fill(i, gUp, (first + step, persistent_tile(r, BLOCKS)))
        cluster.wait()
    else:
        cluster.wait()
        for r in range(rounds):
            j = int32(r * steps)
            acc = warpgroup.mm_AtBt(subtile(gate.wait(j), DEPTH, 0, 64, me), x.wait(j))
            acc2 = warpgroup.mm_AtBt(subtile(up.wait(j), DEPTH, 0, 64, me), x.wait(j))
            for i in range(int32(j + 1), int32(j + steps)):
                acc = warpgroup.mma_AtBt(acc, subtile(gate.wait(i), DEPTH, 0, 64, me), x.wait(i))
                acc2 = warpgroup.mma_AtBt(acc2, subtile(up.wait(i), DEPTH, 0, 64, me), x.wait(i))
                warpgroup.wait(newer=2)
                gate.release(i - 1)
                up.release(i - 1)
                x.release(i - 1)
            acc, acc2 = warpgroup.wait(acc), warpgroup.wait(acc2)
            gate.release(j + steps - 1)
            up.release(j + steps - 1)
            x.release(j + steps - 1)
            total.send(acc, r, gates, gates_full, gates_free)
            total.send(acc2, r, ups, ups_full, ups_free)
            if total.mine():
                acc = total.receive(acc, r, gates, gates_full, gates_free)
                acc2 = total.receive(acc2, r, ups, ups_full, ups_free)
                acc = silu(acc) * acc2
                store(y, transpose(bf16(acc)), (0, COLUMNS * persistent_tile(r, BLOCKS) + 16 * total.warp()))
    cluster.sync()


def launch(x, gate, up, y):
    """y = silu(x @ gate) * (x @ up)"""
    (k, n), processors = gate.shape, machine(describe(y, "y").device).processors
    columns, steps = -(-n // COLUMNS), -(-k // (BLOCKS * DEPTH))
    clusters = min(columns, processors // BLOCKS or 1)
    operands = tiles.tensor(x, X), tiles.tensor(gate, W), tiles.tensor(up, W)
    run = tiles.launch(gated_mlp, clusters * BLOCKS, THREADS, shared=smem, cluster=BLOCKS)
    run(*operands, y, -(-columns // clusters), steps)
