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
from dS, and <S, dS>; gate_gradient.py computes the gradients from these."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import columns, divmod, minimum, row_sum, subtile, tile_sum, truncate, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import Gate, HeadGate, TokenGate
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

CONSUMERS = 2
PRODUCER = CONSUMERS  # the warpgroup after those of the consumers
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
VALUES = CONSUMERS * COLUMNS  # columns of a value, padded
REGISTERS = 40, 232  # of a thread of the producer, of a consumer
CUMSUM_WARPS = warpgroup.WARPGROUP - 1  # warps of the producer that compute b, a chunk each in turn
PANEL = 64  # channels of a panel of a shared tile
STAGES = 2  # chunks in flight
DQ_CONSUMER = 0  # the consumer that computes dQ


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gate: the kind of gates. unrounded: are dQ and dK
    float32, to be added over a group? unrounded_values: is dV float32? varlen: are sequences packed (cu_seqlens)? with_gates:
    are the sums for the gates' gradients stored, too?"""

    key_dim: int
    dtype: dtype
    gate: Gate
    unrounded: bool = False
    unrounded_values: bool = False
    varlen: bool = False
    with_gates: bool = True
    threads = warpgroup.THREADS * (CONSUMERS + 1)
    consumers, ctas_per_sm, supports_segments = CONSUMERS, 1, True  # as of chunk_hopper.py, to choose segments

    def __str__(self):
        flags = "float32" * self.unrounded, "float32 dv" * self.unrounded_values
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


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, gate, KEYS, VARLEN, WITH_GATES = config.dtype, config.gate, config.key_dim, config.varlen, config.with_gates
    (producer_registers, consumer_registers), STATE = REGISTERS, rt(16, KEYS, fp32)
    seq_layout, TRANSPOSED = SequenceLayout(VARLEN, reversed=True), rt(16, CHUNK, INPUT)
    KEY, VALUE, STATES = st(CHUNK, KEYS, INPUT), st(CHUNK, VALUES, INPUT), st(VALUES, KEYS, INPUT)
    PANEL_ROWS = rt(16, PANEL, INPUT)
    # Must loads fence themselves? The meeting before rounded results leave shared memory would.
    FENCED = config.unrounded or config.unrounded_values
    DQK = array(4) if config.unrounded else seq_layout.output_argument(KEY)
    DVALUES = array(4) if config.unrounded_values else seq_layout.output_argument(st(CHUNK, COLUMNS, INPUT))
    vectors = ring(sv(CHUNK, fp32), CUMSUM_WARPS if gate.per_token else 1, WARPS, writers=1)
    smem = shared(
        q=ring(KEY, STAGES, WARPS),
        k=ring(KEY, STAGES, WARPS),
        v=ring(VALUE, STAGES, WARPS),
        do=ring(VALUE, STAGES, WARPS),
        s=ring(STATES, 1, WARPS),
        ds=STATES,
        out=st(CONSUMERS * CHUNK, KEYS, INPUT),
        b=vectors,
    )

    @inlined
    def find_place(block, gCuSeqlens, length, segments, heads):
        """(segment, head, sequence, its tokens, how many chunks they are, the index of the first) of a block. Each warpgroup
        asks by itself: registers before they part are scarce."""
        _, segment, head, sequence = block_coord(block, 1, segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        return segment, head, sequence, seq, seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length)

    @inlined
    def multiply_panel(x, tile, n):
        """The products of 64 channels of x and of a shared tile."""
        panel = subtile(tile, CHUNK, 0, PANEL, n)
        return columns(x, PANEL, n) * fp32(warpgroup.load(panel, PANEL_ROWS, fenced=FENCED))

    @inlined
    def multiply(x, tile):
        """x * tile, with its panels of columns added up: only sums over channels are wanted, and with all columns registers
        would spill."""
        if KEYS > PANEL:
            return multiply_panel(x, tile, 0) + multiply_panel(x, tile, 1)
        else:
            return multiply_panel(x, tile, 0)

    @inlined
    def clear_tails(tiles, remaining):
        """Set to zero the rows of tiles that belong to another sequence."""
        for tile in tiles:
            seq_layout.zero_other_rows(tile, remaining, CONSUMERS)

    def make_store(unrounded):
        """The function that stores a chunk's gradients: by TMA if they are rounded and sequences not packed."""

        @inlined
        def store_rows(gOut, tile, x, seq, token, head, block):
            """Store block number `block` of the columns, of the rows that belong to the sequence."""
            if unrounded:
                at = seq.batch, token, head, int32(x.cols * block)
                warpgroup.store(truncate(gOut, 1, seq.end), x, at, 1, 3, aligned=True)
            elif VARLEN:  # through shared memory, too: with the addresses of its rows beside x registers would spill
                warpgroup.store(tile, x)
                warpgroup.sync()
                for n in range(x.cols // PANEL):
                    at = seq.batch, token, head, int32(x.cols * block + PANEL * n)
                    rows = warpgroup.load(subtile(tile, CHUNK, 0, PANEL, n), PANEL_ROWS, fenced=False)
                    warpgroup.store(truncate(gOut, 1, seq.end), rows, at, 1, 3, aligned=True)
            else:
                warpgroup.send(gOut, (seq.batch, token, head, block), tile, x)

        return store_rows

    store_gradient, store_values = make_store(config.unrounded), make_store(config.unrounded_values)

    @inlined
    def store_inputs(wg, gDQ, gDK, tile, x, seq, token, head):
        """Store a consumer's dQ or dK."""
        if wg == DQ_CONSUMER:
            store_gradient(gDQ, tile, x, seq, token, head, int32(0))
        else:
            store_gradient(gDK, tile, x, seq, token, head, int32(0))

    @inlined
    def store_dots(wg, gQueryDots, gKeyDots, dots, seq, token, head):
        """Store the row sums of q dq or of k dk."""
        at = seq.batch, token, head
        if wg == DQ_CONSUMER:
            warpgroup.store(truncate(gQueryDots, 1, seq.end), dots, at, cols=1)
        else:
            warpgroup.store(truncate(gKeyDots, 1, seq.end), dots, at, cols=1)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_linear(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gDOut: tiled(VALUE, unit=1),
        gStates: tiled(STATES, 4, 2, 3), gGates: array(gate.rank), gDQ: DQK, gDK: DQK, gDV: DVALUES,
        gLastState: array(4), gFirstState: array(4), gQueryDots: array(3), gKeyDots: array(3), gCarriedDots: array(3),
        gStateDots: array(3), gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The gradients of one of the `segments` of a sequence, for one value head; `group` of them share a key head. gStates:
        S^T before each chunk. gLastState: dS^T after each segment, gFirstState: before each sequence."""
        q, k, v, do, s, ds, out_tiles, b = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            segment, head, sequence, seq, n, first_chunk = find_place(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
            key_head, _ = divmod(head, group)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token = seq.chunk_start(j)
                    q.fill(j, gQ, (seq.batch, token, key_head))
                    k.fill(j, gK, (seq.batch, token, key_head))
                    v.fill(j, gV, (seq.batch, token, head))
                    do.fill(j, gDOut, (seq.batch, token, head))
                    s.fill(j, gStates, (int32(first_chunk + seq.chunk_number(j)), head))
            elif gate.per_token:
                for j in range(warpgroup.rank() - 1, n, CUMSUM_WARPS):
                    gate.produce_cumsum(b, b, j, gGates, gGates, gGates, seq.batch, seq.chunk_start(j), seq.end, head)
        else:
            warpgroup.claim_registers(consumer_registers)
            segment, head, sequence, seq, n, first_chunk = find_place(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
            ds_columns, out, dv_out = (
                subtile(ds, COLUMNS, wg),
                subtile(out_tiles, CHUNK, wg),
                subtile(out_tiles, CHUNK, wg, COLUMNS, 0),
            )
            warp, is_dk_consumer, sign = int32(warpgroup.WARPGROUP * wg + warpgroup.rank()), float32(wg), float32(1 - 2 * wg)
            state_index, column = int32(sequence * segments + segment), int32(COLUMNS * wg)
            ds_t = warpgroup.load(gLastState, STATE, (state_index, head, column, 0), aligned=False)
            g = gate.load_head_gate(gGates, head)
            ended_sequence = int32(
                sequence if segment == segments - 1 else -1
            )  # -1: the walk's last segment is another block's
            for j in range(n):
                remaining, chunk, token = seq.remaining(j), int32(first_chunk + seq.chunk_number(j)), seq.chunk_start(j)
                q_tile, k_tile, v_tile, do_tile = q.wait(j), k.wait(j), v.wait(j), do.wait(j)
                clear_tails((q_tile, k_tile), remaining)
                clear_tails((v_tile, do_tile), remaining)
                warpgroup.sync_several(CONSUMERS)  # both have read dS of the previous chunk
                warpgroup.store(ds_columns, ds_t)
                b_rows, b_cols, b_last = gate.consume_cumsum(b, b, j, g, remaining)
                warpgroup.sync_several(CONSUMERS)
                s_tile, do_columns = s.wait(j), subtile(do_tile, CHUNK, 0, COLUMNS, wg)
                if wg == DQ_CONSUMER:  # dx is dQ
                    left, right, states, operand, partner = do_tile, v_tile, s_tile, q_tile, k_tile
                else:  # dx is dK, dp is dP^T, and b has the opposite sign
                    left, right, states, operand, partner = v_tile, do_tile, ds, k_tile, q_tile
                p_t = warpgroup.mm_ABt(k_tile, q_tile)
                dv = warpgroup.mm_ABt(k_tile, ds_columns)
                dp = warpgroup.mm_ABt(left, right)
                p_t = gate.decay_all_scores(warpgroup.wait(p_t, newer=2), b_rows * -1.0, b_cols * -1.0) * scale
                p_t = INPUT(warpgroup.triu(p_t, 0, 0.0))
                dv = gate.decay(warpgroup.wait(dv, newer=1), minimum(b_last - b_rows, 0.0))
                dv = warpgroup.mma_AB(dv, p_t, do_columns)
                dp = gate.decay_all_scores(warpgroup.wait(dp, newer=1), b_rows * sign, b_cols * sign) * scale
                dp = INPUT(warpgroup.tril(warpgroup.triu(dp, CHUNK * (wg - 1), 0.0), CHUNK * wg, 0.0))
                if WITH_GATES:
                    gStateDots[chunk, head, warp] = tile_sum(multiply(ds_t, subtile(s_tile, COLUMNS, wg)))
                store_values(gDV, dv_out, warpgroup.wait(dv), seq, token, head, wg)
                dx = warpgroup.mm_AB(left, states)
                do_t = fp32(warpgroup.load_transposed(do_columns, TRANSPOSED, fenced=FENCED)) * scale
                do_t = INPUT(gate.decay(do_t, b_cols))
                dx = gate.decay(warpgroup.wait(dx), minimum(b_last * is_dk_consumer + b_rows * sign, 0.0))
                s.release(j)
                if wg == DQ_CONSUMER:
                    dx = dx * scale
                elif WITH_GATES:
                    gCarriedDots[chunk, head, warpgroup.rank()] = tile_sum(multiply(dx, operand))
                dx = warpgroup.mma_AB(dx, dp, partner)
                ds_t = warpgroup.mma_AB(gate.decay(ds_t, b_last), do_t, q_tile)
                dx = warpgroup.wait(dx, newer=1)
                if WITH_GATES:
                    store_dots(wg, gQueryDots, gKeyDots, row_sum(multiply(dx, operand)), seq, token, head)
                store_inputs(wg, gDQ, gDK, out, dx, seq, token, head)
                ds_t = warpgroup.wait(ds_t)
                q.release(j)
                k.release(j)
                v.release(j)
                do.release(j)
            warpgroup.store_wait()
            if VARLEN and ended_sequence >= 0:
                padding = seq_layout.padding_tokens(gCuSeqlens, ended_sequence, length)
                for j in range(padding.num_chunks()):
                    token = padding.chunk_start(j)
                    store_inputs(wg, gDQ, gDK, out, zeros(STATE), padding, token, head)
                    store_values(gDV, dv_out, zeros(rt(16, COLUMNS, fp32)), padding, token, head, wg)
            if ended_sequence >= 0:
                warpgroup.store(gFirstState, ds_t, (ended_sequence, head, int32(COLUMNS * warpgroup.id()), 0), aligned=False)

    return differentiate_linear, smem
