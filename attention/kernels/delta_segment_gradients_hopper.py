"""Gradients of the delta rule for Hopper in segments of a sequence, where S before each chunk, E and dV are in memory
(delta_chains_hopper.py; parts/recurrent/delta_chunks.py has the equations). A walk from the last chunk of each segment to its
first one keeps dS and computes what is left:

    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV        dbeta = rowsum(dV * E) / beta
    dP = scale M * dO U^T                     G = -stril(M * dV U^T)
    dQ = scale exp(b) dO S^T + dP K
    dK = [exp(b_last - b) U dS^T + dP^T Q + G^T K]  +  [G K - exp(b) dV S^T]

As dV is there, no product of a step waits for that of another one but by way of dS. Two warpgroups, the consumers, hold dS
transposed, 64 columns of values each; besides, the first computes dP, the second G, whose product has beta dbeta on its
diagonal. A third one computes dQ and dK. What all sum of rows is stored by warps of the fourth.

Where a few value heads share a key head, their blocks add up dQ and dK in the output, one after the other: each chunk and key
head has counts of those that have."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    col_index,
    count_up,
    divmod,
    equal,
    load,
    row_sum,
    store,
    store_wait,
    stores_done,
    subtile,
    tile_sum,
    tma_add,
    tma_store,
    wait_count,
    warpgroup,
    where,
)
from tiles import bf16, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, SEMAPHORES, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors
from ..parts.recurrent.delta_gradient_sums import DeltaGradientSums, store_beta_gradients
from ..parts.recurrent.gates import TILE
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout
from .delta_gradients_hopper import CONSUMERS, DKDQ, FENCED, OUTPUTS, PRODUCER, REGISTERS, STATE_WARPS, WARPS, GradientTiles

DP_CONSUMER, G_CONSUMER = range(CONSUMERS)  # the consumer that computes dP, and that which computes G


@dataclass(frozen=True)
class Config(GradientTiles):
    """A kernel's configuration. adds: do value heads that share a key head add up their dQ and dK?"""

    adds_heads: bool = False

    def __str__(self):
        flags = "gated" * self.gated, "gates" * self.with_gates, "adds" * self.adds_heads
        return ", ".join(filter(None, (f"gradients in segments, Dk {self.key_dim} {self.dtype}", *flags)))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays or without, in bf16. everything: fp16 too, and all that add."""
    if target.has_wgmma:
        for key_dim, input_dtype in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,)):
            for gates in (False, False), (True, False), (True, True):
                yield from (
                    Config(key_dim, input_dtype, *gates, adds_heads)
                    for adds_heads in ((False, True) if everything else (gates[1],))
                )


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WITH_GATES, ADDS, chunk_vectors = config.dtype, config.with_gates, config.adds_heads, ChunkVectors(config.gated)
    ONE_TURN = WITH_GATES  # for dQ and dK together: the warp that stores waits less, but a head follows the one before later
    STATE, TRANSPOSED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    row_sums = DeltaGradientSums(config.key_dim, INPUT)
    seq_layout, SCORES = SequenceLayout(reversed=True), st(CONSUMERS * CHUNK, CHUNK, INPUT)
    KEYS, ALL_VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS, DKDQ_REGISTERS = REGISTERS
    all_warps, consumer_warps = (CONSUMERS + 1) * WARPS, CONSUMERS * WARPS
    smem = shared(
        q=ring(config.key, 1, all_warps),
        k=ring(config.key, 2, all_warps),
        do=ring(config.values, 1, all_warps),
        e=ring(config.values, 2, all_warps),
        s=ring(config.state, 1, all_warps if WITH_GATES else WARPS),
        dv=ring(config.values, 1, all_warps),
        vectors=ring(chunk_vectors.spec, 2, all_warps + 1),
        ds=ring(config.state, 1, WARPS, writers=consumer_warps),
        scores=ring(SCORES, 1, WARPS, writers=consumer_warps),
        value_sums=ring(sv(CHUNK * (1 + 2 * WITH_GATES), fp32), 1, 1, writers=consumer_warps),
        key_sums=ring(sv(CHUNK * 3, fp32), 1, 1, writers=WARPS),
        out=ring(config.key, 1, 1, writers=WARPS),
    )

    @inlined
    def locate_block(length, segments, heads):
        """(sequence, the number of the segment among those of all sequences, head, its tokens, how many chunks they are, the
        index of the last one and its first token) of this block. Each warpgroup asks by itself: registers before they part are
        scarce."""
        slot, head = divmod(cuda.blockIdx.x, heads)
        sequence, segment = divmod(slot, segments)
        seq = seq_layout.segment_tokens(0, sequence, length, segment, segments)
        n = seq.num_chunks()
        last_chunk = int32(seq_layout.chunk_index(seq.start, sequence, length) + n - 1)
        return slot, head, seq, n, last_chunk, seq.chunk_start(0)

    @inlined
    def store_output(out, gOut, at, index, member):
        """One warp stores dQ or dK of a chunk, number `index` of those that come: the first of the value heads that share it
        stores, the others add."""
        if ADDS and member > 0:
            tma_add(gOut, at, out.wait(index))
        else:
            tma_store(gOut, at, out.wait(index))
        store_wait()
        out.release(index)

    @inlined
    def pass_turn(gCounts, at):
        """Wait until what this warp has stored is in memory, and let the next value head have its turn."""
        stores_done()
        count_up(gCounts, at)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gDOut: ALL_VALUES, gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2),
        gDV: ALL_VALUES, gVectors: tiled(chunk_vectors.spec, 3, None, 2), gSegmentStates: array(4), gDQ: KEYS, gDK: KEYS,
        gDBeta: array(3), gDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gCounts: SEMAPHORES, length: INT,
        segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has a head of one of the `segments` of a sequence, of which the last one comes first. gErrors, gStates: of
        each chunk and head. gSegmentStates: the gradient of the state after each segment, transposed. gDots, gCarriedDots,
        gStateDots: see gate_gradient.py; gDots has the differences of both row sums. gCounts: how many value heads have added
        dQ and dK, for each chunk and, one after the other, both of each key head."""
        q, k, do, e, s, dv, vectors, ds, scores, value_sums, key_sums, out = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            _, head, seq, n, last_chunk, last_token = locate_block(length, segments, heads)
            key_head, member = divmod(head, group)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token, chunk = int32(last_token - CHUNK * j), int32(last_chunk - j)
                    e.fill(j, gErrors, (chunk, head))  # what has two slots first, as they are free first
                    k.fill(j, gK, (seq.batch, token, key_head))
                    vectors.fill(j, gVectors, (chunk, head))
                    do.fill(j, gDOut, (seq.batch, token, head))
                    s.fill(j, gStates, (chunk, head))
                    dv.fill(j, gDV, (seq.batch, token, head))
                    q.fill(j, gQ, (seq.batch, token, key_head))
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
                    at = seq.batch, int32(last_token - CHUNK * j), int32(key_head if ADDS else head)
                    of_dq = int32(last_chunk - j), int32(OUTPUTS * key_head)
                    of_dk = int32(last_chunk - j), int32(OUTPUTS * key_head + 1)
                    if ADDS:
                        wait_count(gCounts, of_dq, int32(member))
                    store_output(out, gDQ, at, OUTPUTS * j, member)
                    if ADDS and not ONE_TURN:
                        pass_turn(gCounts, of_dq)
                        wait_count(gCounts, of_dk, int32(member))
                    store_output(out, gDK, at, OUTPUTS * j + 1, member)
                    if ADDS:
                        pass_turn(gCounts, of_dq if ONE_TURN else of_dk)
            elif WITH_GATES:
                for j in range(n):
                    token, chunk, parts = int32(last_token - CHUNK * j), int32(last_chunk - j), key_sums.wait(j)
                    row_sums.store_differences(gDots, seq, head, token, parts)
                    gCarriedDots[chunk, head, 0] = tile_sum(row_sums.add_up(parts, 2 * WARPS, WARPS))
                    key_sums.release(j)
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            _, _, _, n, _, _ = locate_block(length, segments, heads)
            for j in range(n):
                dvs, states = dv.wait(j), s.wait(j)
                dq = warpgroup.mm_AB(do.wait(j), states)
                dk_read = warpgroup.mm_AB(dvs, states)
                vector_tile = vectors.wait(j)
                dq = warpgroup.wait(dq, newer=1) * chunk_vectors.decay_rows(scale, vector_tile, DECAY)
                do.release(j)
                dk_read = warpgroup.wait(dk_read) * chunk_vectors.decay_rows(-1.0, vector_tile, DECAY)
                s.release(j)
                dv.release(j)
                keys = k.wait(j)
                dp, g = subtile(scores.wait(j), CHUNK, DP_CONSUMER), subtile(scores.wait(j), CHUNK, G_CONSUMER)
                dq = warpgroup.mma_AB(dq, dp, keys)
                dk_read = warpgroup.mma_AB(dk_read, g, keys)
                dq = warpgroup.wait(dq, newer=1)
                queries = q.wait(j)
                if WITH_GATES:
                    sums = key_sums.claim(j)
                    warpgroup.store(subtile(sums, CHUNK, 0), row_sums.dot_rows(dq, queries))
                warpgroup.store(out.claim(OUTPUTS * j), dq)
                out.publish(OUTPUTS * j, FENCED)
                dk_write = warpgroup.mm_AB(e.wait(j), ds.wait(j))
                dk_read = warpgroup.wait(dk_read, newer=1)
                factors = chunk_vectors.decay_rows(chunk_vectors.rows(vector_tile, BETA), vector_tile, DECAY_TO_END)
                dk_write = warpgroup.wait(dk_write) * factors
                e.release(j)
                ds.release(j)
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 2), row_sums.dot_rows(dk_write, keys))
                dk_write = warpgroup.mma_AtB(warpgroup.mma_AtB(dk_write, dp, queries), g, keys)
                dk_write = warpgroup.wait(dk_write)
                scores.release(j)
                if WITH_GATES:
                    warpgroup.store(subtile(sums, CHUNK, 1), row_sums.dot_rows(dk_write - dk_read, keys))
                    key_sums.publish(j)
                vectors.release(j)  # its fence is that of all loads of this warp
                q.release(j)
                k.release(j)
                warpgroup.store(out.claim(OUTPUTS * j + 1), dk_write + dk_read)
                out.publish(OUTPUTS * j + 1, FENCED)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            slot, head, _, n, _, _ = locate_block(length, segments, heads)
            row = int32(COLUMNS * wg + 16 * warpgroup.rank())
            ds_t = load(gSegmentStates, STATE, (slot, head, row, 0), aligned=True)
            for j in range(n):
                warpgroup.store(subtile(ds.claim(j), COLUMNS, wg), ds_t)
                ds.publish(j)
                douts, errors, dvs = do.wait(j), e.wait(j), dv.wait(j)
                left = douts
                if wg == G_CONSUMER:
                    left = dvs
                score = warpgroup.mm_ABt(left, errors)
                vector_tile = vectors.wait(j)
                do_t = fp32(warpgroup.load_transposed(subtile(douts, CHUNK, 0, COLUMNS, wg), TRANSPOSED, fenced=False))
                do_t = INPUT(do_t * chunk_vectors.decay_cols(scale, vector_tile, DECAY))
                sums, beta = value_sums.claim(j), chunk_vectors.cols(vector_tile, BETA)
                score = warpgroup.wait(score)
                if wg == DP_CONSUMER:
                    factors, diagonal = beta * scale, 0
                else:
                    on_diagonal = equal(warpgroup.row_index(TILE.col_vec), col_index(TILE.row_vec))
                    warpgroup.store(subtile(sums, CHUNK, 0), row_sum(where(on_diagonal, score, 0.0)))
                    factors, diagonal = 0.0 - beta, -1
                score = chunk_vectors.decay_scores(score, vector_tile, factors)
                warpgroup.store(subtile(scores.claim(j), CHUNK, wg), INPUT(warpgroup.causal(score, diagonal, 0.0)))
                scores.publish(j)  # its fence is that of loads of dO, too
                do.release(j)
                e.release(j)
                dv_t = fp32(warpgroup.load_transposed(subtile(dvs, CHUNK, 0, COLUMNS, wg), TRANSPOSED, fenced=False))
                dv_t = INPUT(dv_t * chunk_vectors.decay_cols(-1.0, vector_tile, DECAY))
                if WITH_GATES:
                    dots = row_sums.dot_rows(ds_t, subtile(s.wait(j), COLUMNS, wg))
                    store(subtile(sums, 16, int32(WARPS + WARPS * wg + warpgroup.rank())), dots)
                value_sums.publish(j)
                ds_t = chunk_vectors.decay_state(ds_t, vector_tile)
                vectors.release(j)  # its fence is that of loads of dV and S, too
                dv.release(j)
                if WITH_GATES:
                    s.release(j)
                ds_t = warpgroup.mma_AB(ds_t, do_t, q.wait(j))
                ds_t = warpgroup.wait(warpgroup.mma_AB(ds_t, dv_t, k.wait(j)))
                q.release(j)
                k.release(j)

    return walk, smem
