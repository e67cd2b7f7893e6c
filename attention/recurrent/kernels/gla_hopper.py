"""Linear attention for Hopper where every channel of a key decays by itself (gated linear attention, Yang et al. 2024).

    S_t = diag(exp(g_t)) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t        g_t: Dk numbers, never positive

In the frame of some r a chunk is one of plain linear attention (b, q', k* and S': see decay_frame.py):

    P = tril(q' k*^T)        O = scale (q' S' + P V)        S = exp(b_last - r) (S' + k*^T V)

Of a chunk two warpgroups make what knows nothing of the state: the framer q' and k*, then the weigher P, while the framer is
at the next chunk. Consumers, of 64 value columns each, carry the state through; they hold it transposed, 64 x Dk, and O too.

What rounding takes from q' and from P is multiplied as well: without that the frame would add half as much error again as
all other roundings together.
"""

import functools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import columns, divmod, store, subtile, warpgroup
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.arguments import ENDS, FLOAT, INT, array, tiled

from . import decay_frame
from .tokens import CHUNK, COLUMNS, Sequences, assigned
from .transposed_state import TransposedState

REGISTERS = {1: (184, 80, 240), 2: (120, 72, 160)}  # consumers -> registers a thread of framer, weigher and consumer
STAGES = {64: 2, 128: 2, 256: 1}  # padded key dim: chunks in flight
WIDE = 128  # key dim, beyond which a state takes half of a consumer's registers: one consumer


class Config(decay_frame.Config):
    """A kernel's configuration: see decay_frame.py."""

    makers = 2


SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    return decay_frame.space(Config, SIZES, arch, everything)


class Frame(decay_frame.Frame):
    """The frame of GLA's kernel, which also keeps what q' loses when it is rounded."""

    @inlined
    def keep(self, lost, query, key, since, strong):
        """Store what rounding takes from q'. A strong chunk has none of it: its scores lie there."""
        if not strong:
            store(lost, query - fp32(self.dtype(query)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE = config.consumers, config.dtype, config.gates is fp32
    FRAMER, WEIGHER, (frames, weighs, claim) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    KEY_DIM, AHEAD, RELEASES = config.key_dim, STAGES[config.key_dim], CONSUMERS > 1
    STATE, WEIGHTS, BLOCK = rt(16, KEY_DIM, fp32), rt(16, CHUNK, INPUT), rt(16, config.key.panel_cols, fp32)
    group, readers = warpgroup.WARPGROUP, CONSUMERS * warpgroup.WARPGROUP
    smem = shared(
        q=ring(config.key, AHEAD, readers + 2 * group),
        k=ring(config.key, AHEAD, readers + 2 * group),
        v=ring(config.value, AHEAD * CONSUMERS, group),
        g=ring(config.gate, AHEAD, group),
        p=ring(st(2 * CHUNK, CHUNK, INPUT), 1, readers, writers=group),
        lost=ring(config.key, 1, group, writers=group),
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
        totals=config.sums,
        factor=ring(config.factor, AHEAD, readers, writers=group),
        flag=ring(decay_frame.FLAG, AHEAD, readers + group, writers=group),
    )
    sequences, frame = Sequences(config.varlen), Frame(KEY_DIM, INPUT, CONSUMERS, BLOCK)
    state = TransposedState(KEY_DIM, INPUT, sequences)

    @inlined
    def read(s_t, queries, factor, strong):
        """(S'^T q'^T, pending; the state as the keys are added to it). A wide state is read in two halves, because registers
        do not hold all of it rounded."""
        if KEY_DIM <= WIDE:
            rounded = INPUT(s_t)
            s_t = frame.scaled(s_t, factor, strong)
            return warpgroup.mm_ABt(rounded, queries), s_t
        else:
            rounded = INPUT(columns(s_t, WIDE, 0))
            o = warpgroup.wait(warpgroup.mm_ABt(rounded, subtile(queries, CHUNK, 0, WIDE, 0)))
            rounded = INPUT(columns(s_t, WIDE, 1))
            s_t = frame.scaled(s_t, factor, strong)
            return warpgroup.mma_ABt(o, rounded, subtile(queries, CHUNK, 0, WIDE, 1)), s_t

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1),
        gGates: tiled(config.gate, unit=1), gO: sequences.output(config.value), gStart: array(4), gState: array(4), gEnds: ENDS,
        length: INT, blocks: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of one of a sequence's `segments`, and after the last one the state, for one of `blocks` blocks of
        columns of a head. `group` value heads share a key head. gStart: the state before each segment."""
        q, k, v, g, p, lost, out, totals, factor, flag = smem.open()
        me = warpgroup.id()
        block, segment, head, sequence = assigned(cuda.blockIdx.x, blocks, segments, heads)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == FRAMER:
            if RELEASES:
                warpgroup.release_registers(frames)
            else:
                warpgroup.claim_registers(frames)
            warp = int32(cuda.threadIdx.x // 32) - FRAMER * warpgroup.WARPGROUP
            for j in range(n):
                queries, keys, gates = q.wait(j), k.wait(j), g.wait(j)
                sequences.clear(keys, span.left(j))
                sequences.clear(gates, span.left(j))
                sums = gates if IN_PLACE else totals
                ends, strong = frame.sum_up(sums, gates, warp)
                rest = lost.claim(j)
                if strong:
                    for i in range(CHUNK // BLOCK.cols):
                        warpgroup.store(subtile(rest, CHUNK, 0, BLOCK.cols, i), frame.one_by_one(queries, keys, sums, i))
                    warpgroup.sync()
                frame.change(queries, keys, rest, sums, ends, factor.claim(j), flag.claim(j), warp, strong)
                factor.publish(j)
                flag.publish(j)
                lost.publish(j)
                g.release(j)
                q.release(j)
                k.release(j)
        elif me == WEIGHER:
            warpgroup.release_registers(weighs)
            key_head, _ = divmod(head, group)
            rings, arrays = (q, k, v, g), (gQ, gK, gV, gGates)
            for j in range(AHEAD):
                frame.fill(rings, arrays, j, n, span, head, key_head, block)
            for j in range(n):
                rest, strong, queries, keys = lost.wait(j), frame.is_strong(flag.wait(j)), q.wait(j), k.wait(j)
                flag.release(j)
                if strong:
                    s = fp32(warpgroup.load(subtile(rest, CHUNK, 0, CHUNK, 0), WEIGHTS))
                else:
                    s = warpgroup.wait(warpgroup.mma_ABt(warpgroup.mm_ABt(queries, keys), rest, keys))
                lost.release(j)
                q.release(j)
                k.release(j)
                s = warpgroup.causal(s, 0, 0.0)
                weights, rounded = p.claim(j), INPUT(s)
                warpgroup.store(subtile(weights, CHUNK, 0), rounded)
                warpgroup.store(subtile(weights, CHUNK, 1), s - fp32(rounded))
                p.publish(j)
                frame.fill(rings, arrays, j + AHEAD, n, span, head, key_head, block)
        else:
            warpgroup.claim_registers(claim)
            column, mine = COLUMNS * (CONSUMERS * block + me), subtile(out, CHUNK, me)
            s_t = warpgroup.load(gStart, STATE, (sequence * segments + segment, head, column, 0), aligned=False)
            for j in range(n):
                scale_by, strong, queries, keys = factor.wait(j), frame.is_strong(flag.wait(j)), q.wait(j), k.wait(j)
                values, weights = v.wait(CONSUMERS * j + me), p.wait(j)
                sequences.clear(values, span.left(j))
                o, s_t = read(frame.scaled(s_t, scale_by, not strong), queries, scale_by, strong)
                o = warpgroup.mma_AtBt(o, values, subtile(weights, CHUNK, 0))
                o = warpgroup.mma_AtBt(o, values, subtile(weights, CHUNK, 1))
                s_t = warpgroup.mma_AtB(s_t, values, keys)
                o = warpgroup.wait(o, newer=1) * scale
                q.release(j)
                p.release(j)
                s_t = frame.scaled(warpgroup.wait(s_t), scale_by, not strong)
                k.release(j)
                v.release(CONSUMERS * j + me)
                factor.release(j)
                flag.release(j)
                state.store(gO, mine, o, span, span.token(j), head, CONSUMERS * block + me)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gState, s_t, (sequence, head, column, 0), aligned=False)
                sequences.store_nobodys(gO, gEnds, sequence, length, head, CONSUMERS * block + me)

    return scan, smem
