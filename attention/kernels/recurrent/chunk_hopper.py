"""Linear attention for Hopper, chunk by chunk, where a decay is one number for a token and head.

    S_t = exp(g_t) S_(t-1) + w_t k_t^T v_t        o_t = scale q_t S_t

A thread block scans a sequence (or a segment of one) chunk by chunk for some columns of the values, 64 for each consumer, and
keeps their part of the state in registers, transposed: S^T is 64 x Dk. Of keys with more than 128 channels two warpgroups have
one half each: both do all of this with their half, and their outputs are added. For a chunk of 64 tokens, where b is the
cumulative sum of its gates g,

    O   = exp(b) Q S + tril(exp(b - b^T) w^T * Q K^T) V          inter-chunk + intra-chunk
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K            ldmatrix transposes V

Every exponent that is used is a sum of gates, so never positive: nothing overflows, however strong the decay. Warps of the
producer load gates of single tokens and compute b, some chunks ahead of the consumers.

If there are few long sequences, each is cut into segments that are scanned at the same time, in two passes. The first one
computes the local state of each segment, that is the state after it if the state before it is 0, and its total decay. The
second one computes the outputs, from the state before each segment. For few segments it composes that state itself from the
local states; for more of them compose_segment_states.py does so in a launch of its own.

What differs between scans are objects with the same methods: the gates (parts/recurrent/gates.py), and the result, which is
outputs, a normalizer, states (results.py) or gradients (gradients.py). Where `has_outputs` is False, a scan updates its state
and does nothing else."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, grid, load, log2, store, subtile, tile_min, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import LARGE, Target

from ...parts.recurrent.block_exponent import BlockExponent
from ...parts.recurrent.gate_formulas import FORMULAS
from ...parts.recurrent.gates import (
    COL_VEC,
    ROW_VEC,
    TILE,
    DecayGate,
    FormulaGate,
    Gate,
    HeadGate,
    Mamba2Gate,
    SummedGate,
    TokenGate,
)
from ...parts.recurrent.gradients import ReversedGate, gradient_fields
from ...parts.recurrent.results import ChunkStates, ScanOutputs, ScanResult, ScanStates, scan_forms
from ...parts.recurrent.state_tiles import StateTiles, sends_states
from ...parts.recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, SequenceLayout, block_coord

WIDE_KEY_DIM = 128  # beyond it a state takes half of a warpgroup's registers: two warpgroups have half of the channels each
REGISTERS = {(1, 2): (48, 208), (2, 1): (72, 216), (1, 1): (88, 256)}  # (warpgroups, blocks an SM) -> of producer, of consumer
ROOMY_REGISTERS = 200, 256  # likewise, of a single consumer: what both read before they part would spill in fewer
CUMSUM_WARPS = warpgroup.WARPGROUP - 1  # of the producer, which compute b; the last one sends states where these are stored
GATE_BYTES = 4 * 1024  # bytes of shared memory for gates and mbarriers
STAGES = 3  # chunks in flight, at most


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, rounded up to one of KEY_DIMS. consumers: each has 64 value
    columns, and is one warpgroup, or two if keys are wide (`key_parts`). gate: the kind of gates. result: what the scan
    computes. varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    consumers: int
    dtype: dtype
    gate: Gate
    result: ScanResult
    varlen: bool = False

    @property
    def key_parts(self):
        """The number of warpgroups of a consumer, each of which has a part of the channels of the keys."""
        return 2 if self.key_dim > WIDE_KEY_DIM else 1

    @property
    def row_parts(self):
        """The number of warpgroups or warps that each have a part of the row sums of a block of columns."""
        return self.key_parts

    @property
    def supports_segments(self):
        """Can sequences be cut into segments?"""
        return True

    @property
    def supports_result(self):
        """Do registers hold what the result takes? Where they do not, another kernel computes it."""
        if not self.result.dots_states or not self.varlen:
            return True
        return self.consumers == 1 and self.key_parts == 1

    @property
    def registers(self):
        """(registers of a thread of the producer, of a consumer)"""
        single_consumer = self.consumers * self.key_parts == 1 and self.ctas_per_sm == 1
        return (
            ROOMY_REGISTERS
            if single_consumer and self.result.dots_states
            else REGISTERS[self.consumers * self.key_parts, self.ctas_per_sm]
        )

    @property
    def ctas_per_sm(self):
        """How many thread blocks the registers of an SM allow."""
        return 2 if self.consumers == 1 and self.key_dim < WIDE_KEY_DIM and not self.gate.weighted else 1

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers * self.key_parts + 1)

    @property
    def overlaps_previous(self):
        """Does it begin while the launch before it ends (PDL)? Scans of gradients' plans do, which others follow."""
        return isinstance(self.result, ChunkStates)

    @property
    def key(self):
        """The tile of Q or K for a chunk, with the channels of one warpgroup of a consumer."""
        return st(CHUNK, self.key_dim // self.key_parts, self.dtype)

    @property
    def value(self):
        """A consumer's tile of V, Z or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def partial_o(self):
        """The tile through which the second warpgroup of a consumer passes its partial output to the first; a small one that is
        not used if there is no second."""
        return st(CHUNK, COLUMNS, fp32) if self.key_parts > 1 else st(16, 16, fp32)

    @property
    def stages(self):
        """The number of chunks in flight, as shared memory allows."""
        keys, values = self.key_parts * self.key.nbytes, self.consumers * self.value.nbytes
        chunk = (1 + self.result.has_outputs) * keys + (1 + self.result.reads_z) * values
        fixed = self.consumers * keys + values + self.partial_o.nbytes + GATE_BYTES
        return min(STAGES, (LARGE - fixed) // chunk)

    def __str__(self):
        size = f"Dk {self.key_dim} {self.dtype}", f"{COLUMNS * self.consumers} columns"
        return ", ".join(filter(None, (*size, str(self.gate), str(self.result), "varlen" * self.varlen)))


KEY_DIMS = 64, 128, 256  # as padded
SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers
KINDS: tuple[type[Gate], ...] = Gate, HeadGate, TokenGate, Mamba2Gate


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations: all gates at all sizes, other results and varlen at one size, and gradients. everything: all of these
    at all sizes, and fp16, whose code takes as many registers as bf16's."""
    if target.has_wgmma:
        for input_dtype, size, kind in itertools.product((bf16, fp16) if everything else (bf16,), SIZES, KINDS):
            all_forms = (everything and input_dtype is bf16) or (size[0] == WIDE_KEY_DIM and kind in (TokenGate, Mamba2Gate))
            for gate, result, varlen in scan_forms(kind, all_forms):
                yield Config(*size, input_dtype, gate, result, varlen)
            if all_forms and kind in (HeadGate, TokenGate):  # Mamba-2's scale is 1
                yield Config(*size, input_dtype, kind(scale_at_end=True), ScanOutputs())
            if kind is not Mamba2Gate and (everything or kind is TokenGate or size == SIZES[-2]):
                all_forms = everything or size == (WIDE_KEY_DIM, 1)
                for gate, result, varlen in gradient_fields(kind, all_forms):
                    config = Config(*size, input_dtype, gate, result, varlen)
                    if config.supports_result:
                        yield config
                if size[0] <= WIDE_KEY_DIM:  # what other kernels of gradients read
                    yield Config(*size, input_dtype, kind(), ScanOutputs(stores_states=True))
                    for varlen in (False, True) if everything else (False,):
                        gate = kind(scale_at_end=True) if issubclass(kind, DecayGate) else kind()
                        yield from (Config(*size, input_dtype, x, ChunkStates(), varlen) for x in (gate, ReversedGate(gate)))
            elif kind is Mamba2Gate and size[0] <= WIDE_KEY_DIM and (everything or size == (WIDE_KEY_DIM, 2)):
                for varlen, weighted in itertools.product((False, True) if everything else (False,), (False, True)):
                    gate = SummedGate(True, weighted)
                    yield Config(*size, input_dtype, gate if weighted else ReversedGate(gate), ChunkStates(), varlen)
                    if not weighted and not varlen and input_dtype is bf16:
                        yield Config(*size, input_dtype, ReversedGate(gate), ChunkStates(gated=True))
                        yield Config(*size, input_dtype, ReversedGate(TokenGate(True)), ScanStates(gated=True))
                    if everything and not weighted:
                        yield Config(*size, input_dtype, gate, ChunkStates(), varlen)
        for formula in FORMULAS:
            yield Config(*SIZES[-2], bf16, FormulaGate(False, formula), ScanOutputs())


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, KEY_PARTS, INPUT, gate, result = config.consumers, config.key_parts, config.dtype, config.gate, config.result
    PRODUCER, KEYS = CONSUMERS * KEY_PARTS, config.key.cols  # the warpgroup after those of the consumers
    (producer_registers, consumer_registers), STATE = config.registers, rt(16, KEYS, fp32)
    TRANSPOSED, seq_layout = rt(16, CHUNK, INPUT), SequenceLayout(config.varlen, gate.reversed)
    block_exponent = BlockExponent(gate.weighted and INPUT is fp16)
    TMA_KEYS, TMA_VALUES = tiled(config.key, unit=1), tiled(config.value, unit=1)
    OUTPUT, HALF_STATE = result.output_argument(seq_layout, config.value), rt(16, KEYS // 2, INPUT)
    OVERLAPS, SENDS_STATES = config.overlaps_previous, KEY_PARTS == 1 and sends_states(result, gate, INPUT)
    GATE_WARPS = CUMSUM_WARPS - SENDS_STATES  # warps that compute b, a chunk each in turn
    states = StateTiles(result, st(COLUMNS, KEYS, INPUT), CONSUMERS * KEY_PARTS, SENDS_STATES)
    PARAMS = result.params(INPUT, states.tile if SENDS_STATES else None)
    SCALES_OUTPUTS = not (gate.folds_scale or gate.reversed or result.scales_scores)

    def key_ring(used=True):
        """A ring of tiles of keys or queries, with the channels of one key part each, which all consumers read. used: are there
        such tiles?"""
        return ring(config.key, config.stages * KEY_PARTS if used else 1, CONSUMERS * warpgroup.WARPGROUP)

    def value_ring(used=True, key_parts=KEY_PARTS):
        """A ring of tiles of values or z, which one consumer reads each. used: are there such tiles? key_parts: how many of its
        warpgroups read them."""
        return ring(config.value, config.stages * CONSUMERS if used else 1, key_parts * warpgroup.WARPGROUP)

    vectors = ring(
        sv(CHUNK, fp32), CONSUMERS * CUMSUM_WARPS if gate.per_token else 1, KEY_PARTS * warpgroup.WARPGROUP, writers=1
    )
    smem = shared(
        q=key_ring(result.has_outputs),
        k=key_ring(),
        v=value_ring(result.reads_values),
        z=value_ring(result.reads_z, KEY_PARTS if result.groups_queries else 1),
        b=vectors,
        a=vectors,
        state=states.spec,
        out=st(COLUMNS * CONSUMERS, COLUMNS, INPUT),
        partial_o=ring(config.partial_o, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def reduce_key_parts(o, partial_o, j, part):
        """The sum of the partial outputs of a consumer's warpgroups, in the first of them."""
        if KEY_PARTS > 1:
            if part > 0:
                warpgroup.store(partial_o.claim(j), o)
                partial_o.publish(j)
                warpgroup.sync()  # as no store_output does so here: all warps have read the state before the next one
            else:
                o = o + warpgroup.load(partial_o.wait(j), TILE)
                partial_o.release(j)
        return o

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def scan(
        gQ: TMA_KEYS, gK: TMA_KEYS, gV: TMA_VALUES, gZ: TMA_VALUES, gGates: array(gate.rank), gA: array(2), gDtBias: array(2),
        gD: array(2), gNormalizer: array(3), gO: OUTPUT, gInitialState: array(4), gLocalStates: array(5), gFinalState: array(4),
        gTotalDecays: array(4), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, scanned_segments: INT,
        states_per_sequence: INT, heads: INT, group: INT, width: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The outputs of a segment, or its local state and total decay. `group` value heads share a key head, and each is
        `width` blocks of 64 columns wide. There are thread blocks for the first `scanned_segments` of the `segments`.
        gInitialState: the state before each of `states_per_sequence` segments. If that is 1, it is the state before the
        sequence, and the state before the segment is composed here from the local states of earlier segments."""
        q, k, v, z, b, a, state, out_tiles, partial_o = smem.open()
        if OVERLAPS:
            grid.follow()
        wg = warpgroup.id()
        block, segment, key_head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        if result.from_zero:
            first_chunk, (first_head, _) = seq_layout.chunk_index(seq.start, sequence, length), divmod(CONSUMERS * block, width)
            last_head, _ = divmod(CONSUMERS * block + CONSUMERS - 1, width)
            block_heads = int32(key_head * group + first_head), int32(key_head * group + last_head)
            seq = result.recent_tokens(params, seq, first_chunk, block_heads, gate.reversed)
        n = seq.num_chunks()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            warp = cuda.threadIdx.x // 32 - 4 * PRODUCER
            if warp == 0:
                query_head = result.query_head(key_head, group, CONSUMERS * block, width)
                for j in range(n):
                    token = seq.chunk_start(j)
                    for part in range(KEY_PARTS):
                        k.fill(KEY_PARTS * j + part, gK, (seq.batch, token, query_head, part))
                        result.fill_queries(q, KEY_PARTS * j + part, gQ, (seq.batch, token, query_head, part))
                    for c in range(CONSUMERS):
                        group_head, column = divmod(CONSUMERS * block + c, width)
                        at = seq.batch, token, result.value_head(key_head, group, group_head), column
                        result.fill_values(v, z, CONSUMERS * j + c, gV, gZ, at)
            elif SENDS_STATES and warp == CUMSUM_WARPS:
                first_index = seq_layout.chunk_index(seq.start, sequence, length)
                for slot in range(CONSUMERS * n):
                    j, c = divmod(slot, CONSUMERS)
                    group_head, column = divmod(CONSUMERS * block + c, width)
                    index = int32(first_index + seq.chunk_number(j))
                    states.send(params, state, slot, index, key_head * group + group_head, column)
            elif gate.per_token:
                for slot in range(warp - 1, CONSUMERS * n, GATE_WARPS):
                    j, c = divmod(slot, CONSUMERS)
                    group_head, _ = divmod(CONSUMERS * block + c, width)
                    head, token = key_head * group + group_head, seq.chunk_start(j)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    place = ChunkPlace(chunk, head, sequence, token, seq)
                    gate.produce_cumsum(b, a, slot, (gGates, gA, gDtBias), place)
            if segment == segments - 1:
                for c in range(CONSUMERS):
                    group_head, column = divmod(CONSUMERS * block + c, width)
                    head = int32(key_head * group + group_head)
                    result.zero_padding(seq_layout, gO, gCuSeqlens, sequence, length, head, column)
        else:
            warpgroup.claim_registers(consumer_registers)
            c, part = (wg, int32(0)) if KEY_PARTS == 1 else (int32(0), wg)
            group_head, column = divmod(CONSUMERS * block + c, width)
            head, row, col = int32(key_head * group + group_head), int32(COLUMNS * column), int32(KEYS * part)  # of S^T
            state_tile, out = states.own_tile(state, wg), subtile(out_tiles, COLUMNS, c)
            state_index = int32(sequence * states_per_sequence + min(segment, states_per_sequence - 1))
            s_t = warpgroup.load(gInitialState, STATE, (state_index, head, row, col), aligned=False)
            for i in range(segment if not result.from_zero and states_per_sequence == 1 else 0):
                total_decay = tile_min(load(gTotalDecays, COL_VEC, (sequence, head, i, 0)))
                s_t = gate.decay(s_t, total_decay) + warpgroup.load(
                    gLocalStates, STATE, (sequence, head, i, row, col), aligned=False
                )
            e = block_exponent.initial_exponent(s_t)
            s_t = block_exponent.ldexp(s_t, -e)
            first_index = seq_layout.chunk_index(seq.start, sequence, length)
            g, segment_b, log2_scale = gate.load_head_gate(gGates, head), float32(0), log2(zeros(COL_VEC) + scale)
            d = load(gD, ROW_VEC, (head, row))
            if not result.reads_values:
                if part == 0:
                    warpgroup.store(out, zeros(TILE) + 1.0)
                warpgroup.sync_several(KEY_PARTS)
            for j in range(n):
                slot, key_slot, remaining = int32(CONSUMERS * j + c), int32(KEY_PARTS * j + part), seq.remaining(j)
                index = int32(first_index + seq.chunk_number(j))
                result.dot_state(params, s_t, HALF_STATE, index, head, row, col, KEY_PARTS * column + part)
                states.put(params, state, slot, block_exponent.ldexp(s_t, e), index, head, row, col, late=False)
                keys, values = k.wait(key_slot), result.wait_values(v, out, slot)
                seq_layout.zero_other_rows(keys, remaining, CONSUMERS)
                if result.reads_values:
                    seq_layout.zero_other_rows(values, remaining, KEY_PARTS)
                if result.has_outputs:
                    queries = q.wait(key_slot)
                    states.write(state_tile, s_t)
                    warpgroup.store_wait()
                    s = warpgroup.mm_ABt(queries, keys)
                    warpgroup.sync()
                    o = warpgroup.mm_ABt(queries, states.read(state, state_tile, slot))
                e_before, e = e, block_exponent.next_exponent(e, block_exponent.wait(b, slot), block_exponent.wait(a, slot))
                b_rows, a_cols, b_last = gate.consume_cumsum(b, a, slot, g, remaining)
                if gate.folds_scale:
                    b_rows = b_rows + log2_scale
                if result.has_outputs:
                    p = gate.decay_scores(warpgroup.wait(s, newer=1), block_exponent.shift_key_decay(b_rows, e), a_cols)
                    p = INPUT(result.scale_scores(gate.scale_keys(p, scale), scale))
                    o = gate.decay(warpgroup.wait(o), block_exponent.shift_state_decay(b_rows, e_before, e))
                    states.release(state, slot)
                    o = result.scale_scores(o, scale)
                    state_part = KEY_PARTS * column + part
                    result.dot_carried(seq_layout, params, o, z, slot, index, head, state_part, TRANSPOSED, remaining)
                    o = warpgroup.mma_AB(o, p, values)
                    q.release(key_slot)
                v_t = result.gate_values(fp32(warpgroup.load_transposed(values, TRANSPOSED)), z, slot, TRANSPOSED)
                v_t = gate.decay_values(v_t, a_cols, block_exponent.shift_key_decay(b_last, e))
                v_t = INPUT(gate.scale_keys(v_t, scale))
                states.put(params, state, slot, block_exponent.ldexp(s_t, e_before), index, head, row, col, late=True)
                s_t = gate.decay(s_t, block_exponent.shift_state_decay(b_last, e_before, e))
                s_t, segment_b = warpgroup.mma_AB(s_t, v_t, keys), segment_b + b_last
                token = seq.chunk_start(j)
                if result.has_outputs:
                    o = block_exponent.ldexp(warpgroup.wait(o, newer=1), e) * (scale if SCALES_OUTPUTS else 1.0)
                    if KEY_PARTS == 1 or part > 0:
                        o = result.add_skip(o, values, d, TRANSPOSED)
                    row_part = KEY_PARTS * (head * width + column) + part
                    result.store_row_dots(params, o, z, slot, (seq, token, row_part), TRANSPOSED)
                    o = reduce_key_parts(o, partial_o, j, part)
                    if KEY_PARTS == 1 or part == 0:
                        o = result.normalize_and_gate(o, z, slot, gNormalizer, (seq.batch, token, head), TRANSPOSED)
                        result.store_output(seq_layout, gO, out, o, seq, token, head, column)
                s_t = warpgroup.wait(s_t)
                k.release(key_slot)
                result.release_values(v, slot)
            s_t = block_exponent.ldexp(s_t, e)
            if result.from_zero:
                warpgroup.store(gLocalStates, s_t, (sequence, head, segment, row, col))
                store(gTotalDecays, zeros(COL_VEC) + segment_b, (sequence, head, segment, 0))
            else:
                result.wait_stored()
                if segment == segments - 1:
                    warpgroup.store(gFinalState, s_t, (sequence, head, row, col), aligned=False)

    return scan, smem
