"""y = (x * rsqrt(mean(x * x) + 1e-5) * g) @ w, for few rows: x (M, K) with M up to 64, g (K,), w (K, N), y (M, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each and add up
what they have. The scale of a row is applied at the end, when its sum of squares is known.
"""

from numba import cuda
from numpy import int32

import tiles
from ops import cluster, divmod, finish_sum, lane_sum, load, persistent_tile, rsqrt, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum, RowSums
from tiles import barrier, bf16, fp32, inlined, ring, rt, shared, st, sv
from tiles.device import machine
from tiles.frameworks import describe

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES = 16, 64, 128, 4, 8
CONSUMERS = COLUMNS // 64
PREPARER, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, 4 * CONSUMERS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, G, W, ACC = st(ROWS, DEPTH, bf16), sv(DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, ROWS, fp32)
BAND, BANDS = rt(16, DEPTH, fp32), ROWS // 16
total, sums = ClusterSum(BLOCKS, WARPS, ACC), RowSums(BLOCKS, ROWS)
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, 4, BANDS), g=ring(G, 4, BANDS), u=ring(X, 4, WARPS, writers=BANDS),
    parts=total.parts, full=barrier(total.finishers), free=barrier(total.senders),
    squares=sums.parts, known=barrier(4),
)  # fmt: skip


@inlined
def prepare(x, g, u, i):
    """u_i = x_i * g_i, and the sums of squares along x_i."""
    band = warpgroup.rank() % BANDS
    tile = load(subtile(x.wait(i), 16, band), BAND)
    store(subtile(u.claim(i), 16, band), tile * load(g.wait(i), BAND.row_vec))
    u.publish(i)
    x.release(i)
    g.release(i)
    return lane_sum(tile * tile)


@cuda.jit(launch_bounds=(THREADS, 1))
def rms_norm_linear(gX, gG, gW, y, rounds, steps, share):
    """A cluster takes `rounds` tiles of y, a block `steps` of DEPTH along its part of K; share: 1 / K."""
    w, x, g, u, parts, full, free, squares, known = smem.open()
    me, first = warpgroup.id(), cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(rounds * steps):
            r, step = divmod(i, steps)
            w.fill(i, gW, (first + step, persistent_tile(r, BLOCKS)))
            x.fill(i, gX, (0, first + step))
            g.fill(i, gG, (first + step,))
        cluster.wait()
    elif me == PREPARER:
        i, square = int32(warpgroup.rank() // BANDS), lane_sum(zeros(BAND))
        while i < steps:  # the warps of a band take turns
            square = square + prepare(x, g, u, i)
            i = int32(i + 4 // BANDS)
        cluster.wait()
        sums.send(finish_sum(square), squares, known)
        while i < rounds * steps:
            prepare(x, g, u, i)
            i = int32(i + 4 // BANDS)
    else:
        cluster.wait()
        for r in range(rounds):
            j = int32(r * steps)
            acc = warpgroup.mm_AtBt(subtile(w.wait(j), DEPTH, 0, 64, me), u.wait(j))
            for i in range(int32(j + 1), int32(j + steps)):
                acc = warpgroup.mma_AtBt(acc, subtile(w.wait(i), DEPTH, 0, 64, me), u.wait(i))
                warpgroup.wait(newer=1)
                w.release(i - 1)
                u.release(i - 1)
            acc = warpgroup.wait(acc)
            w.release(j + steps - 1)
            u.release(j + steps - 1)
            total.send(acc, r, parts, full, free)
            if total.mine():
                acc = total.receive(acc, r, parts, full, free)
                acc = acc * rsqrt(sums.receive(squares, known) * share + 1e-5)
                store(y, transpose(bf16(acc)), (0, COLUMNS * persistent_tile(r, BLOCKS) + 16 * total.warp()))
    cluster.sync()


def launch(x, g, w, y):
    """y = (x * rsqrt(mean(x * x) + 1e-5) * g) @ w"""
    (k, n), processors = w.shape, machine(describe(y, "y").device).processors
    columns, steps = -(-n // COLUMNS), -(-k // (BLOCKS * DEPTH))
    clusters = min(columns, processors // BLOCKS or 1)
    operands = tiles.tensor(x, X), tiles.tensor(g, G), tiles.tensor(w, W)
    run = tiles.launch(rms_norm_linear, clusters * BLOCKS, THREADS, shared=smem, cluster=BLOCKS)
    run(*operands, y, -(-columns // clusters), steps, 1 / k)
