"""The gradients of Hedgehog's queries, their features and the weights of the window, for Hopper, chunk by chunk in any order
(parts/recurrent/hedgehog_gradients.py). With e the exponentials of a chunk's scores with the keys of the window, G = dO S^T and
z the sum of older features,

    n = alpha f . z + beta sum(e) + 1e-6        dO . o = (alpha f . G + beta sum(e dO V^T)) / n
    ds = scale beta (e (dO V^T - dO . o) / n - [e = 1] sum(..) / ties)        dq = ds K + dy M^T
    g = (G - (dO . o) z) / n        df = alpha g        dalpha = sum f . g

so o itself is not computed."""

import functools
import math
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    columns,
    divmod,
    exp2,
    greater,
    load,
    right_fill,
    row_max,
    row_sum,
    store_wait,
    subtile,
    tile_sum,
    tma_store,
    warpgroup,
    zeros,
)
from tiles import fp32, inlined, ring, rt, shared, sv
from tiles.launching.arguments import FLOAT, INT, array, tiled

from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.hedgehog_chunks import FLOOR, HALF
from ...parts.recurrent.hedgehog_gradients import (
    EQUAL,
    EQUAL_AGAIN,
    FEATURE_ROWS,
    HALF_SUMS,
    HEAD,
    INPUT_WARP,
    LOAD_WARP,
    PRODUCER,
    REGISTERS,
    SCORES,
    SIGNAL,
    STATS,
    VALUE_WARP,
    WARPS,
    WINDOW,
    FeatureTiles,
    HedgehogGradientConfig,
    QueryStats,
    Z,
)
from ...parts.recurrent.tokens import CHUNK, SequenceLayout


@dataclass(frozen=True)
class Config(HedgehogGradientConfig):
    """A kernel's configuration, whose fields are those of HedgehogGradientConfig."""

    label = "gradients of Hedgehog's queries"


space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, UNROUNDED, ROWS, seq_layout = config.dtype, config.unrounded, tiled(config.rows, unit=1), SequenceLayout()
    features, query_stats = FeatureTiles(INPUT), QueryStats(INPUT)
    GRADIENTS, (producer_registers, registers) = config.gradients, REGISTERS
    smem = shared(
        q=ring(config.rows, 2, 2 * WARPS if UNROUNDED else 1),
        k=ring(config.rows, 3, WARPS),
        v=ring(config.rows, 2, WARPS),
        do=ring(config.rows, 2, 2 * WARPS + 1),
        f=ring(config.features, 1, WARPS),
        s=ring(config.state, 1, WARPS),
        z=ring(Z, 2, WARPS),
        maps=ring(config.map, 1, WARPS),
        dy=ring(config.square, 1, 2 * WARPS + 1, writers=WARPS),  # the gradient of the features before their softmax
        q_done=ring(SIGNAL, 1, WARPS, writers=WARPS),  # the warpgroup of features has read the queries
        out=ring(SIGNAL, 1, 1, writers=WARPS),  # dq has taken the queries' place
        window_sums=ring(sv(2 * CHUNK, fp32), 1, WARPS, writers=WARPS),  # sum(e) and sum(e dO V^T)
        feature_sums=ring(sv(2 * CHUNK, fp32), 1, WARPS, writers=WARPS),  # f . z and f . G
        stats=ring(STATS, 1, 1, writers=WARPS),
        dn=sv(CHUNK, fp32),  # -(dO . o) / n: what older features add to dz
    )

    @inlined
    def put_pair(sums, j, x, y):
        """Pass two numbers of each token to the other warpgroup."""
        tile = sums.claim(j)
        warpgroup.store(subtile(tile, CHUNK, 0), x)
        warpgroup.store(subtile(tile, CHUNK, 1), y)
        sums.publish(j)

    @inlined
    def take_pair(sums, j):
        """The two numbers of each token that the other warpgroup passes."""
        tile = sums.wait(j)
        x = warpgroup.load(subtile(tile, CHUNK, 0), SCORES.col_vec)
        y = warpgroup.load(subtile(tile, CHUNK, 1), SCORES.col_vec)
        sums.release(j)
        return x, y

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: ROWS, gK: ROWS, gV: ROWS, gDOut: ROWS, gFeatures: tiled(config.features, unit=1),
        gStates: tiled(config.state, rows=2), gZ: tiled(Z, 3, None, 2), gMap: tiled(config.map, 3, 1, 2), gAlphas: array(1),
        gBetas: array(1), gStats: array(3), gDNumerators: ROWS, gDZ: array(4), gDX: GRADIENTS, gDMap: array(4),
        gDAlphas: array(2), gDBetas: array(2), length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has one of the `segments` of a sequence, for one of the `heads`, of which `group` share a key head.
        gFeatures: f(q). gStates: S^T before each chunk, of the keys of all chunks before it. gZ: z before each chunk. gStats
        (chunk, head, number and token): see QueryStats. gDNumerators: dO / n. gDZ: what each chunk adds to dz. gDX: dq. gDMap:
        the sum of a block's dM. gDAlphas, gDBetas: the sum of each warp. scale: 1 / sqrt(D)."""
        q, k, v, do, f, s, z, maps, dy, q_done, out, window_sums, feature_sums, stats, dn = smem.open()
        sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, 0, length, segments, heads)
        key_head, _ = divmod(head, group)
        n, wg = seq.num_chunks(), warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            warp = warpgroup.rank()
            if warp == LOAD_WARP:
                if n > 0:
                    maps.fill(0, gMap, (key_head, 0, 0))
                    before = int32(max(seq.start - CHUNK, 0))
                    k.fill(0, gK, (seq.batch, before, key_head))
                    v.fill(0, gV, (seq.batch, before, head))
                for j in range(n):
                    token = seq.chunk_start(j)
                    states = seq_layout.chunk_index(int32(max(token - CHUNK, 0)), sequence, length)
                    q.fill(j, gQ, (seq.batch, token, key_head))
                    k.fill(j + 1, gK, (seq.batch, token, key_head))
                    do.fill(j, gDOut, (seq.batch, token, head))
                    v.fill(j + 1, gV, (seq.batch, token, head))
                    s.fill(j, gStates, (states, head))
                    z.fill(j, gZ, (seq_layout.chunk_index(token, sequence, length), key_head))
                    f.fill(j, gFeatures, (seq.batch, token, key_head))
            elif warp == VALUE_WARP:
                for j in range(n):
                    at = seq.batch, seq.chunk_start(j), head
                    dy.wait(j)
                    tma_store(gDNumerators, at, do.wait(j))  # dO has been divided by n
                    store_wait()
                    dy.release(j)
                    do.release(j)
            elif warp == INPUT_WARP:
                if not UNROUNDED:
                    for j in range(n):
                        out.wait(j)
                        tma_store(gDX, (seq.batch, seq.chunk_start(j), head), q.wait(j))  # dq lies there
                        store_wait()
                        out.release(j)
                        q.release(j)
            else:
                for j in range(n):
                    chunk = seq_layout.chunk_index(seq.chunk_start(j), sequence, length)
                    query_stats.send(gStats, stats.wait(j), chunk, head)
                    stats.release(j)
        elif wg == WINDOW:
            warpgroup.claim_registers(registers)
            alpha, beta, dbeta, first = gAlphas[head], gBetas[head], float32(0), seq.start
            dm = zeros(HALF_SUMS)
            for j in range(n):
                queries, douts = q.wait(j), do.wait(j)
                near = warpgroup.mm_ABt(queries, k.wait(j + 1))
                far = warpgroup.mm_ABt(queries, k.wait(j))
                dp_near = warpgroup.mm_ABt(douts, v.wait(j + 1))
                dp_far = warpgroup.mm_ABt(douts, v.wait(j))
                near = warpgroup.causal(warpgroup.wait(near, newer=3), 0, -math.inf)
                far = right_fill(warpgroup.wait(far, newer=2), int32(min(first + CHUNK * j, CHUNK)), -math.inf)
                maxima = row_max(near, row_max(far))
                near, far = exp2((near - maxima) * (scale * LOG2_E)), exp2((far - maxima) * (scale * LOG2_E))
                total = row_sum(near, row_sum(far))
                ties = row_sum(greater(near, EQUAL), row_sum(greater(far, EQUAL)))
                dp_near, dp_far = warpgroup.wait(dp_near, newer=1), warpgroup.wait(dp_far)
                v.release(j)
                dp_total = row_sum(near * dp_near, row_sum(far * dp_far))
                do.release(j)
                put_pair(window_sums, j, total, dp_total)
                older_total, older_dp = take_pair(feature_sums, j)
                inverse = 1.0 / (older_total * alpha + total * beta + FLOOR)
                dot = (older_dp * alpha + dp_total * beta) * inverse
                dp_total = (dp_total - dot * total) * inverse
                dbeta += tile_sum(dp_total)
                factor, tie = inverse * (beta * scale), dp_total / ties * (beta * scale)
                ds_near = INPUT(near * ((dp_near - dot) * factor) - greater(near, EQUAL_AGAIN) * tie)
                ds_far = INPUT(far * ((dp_far - dot) * factor) - greater(far, EQUAL_AGAIN) * tie)
                dq = warpgroup.mma_AB(warpgroup.mm_AB(ds_near, k.wait(j + 1)), ds_far, k.wait(j))
                query_stats.store(stats.claim(j), maxima, factor, dot, tie)
                stats.publish(j)
                dy_tile = dy.wait(j)
                dq = warpgroup.mma_ABt(dq, dy_tile, maps.wait(0))
                dm = warpgroup.mma_AtB(dm, subtile(queries, CHUNK, 0, HALF, WINDOW), dy_tile)
                dq, dm = warpgroup.wait(dq, newer=1), warpgroup.wait(dm)
                k.release(j)
                dy.release(j)
                if UNROUNDED:
                    warpgroup.store(gDX, dq, (seq.batch, seq.chunk_start(j), head, 0), 1, 3)
                    q.release(j)
                else:
                    out.claim(j)
                    q_done.wait(j)  # the other warpgroup has read the queries
                    q_done.release(j)
                    warpgroup.sync()  # and so have these warps
                    warpgroup.store(queries, dq)
                    out.publish(j)
            warpgroup.store(gDMap, dm, (HALF * WINDOW, head, slot, 0), 0, 3)
            gDBetas[int32(WARPS * slot + warpgroup.rank()), head] = dbeta
        else:
            warpgroup.claim_registers(registers)
            alpha, beta, dalpha, dm = gAlphas[head], gBetas[head], float32(0), zeros(HALF_SUMS)
            for j in range(n):
                token = seq.chunk_start(j)
                chunk = seq_layout.chunk_index(token, sequence, length)
                g = warpgroup.mm_AB(do.wait(j), s.wait(j))
                f_tile = f.wait(j)
                up, down = features.load_half(f_tile, 0), features.load_half(f_tile, 1)
                z_up, z_down = features.load_sums(z.wait(j), 0), features.load_sums(z.wait(j), 1)
                z.release(j)
                older_total = row_sum(up * z_up, row_sum(down * z_down))
                g = warpgroup.wait(g)
                s.release(j)
                g_up, g_down = columns(g, HALF, 0), columns(g, HALF, 1)
                older_dp = row_sum(up * g_up, row_sum(down * g_down))
                put_pair(feature_sums, j, older_total, older_dp)
                total, dp_total = take_pair(window_sums, j)
                inverse = 1.0 / (older_total * alpha + total * beta + FLOOR)
                dot = (older_dp * alpha + dp_total * beta) * inverse
                dalpha += tile_sum((older_dp - dot * older_total) * inverse)
                factor = inverse * alpha
                dy_tile = features.through_softmax(up, (g_up - z_up * dot) * factor)
                dy_tile = dy_tile - features.through_softmax(down, (g_down - z_down * dot) * factor)
                warpgroup.store(dy.claim(j), INPUT(dy_tile))
                douts = do.wait(j)
                numerators = fp32(warpgroup.load(douts, rt(16, HEAD, INPUT))) * inverse
                warpgroup.store(douts, INPUT(numerators))
                dy.publish(j)  # its fence is dO's, too
                do.release(j)
                dm = warpgroup.mma_AtB(dm, subtile(q.wait(j), CHUNK, 0, HALF, FEATURE_ROWS), dy.wait(j))
                warpgroup.store(dn, dot * inverse * -1.0)
                warpgroup.sync()
                weights = load(dn, SCORES.row_vec)
                for half in range(2):
                    sums = features.sum_tokens(f_tile, half, weights)
                    warpgroup.store(gDZ, sums, (chunk, head, 0, int32(HALF * half)), cols=3)
                f.release(j)
                dm = warpgroup.wait(dm)
                dy.release(j)
                if UNROUNDED:
                    q.release(j)
                else:
                    q_done.claim(j)
                    q_done.publish(j)
                warpgroup.sync()  # all have read dn
            warpgroup.store(gDMap, dm, (HALF * FEATURE_ROWS, head, slot, 0), 0, 3)
            gDAlphas[int32(WARPS * slot + warpgroup.rank()), head] = dalpha

    return differentiate, smem
