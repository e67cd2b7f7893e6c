"""What a sequence's segments by themselves leave of a state, for Hopper, where every channel of a key decays by itself.

    S = diag(exp(b_last)) S + (exp(b_last - b) k)^T v        b: the running sums of a chunk's gates

Without queries there is nothing to be counted from anywhere but a chunk's end, where no exponent is positive, and no chunk is
strong. One warpgroup, the framer, has TMA bring what all need, sums up the gates and decays the keys; consumers, of 64 value
columns each, hold the state transposed, as in gla_hopper.py, which goes on from what starts.py makes of these states.
"""

import functools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, subtile, warpgroup, zeros
from tiles import fp32, ring, rt, shared
from tiles.arguments import ENDS, INT, array, tiled

from . import decay_frame, gla_hopper
from .decay_frame import TOKENS
from .gates import LOG2_E
from .tokens import CHUNK, COLUMNS, Sequences, assigned

REGISTERS = 152, 176  # a thread of the framer, and of two consumers
STAGES = {64: 4, 128: 3, 256: 2}  # padded key dim: chunks in flight
SIZES = gla_hopper.SIZES


class Config(decay_frame.Config):
    """A kernel's configuration: see decay_frame.py."""

    def __str__(self):
        return f"states, {super().__str__()}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    return decay_frame.space(Config, SIZES, arch, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, STATE = config.consumers, config.dtype, config.gates is fp32, rt(16, config.key_dim, fp32)
    FRAMER, (frames, claim), RELEASES = CONSUMERS, REGISTERS, CONSUMERS > 1
    AHEAD, group = STAGES[config.key_dim], warpgroup.WARPGROUP
    readers = CONSUMERS * group
    smem = shared(
        k=ring(config.key, AHEAD, readers + group),
        v=ring(config.value, AHEAD * CONSUMERS, group),
        g=ring(config.gate, AHEAD, group),
        factor=ring(config.factor, AHEAD, readers, writers=group),
        totals=config.sums,
    )
    sequences, frame = Sequences(config.varlen), decay_frame.Frame(config.key_dim, INPUT, CONSUMERS, STATE)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gGates: tiled(config.gate, unit=1), gLocal: array(5),
        gTotal: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT, heads: INT, group: INT,
    ):  # fmt: skip
        """What each of `walked` of the `segments` leaves of a state of 0, and the sums of its gates, in powers of 2. `group`
        heads share a key head; each is `blocks` blocks of columns wide."""
        k, v, g, factor, totals = smem.open()
        me = warpgroup.id()
        block, segment, head, sequence = assigned(cuda.blockIdx.x, blocks, walked, heads)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == FRAMER:
            if RELEASES:
                warpgroup.release_registers(frames)
            warp, (key_head, _) = warpgroup.rank(), divmod(head, group)
            rings, arrays = (k, v, g), (gK, gV, gGates)
            for j in range(AHEAD - 1):
                frame.fill_keys(rings, arrays, j, n, span, head, key_head, block)
            total = zeros(frame.share.row_vec)
            for j in range(n):
                frame.fill_keys(rings, arrays, j + AHEAD - 1, n, span, head, key_head, block)
                keys, gates = k.wait(j), g.wait(j)
                sequences.clear(keys, span.left(j))
                sequences.clear(gates, span.left(j))
                sums = gates if IN_PLACE else totals
                ends = frame.sums_and_ends(sums, gates, warp)
                for i in range(CHUNK // TOKENS):
                    b, key = load(frame.some(sums, i, warp), frame.few) * LOG2_E, load(frame.some(keys, i, warp), frame.few)
                    store(frame.some(keys, i, warp), key * exp2(ends - b))
                store(subtile(factor.claim(j), frame.share.cols, warp), exp2(ends))
                warpgroup.sync()  # whose fence shows the keys to the products: that a vector is published with has none
                factor.publish(j)
                g.release(j)
                k.release(j)
                total = total + ends
            if block == 0:
                store(gTotal, total, (sequence, head, segment, frame.share.cols * warp))
        else:
            if RELEASES:
                warpgroup.claim_registers(claim)
            s_t = zeros(STATE)
            for j in range(n):
                decayed, keys, values = factor.wait(j), k.wait(j), v.wait(CONSUMERS * j + me)
                sequences.clear(values, span.left(j))
                s_t = warpgroup.wait(warpgroup.mma_AtB(s_t * load(decayed, frame.all), values, keys))
                factor.release(j)
                k.release(j)
                v.release(CONSUMERS * j + me)
            column = int32(COLUMNS * (CONSUMERS * block + me))
            warpgroup.store(gLocal, s_t, (sequence, head, segment, column, 0), aligned=False)

    return scan, smem
