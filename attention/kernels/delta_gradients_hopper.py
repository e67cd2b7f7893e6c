"""Gradients of the delta rule for Hopper: one walk over the chunks of a head, from the last one to the first
(parts/recurrent/delta_chunks.py has the equations),

    dU = P^T dO + exp(b_last - b) K dS        Z = dU - L^T (beta dU)        dV = beta Z        dbeta = rowsum(dV * E) / beta
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV
    dP = scale M * dO U^T                     G = -stril(M * dV U^T)
    dQ = scale exp(b) dO S^T + dP K
    dK = [exp(b_last - b) U dS^T + dP^T Q + G^T K]  +  [G K - exp(b) dV S^T]

Two warpgroups, the consumers, hold dS transposed, 64 columns of values each, and dU and Z as well: the product of one step,
rounded, is the left operand of the next one without leaving the registers. The first also computes P, the second G, whose
product has beta dbeta on its diagonal. They store dS and dV in shared memory. From there a third warpgroup computes what is
summed over values, dP, dQ and dK, while the consumers are ahead by up to a chunk. So dS, Z and dP never go through global
memory. Warps of the fourth store what the others have computed, as nobody else is to wait for memory. L and what it multiplies
are two parts each, high and low."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    col_index,
    columns,
    divmod,
    equal,
    load,
    row_sum,
    store,
    store_wait,
    subtile,
    tile_sum,
    tma_store,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors, TwoParts
from ..parts.recurrent.gates import COL_VEC, TILE
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2  # warpgroups with 64 columns of values each
VALUES = CONSUMERS * COLUMNS  # columns of values of a thread block
OF_SCORES, OF_VALUES = range(CONSUMERS)  # the consumer that computes P, and that which computes G
DKDQ, PRODUCER = CONSUMERS, CONSUMERS + 1  # the third warpgroup, which computes dK and dQ, and the fourth
REGISTERS = 24, 160, 168  # of each thread of the producer, of a consumer, of the warpgroup for dK and dQ
WARPS = warpgroup.WARPGROUP
STATE_WARPS = CONSUMERS * WARPS  # that multiply S by dS
OUTPUTS = 2  # dQ and dK, stored one after the other
FENCED = True  # another fence covers what a ring would fence; who stores a tile by TMA fences itself


@dataclass(frozen=True)
class GradientTiles:
    """The tiles of a walk that computes gradients. key_dim: the channels of keys, padded. gated: are there decays? with_gates:
    is what the gates' gradients are made of stored, too?"""

    key_dim: int
    dtype: dtype
    gated: bool
    with_gates: bool = False
    threads = warpgroup.THREADS * (PRODUCER + 1)

    @property
    def key(self):
        """The tile of Q or K, and of their gradients, for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of dO, E or dV for a chunk."""
        return st(CHUNK, VALUES, self.dtype)

    @property
    def state(self):
        """A chunk's S or dS in shared memory, transposed: 128 columns of values by Dk."""
        return st(VALUES, self.key_dim, self.dtype)


@dataclass(frozen=True)
class Config(GradientTiles):
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)?"""

    varlen: bool = False

    def __str__(self):
        kinds = "gated" * self.gated, "gates" * self.with_gates, "varlen" * self.varlen
        return ", ".join(filter(None, (f"gradients, Dk {self.key_dim} {self.dtype}", *kinds)))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays or without, in bf16. everything: fp16 too, and all packed."""
    if target.has_wgmma:
        for key_dim, input_dtype in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,)):
            for gates in (False, False), (True, False), (True, True):
                yield from (
                    Config(key_dim, input_dtype, *gates, varlen) for varlen in ((False, True) if everything else (gates[1],))
                )


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WITH_GATES, vectors_of = config.dtype, config.with_gates, ChunkVectors(config.gated)
    STATE, TRANSPOSED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    PANEL_ROWS, KEY_PANELS = rt(16, 64, INPUT), config.key_dim // 64
    seq_layout, parts_of = SequenceLayout(config.varlen, reversed=True), TwoParts(INPUT)
    SCORES, SOLUTION = st(CHUNK, CHUNK, INPUT), st(2 * CHUNK, CHUNK, INPUT)
    KEYS, ALL_VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS, DKDQ_REGISTERS = REGISTERS
    all_warps, consumer_warps = (CONSUMERS + 1) * WARPS, CONSUMERS * WARPS
    smem = shared(
        q=ring(config.key, 1, all_warps),
        k=ring(config.key, 2, all_warps),
        do=ring(config.values, 1, all_warps),
        e=ring(config.values, 1, 2 * WARPS),
        s=ring(config.state, 1, all_warps if WITH_GATES else WARPS),
        p=ring(SCORES, 1, consumer_warps, writers=WARPS),
        x=ring(SOLUTION, 1, consumer_warps),
        vectors=ring(vectors_of.spec, 2, all_warps + 1),
        ds=ring(config.state, 1, all_warps if WITH_GATES else WARPS, writers=consumer_warps),
        dv=ring(config.values, 1, 2 * WARPS + 1, writers=consumer_warps),
        g=ring(SCORES, 1, WARPS, writers=WARPS),
        value_sums=ring(sv(CHUNK * (1 + 2 * WITH_GATES), fp32), 1, 1, writers=consumer_warps),
        key_sums=ring(sv(CHUNK * 3, fp32), 1, 1, writers=WARPS),
        out=ring(config.key, 1, 1, writers=WARPS),
        dp=SCORES,
    )

    @inlined
    def place(gCuSeqlens, length, segments, heads):
        """(sequence, the number of the segment among those of all sequences, head, its tokens, how many chunks they are, the
        index of the last one and its first token) of this block. Each warpgroup asks by itself: registers before they part are
        scarce."""
        slot, head = divmod(cuda.blockIdx.x, heads)
        sequence, segment = divmod(slot, segments)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        last_chunk = int32(seq_layout.chunk_index(seq.start, sequence, length) + n - 1)
        return sequence, slot, head, seq, n, last_chunk, seq.chunk_start(0)

    @inlined
    def add_up(parts, first, step, count):
        """The sum of `count` parts of 16 numbers of a shared vector, each `step` parts behind the one before."""
        total = zeros(COL_VEC)
        for part in range(count):
            total = total + load(subtile(parts, 16, int32(first + step * part)), COL_VEC)
        return total

    @inlined
    def load_panel(tile, index):
        """This warp's rows of 64 columns of a shared tile, without a fence, which follows before it is given back."""
        return fp32(warpgroup.load(subtile(tile, CHUNK, 0, 64, index), PANEL_ROWS, fenced=False))

    @inlined
    def dot_rows(x, tile):
        """rowsum(x * tile), by panels of 64 columns."""
        dots = row_sum(columns(x, 64, 0) * load_panel(tile, 0))
        if KEY_PANELS > 1:
            dots = dots + row_sum(columns(x, 64, 1) * load_panel(tile, 1))
        return dots

    @inlined
    def dot_rows_of_tiles(x, y):
        """rowsum(x * y) of this warp's rows of two shared tiles."""
        dots = row_sum(load_panel(x, 0) * load_panel(y, 0))
        if KEY_PANELS > 1:
            dots = dots + row_sum(load_panel(x, 1) * load_panel(y, 1))
        return dots

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gDOut: ALL_VALUES, gErrors: tiled(config.values, rows=2),
        gStates: tiled(config.state, rows=2), gSolutions: tiled(SOLUTION, rows=2),
        gVectors: tiled(vectors_of.spec, 3, None, 2), gLastState: array(4), gFirstState: array(4), gDQ: KEYS, gDK: KEYS,
        gDV: ALL_VALUES, gDBeta: array(3), gDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gTailQ: KEYS,
        gTailK: KEYS, gTailDOut: ALL_VALUES, gTailDQ: KEYS, gTailDK: KEYS, gTailDV: ALL_VALUES, gCuSeqlens: ENDS, length: INT,
        segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has a head of a sequence. gErrors .. gVectors: of each chunk and head, as delta_chunk_states_hopper.py stores
        them. gLastState, gFirstState: the gradients of the states after and before each sequence, transposed. gDots,
        gCarriedDots, gStateDots: see gate_gradient.py; gDots has the differences of both row sums. gTailQ .. gTailDV: see
        packed_tails.py. segments: 1; without this number registers spill where sequences are packed."""
        q, k, do, e, s, p, x, vectors, ds, dv, g, value_sums, key_sums, out, dp_tile = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            sequence, slot, head, seq, n, last_chunk, last_token = place(gCuSeqlens, length, segments, heads)
            if warpgroup.rank() == 0:
                key_head, _ = divmod(head, group)
                for j in range(n):
                    token, chunk = int32(last_token - CHUNK * j), int32(last_chunk - j)
                    array, batch, row = seq_layout.whole_tile(gK, gTailK, seq, token, sequence)
                    k.fill(j, array, (batch, row, key_head))
                    array, batch, row = seq_layout.whole_tile(gDOut, gTailDOut, seq, token, sequence)
                    do.fill(j, array, (batch, row, head))
                    vectors.fill(j, gVectors, (chunk, head))
                    array, batch, row = seq_layout.whole_tile(gQ, gTailQ, seq, token, sequence)
                    q.fill(j, array, (batch, row, key_head))
                    x.fill(j, gSolutions, (chunk, head))
                    e.fill(j, gErrors, (chunk, head))
                    s.fill(j, gStates, (chunk, head))
            elif warpgroup.rank() == 1:
                for j in range(n):
                    token, chunk = int32(last_token - CHUNK * j), int32(last_chunk - j)
                    chunk_vectors, parts = vectors.wait(j), value_sums.wait(j)
                    for i in range(WARPS):
                        at = seq.batch, int32(token + 16 * i), head
                        beta = load(subtile(chunk_vectors, 16, int32(WARPS * BETA + i)), COL_VEC)
                        dbeta = load(subtile(parts, 16, i), COL_VEC) / beta
                        store(truncate(gDBeta, 1, seq.end), dbeta, at, cols=1)
                    if WITH_GATES:
                        gStateDots[chunk, head, 0] = tile_sum(add_up(parts, WARPS, 1, STATE_WARPS))
                    vectors.release(j)
                    value_sums.release(j)
            elif warpgroup.rank() == 2:
                for j in range(n):
                    array, batch, row = seq_layout.whole_tile(gDV, gTailDV, seq, int32(last_token - CHUNK * j), sequence)
                    tma_store(array, (batch, row, head), dv.wait(j))
                    store_wait()
                    dv.release(j)
                    array, batch, row = seq_layout.whole_tile(gDQ, gTailDQ, seq, int32(last_token - CHUNK * j), sequence)
                    tma_store(array, (batch, row, head), out.wait(OUTPUTS * j))
                    store_wait()
                    out.release(OUTPUTS * j)
                    array, batch, row = seq_layout.whole_tile(gDK, gTailDK, seq, int32(last_token - CHUNK * j), sequence)
                    tma_store(array, (batch, row, head), out.wait(OUTPUTS * j + 1))
                    store_wait()
                    out.release(OUTPUTS * j + 1)
            elif WITH_GATES:
                for j in range(n):
                    token, chunk, parts = int32(last_token - CHUNK * j), int32(last_chunk - j), key_sums.wait(j)
                    for i in range(WARPS):
                        at = seq.batch, int32(token + 16 * i), head
                        r = load(subtile(parts, 16, i), COL_VEC) - load(subtile(parts, 16, int32(WARPS + i)), COL_VEC)
                        store(truncate(gDots, 1, seq.end), r, at, cols=1)
                    gCarriedDots[chunk, head, 0] = tile_sum(add_up(parts, 2 * WARPS, 1, WARPS))
                    key_sums.release(j)
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            sequence, slot, head, seq, n, last_chunk, last_token = place(gCuSeqlens, length, segments, heads)
            for j in range(n):
                douts, errors = do.wait(j), e.wait(j)
                dp = warpgroup.mm_ABt(douts, errors)
                written = warpgroup.mm_AB(errors, ds.wait(j))
                chunk_vectors, keys, queries = vectors.wait(j), k.wait(j), q.wait(j)
                dp = warpgroup.wait(dp, newer=1)
                dp = vectors_of.decay_scores(dp, chunk_vectors, vectors_of.cols(chunk_vectors, BETA) * scale)
                warpgroup.store(dp_tile, INPUT(warpgroup.causal(dp, 0, 0.0)))
                warpgroup.sync()
                factors = vectors_of.decay_rows(vectors_of.rows(chunk_vectors, BETA), chunk_vectors, DECAY_TO_END)
                written = warpgroup.wait(written) * factors
                ds.release(j)
                e.release(j)
                if WITH_GATES:
                    sums = key_sums.claim(j)
                    warpgroup.store(subtile(sums, CHUNK, 2), dot_rows(written, keys))
                written = warpgroup.mma_AtB(written, dp_tile, queries)
                states = s.wait(j)
                dq = warpgroup.mm_AB(douts, states)
                written = warpgroup.wait(written, newer=1)
                dq = warpgroup.wait(dq) * vectors_of.decay_rows(scale, chunk_vectors, DECAY)
                do.release(j)
                dq = warpgroup.wait(warpgroup.mma_AB(dq, dp_tile, keys))
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 0), dot_rows(dq, queries))
                warpgroup.store(out.claim(OUTPUTS * j), dq)
                out.publish(OUTPUTS * j)  # its fence is that of loads of queries, too
                q.release(j)
                read = warpgroup.mm_AB(dv.wait(j), states)
                read = warpgroup.wait(read) * vectors_of.decay_rows(-1.0, chunk_vectors, DECAY)
                s.release(j)
                dv.release(j)
                g_tile = g.wait(j)
                read = warpgroup.mma_AB(read, g_tile, keys)
                written = warpgroup.mma_AtB(written, g_tile, keys)
                read = warpgroup.wait(read, newer=1)
                written = warpgroup.wait(written)
                g.release(j)
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 1), dot_rows(written - read, keys))
                    key_sums.publish(j)
                vectors.release(j)  # its fence is that of all loads of this warp
                k.release(j)
                warpgroup.store(out.claim(OUTPUTS * j + 1), written + read)
                out.publish(OUTPUTS * j + 1, FENCED)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            sequence, slot, head, seq, n, last_chunk, last_token = place(gCuSeqlens, length, segments, heads)
            row = int32(COLUMNS * wg + 16 * warpgroup.rank())
            ds_t = load(gLastState, STATE, (slot, head, row, 0), aligned=False)
            for j in range(n):
                keys, chunk_vectors = k.wait(j), vectors.wait(j)
                if wg == OF_SCORES:
                    s_qk = warpgroup.wait(warpgroup.mm_ABt(q.wait(j), keys))
                    s_qk = vectors_of.decay_scores(s_qk, chunk_vectors, scale)
                    warpgroup.store(p.claim(j), INPUT(warpgroup.causal(s_qk, 0, 0.0)))
                rounded = INPUT(ds_t)
                du = warpgroup.mm_ABt(rounded, keys)
                warpgroup.store(subtile(ds.claim(j), COLUMNS, wg), rounded)
                ds.publish(j)
                if wg == OF_SCORES:
                    p.publish(j, FENCED)
                douts = subtile(do.wait(j), CHUNK, 0, COLUMNS, wg)
                du = vectors_of.decay_cols(warpgroup.wait(du), chunk_vectors, DECAY_TO_END)
                du = warpgroup.mma_AtB(du, douts, p.wait(j))
                do_t = fp32(warpgroup.load_transposed(douts, TRANSPOSED, fenced=False))
                do_t = INPUT(do_t * vectors_of.decay_cols(scale, chunk_vectors, DECAY))
                ds_t = warpgroup.mma_AB(vectors_of.decay_state(ds_t, chunk_vectors), do_t, q.wait(j))
                du = warpgroup.wait(du, newer=1)
                p.release(j)
                ds_t = warpgroup.wait(ds_t)
                q.release(j)
                high, low = parts_of.split(du * vectors_of.cols(chunk_vectors, BETA))
                x_high, x_low = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                z = warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(du, high, x_high), high, x_low), low, x_high)
                z = warpgroup.wait(z)
                x.release(j)
                dv_t = z * vectors_of.cols(chunk_vectors, BETA)
                dv_tile = subtile(dv.claim(j), CHUNK, 0, COLUMNS, wg)
                warpgroup.store_transposed(dv_tile, dv_t)
                dv_t = INPUT(dv_t * vectors_of.decay_cols(-1.0, chunk_vectors, DECAY))
                ds_t = warpgroup.mma_AB(ds_t, dv_t, keys)
                dv.publish(j)
                do.release(j)
                sums = value_sums.claim(j)
                if wg == OF_VALUES:
                    score = warpgroup.wait(warpgroup.mm_ABt(dv.wait(j), e.wait(j)))
                    dv.release(j)
                    e.release(j)
                    on_diagonal = equal(warpgroup.row_index(TILE.col_vec), col_index(TILE.row_vec))
                    warpgroup.store(subtile(sums, CHUNK, 0), row_sum(where(on_diagonal, score, 0.0)))
                    score = vectors_of.decay_scores(score, chunk_vectors, 0.0 - vectors_of.cols(chunk_vectors, BETA))
                    warpgroup.store(g.claim(j), INPUT(warpgroup.causal(score, -1, 0.0)))
                    g.publish(j)
                if WITH_GATES:
                    me = warpgroup.id()  # not `wg`: what is held over the loop would spill registers
                    dots = dot_rows_of_tiles(subtile(s.wait(j), COLUMNS, me), subtile(ds.wait(j), COLUMNS, me))
                    store(subtile(sums, 16, int32(WARPS + WARPS * me + warpgroup.rank())), dots)
                value_sums.publish(j)
                vectors.release(j)  # its fence is that of all loads of this warp
                if WITH_GATES:
                    s.release(j)
                    ds.release(j)
                ds_t = warpgroup.wait(ds_t)
                k.release(j)
            row = int32(COLUMNS * warpgroup.id() + 16 * warpgroup.rank())  # anew, to save registers
            store(gFirstState, ds_t, (sequence, head, row, 0), aligned=False)

    return walk, smem
