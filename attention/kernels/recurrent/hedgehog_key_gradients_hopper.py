"""The gradients of Hedgehog's keys, their features and the values, for Hopper, chunk by chunk in any order
(parts/recurrent/hedgehog_gradients.py). From what hedgehog_query_gradients_hopper.py stores of queries come the scores of a
chunk's keys with the queries of their own chunk and of the next one, transposed:

    dv = alpha f(k) dS + sum of P^T dO / n        dk = sum of ds^T Q + dy M^T        df = alpha (V dS^T + dz)"""

import functools
import math
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import columns, divmod, right_fill, store_wait, subtile, tma_store, warpgroup, zeros
from tiles import ring, shared
from tiles.launching.arguments import FLOAT, INT, array, tiled

from ...parts.recurrent.hedgehog_chunks import HALF
from ...parts.recurrent.hedgehog_gradients import (
    FEATURE_ROWS,
    HALF_SUMS,
    INPUT_WARP,
    LOAD_WARP,
    PRODUCER,
    REGISTERS,
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

    label = "gradients of Hedgehog's keys"


space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, UNROUNDED, ROWS, seq_layout = config.dtype, config.unrounded, tiled(config.rows, unit=1), SequenceLayout()
    features, query_stats = FeatureTiles(INPUT), QueryStats(INPUT)
    GRADIENTS, (producer_registers, registers) = config.gradients, REGISTERS
    smem = shared(
        q=ring(config.rows, 2, WARPS),
        do=ring(config.rows, 2, 2 * WARPS),
        k=ring(config.rows, 1, 2 * WARPS),
        v=ring(config.rows, 1, 2 * WARPS),
        f=ring(config.features, 1, WARPS),
        s=ring(config.state, 1, WARPS),
        z=ring(Z, 2, WARPS),
        maps=ring(config.map, 1, WARPS),
        stats=ring(STATS, 2, WARPS),
        weights=ring(config.square, 2, WARPS, writers=WARPS),
        dy=ring(config.square, 1, 2 * WARPS, writers=WARPS),
        out=ring(config.rows, 1, 1, writers=WARPS),
        out_values=ring(config.rows, 1, 1, writers=WARPS),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: ROWS, gK: ROWS, gV: ROWS, gDOut: ROWS, gFeatures: tiled(config.features, unit=1),
        gStates: tiled(config.state, rows=2), gZ: tiled(Z, 3, None, 2), gMap: tiled(config.map, 3, 1, 2), gAlphas: array(1),
        gStats: tiled(STATS, 3, None, 2), gDX: GRADIENTS, gDV: ROWS, gDMap: array(4),
        length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The arguments are those of the kernel for queries, but for gFeatures: f(k); gStates: dS^T after each chunk, of the
        queries of all chunks after it; gZ: dz after the next chunk; gDX: dk."""
        q, do, k, v, f, s, z, maps, stats, weights, dy, out, out_values = smem.open()
        sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, 0, length, segments, heads)
        key_head, _ = divmod(head, group)
        n, wg = seq.num_chunks(), warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            warp, last = warpgroup.rank(), int32((length - 1) // CHUNK * CHUNK)  # the sequence's last chunk
            if warp == LOAD_WARP:
                if n > 0:
                    maps.fill(0, gMap, (key_head, 0, 0))
                    q.fill(0, gQ, (seq.batch, seq.start, key_head))
                    do.fill(0, gDOut, (seq.batch, seq.start, head))
                    stats.fill(0, gStats, (seq_layout.chunk_index(seq.start, sequence, length), head))
                for j in range(n):
                    token, later = seq.chunk_start(j), seq.chunk_start(j + 1)
                    chunk = seq_layout.chunk_index(int32(min(later, last)), sequence, length)
                    k.fill(j, gK, (seq.batch, token, key_head))
                    v.fill(j, gV, (seq.batch, token, head))
                    f.fill(j, gFeatures, (seq.batch, token, key_head))
                    s.fill(j, gStates, (chunk, head))
                    z.fill(j, gZ, (seq_layout.chunk_index(token, sequence, length), head))
                    q.fill(j + 1, gQ, (seq.batch, later, key_head))
                    do.fill(j + 1, gDOut, (seq.batch, later, head))
                    stats.fill(j + 1, gStats, (chunk, head))
            elif warp == INPUT_WARP:
                if not UNROUNDED:
                    for j in range(n):
                        tma_store(gDX, (seq.batch, seq.chunk_start(j), head), out.wait(j))
                        store_wait()
                        out.release(j)
            elif warp == VALUE_WARP:
                for j in range(n):
                    tma_store(gDV, (seq.batch, seq.chunk_start(j), head), out_values.wait(j))
                    store_wait()
                    out_values.release(j)
        elif wg == WINDOW:
            warpgroup.claim_registers(registers)
            dm = zeros(HALF_SUMS)
            for j in range(n):
                keys, values = k.wait(j), v.wait(j)
                s_t, dp_t = warpgroup.mm_ABt(keys, q.wait(j)), warpgroup.mm_ABt(values, do.wait(j))
                s_t = warpgroup.triu(warpgroup.wait(s_t, newer=1), 0, -math.inf)
                w, ds = query_stats.differentiate_scores(s_t, warpgroup.wait(dp_t), stats.wait(j), scale)
                dk = warpgroup.mm_AB(ds, q.wait(j))
                warpgroup.store(weights.claim(2 * j), w)
                weights.publish(2 * j)
                stats.release(j)
                do.release(j)
                s_t = warpgroup.mm_ABt(keys, q.wait(j + 1))
                dp_t = warpgroup.mm_ABt(values, do.wait(j + 1))
                dk = warpgroup.wait(dk, newer=2)
                q.release(j)
                # queries after the sequence's end have no scores
                later = int32(length - seq.chunk_start(j + 1))
                s_t = right_fill(warpgroup.wait(s_t, newer=1), int32(max(later, 0)), -math.inf)
                w, ds = query_stats.differentiate_scores(s_t, warpgroup.wait(dp_t), stats.wait(j + 1), scale)
                v.release(j)
                dk = warpgroup.mma_AB(dk, ds, q.wait(j + 1))
                warpgroup.store(weights.claim(2 * j + 1), w)
                weights.publish(2 * j + 1)
                dy_tile = dy.wait(j)
                dk = warpgroup.mma_ABt(dk, dy_tile, maps.wait(0))
                dm = warpgroup.mma_AtB(dm, subtile(keys, CHUNK, 0, HALF, WINDOW), dy_tile)
                dk, dm = warpgroup.wait(dk, newer=1), warpgroup.wait(dm)
                k.release(j)
                dy.release(j)
                if UNROUNDED:
                    warpgroup.store(gDX, dk, (seq.batch, seq.chunk_start(j), head, 0), 1, 3)
                else:
                    warpgroup.store(out.claim(j), dk)
                    out.publish(j)
            warpgroup.store(gDMap, dm, (HALF * WINDOW, head, slot, 0), 0, 3)
        else:
            warpgroup.claim_registers(registers)
            alpha, dm = gAlphas[head], zeros(HALF_SUMS)
            for j in range(n):
                f_tile, states = f.wait(j), s.wait(j)
                g = warpgroup.mm_AB(v.wait(j), states)
                dv = warpgroup.mm_ABt(f_tile, states)
                z_up, z_down = features.load_sums(z.wait(j), 0), features.load_sums(z.wait(j), 1)
                z.release(j)
                g = warpgroup.wait(g, newer=1)
                v.release(j)
                dy_tile = features.through_softmax(features.load_half(f_tile, 0), (columns(g, HALF, 0) + z_up) * alpha)
                g_down = (columns(g, HALF, 1) + z_down) * alpha
                dy_tile = dy_tile - features.through_softmax(features.load_half(f_tile, 1), g_down)
                warpgroup.store(dy.claim(j), INPUT(dy_tile))
                dy.publish(j)
                dv = warpgroup.wait(dv) * alpha
                s.release(j)
                f.release(j)
                dm = warpgroup.mma_AtB(dm, subtile(k.wait(j), CHUNK, 0, HALF, FEATURE_ROWS), dy.wait(j))
                dv = warpgroup.mma_AB(dv, weights.wait(2 * j), do.wait(j))
                dv = warpgroup.mma_AB(dv, weights.wait(2 * j + 1), do.wait(j + 1))
                dm, dv = warpgroup.wait(dm, newer=2), warpgroup.wait(dv)
                k.release(j)
                dy.release(j)
                weights.release(2 * j)
                weights.release(2 * j + 1)
                do.release(j)
                warpgroup.store(out_values.claim(j), dv)
                out_values.publish(j)
            warpgroup.store(gDMap, dm, (HALF * FEATURE_ROWS, head, slot, 0), 0, 3)

    return differentiate, smem
