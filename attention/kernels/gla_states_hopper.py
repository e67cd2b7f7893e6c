"""The local state of each segment, the state after it from a state of 0, for Hopper where every channel of a key decays by
itself.

    S = diag(exp(b_last)) S + (exp(b_last - b) k)^T v        b: the cumulative sum of a chunk's gates

Without queries all keys are decayed to the end of their chunk, where no exponent is positive, so no chunk is strong. One
warpgroup, the preparer, starts all TMA loads, computes b and decays the keys. Consumers, of 64 value columns each, hold the
state transposed. compose_segment_states.py composes these states to the state before each segment, from which gla_hopper.py
computes outputs.
"""

import functools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, subtile, warpgroup, zeros
from tiles import fp32, ring, rt, shared
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent import channel_config, channel_decay
from ..parts.recurrent.channel_decay import TOKEN_GROUP
from ..parts.recurrent.gates import LOG2_E
from ..parts.recurrent.l2norm import L2Norm
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from . import gla_hopper

REGISTERS = 152, 176  # a thread of the preparer, of each of two consumers
STAGES = {64: 4, 128: 3, 256: 2}  # padded key dim: chunks in flight
SIZES = gla_hopper.SIZES


class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py, with another name."""

    def __str__(self):
        return f"states, {super().__str__()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    return channel_config.channel_space(Config, SIZES, target, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, STATE = config.consumers, config.dtype, config.gates is fp32, rt(16, config.key_dim, fp32)
    PREPARER, (preparer_registers, consumer_registers), RELEASES = CONSUMERS, REGISTERS, CONSUMERS > 1
    AHEAD, group = STAGES[config.key_dim], warpgroup.WARPGROUP
    readers = CONSUMERS * group
    raw, PARAMS = config.channel_gates, config.channel_gates.params()
    smem = shared(
        k=ring(config.key, AHEAD, readers + group),
        v=ring(config.value, AHEAD * CONSUMERS, group),
        g=ring(config.gate, AHEAD, group),
        state_decay=ring(config.state_decay, AHEAD, readers, writers=group),
        gate_sums=config.gate_sums,
        biases=raw.biases,
        rates=raw.rates,
    )
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    seq_layout, decay = SequenceLayout(config.varlen), channel_decay.ChannelDecay(config.key_dim, INPUT, CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gGates: tiled(config.gate, unit=1),
        gLocalStates: array(5), gTotalDecays: array(4), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, scanned: INT,
        heads: INT, group: INT,
        params: PARAMS,
    ):  # fmt: skip
        """The local state of each of the first `scanned` of the `segments`, and its total decay, in powers of 2. `group` heads
        share a key head; each is `blocks` blocks of columns wide."""
        k, v, g, state_decay, gate_sums, biases, rates = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == PREPARER:
            if RELEASES:
                warpgroup.release_registers(preparer_registers)
            warp, (key_head, _) = warpgroup.rank(), divmod(head, group)
            rings, arrays = (k, v, g), (gK, gV, gGates)
            for j in range(AHEAD - 1):
                decay.fill_keys(rings, arrays, j, n, seq, head, key_head, block)
            total_b = zeros(decay.warp_tile.row_vec)
            constants = biases, rates
            raw.load_constants(constants, params, head, warp)
            for j in range(n):
                decay.fill_keys(rings, arrays, j + AHEAD - 1, n, seq, head, key_head, block)
                keys, gates = k.wait(j), g.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                seq_layout.zero_other_rows(gates, seq.remaining(j))
                norm.normalize(keys, warp)
                norm.sync()
                sums = gates if IN_PLACE else gate_sums
                raw.cumsum(sums, gates, constants, warp, seq.remaining(j))
                b_last = decay.load_last_sums(sums, warp)
                for i in range(CHUNK // TOKEN_GROUP):
                    b = load(decay.group_part(sums, i, warp), decay.group_tile, fenced=False) * LOG2_E
                    key = load(decay.group_part(keys, i, warp), decay.group_tile, fenced=False)
                    store(decay.group_part(keys, i, warp), key * exp2(b_last - b))
                store(subtile(state_decay.claim(j), decay.warp_tile.cols, warp), exp2(b_last))
                warpgroup.sync()  # its fence makes the keys visible to wgmma; publishing a vector has no such fence
                state_decay.publish(j)
                g.release(j)
                k.release(j)
                total_b = total_b + b_last
            if block == 0:
                store(gTotalDecays, total_b, (sequence, head, segment, decay.warp_tile.cols * warp))
        else:
            if RELEASES:
                warpgroup.claim_registers(consumer_registers)
            s_t = zeros(STATE)
            for j in range(n):
                exp_b_last, keys, values = state_decay.wait(j), k.wait(j), v.wait(CONSUMERS * j + wg)
                seq_layout.zero_other_rows(values, seq.remaining(j))
                s_t = warpgroup.wait(warpgroup.mma_AtB(s_t * load(exp_b_last, decay.channel_vec), values, keys))
                state_decay.release(j)
                k.release(j)
                v.release(CONSUMERS * j + wg)
            column = int32(COLUMNS * (CONSUMERS * block + wg))
            warpgroup.store(gLocalStates, s_t, (sequence, head, segment, column, 0), aligned=False)

    return scan, smem
