"""Gradients of linear attention for Hopper where value heads share queries and keys, of all chunks at once; a decay is one
number for a token and head. With S the state before a chunk, dS the gradient of the state after it, b the cumulative sum of
the chunk's gates, w the weights of its keys (1, or Mamba-2's dt), both of a head, and

    dO' = exp(b) dO        V' = w exp(-b) V        P = tril(Q K^T)        dP = scale tril(sum of dO' V'^T)

these are, the sums being those over the value heads of a key head,

    of a head         dV = w (exp(b_last - b) K dS + scale exp(-b) P^T dO') + D dO
    of its key head   dQ = scale (sum of dO' S^T) + dP K
                      dK = sum of exp(b_last) V' dS^T + dP^T Q

so that the scores of all heads are the same, and products of a head add up in the tensor cores. A thread block has some of the
value heads, of one chunk after another: it loads Q and K of a chunk once, computes P once, and keeps dQ, dK and dP in
registers. One consumer has the rows of queries, dQ and dP; the other those of keys, dK and dV; each makes one of the operands
dO' and V', which both need. Both states are in memory, transposed, in the input's dtype (results.ChunkStates), so that chunks
are independent, and no block waits for another one. A head of more than 64 columns is divided into blocks of 64, which this
kernel treats as heads with the same gates. b, and a = b - log(w), come from memory, too (gate_sums.py).

A chunk is strong if it decays by so much that V' would be too large; in float16 all are. There the consumers decay the scores
of a head themselves, tril(exp(b - b^T)) * P. No exponent is positive there, nor in dO'.

For the gates' gradients (gradients.py) the consumers compute q . dq and v . dv / w of each token, and of the latter the part
that comes from dS, times w; the former as dO' . (Q S + P V'), so that the terms of a chunk's scores are the same products of
rounded numbers in both, and cancel. Warps of the producer compute <S, dS>. For D's gradient there are the sums of dO V over the
chunk, of a head or of each column. Consumers store nothing but dQ and dK: a fence, which tiles of products need, would wait for
these stores. A warp of the producer does."""

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
    exp2,
    last_element,
    load,
    row_sum,
    store,
    store_wait,
    subtile,
    tile_sum,
    tma_store,
    truncate,
    warpgroup,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import COL_VEC, ROW_VEC, TILE
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2
DQ_CONSUMER, DK_CONSUMER, PRODUCER = range(CONSUMERS + 1)  # warpgroups
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
LOAD_WARP, STORE_WARP = range(2)  # of the producer; the others multiply S and dS
STATE_WARPS = warpgroup.WARPGROUP - 2
REGISTERS = 56, 224  # of a thread of the producer, of a consumer
STAGES = 3  # heads whose V, dO and states are in flight
STATE_PART = rt(16, 16, fp32)  # of <S, dS> a warp of the producer adds up as many parts
MIN_SUM = -90.0  # of a chunk's gates, in powers of 2: decays of one that sums to less are no products of factors
SKIPS = "", "head", "column"  # does each head, or each column, have a D? "": there is none
GATES = "", "token", "step"  # are there gates, and weights of keys?


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gates: one of GATES. skip: one of SKIPS. partial:
    are dQ and dK float32, to be added over the blocks that share the value heads of a key head? varlen: are sequences packed
    (cu_seqlens)? with_gates: are the sums for the gates' gradients stored, too?"""

    key_dim: int
    dtype: dtype
    gates: str
    skip: str = ""
    partial: bool = False
    varlen: bool = False
    with_gates: bool = True
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    def __str__(self):
        size, gates = f"Dk {self.key_dim} {self.dtype}", f"gates by {self.gates}" * bool(self.gates)
        flags = f"D by {self.skip}" * bool(self.skip), "partial" * self.partial, "varlen" * self.varlen
        return ", ".join(filter(None, (size, gates, "gradients of gates" * self.with_gates, *flags)))


KEY_DIMS = 64, 128  # as padded


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16, packed sequences, partial sums and D of columns at all sizes, too."""
    if target.has_wgmma:
        for input_dtype, key_dim, gates in itertools.product((bf16, fp16) if everything else (bf16,), KEY_DIMS, GATES):
            for varlen, partial in itertools.product((False, True), repeat=2) if everything else ((False, False),):
                steps = gates == "step"
                for skip in SKIPS if everything and steps else ("head" * steps,):
                    yield Config(key_dim, input_dtype, gates, skip, partial, varlen, bool(gates))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, KEYS, VARLEN, WITH_GATES = config.dtype, config.key_dim, config.varlen, config.with_gates
    producer_registers, consumer_registers = REGISTERS
    SKIP_OF_HEAD, SKIP_OF_COLUMN, HAS_SKIP = config.skip == "head", config.skip == "column", bool(config.skip)
    seq_layout, SUMS, ROWS = SequenceLayout(VARLEN), rt(16, KEYS, fp32), rt(16, COLUMNS, INPUT)
    KEY, VALUE, STATE = st(CHUNK, KEYS, INPUT), st(CHUNK, COLUMNS, INPUT), st(COLUMNS, KEYS, INPUT)
    DQK = array(4, fp32 if config.partial else INPUT)
    D_VEC = ROW_VEC if SKIP_OF_COLUMN else COL_VEC  # D of a head comes with as many columns, all the same
    STATE_READERS = warpgroup.WARPGROUP + STATE_WARPS * WITH_GATES
    GATED, WEIGHTED = bool(config.gates), config.gates == "step"
    STRONG_ONLY = GATED and INPUT is fp16  # whose range is too small for factors of decays
    SHARES, SCALED_SCORES = GATED and not STRONG_ONLY, INPUT is fp16
    GATE_SUMS, TWO_ROWS = sv(CHUNK * (1 + WEIGHTED), fp32), sv(2 * CHUNK, fp32)
    DECAYED_DOS, WEIGHTED_VS = VALUE, VALUE if SHARES else st(16, 16, INPUT)
    smem = shared(
        q=ring(KEY, 1, WARPS),
        k=ring(KEY, 1, WARPS),
        v=ring(VALUE, STAGES, WARPS),
        do=ring(VALUE, STAGES, WARPS),
        s=ring(STATE, STAGES, STATE_READERS),
        ds=ring(STATE, STAGES, STATE_READERS),
        sums=ring(GATE_SUMS, STAGES, WARPS),
        decayed_dos=ring(DECAYED_DOS, 1 + SHARES, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
        weighted_vs=ring(WEIGHTED_VS, 2, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
        query_dots=ring(TWO_ROWS, 2, 1, writers=warpgroup.WARPGROUP),
        key_dots=ring(TWO_ROWS, 2, 1, writers=warpgroup.WARPGROUP),
        out=ring(VALUE, 1, 1, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def hand_over(tiles, j, x):
        """Hand x to the other consumer, rounded, if scores are products of factors. The fence is that of loads before."""
        if SHARES:
            warpgroup.store(tiles.claim(j), x)
            tiles.publish(j)

    @inlined
    def wait_shared(tiles, j, tile):
        """What the other consumer has handed over; without decays the tile itself."""
        if SHARES:
            return tiles.wait(j)
        else:
            return tile

    @inlined
    def release_shared(tiles, j):
        """Release what the other consumer has handed over."""
        if SHARES:
            tiles.release(j)

    @inlined
    def turn_of(i, block, n):
        """Which of the first consumer's tiles dO with decays is; dP comes after those of all heads."""
        return int32((n + 1) * i + block) if SHARES else int32(i)

    @inlined
    def load_sums(sums, slot):
        """(b and a of this warp's rows, b_last)."""
        if GATED:
            b = subtile(sums.wait(slot), CHUNK, 0)
            b_rows, b_last = warpgroup.load(b, COL_VEC), last_element(b)
            if WEIGHTED:
                return b_rows, warpgroup.load(subtile(sums.wait(slot), CHUNK, 1), COL_VEC), b_last
            else:
                return b_rows, b_rows, b_last
        else:
            return 0.0, 0.0, float32(0)

    @inlined
    def load_cols(sums, slot, part):
        """b or a, by `part`, of all columns."""
        return load(subtile(sums.wait(slot), CHUNK, part), ROW_VEC)

    @inlined
    def decay(x, b):
        """x times exp2(b), if there are gates."""
        if GATED:
            return x * exp2(b)
        else:
            return x

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
    def add_strong_scores(dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, sums, slot, b_rows, scale):
        """add_scores of a chunk whose decays are no products of factors of rows and of columns that numbers can hold."""
        if WITH_GATES:
            dots = row_sum(warpgroup.wait(warpgroup.mm_ABt(q_tile, s_tile)) * fp32(decayed_do)) * scale
        else:
            dots = 0.0
        dp = warpgroup.wait(warpgroup.mm_ABt(do_tile, v_tile))
        if WEIGHTED:
            dp = dp * exp2(load_cols(sums, slot, 0) - load_cols(sums, slot, 1))
        decays = warpgroup.causal(exp2(zeros(TILE) + b_rows - load_cols(sums, slot, 0)), 0, 0.0)
        if WITH_GATES:
            dots = dots + scale_scores(row_sum(fp32(INPUT(fp32(p) * decays)) * dp), scale)
        return dp_sum + dp * decays, dots

    @inlined
    def multiply_strong_scores(p_t, do_tile, sums, slot, b_rows):
        """P^T dO of such a chunk."""
        decays = warpgroup.triu(exp2(zeros(TILE) - b_rows + load_cols(sums, slot, 0)), 0, 0.0)
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
        if SCALED_SCORES or WEIGHTED:
            return x
        else:
            return x * scale

    @inlined
    def dot_states(s_tile, ds_tile, part):
        """<S, dS>, by one of STATE_WARPS warps, which has as many parts of the rows: 16 rows of 64 channels at once."""
        total, parts = zeros(STATE_PART), COLUMNS // STATE_PART.rows // STATE_WARPS
        for i in range(parts):
            for panel in range(KEYS // COLUMNS):
                row = int32(parts * part + i)
                states = load(subtile(s_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS, fenced=False)
                gradients = load(subtile(ds_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS)
                products = fp32(states) * fp32(gradients)
                halves = columns(products, COLUMNS // 2, 0) + columns(products, COLUMNS // 2, 1)
                total = total + columns(halves, STATE_PART.cols, 0) + columns(halves, STATE_PART.cols, 1)
        return tile_sum(total)

    @inlined
    def load_part(vector, part):
        """64 of the numbers of a shared vector."""
        return load(subtile(vector, CHUNK, part), ROW_VEC)

    @inlined
    def clear_tails(tiles, remaining):
        """Set to zero the rows of tiles that belong to another sequence."""
        for tile in tiles:
            seq_layout.zero_other_rows(tile, remaining, CONSUMERS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_shared_heads(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gDOut: tiled(VALUE, unit=1),
        gStates: tiled(STATE, 4, 2, 3), gDStates: tiled(STATE, 4, 2, 3), gSums: tiled(GATE_SUMS, 3, None, 2), gD: array(2),
        gDQ: DQK, gDK: DQK, gDV: seq_layout.output_argument(VALUE), gQueryDots: array(3),
        gKeyDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gSkipSums: array(2), gColumnSums: array(3),
        gCuSeqlens: ENDS, length: INT, parts: INT, shares: INT, heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of each share. A key head's `group` value heads,
        of `width` blocks of columns each, are divided into `shares`; gDQ, gDK have as many heads for each key head. gStates,
        gDStates: S^T and dS^T of each chunk. gQueryDots, gKeyDots: of each token and (head, block of columns); gCarriedDots and
        gStateDots: of each chunk, head and block of columns or (block, warp). gSkipSums: of each (chunk, block of columns) and
        head; gColumnSums: of each head, (chunk, warp) and column. gSums: see gate_sums.py."""
        q, k, v, do, s, ds, sums, decayed_dos, weighted_vs, query_dots, key_dots, out = smem.open()
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
            if warp == LOAD_WARP:
                for i in range(chunks):
                    token = seq.chunk_start(part + parts * i)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    k.fill(i, gK, (seq.batch, token, key_head))
                    q.fill(i, gQ, (seq.batch, token, key_head))
                    for block in range(n):
                        slot = n * i + block
                        head, column = divmod(int32(first + block), width)
                        if GATED:
                            sums.fill(slot, gSums, (chunk, head, 0))
                        v.fill(slot, gV, (seq.batch, token, head, column))
                        do.fill(slot, gDOut, (seq.batch, token, head, column))
                        ds.fill(slot, gDStates, (chunk, head, column, 0))
                        s.fill(slot, gStates, (chunk, head, column, 0))
            elif warp == STORE_WARP:
                for slot in range(n * chunks):
                    i, block = divmod(int32(slot), n)
                    head, column = divmod(int32(first + block), width)
                    token = seq.chunk_start(part + parts * i)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    if WITH_GATES or HAS_SKIP:
                        dots = query_dots.wait(slot)
                        if WITH_GATES:
                            at = seq.batch, token, int32(first + block)
                            store(truncate(gQueryDots, 1, seq.end), load_part(dots, 0), at, cols=1)
                        if SKIP_OF_HEAD:
                            gSkipSums[chunk * width + column, head] = tile_sum(load_part(dots, 1))
                        query_dots.release(slot)
                    if WITH_GATES:
                        dots = key_dots.wait(slot)
                        store(truncate(gKeyDots, 1, seq.end), load_part(dots, 0), at, cols=1)
                        gCarriedDots[chunk, head, column] = tile_sum(load_part(dots, 1))
                        key_dots.release(slot)
                    tile = out.wait(slot)
                    if VARLEN:
                        for row in range(CHUNK // 16):
                            rows_at = seq.batch, int32(token + 16 * row), head, int32(COLUMNS * column)
                            rows = load(subtile(tile, 16, row), ROWS, fenced=False)
                            store(truncate(gDV, 1, seq.end), rows, rows_at, 1, 3, aligned=True)
                        cuda.syncwarp()  # all lanes have read the tile before one of them releases it
                    else:
                        tma_store(gDV, (seq.batch, token, head, column), tile)
                        store_wait()
                    out.release(slot)
            elif WITH_GATES:
                for slot in range(n * chunks):
                    i, block = divmod(int32(slot), n)
                    head, column = divmod(int32(first + block), width)
                    chunk = seq_layout.chunk_index(seq.chunk_start(part + parts * i), sequence, length)
                    dot = dot_states(s.wait(slot), ds.wait(slot), warp - 2)
                    s.release(slot)
                    ds.release(slot)
                    gStateDots[chunk, head, int32(STATE_WARPS * column + warp - 2)] = dot
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
                    s_tile, (b_rows, _, b_last) = s.wait(slot), load_sums(sums, slot)
                    dout = fp32(warpgroup.load(do_tile, ROWS, fenced=not SHARES))
                    decayed_do = INPUT(decay(dout, b_rows))
                    if HAS_SKIP:
                        products = dout * fp32(warpgroup.load(v_tile, ROWS, fenced=not SHARES))
                        skip_dots = row_sum(products)
                        if SKIP_OF_COLUMN:
                            row = int32(warpgroup.WARPGROUP * chunk + warpgroup.rank())
                            store(gColumnSums, col_sum(products), (head, row, int32(COLUMNS * column)))
                    hand_over(decayed_dos, turn_of(i, block, n), decayed_do)
                    dq = warpgroup.mma_AB(dq, decayed_do, s_tile)
                    if STRONG_ONLY:
                        dp_sum, dots = add_strong_scores(
                            dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, sums, slot, b_rows, scale
                        )
                        sums.release(slot)
                    elif GATED:
                        if b_last < MIN_SUM:
                            dp_sum, dots = add_strong_scores(
                                dp_sum, p, decayed_do, q_tile, s_tile, do_tile, v_tile, sums, slot, b_rows, scale
                            )
                            wait_shared(weighted_vs, slot, v_tile)
                            sums.release(slot)
                        else:
                            dp_sum, dots = add_scores(dp_sum, p, decayed_do, q_tile, s_tile, v_tile, weighted_vs, slot, scale)
                            sums.release(slot, None, True)  # decayed_do's fence is that of loads, too
                    else:
                        dp_sum, dots = add_scores(dp_sum, p, decayed_do, q_tile, s_tile, v_tile, weighted_vs, slot, scale)
                    dq = warpgroup.wait(dq)
                    release_shared(weighted_vs, slot)
                    v.release(slot)
                    do.release(slot)
                    s.release(slot)
                    if WITH_GATES or HAS_SKIP:
                        row_dots = query_dots.claim(slot)
                        if WITH_GATES:
                            warpgroup.store(subtile(row_dots, CHUNK, 0), dots)
                        if HAS_SKIP:
                            warpgroup.store(subtile(row_dots, CHUNK, 1), skip_dots)
                        query_dots.publish(slot)
                dp_left = INPUT(warpgroup.causal(dp_sum, 0, 0.0) * scale)
                turn = turn_of(i, n, n)
                warpgroup.store(decayed_dos.claim(turn), dp_left)
                decayed_dos.publish(turn)
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
                    ds_tile, (b_rows, a_rows, b_last) = ds.wait(slot), load_sums(sums, slot)
                    values, strong = fp32(warpgroup.load(v_tile, ROWS, fenced=False)), is_strong(b_last)
                    weighted_v = INPUT(decay(values, a_rows * (strong - 1.0)))
                    hand_over(weighted_vs, slot, weighted_v)
                    carried_dv = warpgroup.mm_ABt(k_tile, ds_tile)
                    dk = warpgroup.mma_AB(dk, INPUT(decay(values, b_last - a_rows)), ds_tile)
                    if STRONG_ONLY:
                        dv = multiply_strong_scores(p_t, do_tile, sums, slot, b_rows)
                    elif GATED:
                        if b_last < MIN_SUM:
                            dv = multiply_strong_scores(p_t, do_tile, sums, slot, b_rows)
                            wait_shared(decayed_dos, turn_of(i, block, n), do_tile)
                        else:
                            decayed_do = wait_shared(decayed_dos, turn_of(i, block, n), do_tile)
                            dv = warpgroup.wait(warpgroup.mm_AB(p_t, decayed_do))
                    else:
                        dv = warpgroup.wait(warpgroup.mm_AB(p_t, do_tile))
                    dk, carried_dv = warpgroup.wait(dk), warpgroup.wait(carried_dv)
                    release_shared(decayed_dos, turn_of(i, block, n))
                    values, to_end = fp32(weighted_v), b_last - b_rows * strong
                    dv = scale_scores(dv, scale) + decay(carried_dv, to_end)
                    dots, carried = row_sum(dv * values), decay(row_sum(carried_dv * values), to_end)
                    dv = decay(dv, b_rows * strong - a_rows)
                    if WITH_GATES:
                        row_dots = key_dots.claim(slot)
                        if WEIGHTED:
                            carried = decay(carried, (b_rows - a_rows) * strong)
                            dots = decay(dots, (a_rows - b_rows) * (1.0 - strong))
                        warpgroup.store(subtile(row_dots, CHUNK, 0), dots)
                        warpgroup.store(subtile(row_dots, CHUNK, 1), carried)
                        key_dots.publish(slot)
                    if HAS_SKIP:
                        dv = dv + fp32(warpgroup.load(do_tile, ROWS, fenced=False)) * d
                    warpgroup.store(out.claim(slot), dv)
                    out.publish(slot)  # its fence is that of loads, too
                    if GATED:
                        sums.release(slot, None, True)
                    v.release(slot)
                    do.release(slot)
                    ds.release(slot)
                turn = turn_of(i, n, n)
                dk = warpgroup.wait(warpgroup.mma_AtB(dk, decayed_dos.wait(turn), q.wait(i)))
                decayed_dos.release(turn)
                k.release(i)
                q.release(i)
                out_at = seq.batch, token, out_head, 0
                warpgroup.store(truncate(gDK, 1, seq.end), dk, out_at, 1, 3, aligned=True)

    return differentiate_shared_heads, smem
