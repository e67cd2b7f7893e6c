"""Mamba-2 for Hopper where heads share queries and keys, chunk by chunk.

    S_t = exp(g_t) S_(t-1) + w_t k_t^T v_t        o_t = q_t S_t        heads share q_t and k_t, but not g_t and w_t

The decays are taken out of the chunk: with b the cumulative sum of its gates, in powers of 2,

    V' = exp2(-b) w V        O = exp2(b) (Q S + tril(Q K^T) V')        S = exp2(b_last) (S + K^T V')

so that the intra-chunk scores P = tril(Q K^T) are the same for all heads. One warpgroup, the scorer, computes them, and each of
its warps b of a chunk and head. Consumers, of 64 value columns of a head each, update the state with the chunk that is ready;
they hold it transposed, 64 x Dk, and have three products in flight at once.

A chunk is strong if it decays by so much that V' would overflow. A consumer then decays the scores of its head itself, as
chunk_hopper.py does; no exponent is positive.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, last_element, load, silu, store, subtile, tile_min, warpgroup
from tiles import bf16, dtype, fp32, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.gates import COL_VEC, MIN_LOG2_DECAY, ROW_VEC, Mamba2Gate, load_line
from ...parts.recurrent.results import ScanOutputs
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

CONSUMERS = 2
REGISTERS = 24, 72, 208  # a thread of the producer, the scorer and a consumer
KEY_DIMS = 64, 128  # as padded
AHEAD = 2  # chunks by which the scorer may be ahead of consumers
VECTORS = 8  # chunks whose gates are in shared memory
MIN_DECAY = 2.0**MIN_LOG2_DECAY


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gate: Mamba-2's gates. result: which of D and z there
    are, and whether states are stored. varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    dtype: dtype
    gate: Mamba2Gate
    result: ScanOutputs
    varlen: bool = False

    @property
    def threads(self):
        """The threads of a block, those of the consumers, the scorer and the producer."""
        return warpgroup.THREADS * (CONSUMERS + 2)

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def value(self):
        """A consumer's tile of V, Z or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def stages(self):
        """The number of chunks in flight, as shared memory allows."""
        return 2 if self.result.silu else 3

    def __str__(self):
        flags = str(self.gate), str(self.result), "varlen" * self.varlen
        return ", ".join(filter(None, (f"Dk {self.key_dim} {self.dtype}", *flags)))


def supports(config, column_blocks: int) -> bool:
    """Can this kernel compute the calls of chunk_hopper.py's configuration? column_blocks: how many blocks of 64 value
    columns, of all heads together, share a key head."""
    fits = isinstance(config.gate, Mamba2Gate) and config.dtype is bf16 and config.key_dim in KEY_DIMS
    return fits and isinstance(config.result, ScanOutputs) and column_blocks % CONSUMERS == 0


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations; without `everything` those of the plainest result only."""
    if target.has_wgmma:
        full = Mamba2Gate(softplus=True), ScanOutputs(skip=True, silu=True)
        limited = Mamba2Gate(softplus=True, low=0.001, high=0.1), full[1]
        stored = Mamba2Gate(softplus=True), ScanOutputs(skip=True, stores_states=True)
        forms = ((Mamba2Gate(), ScanOutputs()), stored, full, *[limited] * everything)
        for key_dim, form, varlen in itertools.product(KEY_DIMS, forms, (False, True)):
            if everything or (form is not full and not varlen):
                yield Config(key_dim, bf16, *form, varlen)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    SCORER, PRODUCER, WARPS = CONSUMERS, CONSUMERS + 1, warpgroup.WARPGROUP
    producer_registers, scorer_registers, consumer_registers = REGISTERS
    INPUT, STATE, STAGES, gate, result = config.dtype, rt(16, config.key_dim, fp32), config.stages, config.gate, config.result
    CHUNKS_AT_ONCE, WARPGROUPS, SCORES_TILE = WARPS // CONSUMERS, CONSUMERS + 1, rt(16, CHUNK, INPUT)
    readers = CONSUMERS * WARPS
    seq_layout = SequenceLayout(config.varlen)
    PARAMS, state = result.params(INPUT), TransposedState(config.key_dim, INPUT, seq_layout)
    TMA_KEYS, TMA_VALUES = tiled(config.key, unit=1), tiled(config.value, unit=1)
    keys = ring(config.key, STAGES, readers + WARPS)
    values = ring(config.value, STAGES * CONSUMERS, WARPS)
    vectors = ring(sv(CHUNK, fp32), VECTORS * CONSUMERS, WARPS, writers=1)
    smem = shared(
        q=keys,
        k=keys,
        v=values,
        z=values if result.silu else ring(config.value, 1, WARPS),
        p=ring(st(CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        b=vectors,
        a=vectors,
        exp_b=vectors,
        edge_decay=vectors,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: TMA_KEYS, gK: TMA_KEYS, gV: TMA_VALUES, gZ: TMA_VALUES, gGates: array(3), gA: array(2), gDtBias: array(2),
        gD: array(2), gO: seq_layout.output_argument(config.value), gInitialState: array(4), gFinalState: array(4),
        gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT, group: INT, width: INT, params: PARAMS,
    ):  # fmt: skip
        """The outputs and the state after each sequence. `group` value heads share a key head; each is `width` blocks of 64
        columns wide, and together they have `blocks` thread blocks."""
        q, k, v, z, p, b, a, exp_b, edge_decay, out_tiles = smem.open()
        wg = warpgroup.id()
        block, _, key_head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n = seq.num_chunks()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token = seq.chunk_start(j)
                    k.fill(j, gK, (seq.batch, token, key_head))
                    q.fill(j, gQ, (seq.batch, token, key_head))
                    for c in range(CONSUMERS):
                        group_head, column = divmod(CONSUMERS * block + c, width)
                        result.fill_values(
                            v, z, CONSUMERS * j + c, gV, gZ, (seq.batch, token, key_head * group + group_head, column)
                        )
        elif wg == SCORER:
            warpgroup.release_registers(scorer_registers)
            ahead, c = divmod(warpgroup.rank(), CONSUMERS)  # of the chunk whose b this warp computes
            group_head, _ = divmod(CONSUMERS * block + c, width)
            head = key_head * group + group_head
            rate, bias = gate.load_rate_and_bias(gA, gDtBias, head)
            g = load_line(gGates, seq.end, (seq.batch, seq.chunk_start(ahead), head))
            for j in range(-CHUNKS_AT_ONCE, n):  # computes b of later chunks, and P of chunk j
                if j % CHUNKS_AT_ONCE == 0:
                    chunk = int32(j + CHUNKS_AT_ONCE + ahead)
                    slot = CONSUMERS * chunk + c
                    if chunk < n:
                        b_chunk, a_chunk = gate.compute_cumsum(g, rate, bias, seq.remaining(chunk))
                        b_last = tile_min(b_chunk)
                        store(b.claim(slot), b_chunk)
                        b.publish(slot)
                        store(a.claim(slot), a_chunk)
                        a.publish(slot)
                        store(exp_b.claim(slot), exp2(b_chunk))
                        exp_b.publish(slot)
                        store(edge_decay.claim(slot), exp2((b_last if exp2(b_last) < MIN_DECAY else 0.0) - a_chunk))
                        edge_decay.publish(slot)
                    g = load_line(gGates, seq.end, (seq.batch, seq.chunk_start(chunk + CHUNKS_AT_ONCE), head))
                if j >= 0:
                    keys = k.wait(j)
                    seq_layout.zero_other_rows(keys, seq.remaining(j), WARPGROUPS)
                    s = warpgroup.wait(warpgroup.mm_ABt(q.wait(j), keys))
                    k.release(j)
                    q.release(j)
                    warpgroup.store(p.claim(j), warpgroup.causal(s, 0, 0.0))
                    p.publish(j)
        else:
            warpgroup.claim_registers(consumer_registers)
            group_head, column = divmod(CONSUMERS * block + wg, width)
            head, row, out = int32(key_head * group + group_head), int32(COLUMNS * column), subtile(out_tiles, CHUNK, wg)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, row, 0), aligned=False)
            d = warpgroup.load(gD, COL_VEC, (head, row))
            first_index = seq_layout.chunk_index(seq.start, sequence, length)
            for j in range(n):
                slot = CONSUMERS * j + wg
                keys, queries = k.wait(j), q.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), WARPGROUPS)
                v_tile = v.wait(slot)
                values = seq_layout.zero_other_columns(warpgroup.load_transposed(v_tile, state.values), seq.remaining(j))
                # here, because the fence of the loads before would wait for it
                result.store_state(params, s_t, int32(first_index + j), head, row, 0)
                exp_b_chunk, edge_decay_chunk = exp_b.wait(slot), edge_decay.wait(slot)
                b_chunk, a_chunk = b.wait(slot), a.wait(slot)
                o = warpgroup.mm_ABt(INPUT(s_t), queries)
                v_t = INPUT(fp32(values) * load(edge_decay_chunk, ROW_VEC))
                p_tile, decay = p.wait(j), last_element(exp_b_chunk)
                if decay < MIN_DECAY:
                    o = warpgroup.wait(o) * load(exp_b_chunk, ROW_VEC)
                    s = fp32(warpgroup.load(p_tile, SCORES_TILE))
                    s = warpgroup.causal(gate.decay_scores(s, warpgroup.load(b_chunk, COL_VEC), load(a_chunk, ROW_VEC)), 0, 0.0)
                    warpgroup.store_wait()
                    warpgroup.sync()
                    warpgroup.store(out, s)
                    warpgroup.sync()
                    o = warpgroup.wait(warpgroup.mma_ABt(o, values, out))
                    s_t = warpgroup.wait(warpgroup.mma_AB(s_t * decay, v_t, keys))
                else:
                    o = warpgroup.mma_ABt(o, v_t, p_tile)
                    s_t = warpgroup.mma_AB(s_t, v_t, keys)
                    o = warpgroup.wait(o, newer=1) * load(exp_b_chunk, ROW_VEC)
                    s_t = warpgroup.wait(s_t) * decay
                q.release(j)
                k.release(j)
                p.release(j)
                exp_b.release(slot)
                edge_decay.release(slot)
                b.release(slot)
                a.release(slot)
                if result.skip:
                    o = o + fp32(warpgroup.load_transposed(v_tile, state.values)) * d
                v.release(slot)
                if result.silu:
                    o = o * silu(fp32(warpgroup.load_transposed(z.wait(slot), state.values)))
                    z.release(slot)
                state.store_output(gO, out, o, seq, seq.chunk_start(j), head, column)
            warpgroup.store_wait()
            warpgroup.store(gFinalState, s_t, (sequence, head, row, 0), aligned=False)
            seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, column)

    return scan, smem
