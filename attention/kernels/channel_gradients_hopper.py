"""Gradients of linear attention for Hopper in one walk from the last chunk to the first, where each channel of the keys has a
decay (parts/recurrent/channel_chunks.py has the equations).

A chunk is two blocks of 32 tokens, each with a reference r, the middle of its sums b, in powers of 2 an integer. With c = b - r

    q' = scale exp(c) q        k* = exp(-c) k        P = tril(dO V^T)        A = tril(q'_i . (exp(r_i - r_j) k*_j))
    dq_i = scale exp(c_i) (exp(r_i) S dO_i + sum_j P_ij exp(r_i - r_j) k*_j)
    dk_j = exp(-c_j) (exp(b_last - r_j) dS v_j + sum_i P_ij exp(r_i - r_j) q'_i)
    dv_j = dS^T (exp(b_last - r_j) k*_j) + sum_i A_ij dO_i
    dS before = exp(b_last) dS + sum_i (exp(r_i) q'_i) dO_i^T

so that a token and channel take one exponential as a query and one as a key, and a factor between blocks is one number a
channel: E = exp(r_0), D = exp(r_1 - r_0) and F = exp(b_last - r_1). Sums over blocks are taken by Horner's rule: what has come
so far is multiplied by D. What numbers do not hold is a strong chunk: its references are 0 for queries and b_last for keys, so
what goes through states is right, its P and A are 0, and channel_pairs_ampere.py adds its pairs afterwards.

Two consumers have 64 channels each: they sum up their gates, write q' and k*, hold dS in registers, and compute dQ, dK and r,
what a token has for all gates up to its own. Besides each has 64 columns of dV, for which it reads dS of both. A third
warpgroup, the scorer, loads all tiles, computes P and A, and sums up r."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    col_sum,
    columns,
    cumsum_columns,
    divmod,
    exp2,
    hstack,
    less,
    load,
    load_row,
    minimum,
    ones,
    reverse_cumsum_columns,
    row_sum,
    store,
    subtile,
    tile_min,
    truncate,
    viewed,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import FLOOR, LOG2_E
from ..parts.recurrent.tokens import CHUNK, SequenceLayout, block_coord

KEYS, VALUES = 128, 128  # channels of a key, columns of a value, as padded
HALF = KEYS // 2  # channels of a consumer, and its columns of dV
BLOCK = CHUNK // 2  # tokens with one reference
CONSUMERS, SCORER = 2, 2
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
ALL_WARPS = WARPS + warpgroup.WARPGROUP
REGISTERS = {False: (88, 208), True: (104, 200)}  # of a thread of the scorer, of a consumer; by varlen
LEAST_DECAY = {bf16: -104.0, fp16: -8.0}  # log2 of the least decay by half of a block that q' and k* hold
FACTORS = E, ROOT_D = range(2)  # vectors of powers of 2; D itself may be less than numbers hold
DECAYS = F, LAST = range(2)  # vectors: F, and the decay by all of a chunk
FORGOTTEN = 1.5 * FLOOR  # what a gate below the floor counts in sums: its block decays too much for q' and k*
PREPARED, SUMMED, STORED = (warpgroup.named_barrier(ALL_WARPS, first=first) for first in (1, 2, 3))


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of everything but gates and states. unrounded: are dQ and dK float32, to be added over a
    group? unrounded_values: is dV float32? varlen: are sequences packed (cu_seqlens)?"""

    dtype: dtype
    unrounded: bool = False
    unrounded_values: bool = False
    varlen: bool = False
    label = "walk of channels' gradients"
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def fields(self):
        """All of them, which the kernel of pairs has, too."""
        return self.dtype, self.unrounded, self.unrounded_values, self.varlen

    def __str__(self):
        flags = "float32" * self.unrounded, "float32 dv" * self.unrounded_values, "varlen" * self.varlen
        return ", ".join(filter(None, (f"{self.label}, {self.dtype}", *flags)))


def space_of(make_config: type[Config], target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of a kernel with these fields. everything: fp16, packed sequences and float32 results, too."""
    if target.has_wgmma:
        for of in (bf16, fp16) if everything else (bf16,):
            for varlen, unrounded in itertools.product((False, True), repeat=2) if everything else ((False, False),):
                yield make_config(of, unrounded, unrounded, varlen)


def space(target: Target, everything: bool) -> Iterator[Config]:
    return space_of(Config, target, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VARLEN, least_decay = config.dtype, config.varlen, LEAST_DECAY[config.dtype]
    scorer_registers, consumer_registers = REGISTERS[VARLEN]
    floor = FLOOR * LOG2_E
    of_floor = floor / (2.0 * least_decay)
    seq_layout = SequenceLayout(VARLEN, reversed=True)
    KEY, VALUE, STATES = st(CHUNK, KEYS, INPUT), st(CHUNK, VALUES, INPUT), st(VALUES, KEYS, INPUT)
    SUMS, SCORES, SQUARE = st(CHUNK, KEYS, fp32), st(2 * CHUNK, CHUNK, INPUT, width=BLOCK * INPUT.itemsize), rt(16, CHUNK, fp32)
    STATE, OUT, OPERAND = rt(16, VALUES, fp32), rt(16, HALF, fp32), rt(16, HALF, INPUT)
    ROWS, ROW_OPERAND, TRANSPOSED = rt(16, KEYS, fp32), rt(16, KEYS, INPUT), rt(16, BLOCK, INPUT)
    PANEL, OF_STATES = rt(16, 32, fp32), rt(16, CHUNK, INPUT)  # of gates' gradients; of a state, transposed
    R = st(KEYS, HALF, fp32)  # dS, once it is read: r of both consumers, one below the other
    OF_GATES = array(4) if VARLEN else tiled(st(CHUNK, HALF, fp32), unit=1)
    OUT_TILE = st(CHUNK, HALF, INPUT)
    FENCED = VARLEN or config.unrounded  # must loads fence themselves, as no TMA store follows that does so?
    KEY_GRADIENT = fp32 if config.unrounded else INPUT
    OF_KEYS = array(4) if config.unrounded else seq_layout.output_argument(OUT_TILE)
    OF_VALUES = array(4, fp32 if config.unrounded_values else INPUT)
    smem = shared(
        q=ring(KEY, 2, ALL_WARPS),
        k=ring(KEY, 2, ALL_WARPS),
        v=ring(VALUE, 1, ALL_WARPS),
        do=ring(VALUE, 2, ALL_WARPS),
        s=ring(STATES, 1, WARPS),
        scores=ring(SCORES, 1, WARPS, writers=warpgroup.WARPGROUP),
        ds=st(KEYS, VALUES, INPUT),
        c=ring(SUMS, 1, ALL_WARPS),  # gates, their sums in blocks, and c; at last what all gates have from each warp's tokens
        factors=sv(len(FACTORS) * KEYS, bf16),  # powers of 2
        decays=sv(len(DECAYS) * KEYS, fp32),
        ends=sv(KEYS, fp16),  # of a strong chunk: the references of keys, in powers of 2
    )

    @inlined
    def vector(vectors, which, kind, first, count):
        """`count` channels from `first` * count on of one of the chunk's vectors."""
        return load(subtile(vectors, count, int32(KEYS // count * which + first)), kind)

    @inlined
    def rows(tile, rank):
        """A warp's 16 tokens of a tile."""
        return subtile(tile, 16, rank)

    @inlined
    def part(tile, wg, rank):
        """A warp's 16 tokens and a consumer's channels of a tile."""
        return subtile(tile, 16, rank, HALF, wg)

    @inlined
    def store_keys(gOut, tile, x, seq, token, head, wg):
        """Store a consumer's channels of dQ or dK."""
        if FENCED:
            at = seq.batch, token, head, int32(HALF * wg)
            warpgroup.store(truncate(gOut, 1, seq.end), x, at, 1, 3, aligned=True)
        else:
            warpgroup.store(tile, x)
            warpgroup.tma_store(gOut, (seq.batch, token, head, wg), tile)

    @inlined
    def clear_tails(tiles, remaining):
        """Set to zero the rows of tiles that belong to another sequence."""
        for tile in tiles:
            seq_layout.zero_other_rows(tile, remaining, CONSUMERS)

    @inlined
    def decay_channels(x, decay):
        """Channels times a power of 2 each, which rounds nothing."""
        return x * INPUT(ones(rt(16, BLOCK, fp32)) * decay)

    @inlined
    def decay_twice(x, root):
        """A warp's tokens in all channels times D, which rounds nothing."""
        factor = INPUT(ones(ROWS) * root)
        return x * factor * factor

    @inlined
    def fill(rings, arrays, j, n, seq, first_chunk, head, key_head):
        """Have TMA load the j-th of n chunks, if there is one."""
        (q, k, v, do, s), (gQ, gK, gV, gDOut, gStates) = rings, arrays
        if j < n:
            token = seq.chunk_start(j)
            v.fill(j, gV, (seq.batch, token, head))
            s.fill(j, gStates, (int32(first_chunk + seq.chunk_number(j)), head))
            q.fill(j, gQ, (seq.batch, token, key_head))
            k.fill(j, gK, (seq.batch, token, key_head))
            do.fill(j, gDOut, (seq.batch, token, head))

    @inlined
    def fill_gates(c, gGates, j, n, seq, head):
        """Have TMA load the gates of the j-th of n chunks, if there is one."""
        if j < n:
            c.fill(j, gGates, (seq.batch, seq.chunk_start(j), head))

    @inlined
    def load_end(sums, row):
        """A row of the sums of gates, in powers of 2."""
        return load_row(sums, OUT.row_vec, row, fenced=False) * LOG2_E

    @inlined
    def sum_gates(sums, wg, rank):
        """Sum up the gates of each block, over a consumer's channels. Its warps meet."""
        mine = subtile(sums, BLOCK, rank // 2, PANEL.cols, int32(2 * wg + rank % 2))
        cumsum_columns(mine, mine, FLOOR, below=FORGOTTEN)
        warpgroup.sync(True)

    @inlined
    def load_columns(tile, half, wg, rank):
        """Half of a consumer's channels of a warp's tokens."""
        return fp32(columns(load(part(tile, wg, rank), OPERAND, fenced=FENCED), PANEL.cols, half))

    @inlined
    def factor(tiles, r, end, half, wg, rank, scale):
        """q' and k* of a warp's tokens, in half of a consumer's channels. Writes c over the sums of blocks."""
        (queries, keys, sums), r, end = tiles, columns(r, PANEL.cols, half), columns(end, PANEL.cols, half)
        own = subtile(sums, 16, rank, PANEL.cols, int32(2 * wg + half))
        c = load(own, PANEL, fenced=False) * LOG2_E - r
        store(own, c)
        query = INPUT(load_columns(queries, half, wg, rank) * (exp2(c) * scale))
        return query, INPUT(load_columns(keys, half, wg, rank) * exp2(end - c))

    @inlined
    def prepare(queries, keys, sums, vectors, wg, rank, scale):
        """Write c over the sums of blocks, q' over q, k* over k, and the chunk's vectors, in a consumer's channels."""
        factors, decays, ends = vectors
        mine = subtile(sums, CHUNK, 0, HALF, wg)
        first, last_0 = load_end(mine, 0), load_end(mine, BLOCK - 1)
        r_0, least = (first + last_0) * 0.25 // 1 * 2.0, minimum((last_0 - first) * of_floor, first)
        first, last = load_end(mine, BLOCK), load_end(mine, CHUNK - 1)
        least = minimum(least, minimum((last - first) * of_floor, first))
        r_1, last = (last_0 * 2.0 + first + last) * 0.25 // 1 * 2.0, last_0 + last
        strong = less(least, float32(floor))
        r_0, r_1, end = where(strong, 0.0, r_0), where(strong, 0.0, r_1), where(strong, fp32(fp16(last)), 0.0)
        warpgroup.sync(True)  # all have read these rows
        if rank == 0:
            store(subtile(factors, HALF, int32(2 * E + wg)), exp2(r_0))
            store(subtile(ends, HALF, wg), end)
        elif rank == 1:
            store(subtile(factors, HALF, int32(2 * ROOT_D + wg)), exp2((r_1 - r_0) * 0.5))
        elif rank == 2:
            store(subtile(decays, HALF, int32(2 * F + wg)), exp2(last - end - r_1))
        else:
            store(subtile(decays, HALF, int32(2 * LAST + wg)), exp2(last))
        r = r_0 if rank < 2 else r_1 - last_0
        tiles = queries, keys, sums
        query_0, key_0 = factor(tiles, r, end, 0, wg, rank, scale)
        query_1, key_1 = factor(tiles, r, end, 1, wg, rank, scale)
        store(part(queries, wg, rank), hstack(query_0, query_1))
        store(part(keys, wg, rank), hstack(key_0, key_1))

    @inlined
    def score_values(douts, values, p_tile):
        """P = tril(dO V^T), to shared memory."""
        p = warpgroup.wait(warpgroup.mm_ABt(douts, values))
        warpgroup.store(p_tile, warpgroup.causal(p, 0, 0.0))

    @inlined
    def score_keys(queries, keys, factors, a_tile, rank):
        """Write A. Queries are loaded twice: kept, they would take twice as many registers."""
        x = load(rows(queries, rank), ROW_OPERAND, fenced=False)
        a_1 = warpgroup.wait(warpgroup.mm_ABt(x, subtile(keys, BLOCK, 1)))
        x = load(rows(queries, rank), ROW_OPERAND, fenced=False)
        if rank >= 2:
            x = decay_twice(x, vector(factors, ROOT_D, ROWS.row_vec, 0, KEYS))
        a_0 = warpgroup.wait(warpgroup.mm_ABt(x, subtile(keys, BLOCK, 0)))
        warpgroup.store(a_tile, warpgroup.causal(hstack(a_0, a_1), 0, 0.0))

    @inlined
    def dot_states(ds, states, half, fenced):
        """<S, dS> of each channel, over half of the columns of values."""
        of_states = warpgroup.load_transposed(subtile(states, CHUNK, half), OF_STATES, fenced=fenced)
        return row_sum(columns(ds, CHUNK, half) * fp32(of_states))

    @inlined
    def finish(gradients, for_all, tiles, sums, ends, half, wg, rank, scale):
        """dQ and dK in half of a consumer's channels, from what references are taken out of. Writes r, and `for_all` to the
        warp's part of c."""
        (dq, dk), (queries, keys, r_tile), column = gradients, tiles, int32(2 * wg + half)
        dq, dk = columns(dq, PANEL.cols, half), columns(dk, PANEL.cols, half)
        own = subtile(sums, 16, rank, PANEL.cols, column)
        c = load(own, PANEL, fenced=False)
        store(own, zeros(PANEL) + columns(for_all, PANEL.cols, half))
        r = dq * load_columns(queries, half, wg, rank) - dk * load_columns(keys, half, wg, rank)
        store(subtile(r_tile, 16, rank, PANEL.cols, half), r)
        dq, dk = dq * (exp2(c) * scale), dk * exp2(load(subtile(ends, PANEL.cols, column), PANEL.row_vec) - c)
        return KEY_GRADIENT(dq), KEY_GRADIENT(dk)

    @inlined
    def gather(c, decays, rank):
        """Write what all gates of a chunk have in a warp's channels, from the consumers' warps and from states, over F."""
        of_all = load(subtile(decays, PANEL.cols, rank), PANEL.row_vec)
        for warp in range(1, warpgroup.WARPGROUP):
            of_all = of_all + load_row(subtile(c, 16, warp, PANEL.cols, rank), PANEL.row_vec, 0, fenced=False)
        of_all = of_all + load_row(subtile(c, 16, 0, PANEL.cols, rank), PANEL.row_vec, 0)
        cuda.syncwarp()  # all lanes have read what is overwritten
        store(subtile(decays, PANEL.cols, rank), of_all)
        cuda.syncwarp()

    @inlined
    def store_gates(gDGates, r, seq, token, head, rank):
        """Store the gradients of a chunk's gates, half of the channels above the other."""
        for half in range(2):
            if VARLEN:
                at = seq.batch, int32(token + 16 * rank), head, int32(HALF * half)
                gradients = load(subtile(r, 16, int32(4 * half + rank)), OUT, fenced=False)
                store(truncate(gDGates, 1, seq.end), gradients, at, 1, 3, aligned=True)
            else:
                warpgroup.tma_store(gDGates, (seq.batch, token, head, half), subtile(r, CHUNK, half))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_channels(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gDOut: tiled(VALUE, unit=1),
        gStates: tiled(STATES, 4, 2, 3), gGates: tiled(SUMS, unit=1), gDQ: OF_KEYS, gDK: OF_KEYS, gDV: OF_VALUES,
        gDGates: OF_GATES, gLastState: array(4), gFirstState: array(4), gStrong: array(2), gStrongSegments: array(2),
        gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The gradients of one of the `segments` of a sequence, for one value head; `group` of them share a key head. gStates:
        S^T before each chunk. gLastState: dS after each segment, gFirstState: before each sequence. gStrong, gStrongSegments:
        of each chunk and head, of each segment and head, is it, or one of its chunks, strong?"""
        q, k, v, do, s, scores, ds_tile, c, factors, decays, ends = smem.open()
        wg, rank = warpgroup.id(), warpgroup.rank()
        _, segment, head, sequence = block_coord(cuda.blockIdx.x, 1, segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n, first_chunk = seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length)
        if wg == SCORER:
            warpgroup.release_registers(scorer_registers)
            key_head, _ = divmod(head, group)
            rings, arrays = (q, k, v, do, s), (gQ, gK, gV, gDOut, gStates)
            gStrongSegments[int32(sequence * segments + segment), head] = float32(0)
            fill_gates(c, gGates, int32(0), n, seq, head)
            fill(rings, arrays, int32(0), n, seq, first_chunk, head, key_head)
            for j in range(n):
                token = seq.chunk_start(j)
                queries, keys, douts, values, of_chunk = q.wait(j), k.wait(j), do.wait(j), v.wait(j), scores.claim(j)
                if not VARLEN:  # where consumers clear tails, P waits for that
                    score_values(douts, values, subtile(of_chunk, CHUNK, 0))
                PREPARED.sync(0)
                if VARLEN:
                    score_values(douts, values, subtile(of_chunk, CHUNK, 0))
                strong = tile_min(load(ends, ROWS.row_vec)) < float32(0)
                gStrong[int32(first_chunk + seq.chunk_number(j)), head] = float32(1.0 if strong else 0.0)
                if strong:
                    gStrongSegments[int32(sequence * segments + segment), head] = float32(1)
                    warpgroup.store(subtile(of_chunk, CHUNK, 0), zeros(SQUARE))
                    warpgroup.store(subtile(of_chunk, CHUNK, 1), zeros(SQUARE))
                else:
                    score_keys(queries, keys, factors, subtile(of_chunk, CHUNK, 1), rank)
                scores.publish(j)
                q.release(j)
                k.release(j)
                v.release(j)
                do.release(j)
                fill(rings, arrays, int32(j + 1), n, seq, first_chunk, head, key_head)
                SUMMED.sync(0)
                gather(c.wait(j), decays, rank)
                c.release(j)
                fill_gates(c, gGates, int32(j + 1), n, seq, head)
                r = viewed(ds_tile, R)
                mine = subtile(r, CHUNK, rank // 2, PANEL.cols, rank % 2)
                reverse_cumsum_columns(mine, subtile(decays, PANEL.cols, rank))
                warpgroup.sync()
                store_gates(gDGates, r, seq, token, head, rank)
                if not VARLEN:
                    warpgroup.store_wait()
                STORED.arrive(0)
        else:
            warpgroup.claim_registers(consumer_registers)
            at = int32(sequence * segments + segment), head, int32(HALF * wg), 0
            ds = warpgroup.load(gLastState, STATE, at)
            for j in range(n):
                token, remaining = seq.chunk_start(j), seq.remaining(j)
                douts, values, queries, keys = do.wait(j), v.wait(j), q.wait(j), k.wait(j)
                if VARLEN:
                    clear_tails((douts, values), remaining)
                    clear_tails((queries, keys), remaining)
                    clear_tails((c.wait(j),), remaining)
                    warpgroup.sync_several(CONSUMERS)
                states = subtile(s.wait(j), VALUES, 0, HALF, wg)
                dots = dot_states(ds, states, 0, False) + dot_states(ds, states, 1, True)
                if j > 0:
                    warpgroup.store_wait()
                    q.release(j - 1)
                    k.release(j - 1)
                    scores.release(j - 1)
                sums = c.wait(j)
                sum_gates(sums, wg, rank)
                if j > 0:
                    STORED.sync(0)  # the gates' gradients of the chunk before have left the place of dS
                prepare(queries, keys, sums, (factors, decays, ends), wg, rank, scale)
                warpgroup.sync(True)  # all have written vectors
                channel = int32(4 * wg + rank)  # the first one of a warp's rows of dS, over 16
                warpgroup.store(subtile(ds_tile, HALF, wg), ds * vector(decays, F, STATE.col_vec, channel, 16))
                warpgroup.sync_several(CONSUMERS)
                PREPARED.arrive(0)
                store(subtile(decays, 16, channel), dots * vector(decays, LAST, STATE.col_vec, channel, 16))
                x = load(rows(keys, rank), ROW_OPERAND, fenced=False)
                if rank < 2:
                    x = decay_twice(x, vector(factors, ROOT_D, ROWS.row_vec, 0, KEYS))
                dv = warpgroup.mm_AB(x, subtile(ds_tile, KEYS, 0, HALF, wg))
                dv = warpgroup.wait(dv)
                dq = warpgroup.mm_AB(douts, states)
                dk = warpgroup.mm_ABt(values, subtile(ds_tile, HALF, wg))
                of_chunk = scores.wait(j)
                p_tile, a_tile = subtile(of_chunk, CHUNK, 0), subtile(of_chunk, CHUNK, 1)
                dv = warpgroup.mma_AtB(dv, a_tile, subtile(douts, CHUNK, 0, HALF, wg))
                own_queries, own_keys = subtile(queries, CHUNK, 0, HALF, wg), subtile(keys, CHUNK, 0, HALF, wg)
                at = seq.batch, token, head, int32(CHUNK * wg)
                dq, dk, dv = warpgroup.wait(dq, newer=2), warpgroup.wait(dk, newer=1), warpgroup.wait(dv)
                s.release(j)
                v.release(j)
                warpgroup.store(truncate(gDV, 1, seq.end), dv, at, 1, 3, aligned=True)
                dq = dq * vector(factors, E, OUT.row_vec, wg, HALF)
                dq = warpgroup.mma_AB(dq, subtile(p_tile, CHUNK, 0, BLOCK, 0), subtile(own_keys, BLOCK, 0))
                for_all = col_sum(dk * fp32(load(rows(own_keys, rank), OPERAND, fenced=False)))
                if rank < 2:
                    between = vector(factors, ROOT_D, OUT.row_vec, wg, HALF)
                    for_all = for_all * between * between
                dk = warpgroup.mma_AtB(dk, subtile(p_tile, BLOCK, 1), subtile(own_queries, BLOCK, 1))
                dq, dk = warpgroup.wait(dq, newer=1), warpgroup.wait(dk)
                between = vector(factors, ROOT_D, OUT.row_vec, wg, HALF)
                if rank < 2:
                    dk = dk * between * between
                else:
                    dq = dq * between * between
                dq = warpgroup.mma_AB(dq, subtile(p_tile, CHUNK, 0, BLOCK, 1), subtile(own_keys, BLOCK, 1))
                dk = warpgroup.mma_AtB(dk, subtile(p_tile, BLOCK, 0), subtile(own_queries, BLOCK, 0))
                state_decay = vector(decays, LAST, STATE.col_vec, channel, 16)
                decay = vector(factors, E, STATE.col_vec, channel, 16)
                x_0 = decay_channels(warpgroup.load_transposed(subtile(own_queries, BLOCK, 0), TRANSPOSED, fenced=False), decay)
                ds = warpgroup.mma_AB(ds * state_decay, x_0, subtile(douts, BLOCK, 0))
                root = vector(factors, ROOT_D, STATE.col_vec, channel, 16)
                decay = decay * root * root
                x_1 = decay_channels(warpgroup.load_transposed(subtile(own_queries, BLOCK, 1), TRANSPOSED, fenced=False), decay)
                ds = warpgroup.mma_AB(ds, x_1, subtile(douts, BLOCK, 1))
                dq, dk = warpgroup.wait(dq, newer=3), warpgroup.wait(dk, newer=2)
                ds = warpgroup.wait(ds)
                do.release(j)
                warpgroup.sync_several(CONSUMERS)  # both have read P, A, keys and vectors
                gradients, of_chunk = (dq, dk), (queries, keys, subtile(viewed(ds_tile, R), CHUNK, wg))
                dq_0, dk_0 = finish(gradients, for_all, of_chunk, sums, ends, 0, wg, rank, scale)
                dq_1, dk_1 = finish(gradients, for_all, of_chunk, sums, ends, 1, wg, rank, scale)
                dq, dk = hstack(dq_0, dq_1), hstack(dk_0, dk_1)
                SUMMED.arrive(0)
                store_keys(gDQ, own_queries, dq, seq, token, head, wg)
                if FENCED:
                    warpgroup.sync()
                c.release(j)
                store_keys(gDK, own_keys, dk, seq, token, head, wg)
            warpgroup.store_wait()
            if n > 0:
                q.release(n - 1)
                k.release(n - 1)
                scores.release(n - 1)
                STORED.sync(0)
            if VARLEN and segment == segments - 1:
                padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                for j in range(padding.num_chunks()):
                    at = padding.batch, padding.chunk_start(j), head, int32(HALF * wg)
                    warpgroup.store(gDQ, zeros(OUT), at, 1, 3, aligned=True)
                    warpgroup.store(gDK, zeros(OUT), at, 1, 3, aligned=True)
                    warpgroup.store(gDGates, zeros(OUT), at, 1, 3, aligned=True)
                    warpgroup.store(gDV, zeros(OUT), at, 1, 3, aligned=True)
            if segment == segments - 1:
                at = sequence, head, int32(HALF * warpgroup.id()), 0  # anew, to save registers
                warpgroup.store(gFirstState, ds, at, aligned=False)

    return differentiate_channels, smem
