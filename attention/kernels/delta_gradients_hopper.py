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
    divmod,
    equal,
    load,
    row_sum,
    store,
    store_wait,
    subtile,
    tile_sum,
    tma_store,
    warpgroup,
    where,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors, TwoParts
from ..parts.recurrent.delta_gradient_sums import DeltaGradientSums, store_beta_gradients
from ..parts.recurrent.gates import TILE
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2  # warpgroups with 64 columns of values each
VALUES = CONSUMERS * COLUMNS  # columns of values of a thread block
P_CONSUMER, G_CONSUMER = range(CONSUMERS)  # the consumer that computes P, and that which computes G
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
        flags = "gated" * self.gated, "gates" * self.with_gates, "varlen" * self.varlen
        return ", ".join(filter(None, (f"gradients, Dk {self.key_dim} {self.dtype}", *flags)))


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
    INPUT, WITH_GATES, chunk_vectors = config.dtype, config.with_gates, ChunkVectors(config.gated)
    STATE, TRANSPOSED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    row_sums = DeltaGradientSums(config.key_dim, INPUT)
    seq_layout, two_parts = SequenceLayout(config.varlen, reversed=True), TwoParts(INPUT)
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
        vectors=ring(chunk_vectors.spec, 2, all_warps + 1),
        ds=ring(config.state, 1, all_warps if WITH_GATES else WARPS, writers=consumer_warps),
        dv=ring(config.values, 1, 2 * WARPS + 1, writers=consumer_warps),
        g=ring(SCORES, 1, WARPS, writers=WARPS),
        value_sums=ring(sv(CHUNK * (1 + 2 * WITH_GATES), fp32), 1, 1, writers=consumer_warps),
        key_sums=ring(sv(CHUNK * 3, fp32), 1, 1, writers=WARPS),
        out=ring(config.key, 1, 1, writers=WARPS),
        dp=SCORES,
    )

    @inlined
    def locate_block(gCuSeqlens, length, segments, heads):
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
    def store_tile(ring, index, place, head):
        """One warp stores a tile of a ring by TMA at a place, (array, batch, row), of a head, and gives it back."""
        array, batch, row = place
        tma_store(array, (batch, row, head), ring.wait(index))
        store_wait()
        ring.release(index)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gDOut: ALL_VALUES, gErrors: tiled(config.values, rows=2),
        gStates: tiled(config.state, rows=2), gSolutions: tiled(SOLUTION, rows=2),
        gVectors: tiled(chunk_vectors.spec, 3, None, 2), gLastState: array(4), gFirstState: array(4), gDQ: KEYS, gDK: KEYS,
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
            sequence, slot, head, seq, n, last_chunk, last_token = locate_block(gCuSeqlens, length, segments, heads)
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
                    vector_tile, parts = vectors.wait(j), value_sums.wait(j)
                    store_beta_gradients(gDBeta, seq, head, token, parts, subtile(vector_tile, CHUNK, BETA))
                    if WITH_GATES:
                        gStateDots[chunk, head, 0] = tile_sum(row_sums.add_up(parts, WARPS, STATE_WARPS))
                    vectors.release(j)
                    value_sums.release(j)
            elif warpgroup.rank() == 2:
                for j in range(n):
                    token = int32(last_token - CHUNK * j)
                    store_tile(dv, j, seq_layout.whole_tile(gDV, gTailDV, seq, token, sequence), head)
                    store_tile(out, OUTPUTS * j, seq_layout.whole_tile(gDQ, gTailDQ, seq, token, sequence), head)
                    store_tile(out, OUTPUTS * j + 1, seq_layout.whole_tile(gDK, gTailDK, seq, token, sequence), head)
            elif WITH_GATES:
                for j in range(n):
                    token, chunk, parts = int32(last_token - CHUNK * j), int32(last_chunk - j), key_sums.wait(j)
                    row_sums.store_differences(gDots, seq, head, token, parts)
                    gCarriedDots[chunk, head, 0] = tile_sum(row_sums.add_up(parts, 2 * WARPS, WARPS))
                    key_sums.release(j)
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            sequence, slot, head, seq, n, last_chunk, last_token = locate_block(gCuSeqlens, length, segments, heads)
            for j in range(n):
                douts, errors = do.wait(j), e.wait(j)
                dp = warpgroup.mm_ABt(douts, errors)
                dk_write = warpgroup.mm_AB(errors, ds.wait(j))
                vector_tile, keys, queries = vectors.wait(j), k.wait(j), q.wait(j)
                dp = warpgroup.wait(dp, newer=1)
                dp = chunk_vectors.decay_scores(dp, vector_tile, chunk_vectors.cols(vector_tile, BETA) * scale)
                warpgroup.store(dp_tile, INPUT(warpgroup.causal(dp, 0, 0.0)))
                warpgroup.sync()
                factors = chunk_vectors.decay_rows(chunk_vectors.rows(vector_tile, BETA), vector_tile, DECAY_TO_END)
                dk_write = warpgroup.wait(dk_write) * factors
                ds.release(j)
                e.release(j)
                if WITH_GATES:
                    sums = key_sums.claim(j)
                    warpgroup.store(subtile(sums, CHUNK, 2), row_sums.dot_rows(dk_write, keys))
                dk_write = warpgroup.mma_AtB(dk_write, dp_tile, queries)
                states = s.wait(j)
                dq = warpgroup.mm_AB(douts, states)
                dk_write = warpgroup.wait(dk_write, newer=1)
                dq = warpgroup.wait(dq) * chunk_vectors.decay_rows(scale, vector_tile, DECAY)
                do.release(j)
                dq = warpgroup.wait(warpgroup.mma_AB(dq, dp_tile, keys))
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 0), row_sums.dot_rows(dq, queries))
                warpgroup.store(out.claim(OUTPUTS * j), dq)
                out.publish(OUTPUTS * j)  # its fence is that of loads of queries, too
                q.release(j)
                dk_read = warpgroup.mm_AB(dv.wait(j), states)
                dk_read = warpgroup.wait(dk_read) * chunk_vectors.decay_rows(-1.0, vector_tile, DECAY)
                s.release(j)
                dv.release(j)
                g_tile = g.wait(j)
                dk_read = warpgroup.mma_AB(dk_read, g_tile, keys)
                dk_write = warpgroup.mma_AtB(dk_write, g_tile, keys)
                dk_read = warpgroup.wait(dk_read, newer=1)
                dk_write = warpgroup.wait(dk_write)
                g.release(j)
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 1), row_sums.dot_rows(dk_write - dk_read, keys))
                    key_sums.publish(j)
                vectors.release(j)  # its fence is that of all loads of this warp
                k.release(j)
                warpgroup.store(out.claim(OUTPUTS * j + 1), dk_write + dk_read)
                out.publish(OUTPUTS * j + 1, FENCED)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            sequence, slot, head, seq, n, last_chunk, last_token = locate_block(gCuSeqlens, length, segments, heads)
            row = int32(COLUMNS * wg + 16 * warpgroup.rank())
            ds_t = load(gLastState, STATE, (slot, head, row, 0), aligned=False)
            for j in range(n):
                keys, vector_tile = k.wait(j), vectors.wait(j)
                if wg == P_CONSUMER:
                    s_qk = warpgroup.wait(warpgroup.mm_ABt(q.wait(j), keys))
                    s_qk = chunk_vectors.decay_scores(s_qk, vector_tile, scale)
                    warpgroup.store(p.claim(j), INPUT(warpgroup.causal(s_qk, 0, 0.0)))
                rounded = INPUT(ds_t)
                du = warpgroup.mm_ABt(rounded, keys)
                warpgroup.store(subtile(ds.claim(j), COLUMNS, wg), rounded)
                ds.publish(j)
                if wg == P_CONSUMER:
                    p.publish(j, FENCED)
                douts = subtile(do.wait(j), CHUNK, 0, COLUMNS, wg)
                du = chunk_vectors.decay_cols(warpgroup.wait(du), vector_tile, DECAY_TO_END)
                du = warpgroup.mma_AtB(du, douts, p.wait(j))
                do_t = fp32(warpgroup.load_transposed(douts, TRANSPOSED, fenced=False))
                do_t = INPUT(do_t * chunk_vectors.decay_cols(scale, vector_tile, DECAY))
                ds_t = warpgroup.mma_AB(chunk_vectors.decay_state(ds_t, vector_tile), do_t, q.wait(j))
                du = warpgroup.wait(du, newer=1)
                p.release(j)
                ds_t = warpgroup.wait(ds_t)
                q.release(j)
                high, low = two_parts.split(du * chunk_vectors.cols(vector_tile, BETA))
                x_high, x_low = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                z = warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(du, high, x_high), high, x_low), low, x_high)
                z = warpgroup.wait(z)
                x.release(j)
                dv_t = z * chunk_vectors.cols(vector_tile, BETA)
                dv_tile = subtile(dv.claim(j), CHUNK, 0, COLUMNS, wg)
                warpgroup.store_transposed(dv_tile, dv_t)
                dv_t = INPUT(dv_t * chunk_vectors.decay_cols(-1.0, vector_tile, DECAY))
                ds_t = warpgroup.mma_AB(ds_t, dv_t, keys)
                dv.publish(j)
                do.release(j)
                sums = value_sums.claim(j)
                if wg == G_CONSUMER:
                    score = warpgroup.wait(warpgroup.mm_ABt(dv.wait(j), e.wait(j)))
                    dv.release(j)
                    e.release(j)
                    on_diagonal = equal(warpgroup.row_index(TILE.col_vec), col_index(TILE.row_vec))
                    warpgroup.store(subtile(sums, CHUNK, 0), row_sum(where(on_diagonal, score, 0.0)))
                    score = chunk_vectors.decay_scores(score, vector_tile, 0.0 - chunk_vectors.cols(vector_tile, BETA))
                    warpgroup.store(g.claim(j), INPUT(warpgroup.causal(score, -1, 0.0)))
                    g.publish(j)
                if WITH_GATES:
                    consumer = warpgroup.id()  # not `wg`: what is held over the loop would spill registers
                    states, gradients = subtile(s.wait(j), COLUMNS, consumer), subtile(ds.wait(j), COLUMNS, consumer)
                    dots = row_sums.dot_rows_of_tiles(states, gradients)
                    store(subtile(sums, 16, int32(WARPS + WARPS * consumer + warpgroup.rank())), dots)
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
