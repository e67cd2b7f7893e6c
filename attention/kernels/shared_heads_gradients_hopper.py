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
from numpy import float32, int32

from ops import (
    col_sum,
    columns,
    divmod,
    load,
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
KEY_STAGES = 1  # chunks whose Q and K are in flight
STAGES = CUMSUM_WARPS  # heads whose V, dO and states are in flight: each of those warps has the same slots of S and dS
STATE_PART = rt(16, 16, fp32)  # of <S, dS> a warp of the producer adds up as many parts
MIN_SUM = -90.0  # of a chunk's gates, in powers of 2: decays of one that sums to less are no products of factors
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
    GATED, STRONG_ONLY = bool(gate.kind), bool(gate.kind) and INPUT is fp16
    SHARES, SCALED_SCORES = GATED and not STRONG_ONLY, INPUT is fp16
    vectors = ring(sv(CHUNK, fp32), CUMSUM_WARPS, WARPS, writers=1)
    shared_values = ring(VALUE if SHARES else st(16, 16, INPUT), 2, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP)
    smem = shared(
        q=ring(KEY, KEY_STAGES, WARPS),
        k=ring(KEY, KEY_STAGES, WARPS),
        v=ring(VALUE, STAGES, WARPS),
        do=ring(VALUE, STAGES, WARPS),
        s=ring(STATE, STAGES, STATE_READERS),
        ds=ring(STATE, STAGES, STATE_READERS),
        dp=ring(SCORES, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
        decayed_dos=shared_values,
        weighted_vs=shared_values,
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
    def hand_over(tiles, slot, x):
        """Hand x to the other consumer, rounded, if scores are products of factors."""
        if SHARES:
            warpgroup.store(tiles.claim(slot), x)
            tiles.publish(slot)

    @inlined
    def wait_shared(tiles, slot, tile):
        """What the other consumer has handed over; without decays the tile itself."""
        if SHARES:
            return tiles.wait(slot)
        else:
            return tile

    @inlined
    def release_shared(tiles, slot):
        """Release what the other consumer has handed over."""
        if SHARES:
            tiles.release(slot)

    @inlined
    def add_scores(dp_sum, p, decayed_do, q_tile, s_tile, v_tile, weighted_vs, slot, scale):
        """(dp_sum with the products of a head, the row sums of q * dq), where decays are in dO and V."""
        if WITH_GATES:
            o = warpgroup.mm_ABt(q_tile, s_tile)
            weighted_v = wait_shared(weighted_vs, slot, v_tile)
            dp_sum = warpgroup.mma_ABt(dp_sum, decayed_do, weighted_v)
            o = warpgroup.wait(warpgroup.mma_AB(o, p, weighted_v))
            dots = row_sum(o * fp32(decayed_do)) * scale
        else:
            dp_sum, dots = warpgroup.mma_ABt(dp_sum, decayed_do, wait_shared(weighted_vs, slot, v_tile)), 0.0
        return warpgroup.wait(dp_sum), dots

    @inlined
    def add_strong_scores(dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, b, a, slot, b_rows, scale):
        """add_scores of a chunk whose decays are no products of factors of rows and of columns that numbers can hold."""
        if WITH_GATES:
            dots = row_sum(warpgroup.wait(warpgroup.mm_ABt(q_tile, s_tile)) * fp32(decayed_do)) * scale
        else:
            dots = 0.0
        dp = gate.weigh_columns(warpgroup.wait(warpgroup.mm_ABt(do_tile, v_tile)), b, a, slot)
        decays = warpgroup.causal(gate.load_decays(b, slot, b_rows), 0, 0.0)
        if WITH_GATES:
            dots = dots + scale_scores(row_sum(fp32(INPUT(fp32(p) * decays)) * dp), scale)
        return dp_sum + dp * decays, dots

    @inlined
    def multiply_strong_scores(p_t, do_tile, b, slot, b_rows):
        """P^T dO of such a chunk."""
        decays = warpgroup.triu(gate.load_decays_of_rows(b, slot, b_rows), 0, 0.0)
        return warpgroup.wait(warpgroup.mm_AB(INPUT(fp32(p_t) * decays), do_tile))

    @inlined
    def is_strong(b_last):
        """1.0 if a chunk is strong, 0.0 if not."""
        if STRONG_ONLY:
            return float32(1)
        elif GATED:
            return float32(1) if b_last < MIN_SUM else float32(0)
        else:
            return float32(0)

    @inlined
    def scale_scores(x, scale):
        """x, made from scores, times the scale, if it is not in the scores, nor 1."""
        if SCALED_SCORES or gate.weighted:
            return x
        else:
            return x * scale

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
        q, k, v, do, s, ds, dp_tiles, decayed_dos, weighted_vs, out, b, a = smem.open()
        wg = warpgroup.id()
        score_scale = scale if SCALED_SCORES else float32(1)
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
                p = INPUT(warpgroup.causal(warpgroup.wait(warpgroup.mm_ABt(q_tile, k_tile)) * score_scale, 0, 0.0))
                dq, dp_sum = zeros(SUMS), zeros(TILE)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    clear_tails((v_tile, do_tile), remaining)
                    s_tile, (b_rows, _, b_last) = s.wait(slot), gate.load_sums(b, a, slot)
                    dout = fp32(warpgroup.load(do_tile, ROWS))
                    decayed_do = INPUT(gate.decay(dout, b_rows))
                    hand_over(decayed_dos, slot, decayed_do)
                    dq = warpgroup.mma_AB(dq, decayed_do, s_tile)
                    if HAS_SKIP:
                        products = dout * fp32(warpgroup.load(v_tile, ROWS))
                        row = int32(warpgroup.WARPGROUP * chunk + warpgroup.rank())
                        if SKIP_OF_HEAD:
                            gSkipSums[row * width + column, head] = tile_sum(products)
                        if SKIP_OF_COLUMN:
                            store(gColumnSums, col_sum(products), (head, row, int32(COLUMNS * column)))
                    if STRONG_ONLY:
                        dp_sum, dots = add_strong_scores(
                            dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, b, a, slot, b_rows, scale
                        )
                    elif GATED:
                        if b_last < MIN_SUM:
                            dp_sum, dots = add_strong_scores(
                                dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, b, a, slot, b_rows, scale
                            )
                            wait_shared(weighted_vs, slot, v_tile)
                        else:
                            dp_sum, dots = add_scores(dp_sum, p, decayed_do, q_tile, s_tile, v_tile, weighted_vs, slot, scale)
                    else:
                        dp_sum, dots = add_scores(dp_sum, p, decayed_do, q_tile, s_tile, v_tile, weighted_vs, slot, scale)
                    dq = warpgroup.wait(dq)
                    release_shared(weighted_vs, slot)
                    gate.release_sums(b, a, slot)
                    v.release(slot)
                    do.release(slot)
                    s.release(slot)
                    if WITH_GATES:
                        at = seq.batch, token, int32(first + block)
                        warpgroup.store(truncate(gQueryDots, 1, seq.end), dots, at, cols=1)
                dp_left = INPUT(warpgroup.causal(dp_sum, 0, 0.0) * scale)
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
                p_t = INPUT(warpgroup.triu(warpgroup.wait(warpgroup.mm_ABt(k_tile, q_tile)) * score_scale, 0, 0.0))
                dk = zeros(SUMS)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    if HAS_SKIP:
                        d = load(gD, D_VEC, (head, int32(COLUMNS * column)))
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    clear_tails((v_tile, do_tile), remaining)
                    ds_tile, (b_rows, a_rows, b_last) = ds.wait(slot), gate.load_sums(b, a, slot)
                    values, strong = fp32(warpgroup.load(v_tile, ROWS)), is_strong(b_last)
                    weighted_v = INPUT(gate.decay(values, a_rows * (strong - 1.0)))
                    hand_over(weighted_vs, slot, weighted_v)
                    carried_dv = warpgroup.mm_ABt(k_tile, ds_tile)
                    dk = warpgroup.mma_AB(dk, INPUT(gate.decay(values, b_last - a_rows)), ds_tile)
                    if STRONG_ONLY:
                        dv = multiply_strong_scores(p_t, do_tile, b, slot, b_rows)
                    elif GATED:
                        if b_last < MIN_SUM:
                            dv = multiply_strong_scores(p_t, do_tile, b, slot, b_rows)
                            wait_shared(decayed_dos, slot, do_tile)
                        else:
                            dv = warpgroup.wait(warpgroup.mm_AB(p_t, wait_shared(decayed_dos, slot, do_tile)))
                    else:
                        dv = warpgroup.wait(warpgroup.mm_AB(p_t, do_tile))
                    dk, carried_dv = warpgroup.wait(dk), warpgroup.wait(carried_dv)
                    release_shared(decayed_dos, slot)
                    values, to_end = fp32(weighted_v), b_last - b_rows * strong
                    dv = scale_scores(dv, scale) + gate.decay(carried_dv, to_end)
                    dots, carried = row_sum(dv * values), gate.decay(row_sum(carried_dv * values), to_end)
                    dv = gate.decay(dv, b_rows * strong - a_rows)
                    gate.release_sums(b, a, slot)
                    if WITH_GATES:
                        at = seq.batch, token, int32(first + block)
                        dots = gate.decay(dots, (a_rows - b_rows) * (1.0 - strong))
                        warpgroup.store(truncate(gKeyDots, 1, seq.end), dots, at, cols=1)
                        warp = int32(warpgroup.WARPGROUP * column + warpgroup.rank())
                        carried = gate.decay(carried, (b_rows - a_rows) * strong)
                        gCarriedDots[chunk, head, warp] = tile_sum(carried)
                    if HAS_SKIP:
                        dv = dv + fp32(warpgroup.load(do_tile, ROWS)) * d
                    if VARLEN:
                        seq_layout.store_rows(gDV, dv, seq, token, head, column)
                    else:
                        warpgroup.send(gDV, (seq.batch, token, head, column), out, dv)
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
