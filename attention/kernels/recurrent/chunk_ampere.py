"""Linear attention for sm_80 and later, chunk by chunk: cp.async, ldmatrix and mma.sync. The equations are chunk_hopper.py's.

A thread block of four warps scans a sequence (or a segment of one) for 64 columns of the values. Each warp keeps the state of
16 of them in registers, transposed: S^T is 16 x Dk, and its fragment, rounded, is the right operand of Q S without a move. The
intra-chunk weights P = tril(exp(b - b^T) w^T * Q K^T) are computed once for all warps, 16 rows by each, and passed through
shared memory:

    O   = exp(b) Q S + P V                                    64 x 16 for each warp: Q and P from shared memory
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K         V^T from registers, K from shared memory

The next keys are copied while O is computed, the next queries and values while the state is updated. The kernel also takes
arrays that TMA does not, with addresses and strides that are multiples of 8, 4 or 2 bytes only, by as many smaller copies."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import block as thread_block
from ops import (
    divmod,
    load,
    mma_AB,
    mma_ABt,
    row_max,
    row_sum,
    silu,
    store,
    subtile,
    tile_min,
    tile_sum,
    transpose,
    truncate,
    warp_index,
    warpgroup,
    zeros,
)
from tiles import bf16, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.block_exponent import BlockExponent
from ...parts.recurrent.gate_formulas import FORMULAS
from ...parts.recurrent.gates import CHUNK_COL_VEC, COL_VEC, ROW_VEC, TILE, FormulaGate, Gate, Mamba2Gate, TokenGate
from ...parts.recurrent.gradients import gradient_fields
from ...parts.recurrent.results import NORMALIZER_EPSILON, ScanOutputs, scan_forms
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from . import chunk_hopper
from .chunk_hopper import KEY_DIMS, WIDE_KEY_DIM

WARPS = 4  # of a thread block
WARP_COLUMNS = COLUMNS // WARPS  # value columns of a warp, and rows of P that it computes


@dataclass(frozen=True)
class Config(chunk_hopper.Config):
    """A kernel's configuration: that of chunk_hopper.py, with one consumer. vector_bytes: how many bytes a cp.async copies; all
    addresses and strides are multiples of it."""

    vector_bytes: int = 16

    @property
    def key_parts(self):
        """1, because a warp has all channels of the keys."""
        return 1

    @property
    def ctas_per_sm(self):
        """How many thread blocks the registers of an SM allow."""
        return 2 if self.key_dim <= WIDE_KEY_DIM else 1

    @property
    def threads(self):
        """The threads of a block, those of four warps."""
        return LANES * WARPS

    @property
    def stages(self):
        """Chunks of keys in flight: two if they fit in 99 KB, the shared memory that every GPU gives a block."""
        return 2 if self.key_dim <= WIDE_KEY_DIM else 1

    @property
    def supports_result(self):
        """Do the registers hold the result's tiles, too? If not, another kernel computes it."""
        return self.key_dim <= WIDE_KEY_DIM or not (self.result.groups_queries and self.result.reads_z)

    @property
    def row_parts(self):
        """The warps, which have 16 columns of the outputs each."""
        return WARPS

    @property
    def supports_segments(self):
        """Can sequences be cut into segments?"""
        return self.key_dim <= WIDE_KEY_DIM

    def __str__(self):
        return super().__str__() + f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations: all gates at all sizes, other results and varlen at one size. everything: all of these at all sizes,
    other vector_bytes, and fp16; only the plainest of 8 bytes and of fp16, whose code differs little from 16 bytes and bf16."""
    for vector_bytes, dtype in (
        (VECTOR_SIZES[0], bf16),
        *(((8, bf16), (4, bf16), (2, bf16), (16, fp16)) if everything else ()),
    ):
        for key_dim, kind in itertools.product(KEY_DIMS, (Gate, TokenGate, Mamba2Gate)):
            plainest = (vector_bytes, dtype) in ((8, bf16), (16, fp16))
            all_forms = (everything and not plainest) or (key_dim == WIDE_KEY_DIM and kind is not Gate)
            for gate, result, varlen in scan_forms(kind, all_forms):
                config = Config(key_dim, 1, dtype, gate, result, varlen, vector_bytes)
                if result.has_outputs or config.supports_segments:
                    yield config
            if kind is not Mamba2Gate:
                forms = gradient_fields(kind, everything and not plainest)
                for gate, result, varlen in forms:
                    config = Config(key_dim, 1, dtype, gate, result, varlen, vector_bytes)
                    if config.supports_result and (result.has_outputs or config.supports_segments):
                        yield config
    for formula in FORMULAS:
        yield Config(WIDE_KEY_DIM, 1, bf16, FormulaGate(False, formula), ScanOutputs(), False, VECTOR_SIZES[0])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, OUT = config.dtype, rt(WARP_COLUMNS, config.key_dim, fp32), rt(CHUNK, WARP_COLUMNS, fp32)
    Z_TILE, TRANSPOSED, STAGES = rt(WARP_COLUMNS, WARP_COLUMNS, fp32), rt(WARP_COLUMNS, CHUNK, INPUT), config.stages
    VECTOR_BYTES, gate, result = config.vector_bytes, config.gate, config.result
    COMPOSES = config.supports_segments and result.has_outputs and result.reads_values  # earlier segments' local states
    V_PENDING = STAGES - 1  # groups of copies committed after those of a chunk's values: of later keys
    Q_PENDING = (3 if result.reads_z else 2) * V_PENDING  # groups of copies committed after those of its queries
    REVERSED, SCALES_OUTPUTS = gate.reversed, not (gate.reversed or result.scales_scores)
    OUT_BYTES = True if result.unrounded else VECTOR_BYTES
    HALF_STATE, PARAMS = rt(WARP_COLUMNS, config.key_dim // 2, INPUT), result.params(INPUT)
    seq_layout, block_exponent = SequenceLayout(config.varlen, REVERSED), BlockExponent(gate.weighted and INPUT is fp16)
    OUTPUT = array(4 if result.reads_values else 3, INPUT if result.reads_values and not result.unrounded else fp32)
    smem = shared(
        q=pipeline(config.key, 1, WARPS),
        k=pipeline(config.key, STAGES, WARPS),
        v=pipeline(config.value, 1, WARPS),
        z=pipeline(config.value if result.reads_z else st(8 * WARPS, 16, INPUT), 1, WARPS),
        p=st(CHUNK, CHUNK, INPUT),
        b=sv(CHUNK, fp32),
        a=sv(CHUNK, fp32),
    )

    @inlined
    def fill(q, v, z, gQ, gV, gZ, j, n, batch, token, query_head, value_head, col):
        """Start to copy the queries, values and z of the j-th of n chunks, as far as the scan reads them."""
        q.fill(j, gQ, (batch, token, query_head, 0), 1, 3, n if result.has_outputs else 0, VECTOR_BYTES)
        if result.reads_z:
            z.fill(j, gZ, (batch, token, value_head, col), 1, 3, n, VECTOR_BYTES)
        v.fill(j, gV, (batch, token, value_head, col), 1, 3, n if result.reads_values else 0, VECTOR_BYTES)

    @inlined
    def reverse_chunk_start(seq, j):
        """The first token of the j-th chunk in reverse order; of the last chunk in this order if there are fewer chunks."""
        return max(seq.chunk_start(j), seq.start)

    @inlined
    def z_columns(z, j):
        """This warp's columns of z, for all tokens of the j-th chunk."""
        return fp32(transpose(warpgroup.load_transposed(z.wait(j, V_PENDING), TRANSPOSED)))

    @inlined
    def dot_carried(params, o, z, j, index, head, column):
        """Store carried dots, if the result is a gradient with them: see results.ScanResult.dot_carried."""
        if result.dots_states:
            params.carried_dots[index, head, WARPS * column + warp_index()] = tile_sum(o * z_columns(z, j))

    @inlined
    def store_row_dots(params, o, z, j, at):
        """Store row dots, if the result is a gradient with them: see results.ScanResult.store_row_dots."""
        if result.groups_queries and result.reads_z:
            seq, token, part = at
            store(truncate(params.row_dots, 1, seq.end), row_sum(o * z_columns(z, j)), (seq.batch, token, part), cols=1)

    @inlined
    def normalize_and_gate(o, z, j, gNormalizer, at):
        """o / normalizer * silu(z), as far as the result has these (results.ScanOutputs)."""
        if result.normalized:
            o = o / (load(gNormalizer, OUT.col_vec, at, cols=1) + NORMALIZER_EPSILON)
        if result.silu:
            o = o * silu(z_columns(z, j))
        return o

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def scan(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gZ: array(4, INPUT), gGates: array(3), gA: array(2),
        gDtBias: array(2), gD: array(2), gNormalizer: array(3), gO: OUTPUT,
        gInitialState: array(4), gLocalStates: array(5), gFinalState: array(4), gTotalDecays: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, segments: INT, scanned_segments: INT, states_per_sequence: INT, heads: INT, group: INT,
        width: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The outputs of a segment, or its local state and total decay. The arguments are those of chunk_hopper.py's kernel."""
        q, k, v, z, p, b, a = smem.open()
        a = a if gate.weighted else b
        warp = warp_index()
        block, segment, key_head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        first, end, batch = seq
        n = seq.num_chunks()
        group_head, column = divmod(block, width)
        head, col = int32(key_head * group + group_head), int32(COLUMNS * column)
        first_column = int32(col + WARP_COLUMNS * warp)  # of this warp
        query_head = result.query_head(key_head, group, block, width)
        value_head = int32(result.value_head(key_head, group, group_head))
        start = seq.chunk_start(0) if REVERSED else first
        gPaddedO = gO
        gQ, gK, gV, gZ = truncate(gQ, 1, end), truncate(gK, 1, end), truncate(gV, 1, end), truncate(gZ, 1, end)
        gO = truncate(gO, 1, end)
        for i in range(STAGES - 1):
            at = batch, reverse_chunk_start(seq, i) if REVERSED else first + CHUNK * i, query_head, 0
            k.fill(i, gK, at, 1, 3, n, VECTOR_BYTES)
        fill(q, v, z, gQ, gV, gZ, 0, n, batch, start, query_head, value_head, col)
        at = batch, reverse_chunk_start(seq, STAGES - 1) if REVERSED else first + CHUNK * (STAGES - 1), query_head, 0
        k.fill(STAGES - 1, gK, at, 1, 3, n, VECTOR_BYTES)
        state_index = int32(sequence * states_per_sequence + min(segment, states_per_sequence - 1))
        s_t = load(gInitialState, STATE, (state_index, head, first_column, 0), aligned=False)
        for i in range(segment if COMPOSES and states_per_sequence == 1 else 0):
            total_decay = tile_min(load(gTotalDecays, COL_VEC, (sequence, head, i, 0)))
            s_t = gate.decay(s_t, total_decay) + load(gLocalStates, STATE, (sequence, head, i, first_column, 0), aligned=False)
        e = block_exponent.initial_exponent(s_t)
        s_t = block_exponent.ldexp(s_t, -e)
        rate, bias = gate.load_rate_and_bias(gA, gDtBias, head)
        d = load(gD, OUT.row_vec, (head, first_column), aligned=False) if result.skip else 0.0
        segment_b, g = float32(0), gate.load_gates(gGates, batch, start, end, head)
        first_index = seq_layout.chunk_index(first, sequence, length)
        for j in range(n):
            token = seq.chunk_start(j)
            next_token = reverse_chunk_start(seq, j + 1) if REVERSED else seq.chunk_start(j + 1)
            index = int32(first_index + seq.chunk_number(j))
            if warp == 0:
                gate.store_cumsum(b, a, g, rate, bias, end - token)
            keys = k.wait(j, Q_PENDING)  # its barrier also shows b and a to all warps
            e_before, e = e, block_exponent.next_exponent(e, b, a)
            if result.has_outputs:
                queries = q.wait(j, Q_PENDING)
                q_rows = subtile(queries, WARP_COLUMNS, warp)
                s = mma_ABt(zeros(TILE), q_rows, keys)
                if not result.reads_values:
                    q_z = row_max(mma_ABt(zeros(Z_TILE), q_rows, INPUT(s_t)))  # all columns are the same
                b_rows = gate.load_cumsum(subtile(b, WARP_COLUMNS, warp), COL_VEC, b)
                s = gate.decay_scores(s, block_exponent.shift_key_decay(b_rows, e), gate.load_cumsum(a, ROW_VEC, b))
                s = result.scale_scores(gate.scale_keys(s, scale), scale)
                if result.reads_values:
                    store(subtile(p, WARP_COLUMNS, warp), INPUT(s))
                else:
                    o = (row_sum(s) + gate.decay(q_z, b_rows)) * scale
                    store(gO, o, (batch, token + WARP_COLUMNS * warp, head), cols=1)
            values = v.wait(j, V_PENDING)  # its barrier also shows P to all warps
            v_t = warpgroup.load_transposed(values, TRANSPOSED) if result.reads_values else INPUT(zeros(TILE) + 1.0)
            if result.has_outputs and result.reads_values:
                b_chunk = block_exponent.shift_state_decay(gate.load_cumsum(b, CHUNK_COL_VEC, b), e_before, e)
                o = result.scale_scores(gate.decay(mma_ABt(zeros(OUT), queries, INPUT(s_t)), b_chunk), scale)
                dot_carried(params, o, z, j, index, head, column)
                if result.skip:  # Mamba-2, where scale is 1
                    o = o + block_exponent.ldexp(fp32(transpose(v_t)) * d, -e)
                o = block_exponent.ldexp(mma_ABt(o, p, v_t), e) * (scale if SCALES_OUTPUTS else 1.0)
                o = normalize_and_gate(o, z, j, gNormalizer, (batch, token, head))
                store_row_dots(params, o, z, j, (seq, token, int32((head * width + column) * WARPS + warp)))
                store(gO, o, (batch, token, head, first_column), 1, 3, OUT_BYTES)
            a_cols, b_last = gate.load_cumsum(a, ROW_VEC, b), gate.load_last(b)
            u_t = gate.decay_values(fp32(v_t), a_cols, block_exponent.shift_key_decay(b_last, e))
            u_t = INPUT(gate.scale_keys(u_t, scale))
            thread_block.sync()
            fill(q, v, z, gQ, gV, gZ, j + 1, n, batch, next_token, query_head, value_head, col)
            g = gate.load_gates(gGates, batch, next_token, end, head)
            result.dot_state(params, s_t, HALF_STATE, index, head, col, 0, column)
            result.store_state(params, s_t, index, head, col, 0)
            s_t = gate.decay(s_t, block_exponent.shift_state_decay(b_last, e_before, e))
            s_t, segment_b = mma_AB(s_t, u_t, keys), segment_b + b_last
            thread_block.sync()
            at = batch, int32(reverse_chunk_start(seq, j + STAGES) if REVERSED else token + CHUNK * STAGES), query_head, 0
            k.fill(j + STAGES, gK, at, 1, 3, n, VECTOR_BYTES)
        s_t = block_exponent.ldexp(s_t, e)
        if result.has_outputs:
            if segment == segments - 1:
                store(gFinalState, s_t, (sequence, head, first_column, 0), aligned=False)
                if seq_layout.varlen and result.reads_values:
                    padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                    for j in range(padding.num_chunks()):
                        at = padding.batch, padding.chunk_start(j), head, first_column
                        store(gPaddedO, zeros(OUT), at, 1, 3, OUT_BYTES)
        else:
            store(gLocalStates, s_t, (sequence, head, segment, first_column, 0), aligned=False)
            store(gTotalDecays, zeros(COL_VEC) + segment_b, (sequence, head, segment, 0))

    return scan, smem
