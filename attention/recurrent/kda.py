"""The delta rule for Hopper, chunk by chunk, where every channel of a key decays by itself (Kimi delta attention, 2025).

    S = diag(exp(g_t)) S_(t-1)        u_t = beta_t (v_t - k_t S)        S_t = S + k_t^T u_t        o_t = scale q_t S_t

With b the running sums of a chunk's gates, and any r, one number a channel, to count them from (see gated.py),

    q' = q exp(b - r),  k' = k exp(b - r),  k* = k exp(r - b),  S' = exp(r) S
    A  = tril(beta k' k*^T, -1)       T = (I + A)^-1 beta                                     (see delta.py)
    U  = T (V - k' S')                O = scale (q' S' + tril(q' k*^T) U)
    S  = exp(b_last - r) (S' + k*^T U)

so in the frame of r a chunk is one of the delta rule without decays. r = b_last / 2 keeps all exponents small. q', k', k*, T
and the weights of U know nothing of the state: one warpgroup, the preparer, makes them for the next chunk, while consumers, of
64 value columns each, carry the state through this one.

Where a chunk decays by more than a dtype can hold, the weights of its pairs are computed one by one; then q' and k' count from
the chunk's beginning, k* from its end, and no exponent is positive.
"""

import functools

from numba import cuda
from numpy import int32

from ops import (
    clip,
    col_index,
    col_min,
    col_sum,
    cumsum,
    equal,
    exp2,
    greater_equal,
    load,
    load_row,
    row_sum,
    split,
    store,
    subtile,
    tile_min,
    warpgroup,
    where,
    zeros,
)
from ops.inverse import DIAGONAL, TRIANGLE, inverse_transposed, store_parts
from tiles import fp32, inlined, ring, rt, shared, st, sv

from ..signature import ENDS, FLOAT, INT, array, tiled
from .gated import LEAST, SLICE, Config
from .gates import LOG2_E, floored
from .places import CHUNK, COLUMNS, span
from .turned import turned

REGISTERS = {1: (240, 240), 2: (152, 176)}  # consumers -> registers a thread of preparer and consumer
KEY_DIMS = 64, 128  # as padded
STAGES = 2  # chunks in flight
ARRAYS = "q", "k", "v", "beta", "decay", "out", "initial_state", "state", "cu_seqlens"  # of the kernel, in order


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, VARLEN, INPUT, LIMIT = config.consumers, config.varlen, config.dtype, LEAST[config.dtype]
    PREPARER, (prepare, claim), CLAIMS = CONSUMERS, REGISTERS[CONSUMERS], CONSUMERS > 1
    STATE, TURNED, SCORES = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT), rt(16, CHUNK, fp32)
    CHANNELS, ROWS = STATE.row_vec, SCORES.col_vec
    PART, OWN = rt(CHUNK, SLICE, fp32, "col"), rt(16, SLICE, fp32)
    WARPS, SLICES, WIDTH = warpgroup.WARPGROUP, config.key_dim // SLICE, SLICE
    readers = CONSUMERS * WARPS
    square, of_channels = st(CHUNK, CHUNK, INPUT), sv(config.key_dim, fp32)
    smem = shared(
        q=ring(config.key, STAGES, readers + WARPS),
        k=ring(config.key, STAGES, readers + WARPS),
        kept=ring(config.key, STAGES, readers + WARPS, writers=WARPS),
        g=ring(config.gate, 1, WARPS),
        v=ring(config.value, STAGES * CONSUMERS, WARPS),
        t=ring(square, STAGES, readers, writers=WARPS),
        p=ring(square, 1, readers, writers=WARPS),
        outer=ring(of_channels, STAGES, readers, writers=WARPS),
        inner=ring(of_channels, STAGES, readers, writers=WARPS),
        high=TRIANGLE,
        low=TRIANGLE,
        inverse_high=DIAGONAL,
        inverse_low=DIAGONAL,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )
    tokens, (read, without_others, hand_out) = span(VARLEN), turned(config.key_dim, INPUT, VARLEN)

    @inlined
    def bring(q, k, v, g, gQ, gK, gV, gGates, j, n, batch, token, head, key_head, block):
        """The j-th chunk, if there is one."""
        if j < n:
            g.fill(j, gGates, (batch, token, head))
            k.fill(j, gK, (batch, token, key_head))
            q.fill(j, gQ, (batch, token, key_head))
            for c in range(CONSUMERS):
                v.fill(CONSUMERS * j + c, gV, (batch, token, head, CONSUMERS * block + c))

    @inlined
    def part(tile, i):
        """The i-th slice of a chunk's tile."""
        return subtile(tile, CHUNK, 0, WIDTH, i)

    @inlined
    def gates_of(gates, i):
        """Those of a slice, in powers of 2."""
        return floored(load(part(gates, i), PART)) * LOG2_E

    @inlined
    def strongest(gates, warp):
        """The least sum of a channel's gates, of this warp's slices."""
        least = 0.0
        for i in range(warp, SLICES, WARPS):
            least = min(least, tile_min(col_sum(gates_of(gates, i))))
        return least

    @inlined
    def change_frame(queries, keys, decayed, gates, outer, inner, warp, strong):
        """q' and k* in place of q and k, and k', of this warp's slices. What the state is scaled by: `outer` before the chunk
        reads it and after the chunk, `inner` between."""
        of_queries, of_keys = 0.0 if strong else 0.5, 1.0 if strong else 0.5
        for i in range(warp, SLICES, WARPS):
            b = cumsum(gates_of(gates, i))
            end, q, k = col_min(b), part(queries, i), part(keys, i)
            since = exp2(b - end * of_queries)
            store(q, load(q, PART) * since)
            store(part(decayed, i), load(k, PART) * since)
            store(k, load(k, PART) * exp2(end * of_keys - b))
            store(subtile(outer, SLICE, i), exp2(end * of_queries))
            store(subtile(inner, SLICE, i), exp2(end * (of_keys - of_queries)))

    @inlined
    def one_by_one(queries, keys, gates):
        """q_i . (exp2(b_i - b_j) k_j) where j <= i, key after key from the last one, and a slice at a time."""
        s, rows = zeros(SCORES), warpgroup.row_index(OWN)
        for i in range(SLICES):
            own, between = warpgroup.load(part(queries, i), OWN), zeros(OWN)
            for back in range(CHUNK):
                j = CHUNK - 1 - back
                scores = row_sum(own * exp2(between) * load_row(part(keys, i), OWN.row_vec, j))
                s = where(equal(col_index(SCORES), j), s + scores, s)
                gate = floored(load_row(part(gates, i), OWN.row_vec, j)) * LOG2_E
                between = where(greater_equal(rows, j), between + gate, 0.0)
        return s

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(gQ, gK, gV, gBeta, gGates, gO, gStart, gState, gEnds, length, blocks, heads, group, scale):
        """O and the state after each sequence. `group` value heads, of `blocks` blocks of columns each, share a key head."""
        q, k, kept, g, v, t, p, outer, inner, high, low, inverse_high, inverse_low, out = smem.open()
        me = warpgroup.id()
        block, head = split(cuda.blockIdx.x, blocks)
        head, sequence = split(head, heads * group)
        first, end, batch = tokens(gEnds, sequence, length)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if me == PREPARER:
            if CLAIMS:
                warpgroup.release_registers(prepare)
            betas, (_, key_head) = clip(gBeta, 1, end), split(head, group)
            warp = int32(cuda.threadIdx.x // 32) - PREPARER * WARPS
            bring(q, k, v, g, gQ, gK, gV, gGates, 0, n, batch, first, head, key_head, block)
            for j in range(n):
                token = int32(first + CHUNK * j)
                queries, keys, gates = q.wait(j), k.wait(j), g.wait(j)
                if VARLEN and end - token < CHUNK:
                    warpgroup.zero_rows(keys, end - token)
                    warpgroup.zero_rows(gates, end - token)
                beta = warpgroup.load(betas, ROWS, (batch, token, head), cols=1)
                strong = warpgroup.reduce_any(strongest(gates, warp) < 2 * LIMIT)
                if strong:
                    warpgroup.store(p.claim(j), warpgroup.causal(one_by_one(queries, keys, gates), 0, 0.0))
                    store_parts(high, low, one_by_one(keys, keys, gates))
                    warpgroup.sync()
                decayed = kept.claim(j)
                change_frame(queries, keys, decayed, gates, outer.claim(j), inner.claim(j), warp, strong)
                g.release(j)
                kept.publish(j)
                outer.publish(j)
                inner.publish(j)
                warpgroup.sync()
                bring(q, k, v, g, gQ, gK, gV, gGates, j + 1, n, batch, token + CHUNK, head, key_head, block)
                if strong:
                    a = warpgroup.load(high, SCORES) + warpgroup.load(low, SCORES)
                else:
                    a = warpgroup.wait(warpgroup.mm_ABt(decayed, keys))
                    s = warpgroup.wait(warpgroup.mm_ABt(queries, keys))
                    warpgroup.store(p.claim(j), warpgroup.causal(s, 0, 0.0))  # claimed no sooner than needed: it has one stage
                p.publish(j)
                kept.release(j)
                q.release(j)
                k.release(j)
                x = inverse_transposed(a * beta, high, low, inverse_high, inverse_low)
                warpgroup.store(t.claim(j), x * beta)
                t.publish(j)
        else:
            if CLAIMS:
                warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, 0, column), 3, 2)
            for j in range(n):
                token = int32(first + CHUNK * j)
                decayed, scaled, between = kept.wait(j), outer.wait(j), inner.wait(j)
                s_t = s_t * load(scaled, CHANNELS)
                u, o = read(s_t, decayed, q.wait(j))
                q.release(j)
                kept.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), TURNED))
                v.release(CONSUMERS * j + me)
                u = without_others(values, end - token) - u
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t * load(between, CHANNELS), u, k.wait(j)))
                k.release(j)
                inner.release(j)
                s_t = s_t * load(scaled, CHANNELS)
                outer.release(j)
                o = warpgroup.wait(warpgroup.mma_ABt(o, u, p.wait(j))) * scale
                p.release(j)
                hand_out(gO, mine, o, batch, token, end, head, CONSUMERS * block + me)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, head, 0, column), 3, 2)

    return scan, smem


def signature(config: Config):
    """The Numba types of the kernel's arguments."""
    key, value, state = tiled(config.key, unit=1), tiled(config.value, unit=1), array(4)
    output = array(4, config.dtype) if config.varlen else value
    return key, key, value, array(3), tiled(config.gate, unit=1), output, state, state, ENDS, *[INT] * 4, FLOAT
