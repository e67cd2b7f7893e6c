"""y = (x * rsqrt(mean(x * x) + 1e-5) * g) @ w, for x (M, K) of up to ROWS rows, g (K,), w (K, N) in bf16.

Weights stream through a ring and stand on the left of y.T = w.T @ u.T, u = x * g. The blocks of a cluster take a part of K
each, and add up what they have. A row's scale is applied at the end, when its sum of squares is known. Weights are on their way
before the grid before this one is done: it must not write them.
"""

from numba import cuda

import tiles
from ops import cluster, finish_sum, grid, lane_sum, load, rsqrt, store, subtile, transpose, warpgroup, zeros
from ops.cluster_sum import ClusterSum, RowSums
from tiles import barrier, bf16, fp32, ring, rt, shared, st, sv

ROWS, COLUMNS, DEPTH, BLOCKS, STAGES, AHEAD = 16, 128, 64, 2, 10, 8
CONSUMERS, BANDS = COLUMNS // 64, ROWS // 16
PREPARER, FETCHER, PRODUCER, WARPS, TURNS = CONSUMERS, CONSUMERS + 1, CONSUMERS + 2, 4 * CONSUMERS, 4 // BANDS
THREADS = PRODUCER * warpgroup.THREADS + 32
X, G, W, BAND = st(ROWS, DEPTH, bf16), sv(DEPTH, bf16), st(DEPTH, COLUMNS, bf16), rt(16, DEPTH, fp32)
total, sums = ClusterSum(BLOCKS, WARPS, rt(16, ROWS, fp32)), RowSums(BLOCKS, ROWS)
smem = shared(
    w=ring(W, STAGES, WARPS), x=ring(X, AHEAD, BANDS), g=ring(G, AHEAD, BANDS),
    u=ring(X, max(2, TURNS), WARPS, writers=BANDS),
    parts=total.parts, full=barrier(total.finishers), squares=sums.parts, known=barrier(4),
)  # fmt: skip


@cuda.jit(launch_bounds=(THREADS, 1))
def rms_norm_linear(gX, gG, gW, y, steps, share):
    """A cluster has COLUMNS of y, a block `steps` of DEPTH along its part of K; share: 1 / K."""
    w, x, g, u, parts, full, squares, known = smem.open()
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
            g.fill(i, gG, (first + i,))
        cluster.wait()
    elif me == PREPARER:
        band, turn = warpgroup.rank() % BANDS, warpgroup.rank() // BANDS  # the warps of a band take turns along k
        square = lane_sum(zeros(BAND))
        for i in range(turn, steps, TURNS):
            tile = load(subtile(x.wait(i), 16, band), BAND)
            store(subtile(u.claim(i), 16, band), tile * load(g.wait(i), BAND.row_vec))
            u.publish(i)
            x.release(i)
            g.release(i)
            square = square + lane_sum(tile * tile)
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
    run = tiles.launch(rms_norm_linear, blocks, THREADS, shared=smem, cluster=BLOCKS, early=True)
    run(tiles.tensor(x, X), tiles.tensor(g, G), tiles.tensor(w, W), y, steps, 1 / k)
