"""Gradients of linear attention for Hopper in one walk from the last chunk to the first, where a decay is one number for a
token and head. With S the state before a chunk, dS the gradient of the state after it, b the cumulative sum of the chunk's
gates and M = tril(exp(b - b^T)),

    dP = scale M * dO V^T        P = scale M * Q K^T
    dQ = scale exp(b) dO S^T + dP K
    dK = exp(b_last - b) V dS^T + dP^T Q
    dV = exp(b_last - b) K dS + P^T dO
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO

The states before all chunks are in memory, transposed, in the input's dtype (results.ChunkStates). Each consumer has 64
columns of the values, for which it keeps dS in registers, transposed, and computes dV. Besides, the first computes dQ, the
second dK, for which it reads dS of both in shared memory. Every exponent is a sum of gates, so never positive.

For the gates' gradients (gradients.py) it stores q . dq and k . dk, and for each chunk the sum of the parts of k . dk that come
from dS and of exp(b_last) <S, dS>; gate_gradient.py computes the gradients from these. Consumers store no sums, and nothing
that is rounded: fences, which tiles of products need, would wait for these stores. Warps of the producer do."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, grid, minimum, subtile, warpgroup
from tiles import bf16, dtype, fp16, fp32, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.gates import Gate, HeadGate, TokenGate
from ...parts.recurrent.pair_exchange import BLOCKS
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, walk_of_block
from ...parts.recurrent.walk_outputs import CONSUMERS, DQ_CONSUMER, PairedOutputs, WalkOutputs

PRODUCER = CONSUMERS  # the warpgroup after those of the consumers
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
VALUES = CONSUMERS * COLUMNS  # columns of a value, padded
REGISTERS = 56, 224  # of a thread of the producer, of a consumer
LOAD_WARP, SUM_WARP, STORE_WARP = range(3)  # of the producer: the last is the first consumer's, the warp after it the second's
SUM_STAGES = 3  # chunks whose b is in shared memory; one less where that has to hold what a pair's blocks send each other, too
SUMS_LATE = 2  # chunks by which the warp that computes b is ahead of the sums that it stores
STAGES = 2  # chunks in flight


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gate: the kind of gates. unrounded: are dQ and dK
    float32, to be added over a group? unrounded_values: is dV float32? varlen: are sequences packed (cu_seqlens)? with_gates:
    are the sums for the gates' gradients stored, too? paired: do the two value heads of a key head have the blocks of a
    cluster, which add up dQ and dK?"""

    key_dim: int
    dtype: dtype
    gate: Gate
    unrounded: bool = False
    unrounded_values: bool = False
    varlen: bool = False
    with_gates: bool = True
    paired: bool = False
    threads, overlaps_previous = warpgroup.THREADS * (CONSUMERS + 1), True
    consumers, ctas_per_sm, supports_segments = CONSUMERS, 1, True  # as of chunk_hopper.py, to choose segments

    @property
    def cluster(self):
        """How many thread blocks a cluster has: two of a pair, else one."""
        return BLOCKS if self.paired else 1

    @property
    def outputs(self):
        """The class of the objects by which results leave."""
        return PairedOutputs if self.paired else WalkOutputs

    def __str__(self):
        flags = "float32" * self.unrounded, "float32 dv" * self.unrounded_values, "pairs" * self.paired
        size, gates = f"Dk {self.key_dim} {self.dtype}", "gradients of gates" * self.with_gates
        return ", ".join(filter(None, (size, str(self.gate), gates, *flags, "varlen" * self.varlen)))


KEY_DIMS = 64, 128  # as padded
GATES = Gate(), HeadGate(scale_at_end=True), TokenGate(scale_at_end=True)
RESULTS = (False, False), (True, False), (True, True)  # are dQ and dK float32, is dV?


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16, packed sequences and float32 results at all sizes, too."""
    if target.has_wgmma:
        for input_dtype, key_dim, gate in itertools.product((bf16, fp16) if everything else (bf16,), KEY_DIMS, GATES):
            for varlen, results in itertools.product((False, True), RESULTS) if everything else ((False, RESULTS[0]),):
                if gate.kind == HeadGate.kind and varlen:
                    continue  # the plan repeats these gates for each token
                if gate.kind:
                    yield Config(key_dim, input_dtype, gate, *results, varlen)
                if everything or not gate.kind:
                    yield Config(key_dim, input_dtype, gate, *results, varlen, with_gates=False)
                if key_dim == VALUES and not varlen and results == RESULTS[0]:
                    yield Config(key_dim, input_dtype, gate, with_gates=bool(gate.kind), paired=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, gate, KEYS = config.dtype, config.gate, config.key_dim
    (producer_registers, consumer_registers), STATE = REGISTERS, rt(16, KEYS, fp32)
    seq_layout, TRANSPOSED = SequenceLayout(config.varlen, reversed=True), rt(16, CHUNK, INPUT)
    KEY, VALUE, STATES = st(CHUNK, KEYS, INPUT), st(CHUNK, VALUES, INPUT), st(VALUES, KEYS, INPUT)
    Outputs, results = config.outputs, (config.unrounded, config.unrounded_values, config.with_gates)
    outputs, sum_stages = Outputs(seq_layout, KEYS, INPUT, *results), SUM_STAGES - config.paired
    ALL_KEYS, ALL_VALUES = tiled(KEY, unit=1), tiled(VALUE, unit=1)
    DQK, DVALUES = outputs.input_gradients, outputs.value_gradients
    vectors = ring(sv(CHUNK, fp32), sum_stages if gate.per_token else 1, WARPS, writers=1)
    smem = shared(
        q=ring(KEY, STAGES, WARPS),
        k=ring(KEY, STAGES, WARPS),
        v=ring(VALUE, STAGES, WARPS),
        do=ring(VALUE, STAGES, WARPS),
        s=ring(STATES, 1, WARPS),
        ds=STATES,
        out=ring(outputs.tile, CONSUMERS, 1, writers=warpgroup.WARPGROUP),
        **outputs.members(),
        dots=ring(sv(2 * CHUNK, fp32), CONSUMERS, 1, writers=warpgroup.WARPGROUP),
        b=vectors,
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_linear(
        gQ: ALL_KEYS, gK: ALL_KEYS, gV: ALL_VALUES, gDOut: ALL_VALUES, gStates: tiled(STATES, 4, 2, 3),
        gGates: array(gate.rank), gDQ: DQK, gDK: DQK, gDV: DVALUES, gLastState: array(4), gFirstState: array(4),
        gQueryDots: array(3), gKeyDots: array(3), gCarriedDots: array(3), gTailQ: ALL_KEYS, gTailK: ALL_KEYS,
        gTailV: ALL_VALUES, gTailDOut: ALL_VALUES, gTailDQ: DQK, gTailDK: DQK, gTailDV: DVALUES, gCuSeqlens: ENDS,
        length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The gradients of one of the `segments` of a sequence, for one value head; `group` of them share a key head. gStates:
        S^T before each chunk. gLastState: dS^T after each segment, gFirstState: before each sequence. gTailQ .. gTailDV: see
        packed_tails.py."""
        memory = smem.open()
        q, k, v, do, s, ds, out, dots, b = (
            memory.q, memory.k, memory.v, memory.do, memory.s, memory.ds, memory.out, memory.dots, memory.b
        )  # fmt: skip
        grid.follow()
        outputs.meet()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            key_head, _ = divmod(walk.head, group)
            warp = warpgroup.rank()
            if warp == LOAD_WARP:
                for j in range(walk.n):
                    place = walk.place(j)
                    seq_layout.fill_chunk(q, j, gQ, gTailQ, place, key_head)
                    seq_layout.fill_chunk(k, j, gK, gTailK, place, key_head)
                    seq_layout.fill_chunk(v, j, gV, gTailV, place, walk.head)
                    seq_layout.fill_chunk(do, j, gDOut, gTailDOut, place, walk.head)
                    s.fill(j, gStates, (place.chunk, walk.head))
            elif warp == SUM_WARP:
                for j in range(walk.n + SUMS_LATE):
                    if j < walk.n:
                        gate.produce_cumsum(b, b, j, (gGates, gGates, gGates), walk.place(j))
                    if j >= SUMS_LATE:
                        late = int32(j - SUMS_LATE)
                        outputs.send_dots(gQueryDots, gKeyDots, gCarriedDots, dots, late, walk.place(late))
            else:
                consumer = int32(warp - STORE_WARP)
                for j in range(walk.n):
                    outputs.send((gDQ, gDK, gDV), (gTailDQ, gTailDK, gTailDV), out, consumer, j, walk.n, walk.place(j), memory)
        else:
            warpgroup.claim_registers(consumer_registers)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            ds_columns, is_dk_consumer, sign = subtile(ds, COLUMNS, wg), float32(wg), float32(1 - 2 * wg)
            ds_t = warpgroup.load(gLastState, STATE, (walk.slot, walk.head, int32(COLUMNS * wg), 0), aligned=False)
            g = gate.load_head_gate(gGates, walk.head)
            for j in range(walk.n):
                place = walk.place(j)
                q_tile, k_tile, v_tile, do_tile = q.wait(j), k.wait(j), v.wait(j), do.wait(j)
                warpgroup.sync_several(CONSUMERS)  # both have read dS of the previous chunk
                warpgroup.store(ds_columns, ds_t)
                b_rows, b_cols, b_last = gate.consume_cumsum(b, b, j, g, int32(walk.seq.end - place.token))
                warpgroup.sync_several(CONSUMERS)
                s_tile, do_columns = s.wait(j), subtile(do_tile, CHUNK, 0, COLUMNS, wg)
                if wg == DQ_CONSUMER:  # dx is dQ
                    left, right, states, x, partner = do_tile, v_tile, s_tile, q_tile, k_tile
                else:  # dx is dK, dp is dP^T, and b has the opposite sign
                    left, right, states, x, partner = v_tile, do_tile, ds, k_tile, q_tile
                p_t = warpgroup.mm_ABt(k_tile, q_tile)
                dv = warpgroup.mm_ABt(k_tile, ds_columns)
                dp = warpgroup.mm_ABt(left, right)
                p_t = gate.decay_all_scores(warpgroup.wait(p_t, newer=2), b_rows * -1.0, b_cols * -1.0) * scale
                p_t = INPUT(warpgroup.triu(p_t, 0, 0.0))
                dv = gate.decay(warpgroup.wait(dv, newer=1), minimum(b_last - b_rows, 0.0))
                dv = warpgroup.mma_AB(dv, p_t, do_columns)
                dp = gate.decay_all_scores(warpgroup.wait(dp, newer=1), b_rows * sign, b_cols * sign) * scale
                dp = INPUT(warpgroup.tril(warpgroup.triu(dp, CHUNK * (wg - 1), 0.0), CHUNK * wg, 0.0))
                later_dots = gate.decay(outputs.dot(ds_t, subtile(s_tile, COLUMNS, wg)), b_last)
                outputs.put_values(gDV, out, wg, j, warpgroup.wait(dv), place)
                dx = warpgroup.mm_AB(left, outputs.operand(states))
                do_t = fp32(warpgroup.load_transposed(do_columns, TRANSPOSED, fenced=outputs.fenced)) * scale
                do_t = INPUT(gate.decay(do_t, b_cols))
                dx = gate.decay(warpgroup.wait(dx), minimum(b_last * is_dk_consumer + b_rows * sign, 0.0))
                s.release(j)
                if wg == DQ_CONSUMER:
                    dx = dx * scale
                else:
                    later_dots = later_dots + outputs.dot(dx, x)
                dx = warpgroup.mma_AB(dx, dp, outputs.operand(partner))
                ds_t = warpgroup.mma_AB(gate.decay(ds_t, b_last), do_t, outputs.operand(q_tile))
                dx = warpgroup.wait(dx, newer=1)
                outputs.put_dots(dots, wg, j, dx, x, later_dots)
                outputs.put_inputs(gDQ, gDK, out, wg, j, dx, place, memory)
                ds_t = warpgroup.wait(ds_t)
                q.release(j)
                k.release(j)
                v.release(j)
                do.release(j)
            if walk.slot + 1 == segments * (walk.sequence + 1):  # no other block's segment ends the sequence
                outputs.zero_padding((gDQ, gDK, gDV), gCuSeqlens, walk, length, wg)
                at = walk.sequence, walk.head, int32(COLUMNS * warpgroup.id()), 0
                warpgroup.store(gFirstState, ds_t, at, aligned=False)
        outputs.meet()

    return differentiate_linear, smem
