"""What a sequence's segments by themselves do to a state under the delta rule, for Hopper, where every channel of a key decays
by itself: kda_hopper.py without queries and outputs.

A state begins as [0 | 1], and values are 0 in the columns that they have not (TMA brings zeros for these). So the pass gives
[N | M], what a segment leaves of a state of 0, and the matrix that it multiplies one by: maps_hopper.py adds up these.
"""

import functools
import itertools
from collections.abc import Iterator

from numba import cuda
from numpy import float32, int32

from ops import col_index, divmod, equal, exp2, load, store, subtile, truncate, warpgroup, where, zeros
from ops.for_attention.triangular_inverse import TRIANGLE, inverse_transposed, store_parts
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.arguments import ENDS, INT, array, tiled

from . import decay_frame
from .decay_frame import FLAG, NUMBER, TOKENS
from .kda_hopper import KEY_DIMS, REGISTERS, STAGES
from .tokens import CHUNK, COLUMNS, Sequences, assigned

SIZES = tuple(itertools.product(KEY_DIMS, REGISTERS))  # padded key dim, consumers


class Config(decay_frame.Config):
    """A kernel's configuration: see decay_frame.py. consumers: each has 64 columns of a state."""

    def __str__(self):
        return f"states, {super().__str__()}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    return decay_frame.space(Config, SIZES, arch, everything)


class Frame(decay_frame.Frame):
    """The frame without queries."""

    @inlined
    def change_keys(self, keys, decayed, sums, ends, factor, flag, warp, strong):
        """See `change`: write k* over k, and k' to `decayed`."""
        start, finish = ends * (0.0 if strong else 0.5), ends * (1.0 if strong else 0.5)
        for i in range(CHUNK // TOKENS):
            b, key = load(self.some(sums, i, warp), self.few), load(self.some(keys, i, warp), self.few)
            b = b * decay_frame.LOG2_E
            store(self.some(decayed, i, warp), key * exp2(b - start))
            store(self.some(keys, i, warp), key * exp2(finish - b))
        store(subtile(factor, self.share.cols, warp), exp2(finish))
        if warp == 0:
            store(flag, zeros(NUMBER) + (1.0 if strong else 0.0))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, KEY_DIM = config.consumers, config.dtype, config.gates is fp32, config.key_dim
    PREPARER, (prepare, claim), CLAIMS = CONSUMERS, REGISTERS[CONSUMERS], CONSUMERS > 1
    STATE, SCORES = rt(16, KEY_DIM, fp32), rt(16, CHUNK, fp32)
    ROWS, WARPS, VALUES = SCORES.col_vec, warpgroup.WARPGROUP, rt(16, CHUNK, INPUT)
    readers = CONSUMERS * WARPS
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        kept=ring(config.key, STAGES, readers + WARPS, writers=WARPS),
        g=ring(config.gate, 1, WARPS),
        v=ring(config.value, STAGES * CONSUMERS, WARPS),
        t=ring(st(CHUNK, CHUNK, INPUT), STAGES, readers, writers=WARPS),
        factor=ring(config.factor, STAGES, readers, writers=WARPS),
        flag=ring(FLAG, STAGES, readers, writers=WARPS),
        high=TRIANGLE,
        low=TRIANGLE,
        totals=config.sums,
    )
    sequences, frame = Sequences(config.varlen), Frame(KEY_DIM, INPUT, CONSUMERS, SCORES)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gBeta: array(3), gGates: tiled(config.gate, unit=1),
        gState: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT, heads: INT, group: INT,
        values: INT,
    ):  # fmt: skip
        """[N | M] (maps_hopper.py) of each of `walked` of the `segments` of a sequence. values: how many columns have values,
        those of N. `group` value heads share a key head; each is `blocks` blocks of columns wide."""
        k, kept, g, v, t, factor, flag, high, low, totals = smem.open()
        me = warpgroup.id()
        block, segment, head, sequence = assigned(cuda.blockIdx.x, blocks, walked, heads * group)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == PREPARER:
            if CLAIMS:
                warpgroup.release_registers(prepare)
            betas, (key_head, _) = truncate(gBeta, 1, span.end), divmod(head, group)
            warp = int32(cuda.threadIdx.x // 32) - PREPARER * WARPS
            rings, arrays = (k, v, g), (gK, gV, gGates)
            frame.fill_keys(rings, arrays, 0, n, span, head, key_head, block)
            for j in range(n):
                keys, gates = k.wait(j), g.wait(j)
                sequences.clear(keys, span.left(j))
                sequences.clear(gates, span.left(j))
                beta = warpgroup.load(betas, ROWS, (span.batch, span.token(j), head), cols=1)
                sums = gates if IN_PLACE else totals
                ends, strong = frame.sum_up(sums, gates, warp)
                if strong:
                    store_parts(high, low, frame.one_by_one(keys, keys, sums, 0))
                    warpgroup.sync()
                decayed = kept.claim(j)
                frame.change_keys(keys, decayed, sums, ends, factor.claim(j), flag.claim(j), warp, strong)
                kept.publish(j)
                factor.publish(j)
                flag.publish(j)
                g.release(j)
                warpgroup.sync()
                frame.fill_keys(rings, arrays, j + 1, n, span, head, key_head, block)
                if strong:
                    a = warpgroup.load(high, SCORES) + warpgroup.load(low, SCORES)
                else:
                    a = warpgroup.wait(warpgroup.mm_ABt(decayed, keys))
                kept.release(j)
                k.release(j)
                x = inverse_transposed(a * beta, high, low)
                warpgroup.store(t.claim(j), x * beta)
                t.publish(j)
        else:
            if CLAIMS:
                warpgroup.claim_registers(claim)
            column = int32(COLUMNS * (CONSUMERS * block + me))
            one = equal(warpgroup.row_index(ROWS) + float32(column - values), col_index(STATE))
            s_t = where(one, 1.0, zeros(STATE))
            for j in range(n):
                decayed, scale_by, strong = kept.wait(j), factor.wait(j), frame.is_strong(flag.wait(j))
                s_t = frame.scaled(s_t, scale_by, not strong)
                known = warpgroup.mm_ABt(INPUT(s_t), decayed)
                own = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + me), VALUES))
                v.release(CONSUMERS * j + me)
                u = sequences.without_others(own, span.left(j)) - warpgroup.wait(known)
                kept.release(j)
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(frame.scaled(s_t, scale_by, strong), u, k.wait(j)))
                k.release(j)
                s_t = frame.scaled(s_t, scale_by, not strong)
                factor.release(j)
                flag.release(j)
            warpgroup.store(gState, s_t, (sequence * walked + segment, head, 0, column), 3, 2)

    return scan, smem
