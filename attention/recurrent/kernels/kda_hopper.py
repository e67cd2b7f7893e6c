"""The delta rule for Hopper, chunk by chunk, where every channel of a key decays by itself (Kimi delta attention, 2025).

    S = diag(exp(g_t)) S_(t-1)        u_t = beta_t (v_t - k_t S)        S_t = S + k_t^T u_t        o_t = scale q_t S_t

In the frame of some r a chunk is one of the delta rule without decays (b, q', k', k* and S': see decay_frame.py):

    A  = tril(beta k' k*^T, -1)       T = (I + A)^-1 beta                                     (see delta_hopper.py)
    U  = T (V - k' S')                O = scale (q' S' + tril(q' k*^T) U)
    S  = exp(b_last - r) (S' + k*^T U)

q', k', k*, T and the weights of U know nothing of the state: one warpgroup, the preparer, makes them for the next chunk, while
consumers, of 64 value columns each, carry the state through this one.
"""

import functools

from numba import cuda
from numpy import int32

from ops import divmod, store, subtile, truncate, warpgroup
from ops.for_attention.triangular_inverse import DIAGONAL, TRIANGLE, inverse_transposed, store_parts
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from .decay_frame import FLAG, Config, bringing, frame
from .tokens import CHUNK, COLUMNS, span
from .transposed_state import turned

REGISTERS = {1: (240, 240), 2: (152, 176)}  # consumers -> registers a thread of preparer and consumer
KEY_DIMS = 64, 128  # as padded
STAGES = 2  # chunks in flight
ARRAYS = "q", "k", "v", "beta", "decay", "out", "initial_state", "state", "cu_seqlens"  # of the kernel, in order


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, VARLEN, INPUT, IN_PLACE = config.consumers, config.varlen, config.dtype, config.gates is fp32
    PREPARER, (prepare, claim), CLAIMS = CONSUMERS, REGISTERS[CONSUMERS], CONSUMERS > 1
    STATE, TURNED, SCORES = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT), rt(16, CHUNK, fp32)
    ROWS, WARPS, VALUES = SCORES.col_vec, warpgroup.WARPGROUP, STAGES if IN_PLACE else 1  # it is released early
    readers = CONSUMERS * WARPS
    square = st(CHUNK, CHUNK, INPUT)
    smem = shared(
        q=ring(config.key, STAGES, readers + WARPS),
        k=ring(config.key, STAGES, readers + WARPS),
        kept=ring(config.key, STAGES, readers + WARPS, writers=WARPS),
        g=ring(config.gate, 1, WARPS),
        v=ring(config.value, VALUES * CONSUMERS, WARPS),
        t=ring(square, STAGES, readers, writers=WARPS),
        p=ring(square, 1, readers, writers=WARPS),
        factor=ring(config.factor, STAGES, readers, writers=WARPS),
        flag=ring(FLAG, STAGES, readers, writers=WARPS),
        high=TRIANGLE,
        low=TRIANGLE,
        inverse_high=DIAGONAL,
        inverse_low=DIAGONAL,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
        totals=config.sums,
    )
    VALUES_OF_TMA = tiled(config.value, unit=1)
    tokens, (read, without_others, hand_out) = span(VARLEN), turned(config.key_dim, INPUT, VARLEN)

    @inlined
    def keep_decayed(decayed, query, key, since, strong):
        """k'"""
        store(decayed, key * since)

    sum_up, change_frame, one_by_one, is_strong, scaled = frame(config, keep_decayed, SCORES)
    bring = bringing(CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: VALUES_OF_TMA, gBeta: array(3),
        gGates: tiled(config.gate, unit=1), gO: array(4, INPUT) if VARLEN else VALUES_OF_TMA, gStart: array(4),
        gState: array(4), gEnds: ENDS, length: INT, blocks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """O and the state after each sequence. `group` value heads, of `blocks` blocks of columns each, share a key head."""
        q, k, kept, g, v, t, p, factor, flag, high, low, inverse_high, inverse_low, out, totals = smem.open()
        me = warpgroup.id()
        head, block = divmod(cuda.blockIdx.x, blocks)
        sequence, head = divmod(head, heads * group)
        first, end, batch = tokens(gEnds, sequence, length)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if me == PREPARER:
            if CLAIMS:
                warpgroup.release_registers(prepare)
            betas, (key_head, _) = truncate(gBeta, 1, end), divmod(head, group)
            warp = int32(cuda.threadIdx.x // 32) - PREPARER * WARPS
            bring(q, k, v, g, gQ, gK, gV, gGates, 0, n, batch, first, head, key_head, block)
            for j in range(n):
                token = int32(first + CHUNK * j)
                queries, keys, gates = q.wait(j), k.wait(j), g.wait(j)
                if VARLEN and end - token < CHUNK:
                    warpgroup.zero_rows(keys, end - token)
                    warpgroup.zero_rows(gates, end - token)
                beta = warpgroup.load(betas, ROWS, (batch, token, head), cols=1)
                sums = gates if IN_PLACE else totals
                ends, strong = sum_up(sums, gates, warp)
                if strong:
                    warpgroup.store(p.claim(j), warpgroup.causal(one_by_one(queries, keys, sums, 0), 0, 0.0))
                    store_parts(high, low, one_by_one(keys, keys, sums, 0))
                    warpgroup.sync()
                decayed = kept.claim(j)
                change_frame(queries, keys, decayed, sums, ends, factor.claim(j), flag.claim(j), warp, strong)
                kept.publish(j)
                factor.publish(j)
                flag.publish(j)
                g.release(j)
                warpgroup.sync()
                bring(q, k, v, g, gQ, gK, gV, gGates, j + 1, n, batch, first, head, key_head, block)
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
                decayed, scale_by, strong = kept.wait(j), factor.wait(j), is_strong(flag.wait(j))
                s_t = scaled(s_t, scale_by, not strong)
                u, o = read(s_t, decayed, q.wait(j))
                q.release(j)
                kept.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), TURNED))
                v.release(CONSUMERS * j + me)
                u = without_others(values, end - token) - u
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(scaled(s_t, scale_by, strong), u, k.wait(j)))
                k.release(j)
                s_t = scaled(s_t, scale_by, not strong)
                factor.release(j)
                flag.release(j)
                o = warpgroup.wait(warpgroup.mma_ABt(o, u, p.wait(j))) * scale
                p.release(j)
                hand_out(gO, mine, o, batch, token, end, head, CONSUMERS * block + me)
            warpgroup.store_wait()
            warpgroup.store(gState, s_t, (sequence, head, 0, column), 3, 2)

    return scan, smem
