"""The local state of each segment, which gla_states_hopper.py computes too, but from the segment's last chunk to its first, and
only as far back as anything is left of what a token added.

    S = sum over chunks (exp(B + b_last - b) k)^T v        b: the cumulative sum of a chunk's gates; B: the sum of all after it

Keys are decayed to the end of the segment, where no exponent is positive, so consumers add products up and do nothing else.
Once exp(B) is 0 in fp32 in all channels, earlier tokens are not read: that of strong gates is a chunk or two, of gentle ones a
part of the segment, and where one channel keeps its state, all of it. (Of a decay a token, recent_chunks.py counts the
chunks beforehand.)

One warpgroup, the preparer, computes b and decays the keys. Consumers, of 64 value columns each, hold the state transposed; the
first one starts all TMA loads, so that the preparer never waits for consumers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, tile_max, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent import channel_config, channel_decay
from ...parts.recurrent.channel_decay import FLAG, FLAG_VEC, TOKEN_GROUP
from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.recent_chunks import LEAST_LOG2
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from . import gla_states_hopper

STAGES = gla_states_hopper.STAGES


@dataclass(frozen=True)
class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py. Keys are of bf16, whose exponents are those of fp32. reverse: are
    these gradients of states, and keys the queries, decayed from the start of the segment, whose first chunk comes first?"""

    reverse: bool = field(default=False, kw_only=True)

    def __str__(self):
        return f"recent {'gradients of ' * self.reverse}states, {super().__str__()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only."""
    configs = channel_config.channel_space(Config, channel_config.GLA_SIZES, target, everything)
    yield from (config for config in configs if config.dtype is bf16)
    if target.has_wgmma:
        yield from (Config(128, 2, fp32, bf16, varlen, reverse=True) for varlen in ((False, True) if everything else (False,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, STATE = config.consumers, config.dtype, config.gates is fp32, rt(16, config.key_dim, fp32)
    PREPARER, STAGE_COUNT, WARPS = CONSUMERS, STAGES[config.key_dim], warpgroup.WARPGROUP
    readers = CONSUMERS * WARPS
    channel_gates, PARAMS = config.channel_gates, config.channel_gates.params()
    smem = shared(
        k=ring(config.key, STAGE_COUNT, readers + WARPS),
        v=ring(config.value, STAGE_COUNT * CONSUMERS, WARPS),
        g=ring(config.gate, STAGE_COUNT, WARPS),
        flag=ring(FLAG, STAGE_COUNT, readers, writers=WARPS),
        gate_sums=config.gate_sums,
        biases=channel_gates.biases,
        rates=channel_gates.rates,
    )
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    REVERSE, seq_layout = config.reverse, SequenceLayout(config.varlen, config.reverse)
    decay = channel_decay.ChannelDecay(config.key_dim, INPUT, CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan_back(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gGates: tiled(config.gate, unit=1),
        gLocalStates: array(5), gTotalDecays: array(4), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT,
        scanned_segments: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The local state of each of the first `scanned_segments` of the `segments`, and its total decay, in powers of 2;
        where that is below LEAST_LOG2, any number below it. heads: of values, `group` of which share a key head, and each of
        which is `blocks` blocks of columns wide. scale: of local states."""
        k, v, g, flag, gate_sums, biases, rates = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments).backwards()
        n = seq.num_chunks()
        j, goes_on = int32(0), n > 0
        if wg == PREPARER:
            warp = warpgroup.rank()
            total, constants = zeros(decay.warp_tile.row_vec), (biases, rates)
            channel_gates.load_constants(constants, params, head, warp)
            while goes_on:
                gates, remaining = g.wait(j), seq.remaining(j)
                seq_layout.zero_other_rows(gates, remaining)
                sums = gates if IN_PLACE else gate_sums
                channel_gates.cumsum(sums, gates, constants, warp, remaining)
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, remaining)
                norm.normalize(keys, warp)
                norm.sync()
                before, total = total, total + decay.load_last_sums(sums, warp)
                for i in range(CHUNK // TOKEN_GROUP):
                    b = load(decay.group_part(sums, i, warp), decay.group_tile, fenced=False) * LOG2_E
                    key = load(decay.group_part(keys, i, warp), decay.group_tile, fenced=False)
                    store(decay.group_part(keys, i, warp), key * exp2(before + b if REVERSE else total - b))
                goes_on = warpgroup.reduce_any(tile_max(total) > LEAST_LOG2) and j + 1 < n
                flag_slot = flag.claim(j)
                if warp == 0:
                    store(flag_slot, zeros(FLAG_VEC) + (1.0 if goes_on else 0.0))
                warpgroup.sync()  # its fence makes the keys visible to wgmma; publishing a vector has no such fence
                flag.publish(j)
                g.release(j)
                k.release(j)
                j = int32(j + 1)
            for i in range(j, min(int32(j + STAGE_COUNT - 1), n)):  # no block ends before what TMA loads for it is there
                g.wait(i)
                k.wait(i)
            if block == 0:
                store(gTotalDecays, total, (sequence, head, segment, decay.warp_tile.cols * warp))
        else:
            column, (key_head, _) = int32(COLUMNS * (CONSUMERS * block + wg)), divmod(head, group)
            rings, arrays = (k, v, g), (gK, gV, gGates)
            if wg == 0:
                for i in range(STAGE_COUNT):
                    decay.fill_keys(rings, arrays, i, n, seq, head, key_head, block)
            s_t = zeros(STATE)
            while goes_on:
                goes_on = decay.load_flag(flag.wait(j)) > 0
                keys, values = k.wait(j), v.wait(CONSUMERS * j + wg)
                seq_layout.zero_other_rows(values, seq.remaining(j))
                s_t = warpgroup.wait(warpgroup.mma_AtB(s_t, values, keys))
                flag.release(j)
                k.release(j)
                v.release(CONSUMERS * j + wg)
                if goes_on and wg == 0:
                    decay.fill_keys(rings, arrays, j + STAGE_COUNT, n, seq, head, key_head, block)
                j = int32(j + 1)
            for i in range(j, min(int32(j + STAGE_COUNT - 1), n)):
                v.wait(CONSUMERS * i + wg)
            warpgroup.store(gLocalStates, s_t * scale, (sequence, head, segment, column, 0), aligned=False)

    return scan_back, smem
