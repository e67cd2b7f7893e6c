"""The local state of each segment, the state after it from a state of 0, for Hopper where every channel of a key decays by
itself.

    S = diag(exp(b_last)) S + (exp(b_last - b) k)^T v        b: the cumulative sum of a chunk's gates

Without queries all keys are decayed to the end of their chunk, where no exponent is positive, so no chunk is strong. One
warpgroup, the preparer, starts all TMA loads, computes b and decays the keys. Consumers, of 64 value columns each, hold the
state transposed. compose_segment_states.py composes these states to the state before each segment, from which gla_hopper.py
computes outputs.

For gradients (channel_gradients_hopper.py) the kernel also stores the states before all chunks; and in reverse, with queries,
decayed from the start of their chunk, for keys and dO for values, it computes the gradients of states."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, subtile, warpgroup, zeros
from tiles import bf16, fp16, fp32, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent import channel_config, channel_decay
from ...parts.recurrent.channel_decay import TOKEN_GROUP
from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

REGISTERS = 152, 176  # a thread of the preparer, of each of two consumers
STAGES = {64: 4, 128: 3, 256: 2}  # padded key dim: chunks in flight


@dataclass(frozen=True)
class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py. stores_states: are the states before all chunks stored, transposed,
    in the dtype of keys, from a state that is given? reverse: are these gradients of states, from the last chunk to the first,
    and keys the queries, decayed from the start of their chunk?"""

    stores_states: bool = field(default=False, kw_only=True)
    reverse: bool = field(default=False, kw_only=True)

    def __str__(self):
        label = "states of chunks" if self.stores_states else "gradients of states" if self.reverse else "states"
        return f"{label}, {super().__str__()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    yield from channel_config.channel_space(Config, channel_config.GLA_SIZES, target, everything)
    if target.has_wgmma:
        for input_dtype, varlen in itertools.product((bf16, fp16), (False, True)) if everything else ((bf16, False),):
            yield Config(128, 2, fp32, input_dtype, varlen, stores_states=True)
            yield Config(128, 2, fp32, input_dtype, varlen, reverse=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, STATE = config.consumers, config.dtype, config.gates is fp32, rt(16, config.key_dim, fp32)
    PREPARER, (preparer_registers, consumer_registers), SETMAXNREG = CONSUMERS, REGISTERS, CONSUMERS > 1
    STORES_STATES = config.stores_states
    STAGE_COUNT, WARPS = STAGES[config.key_dim], warpgroup.WARPGROUP
    readers = CONSUMERS * WARPS
    channel_gates, PARAMS = config.channel_gates, config.channel_gates.params()
    smem = shared(
        k=ring(config.key, STAGE_COUNT, readers + WARPS),
        v=ring(config.value, STAGE_COUNT * CONSUMERS, WARPS),
        g=ring(config.gate, STAGE_COUNT, WARPS),
        state_decay=ring(config.state_decay, STAGE_COUNT, readers, writers=WARPS),
        gate_sums=config.gate_sums,
        biases=channel_gates.biases,
        rates=channel_gates.rates,
    )
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    REVERSE, seq_layout = config.reverse, SequenceLayout(config.varlen, config.reverse)
    decay = channel_decay.ChannelDecay(config.key_dim, INPUT, CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gGates: tiled(config.gate, unit=1),
        gLocalStates: array(5), gTotalDecays: array(4), gInitialState: array(4), gStates: array(4, INPUT), gCuSeqlens: ENDS,
        length: INT, blocks: INT, segments: INT, scanned_segments: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The local state of each of the first `scanned_segments` of the `segments`, and its total decay, in powers of 2.
        `group` heads share a key head; each is `blocks` blocks of columns wide. gInitialState: the state before each segment,
        and gStates: before each chunk, where these are wanted instead. scale: of local states."""
        k, v, g, state_decay, gate_sums, biases, rates = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == PREPARER:
            if SETMAXNREG:
                warpgroup.release_registers(preparer_registers)
            warp, (key_head, _) = warpgroup.rank(), divmod(head, group)
            rings, arrays = (k, v, g), (gK, gV, gGates)
            for j in range(STAGE_COUNT - 1):
                decay.fill_keys(rings, arrays, j, n, seq, head, key_head, block)
            total_b = zeros(decay.warp_tile.row_vec)
            constants = biases, rates
            channel_gates.load_constants(constants, params, head, warp)
            for j in range(n):
                decay.fill_keys(rings, arrays, j + STAGE_COUNT - 1, n, seq, head, key_head, block)
                keys, gates = k.wait(j), g.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                seq_layout.zero_other_rows(gates, seq.remaining(j))
                norm.normalize(keys, warp)
                norm.sync()
                sums = gates if IN_PLACE else gate_sums
                channel_gates.cumsum(sums, gates, constants, warp, seq.remaining(j))
                b_last = decay.load_last_sums(sums, warp)
                for i in range(CHUNK // TOKEN_GROUP):
                    b = load(decay.group_part(sums, i, warp), decay.group_tile, fenced=False) * LOG2_E
                    key = load(decay.group_part(keys, i, warp), decay.group_tile, fenced=False)
                    if REVERSE:
                        store(decay.group_part(keys, i, warp), key * exp2(b))
                    else:
                        store(decay.group_part(keys, i, warp), key * exp2(b_last - b))
                store(subtile(state_decay.claim(j), decay.warp_tile.cols, warp), exp2(b_last))
                warpgroup.sync()  # its fence makes the keys visible to wgmma; publishing a vector has no such fence
                state_decay.publish(j)
                g.release(j)
                k.release(j)
                total_b = total_b + b_last
            if block == 0 and not STORES_STATES:
                store(gTotalDecays, total_b, (sequence, head, segment, decay.warp_tile.cols * warp))
        else:
            if SETMAXNREG:
                warpgroup.claim_registers(consumer_registers)
            column = int32(COLUMNS * (CONSUMERS * block + wg))
            first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
            if STORES_STATES:
                at = int32(sequence * segments + segment), head, column, 0
                s_t = warpgroup.load(gInitialState, STATE, at, aligned=False)
            else:
                s_t = zeros(STATE)
            for j in range(n):
                if STORES_STATES:
                    warpgroup.store(gStates, s_t, (int32(first_chunk + j), head, column, 0), aligned=True)
                exp_b_last, keys, values = state_decay.wait(j), k.wait(j), v.wait(CONSUMERS * j + wg)
                seq_layout.zero_other_rows(values, seq.remaining(j))
                s_t = warpgroup.wait(warpgroup.mma_AtB(s_t * load(exp_b_last, decay.channel_vec), values, keys))
                state_decay.release(j)
                k.release(j)
                v.release(CONSUMERS * j + wg)
            if not STORES_STATES:
                warpgroup.store(gLocalStates, s_t * scale, (sequence, head, segment, column, 0), aligned=False)

    return scan, smem
