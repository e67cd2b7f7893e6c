"""Gradients of linear attention for Hopper where value heads share queries and keys, of all chunks at once; a decay is one
number for a token and head. With S the state before a chunk, dS the gradient of the state after it, b the cumulative sum of
the chunk's gates, w the weights of its keys (1, or Mamba-2's dt) and M = tril(exp(b - b^T)),

    of a head         dP = M * w^T * dO V^T                   P = scale M * Q K^T
                      dV = w (exp(b_last - b) K dS + P^T dO) + D dO
    of its key head   dQ = sum of scale exp(b) dO S^T + scale (sum of dP) K
                      dK = sum of w exp(b_last - b) V dS^T + scale (sum of dP)^T Q

over the value heads of the key head. A thread block has some of these, of one chunk after another: it loads Q and K of a chunk
once, computes Q K^T once, and keeps dQ, dK and the sum of dP in registers. One consumer has the rows of queries, dQ and dP; the
other those of keys, dK and dV. Both states are in memory, transposed, in the input's dtype (results.ChunkStates), so that
chunks are independent, and no block waits for another one. A head of more than 64 columns is divided into blocks of 64, which
this kernel treats as heads with the same gates. Every exponent is a sum of gates, so never positive, or the logarithm of a
weight.

For the gates' gradients (gradients.py) the consumers store the row sums of dP * P and of its transpose, to which they add the
states' parts of q . dq and of v . dv / w, and the sum of the latter part, times w, for each chunk; producers compute <S, dS>.
For D's gradient they store the sums of dO V over the chunk, of a head or of each column."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    col_sum,
    columns,
    divmod,
    load,
    minimum,
    row_sum,
    store,
    subtile,
    tile_sum,
    transpose,
    truncate,
    warpgroup,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import COL_VEC, ROW_VEC, TILE, Gate, Mamba2Gate, TokenGate
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2
DQ_CONSUMER, DK_CONSUMER, PRODUCER = range(CONSUMERS + 1)  # warpgroups
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
REGISTERS = 56, 224  # of a thread of the producer, of a consumer
CUMSUM_WARPS = warpgroup.WARPGROUP - 1  # warps of the producer that compute b and <S, dS>, a head each in turn
KEY_STAGES = 2  # chunks whose Q and K are in flight
STAGES = CUMSUM_WARPS  # heads whose V, dO and states are in flight: each of those warps has the same slots of S and dS
STATE_PART = rt(16, 16, fp32)  # of <S, dS> a warp of the producer adds up as many parts
SKIPS = "", "head", "column"  # does each head, or each column, have a D? "": there is none


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gate: the kind of gates. skip: one of SKIPS. partial:
    are dQ and dK float32, to be added over the blocks that share the value heads of a key head? varlen: are sequences packed
    (cu_seqlens)? with_gates: are the sums for the gates' gradients stored, too?"""

    key_dim: int
    dtype: dtype
    gate: Gate
    skip: str = ""
    partial: bool = False
    varlen: bool = False
    with_gates: bool = True
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    def __str__(self):
        size, gates = f"Dk {self.key_dim} {self.dtype}", "gradients of gates" * self.with_gates
        flags = f"D by {self.skip}" * bool(self.skip), "partial" * self.partial, "varlen" * self.varlen
        return ", ".join(filter(None, (size, str(self.gate), gates, *flags)))


KEY_DIMS = 64, 128  # as padded
LINEAR_GATES = Gate(), TokenGate(scale_at_end=True)
STEPS = Mamba2Gate(softplus=True)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16, packed sequences, partial sums and D of columns at all sizes, too."""
    if target.has_wgmma:
        for input_dtype, key_dim, gate in itertools.product(
            (bf16, fp16) if everything else (bf16,), KEY_DIMS, (*LINEAR_GATES, STEPS)
        ):
            for varlen, partial in itertools.product((False, True), repeat=2) if everything else ((False, False),):
                for skip in SKIPS if everything and gate is STEPS else ("head" if gate is STEPS else "",):
                    yield Config(key_dim, input_dtype, gate, skip, partial, varlen, bool(gate.kind))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, gate, KEYS, VARLEN, WITH_GATES = config.dtype, config.gate, config.key_dim, config.varlen, config.with_gates
    producer_registers, consumer_registers = REGISTERS
    SKIP_OF_HEAD, SKIP_OF_COLUMN, HAS_SKIP = config.skip == "head", config.skip == "column", bool(config.skip)
    seq_layout, SUMS, ROWS = SequenceLayout(VARLEN), rt(16, KEYS, fp32), rt(16, COLUMNS, INPUT)
    KEY, VALUE, STATE, SCORES = (
        st(CHUNK, KEYS, INPUT),
        st(CHUNK, COLUMNS, INPUT),
        st(COLUMNS, KEYS, INPUT),
        st(CHUNK, CHUNK, INPUT),
    )
    DQK = array(4, fp32 if config.partial else INPUT)
    D_VEC = ROW_VEC if SKIP_OF_COLUMN else COL_VEC  # D of a head comes with as many columns, all the same
    STATE_READERS = warpgroup.WARPGROUP + WITH_GATES  # a consumer, and the warp that multiplies S and dS
    vectors = ring(sv(CHUNK, fp32), CUMSUM_WARPS, WARPS, writers=1)
    smem = shared(
        q=ring(KEY, KEY_STAGES, WARPS),
        k=ring(KEY, KEY_STAGES, WARPS),
        v=ring(VALUE, STAGES, WARPS),
        do=ring(VALUE, STAGES, WARPS),
        s=ring(STATE, STAGES, STATE_READERS),
        ds=ring(STATE, STAGES, STATE_READERS),
        dp=ring(SCORES, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
        out=VALUE,
        b=vectors,
        a=vectors,
    )

    @inlined
    def find_block(slot, n, first, width):
        """(the number of the chunk, the head, the number of the block of columns) of a slot of a thread block."""
        i, block = divmod(int32(slot), n)
        head, column = divmod(int32(first + block), width)
        return i, head, column

    @inlined
    def dot_panel(x, tile, n):
        """The row sums of 64 channels of x and of a shared tile."""
        panel = subtile(tile, CHUNK, 0, COLUMNS, n)
        return row_sum(columns(x, COLUMNS, n) * fp32(warpgroup.load(panel, ROWS)))

    @inlined
    def dot_rows(x, tile):
        """The row sums of x * tile."""
        if KEYS > COLUMNS:
            return dot_panel(x, tile, 0) + dot_panel(x, tile, 1)
        else:
            return dot_panel(x, tile, 0)

    @inlined
    def dot_states(s_tile, ds_tile):
        """<S, dS>, by one warp: 16 rows of 64 channels at once."""
        total = zeros(STATE_PART)
        for row in range(COLUMNS // STATE_PART.rows):
            for panel in range(KEYS // COLUMNS):
                states = load(subtile(s_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS)
                products = fp32(states) * fp32(load(subtile(ds_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS))
                halves = columns(products, COLUMNS // 2, 0) + columns(products, COLUMNS // 2, 1)
                total = total + columns(halves, STATE_PART.cols, 0) + columns(halves, STATE_PART.cols, 1)
        return tile_sum(total)

    @inlined
    def clear_tails(tiles, remaining):
        """Set to zero the rows of tiles that belong to another sequence."""
        for tile in tiles:
            seq_layout.zero_other_rows(tile, remaining, CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_shared_heads(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gDOut: tiled(VALUE, unit=1),
        gStates: tiled(STATE, 4, 2, 3), gDStates: tiled(STATE, 4, 2, 3), gGates: array(gate.rank), gA: array(2),
        gDtBias: array(2), gD: array(2), gDQ: DQK, gDK: DQK, gDV: seq_layout.output_argument(VALUE), gQueryDots: array(3),
        gKeyDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gSkipSums: array(2), gColumnSums: array(3),
        gCuSeqlens: ENDS, length: INT, parts: INT, shares: INT, heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of each share. A key head's `group` value heads,
        of `width` blocks of columns each, are divided into `shares`; gDQ, gDK have as many heads for each key head. gStates,
        gDStates: S^T and dS^T of each chunk. gQueryDots, gKeyDots: of each token and (head, block of columns); gCarriedDots and
        gStateDots: of each chunk, head and (block of columns, warp) or block of columns. gSkipSums: of each (chunk, warp, block
        of columns) and head; gColumnSums: of each head, (chunk, warp) and column."""
        q, k, v, do, s, ds, dp_tiles, out, b, a = smem.open()
        wg = warpgroup.id()
        index, share = divmod(cuda.blockIdx.x, shares)
        index, key_head = divmod(index, heads)
        sequence, part = divmod(index, parts)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        chunks, _ = divmod(int32(seq.num_chunks() - part + parts - 1), parts)  # of this block
        blocks = group * width
        blocks_per_share, _ = divmod(int32(blocks + shares - 1), shares)
        first = int32(key_head * blocks + blocks_per_share * share)  # of all heads' blocks of columns
        n, out_head = int32(min(blocks_per_share, blocks - blocks_per_share * share)), int32(shares * key_head + share)
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            warp = warpgroup.rank()
            if warp == 0:
                for i in range(chunks):
                    token = seq.chunk_start(part + parts * i)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    k.fill(i, gK, (seq.batch, token, key_head))
                    q.fill(i, gQ, (seq.batch, token, key_head))
                    for block in range(n):
                        slot = n * i + block
                        head, column = divmod(int32(first + block), width)
                        v.fill(slot, gV, (seq.batch, token, head, column))
                        do.fill(slot, gDOut, (seq.batch, token, head, column))
                        ds.fill(slot, gDStates, (chunk, head, column, 0))
                        s.fill(slot, gStates, (chunk, head, column, 0))
            elif gate.per_token:
                i, head, _ = find_block(warp - 1, n, first, width)
                g = gate.load_gates(gGates, seq.batch, seq.chunk_start(part + parts * i), seq.end, head)
                rate, bias = gate.load_rate_and_bias(gA, gDtBias, head)
                for slot in range(warp - 1, n * chunks, CUMSUM_WARPS):
                    i, head, column = find_block(slot, n, first, width)
                    token = seq.chunk_start(part + parts * i)
                    gate.publish_cumsum(b, a, slot, transpose(g), rate, bias, seq.end - token)
                    i, next_head, _ = find_block(slot + CUMSUM_WARPS, n, first, width)  # loaded under <S, dS>
                    g = gate.load_gates(gGates, seq.batch, seq.chunk_start(part + parts * i), seq.end, next_head)
                    rate, bias = gate.load_rate_and_bias(gA, gDtBias, next_head)
                    if WITH_GATES:
                        dot = dot_states(s.wait(slot), ds.wait(slot))
                        s.release(slot)
                        ds.release(slot)
                        gStateDots[seq_layout.chunk_index(token, sequence, length), head, column] = dot
        elif wg == DQ_CONSUMER:
            warpgroup.claim_registers(consumer_registers)
            for i in range(chunks):
                number = int32(part + parts * i)
                token, remaining = seq.chunk_start(number), seq.remaining(number)
                chunk = seq_layout.chunk_index(token, sequence, length)
                q_tile, k_tile = q.wait(i), k.wait(i)
                clear_tails((q_tile, k_tile), remaining)
                p = warpgroup.wait(warpgroup.mm_ABt(q_tile, k_tile)) * scale
                dq, dp_sum = zeros(SUMS), zeros(TILE)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    clear_tails((v_tile, do_tile), remaining)
                    dp = warpgroup.mm_ABt(do_tile, v_tile)
                    if HAS_SKIP:
                        products = fp32(warpgroup.load(do_tile, ROWS)) * fp32(warpgroup.load(v_tile, ROWS))
                        row = int32(warpgroup.WARPGROUP * chunk + warpgroup.rank())
                        if SKIP_OF_HEAD:
                            gSkipSums[row * width + column, head] = tile_sum(products)
                        if SKIP_OF_COLUMN:
                            store(gColumnSums, col_sum(products), (head, row, int32(COLUMNS * column)))
                    b_rows, a_cols, _ = gate.consume_cumsum(b, a, slot, 0.0, remaining)
                    dp = gate.decay_scores(warpgroup.wait(dp), b_rows, a_cols)
                    v.release(slot)
                    dq_block = warpgroup.mm_AB(do_tile, s.wait(slot))
                    dp_sum = dp_sum + dp
                    dots = row_sum(dp * p)
                    dq_block = warpgroup.wait(dq_block)
                    do.release(slot)
                    s.release(slot)
                    if WITH_GATES:
                        dots = dots + gate.decay(dot_rows(dq_block, q_tile), b_rows) * scale
                        at = seq.batch, token, int32(first + block)
                        warpgroup.store(truncate(gQueryDots, 1, seq.end), dots, at, cols=1)
                    dq = dq + gate.decay(dq_block, b_rows)
                dp_left = INPUT(dp_sum * scale)
                warpgroup.store(dp_tiles.claim(i), dp_left)
                dp_tiles.publish(i)
                dq = warpgroup.wait(warpgroup.mma_AB(dq * scale, dp_left, k_tile))
                k.release(i)
                q.release(i)
                out_at = seq.batch, token, out_head, 0
                warpgroup.store(truncate(gDQ, 1, seq.end), dq, out_at, 1, 3, aligned=True)
            if VARLEN and part == 0:
                padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                for j in range(padding.num_chunks()):
                    token = padding.chunk_start(j)
                    out_at = padding.batch, token, out_head, 0
                    warpgroup.store(gDQ, zeros(SUMS), out_at, 1, 3, aligned=True)
                    warpgroup.store(gDK, zeros(SUMS), out_at, 1, 3, aligned=True)
                    for block in range(n):
                        head, column = divmod(int32(first + block), width)
                        seq_layout.store_rows(gDV, zeros(TILE), padding, token, head, column)
        else:
            warpgroup.claim_registers(consumer_registers)
            for i in range(chunks):
                number = int32(part + parts * i)
                token, remaining = seq.chunk_start(number), seq.remaining(number)
                chunk = seq_layout.chunk_index(token, sequence, length)
                q_tile, k_tile = q.wait(i), k.wait(i)
                clear_tails((q_tile, k_tile), remaining)
                p = warpgroup.wait(warpgroup.mm_ABt(k_tile, q_tile)) * scale
                dk = zeros(SUMS)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    if HAS_SKIP:
                        d = load(gD, D_VEC, (head, int32(COLUMNS * column)))
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    clear_tails((v_tile, do_tile), remaining)
                    ds_tile = ds.wait(slot)
                    dp = warpgroup.mm_ABt(v_tile, do_tile)
                    b_rows, b_cols, b_last, weights = gate.consume_weighted_cumsum(b, a, slot, 0.0, remaining)
                    to_end = minimum(b_last - b_rows, 0.0)
                    p_block = warpgroup.triu(gate.decay_all_scores(p, b_rows * -1.0, b_cols * -1.0), 0, 0.0)
                    dots = row_sum(warpgroup.wait(dp) * p_block)
                    p_block = INPUT(p_block)
                    dv = warpgroup.mm_ABt(k_tile, ds_tile)
                    dv = gate.decay(warpgroup.wait(dv), to_end)
                    values = fp32(warpgroup.load(v_tile, ROWS))
                    carried = row_sum(dv * values)
                    dv = warpgroup.mma_AB(dv, p_block, do_tile)
                    dk = warpgroup.mma_AB(dk, INPUT(values * gate.decay(weights, to_end)), ds_tile)
                    if WITH_GATES:
                        at = seq.batch, token, int32(first + block)
                        warpgroup.store(truncate(gKeyDots, 1, seq.end), dots + carried, at, cols=1)
                        warp = int32(warpgroup.WARPGROUP * column + warpgroup.rank())
                        gCarriedDots[chunk, head, warp] = tile_sum(carried * weights)
                    dv = warpgroup.wait(dv, newer=1) * weights
                    if HAS_SKIP:
                        dv = dv + fp32(warpgroup.load(do_tile, ROWS)) * d
                    if VARLEN:
                        seq_layout.store_rows(gDV, dv, seq, token, head, column)
                    else:
                        warpgroup.send(gDV, (seq.batch, token, head, column), out, dv)
                    dk = warpgroup.wait(dk)
                    v.release(slot)
                    do.release(slot)
                    ds.release(slot)
                dk = warpgroup.wait(warpgroup.mma_AtB(dk, dp_tiles.wait(i), q.wait(i)))
                dp_tiles.release(i)
                k.release(i)
                q.release(i)
                out_at = seq.batch, token, out_head, 0
                warpgroup.store(truncate(gDK, 1, seq.end), dk, out_at, 1, 3, aligned=True)
            warpgroup.store_wait()

    return differentiate_shared_heads, smem
