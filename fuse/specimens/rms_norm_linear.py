"""y = (x * rsqrt(mean(x * x) + 1e-5) * g) @ w, for few rows: x (M, K) with M up to ROWS, g (K,), w (K, N), y (M, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ x.T. The blocks of a cluster take a part of K each and add up
what they have. The scale of a row is applied at the end, when its sum of squares is known. Weights are on their way before
the grid before this one is done: it must not write them.
"""

from numba import cuda

import tiles
from ops import cluster, finish_sum, grid, lane_sum, load, rsqrt, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum, RowSums
from tiles import barrier, bf16, fp32, inlined, ring, rt, shared, st, sv

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES = 16, 64, 64, 2, 8
CONSUMERS, BANDS = COLUMNS // 64, ROWS // 16
PREPARER, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, 4 * CONSUMERS
AHEAD = max(4, STAGES // 4 * 4)  # x's slots: each is always read by the same warps
THREADS = PRODUCER * warpgroup.THREADS + 32
X, G, W, ACC = st(ROWS, DEPTH, bf16), sv(DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, ROWS, fp32)
BAND = rt(16, DEPTH, fp32)
total, sums = ClusterSum(BLOCKS, WARPS, ACC), RowSums(BLOCKS, ROWS)
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, AHEAD, BANDS), g=ring(G, AHEAD, BANDS), u=ring(X, 4, WARPS, writers=BANDS),
    parts=total.parts, full=barrier(total.finishers), squares=sums.parts, known=barrier(4),
)  # fmt: skip


@inlined
def prepare(x, g, u, i):
    """u_i = x_i * g_i, and the sums of squares along x_i, of one band of rows."""
    band = warpgroup.rank() % BANDS
    tile = load(subtile(x.wait(i), 16, band), BAND)
    store(subtile(u.claim(i), 16, band), tile * load(g.wait(i), BAND.row_vec))
    u.publish(i)
    x.release(i)
    g.release(i)
    return lane_sum(tile * tile)


@cuda.jit(launch_bounds=(THREADS, 1))
def rms_norm_linear(gX, gG, gW, y, steps, share):
    """A cluster has COLUMNS of y, a block `steps` of DEPTH along its part of K; share: 1 / K."""
    w, x, g, u, parts, full, squares, known = smem.open()
    me, col, first = warpgroup.id(), cuda.blockIdx.x // BLOCKS, cluster.rank() * steps
    cluster.arrive()
    if me == PRODUCER:
        for i in range(min(steps, STAGES)):
            w.fill(i, gW, (first + i, col))
        grid.wait()
        grid.release()
        for i in range(steps):
            x.fill(i, gX, (0, first + i))
            g.fill(i, gG, (first + i,))
            if i >= STAGES:
                w.fill(i, gW, (first + i, col))
        cluster.wait()
    elif me == PREPARER:
        square = lane_sum(zeros(BAND))
        for i in range(warpgroup.rank() // BANDS, steps, 4 // BANDS):  # the warps of a band take turns
            square = square + prepare(x, g, u, i)
        cluster.wait()
        sums.send(finish_sum(square), squares, known)
    else:
        acc = warpgroup.mm_AtBt(subtile(w.wait(0), DEPTH, 0, 64, me), u.wait(0))
        for i in range(1, steps):
            acc = warpgroup.mma_AtBt(acc, subtile(w.wait(i), DEPTH, 0, 64, me), u.wait(i))
            warpgroup.wait(newer=1)
            w.release(i - 1)
            u.release(i - 1)
        acc = warpgroup.wait(acc)
        cluster.wait()
        total.send(acc, parts, full)
        if total.mine():
            acc = total.receive(acc, parts, full)
            acc = acc * rsqrt(sums.receive(squares, known) * share + 1e-5)
            store(y, transpose(bf16(acc)), (0, COLUMNS * col + 16 * total.warp()))


def launch(x, g, w, y):
    """y = (x * rsqrt(mean(x * x) + 1e-5) * g) @ w"""
    k, n = w.shape
    blocks, steps = -(-n // COLUMNS) * BLOCKS, -(-k // (BLOCKS * DEPTH))
    operands = tiles.tensor(x, X), tiles.tensor(g, G), tiles.tensor(w, W)
    run = tiles.launch(rms_norm_linear, blocks, THREADS, shared=smem, cluster=BLOCKS, early=True)
    run(*operands, y, steps, 1 / k)
