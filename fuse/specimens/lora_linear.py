"""y = x @ w + (x @ a) @ b, for few rows: x (M, K) with M up to 64, w (K, N), a (K, R), b (R, N), y (M, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each, of x @ a
too, and add up what they have. Four warps take turns along k with x @ a: their parts lie side by side, and meet b four times.
"""

from numba import cuda
from numpy import int32

import tiles
from ops import cluster, divmod, load, mma_AtBt, persistent_tile, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum
from tiles import barrier, bf16, fp32, ring, rt, shared, st
from tiles.device import machine
from tiles.frameworks import describe

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES = 16, 64, 128, 4, 8
RANK, CONSUMERS = 16, COLUMNS // 64
SIDE, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, 4 * CONSUMERS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, W, ACC = st(ROWS, DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, ROWS, fp32)
A, XA, B = st(DEPTH, RANK, bf16), rt(RANK, ROWS, fp32), st(RANK, COLUMNS, bf16)
A_HELD, X_HELD = rt(DEPTH, RANK, bf16, "col"), rt(ROWS, DEPTH, bf16)
total = ClusterSum(BLOCKS, WARPS, ACC)
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, STAGES, WARPS + 1), a=ring(A, STAGES, 1),
    b=ring(st(4 * RANK, COLUMNS, bf16), 1, WARPS), xa=ring(st(4 * RANK, ROWS, bf16), 1, WARPS, writers=4),
    parts=total.parts, full=barrier(total.finishers), free=barrier(total.senders),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def lora_linear(gX, gW, gA, gB, y, rounds, steps):
    """A cluster takes `rounds` tiles of y, a block `steps` of DEPTH along its part of K."""
    w, x, a, b, xa, parts, full, free = smem.open()
    me, first = warpgroup.id(), cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(rounds * steps):
            r, step = divmod(i, steps)
            w.fill(i, gW, (first + step, persistent_tile(r, BLOCKS)))
            x.fill(i, gX, (0, first + step))
            if r == 0:
                a.fill(i, gA, (first + step, 0))
            if step == 0:
                for part in range(4):
                    b.fill(r, gB, (0, persistent_tile(r, BLOCKS)), part, 4)
        cluster.wait()
    elif me == SIDE:
        i, narrow = int32(warpgroup.rank()), zeros(XA)
        while i < steps:
            narrow = mma_AtBt(narrow, load(a.wait(i), A_HELD), load(x.wait(i), X_HELD))
            a.release(i)
            x.release(i)
            i = int32(i + 4)
        store(subtile(xa.claim(0), RANK, warpgroup.rank()), narrow)
        xa.publish(0)
        while i < rounds * steps:
            x.wait(i)
            x.release(i)
            i = int32(i + 4)
        cluster.wait()
    else:
        cluster.wait()
        for r in range(rounds):
            j = int32(r * steps)
            acc = warpgroup.mm_AtBt(subtile(w.wait(j), DEPTH, 0, 64, me), x.wait(j))
            for i in range(int32(j + 1), int32(j + steps)):
                acc = warpgroup.mma_AtBt(acc, subtile(w.wait(i), DEPTH, 0, 64, me), x.wait(i))
                warpgroup.wait(newer=1)
                w.release(i - 1)
                x.release(i - 1)
            acc = warpgroup.mma_AtB(acc, subtile(b.wait(r), 4 * RANK, 0, 64, me), xa.wait(0))
            acc = warpgroup.wait(acc)
            w.release(j + steps - 1)
            x.release(j + steps - 1)
            b.release(r)
            total.send(acc, r, parts, full, free)
            if total.mine():
                acc = total.receive(acc, r, parts, full, free)
                store(y, transpose(bf16(acc)), (0, COLUMNS * persistent_tile(r, BLOCKS) + 16 * total.warp()))
    cluster.sync()


def launch(x, w, a, b, y):
    """y = x @ w + (x @ a) @ b"""
    (k, n), processors = w.shape, machine(describe(y, "y").device).processors
    columns, steps = -(-n // COLUMNS), -(-k // (BLOCKS * DEPTH))
    clusters = min(columns, processors // BLOCKS or 1)
    operands = tiles.tensor(x, X), tiles.tensor(w, W), tiles.tensor(a, A), tiles.tensor(b, B)
    run = tiles.launch(lora_linear, clusters * BLOCKS, THREADS, shared=smem, cluster=BLOCKS)
    run(*operands, y, -(-columns // clusters), steps)
