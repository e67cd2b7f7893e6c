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
import itertools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import divmod, store, subtile, truncate, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE, inverse_transposed, store_parts
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from . import decay_frame
from .decay_frame import FLAG, Config
from .tokens import CHUNK, COLUMNS, Sequences, assigned
from .transposed_state import TransposedState

REGISTERS = {1: (240, 240), 2: (152, 176)}  # consumers -> registers a thread of preparer and consumer
KEY_DIMS = 64, 128  # as padded
STAGES = 2  # chunks in flight


SIZES = tuple(itertools.product(KEY_DIMS, REGISTERS))  # padded key dim, consumers


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    return decay_frame.space(Config, SIZES, arch, everything)


class Frame(decay_frame.Frame):
    """The frame of KDA's kernel, which also keeps k'."""

    @inlined
    def keep(self, decayed, query, key, since, strong):
        """Store k' = k exp(b - r)."""
        store(decayed, key * since)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE = config.consumers, config.dtype, config.gates is fp32
    PREPARER, (prepare, claim), CLAIMS = CONSUMERS, REGISTERS[CONSUMERS], CONSUMERS > 1
    STATE, SCORES = rt(16, config.key_dim, fp32), rt(16, CHUNK, fp32)
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
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
        totals=config.sums,
    )
    sequences, frame = Sequences(config.varlen), Frame(config.key_dim, INPUT, CONSUMERS, SCORES)
    state = TransposedState(config.key_dim, INPUT, sequences)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1),
        gBeta: array(3), gGates: tiled(config.gate, unit=1), gO: sequences.output(config.value), gStart: array(4),
        gState: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a segment, and the state after it. Each of the `segments` of a sequence has thread blocks of its own,
        and begins with a state of gStart. `group` value heads share a key head; each is `blocks` blocks of columns wide."""
        q, k, kept, g, v, t, p, factor, flag, high, low, out, totals = smem.open()
        me = warpgroup.id()
        block, segment, head, sequence = assigned(cuda.blockIdx.x, blocks, segments, heads * group)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == PREPARER:
            if CLAIMS:
                warpgroup.release_registers(prepare)
            betas, (key_head, _) = truncate(gBeta, 1, span.end), divmod(head, group)
            warp = int32(cuda.threadIdx.x // 32) - PREPARER * WARPS
            rings, arrays = (q, k, v, g), (gQ, gK, gV, gGates)
            frame.fill(rings, arrays, 0, n, span, head, key_head, block)
            for j in range(n):
                queries, keys, gates = q.wait(j), k.wait(j), g.wait(j)
                sequences.clear(keys, span.left(j))
                sequences.clear(gates, span.left(j))
                beta = warpgroup.load(betas, ROWS, (span.batch, span.token(j), head), cols=1)
                sums = gates if IN_PLACE else totals
                ends, strong = frame.sum_up(sums, gates, warp)
                if strong:
                    warpgroup.store(p.claim(j), warpgroup.causal(frame.one_by_one(queries, keys, sums, 0), 0, 0.0))
                    store_parts(high, low, frame.one_by_one(keys, keys, sums, 0))
                    warpgroup.sync()
                decayed = kept.claim(j)
                frame.change(queries, keys, decayed, sums, ends, factor.claim(j), flag.claim(j), warp, strong)
                kept.publish(j)
                factor.publish(j)
                flag.publish(j)
                g.release(j)
                warpgroup.sync()
                frame.fill(rings, arrays, j + 1, n, span, head, key_head, block)
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
                x = inverse_transposed(a * beta, high, low)
                warpgroup.store(t.claim(j), x * beta)
                t.publish(j)
        else:
            if CLAIMS:
                warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence * segments + segment, head, 0, column), 3, 2)
            for j in range(n):
                decayed, scale_by, strong = kept.wait(j), factor.wait(j), frame.is_strong(flag.wait(j))
                s_t = frame.scaled(s_t, scale_by, not strong)
                u, o = state.read(s_t, decayed, q.wait(j))
                q.release(j)
                kept.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), state.values))
                v.release(CONSUMERS * j + me)
                u = sequences.without_others(values, span.left(j)) - u
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(frame.scaled(s_t, scale_by, strong), u, k.wait(j)))
                k.release(j)
                s_t = frame.scaled(s_t, scale_by, not strong)
                factor.release(j)
                flag.release(j)
                o = warpgroup.wait(warpgroup.mma_ABt(o, u, p.wait(j))) * scale
                p.release(j)
                state.store(gO, mine, o, span, span.token(j), head, CONSUMERS * block + me)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gState, s_t, (sequence, head, 0, column), 3, 2)
                sequences.store_nobodys(gO, gEnds, sequence, length, head, CONSUMERS * block + me)

    return scan, smem
