"""Gradients of the delta rule for Hopper in segments of a sequence, where S before each chunk, E and dV are in memory
(delta_chains_hopper.py; parts/delta/delta_chunks.py has the equations). A walk from the last chunk of each segment to its
first one keeps dS and computes what is left:

    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV        dbeta = rowsum(dV * E) / beta
    dP = scale M * dO U^T                     G = -stril(M * dV U^T)
    dQ = scale exp(b) dO S^T + dP K
    dK = [exp(b_last - b) U dS^T + dP^T Q + G^T K]  +  [G K - exp(b) dV S^T]

As dV is there, a chunk's products depend on those of the chunk after it through dS alone. Two warpgroups, the consumers, hold
dS transposed, 64 columns of values each; besides, the first computes dP, the second G, whose product has beta dbeta on its
diagonal. A third one computes dQ and dK. Warps of the fourth store the sums of rows that the other three compute.

Where a few value heads share a key head, their blocks add up dQ and dK in the output, one after the other: for each chunk and
key head, two counts say how many have added their dQ, and how many their dK."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import count_up, divmod, load, store_wait, stores_done, subtile, tma_add, tma_store, wait_count, warpgroup
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, SEMAPHORES, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import BETA, DECAY, DECAY_TO_END
from ...parts.delta.delta_config import delta_sizes
from ...parts.delta.delta_gate_sums import CARRIED_DOTS, DOT_FIELDS, GATE_FIELDS, KEY_DOTS, QUERY_DOTS
from ...parts.delta.delta_gradient_config import (
    CONSUMERS,
    DKDQ,
    GRADIENTS,
    LOADER,
    OUTPUTS,
    PRODUCER,
    REGISTERS,
    VALUE_SUMS,
    WARPS,
    DeltaGradientConfig,
    find_counts,
)
from ...parts.delta.delta_gradient_sums import DeltaGradientSums
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, walk_of_block

DP_CONSUMER, G_CONSUMER = range(CONSUMERS)  # the consumer that computes dP, and that which computes G


@dataclass(frozen=True)
class Config(DeltaGradientConfig):
    """A kernel's configuration. adds_heads: do value heads that share a key head add up their dQ and dK?"""

    adds_heads: bool = False
    label = "gradients in segments"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays or without, in bf16. everything: fp16 too, and all that add."""
    if target.has_wgmma:
        for size, gates in itertools.product(delta_sizes(everything), (*GATE_FIELDS, *(DOT_FIELDS,) * everything)):
            yield from (Config(*size, *gates, adds) for adds in ((False, True) if everything else (gates[1].wanted,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, ADDS, chunk_vectors, gates = config.dtype, config.adds_heads, config.vectors, config.gates
    ONE_TURN = gates.wanted  # for dQ and dK: the warp that stores waits less, but a head follows the one before later
    STATE, TRANSPOSED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    row_sums, GATES = DeltaGradientSums(config.key_dim, INPUT, gates), gates.params()
    seq_layout, SCORES = SequenceLayout(reversed=True), st(CONSUMERS * CHUNK, CHUNK, INPUT)
    KEYS, ALL_VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS, DKDQ_REGISTERS = REGISTERS
    all_warps, consumer_warps = (CONSUMERS + 1) * WARPS, CONSUMERS * WARPS
    smem = shared(
        q=ring(config.key, 1, all_warps),
        k=ring(config.key, 2, all_warps),
        do=ring(config.values, 1, all_warps),
        e=ring(config.values, 2, all_warps),
        s=ring(config.state, 1, WARPS + row_sums.state_warps),
        dv=ring(config.values, 1, all_warps),
        vectors=ring(chunk_vectors.spec, 2, all_warps + 1 + gates.readers),
        ds=ring(config.state, 1, WARPS, writers=consumer_warps),
        scores=ring(SCORES, 1, WARPS, writers=consumer_warps),
        value_sums=ring(row_sums.value_sums, 1, 1 + gates.readers, writers=consumer_warps),
        key_sums=ring(row_sums.key_sums, 1, 1, writers=WARPS),
        out=ring(config.key, 1, 1, writers=WARPS),
    )

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
    def wait_turn(gCounts, at, member):
        """Wait until the value heads before this one have added theirs."""
        if ADDS:
            wait_count(gCounts, at, int32(member))

    @inlined
    def pass_turn(gCounts, at):
        """Wait until what this warp has stored is in memory, and let the next value head have its turn."""
        if ADDS:
            stores_done()
            count_up(gCounts, at)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: KEYS, gK: KEYS, gDOut: ALL_VALUES, gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2),
        gDV: ALL_VALUES, gVectors: tiled(chunk_vectors.spec, 3, None, 2), gSegmentStates: array(4), gDQ: KEYS, gDK: KEYS,
        gDBeta: array(3), gCounts: SEMAPHORES, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        gate_args: GATES,
    ):  # fmt: skip
        """A block has a head of one of the `segments` of a sequence, of which the last one comes first. gErrors, gStates: of
        each chunk and head. gSegmentStates: the gradient of the state after each segment, transposed. gCounts: see
        delta_gradient_config.py."""
        q, k, do, e, s, dv, vectors, ds, scores, value_sums, key_sums, out = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            walk = walk_of_block(seq_layout, 0, length, segments, heads)
            key_head, member = divmod(walk.head, group)
            if warpgroup.rank() == LOADER:
                for j in range(walk.n):
                    chunk, head, _, token, seq = walk.place(j)
                    e.fill(j, gErrors, (chunk, head))  # what has two slots first, as they are free first
                    k.fill(j, gK, (seq.batch, token, key_head))
                    vectors.fill(j, gVectors, (chunk, head))
                    do.fill(j, gDOut, (seq.batch, token, head))
                    s.fill(j, gStates, (chunk, head))
                    dv.fill(j, gDV, (seq.batch, token, head))
                    q.fill(j, gQ, (seq.batch, token, key_head))
            elif warpgroup.rank() == VALUE_SUMS:
                row_sums.send_value_sums(vectors, value_sums, gDBeta, gate_args, walk)
            elif warpgroup.rank() == GRADIENTS:
                for j in range(walk.n):
                    chunk, head, _, token, seq = walk.place(j)
                    at = seq.batch, token, int32(key_head if ADDS else head)
                    of_dq, of_dk = find_counts(chunk, key_head)
                    wait_turn(gCounts, of_dq, member)
                    store_output(out, gDQ, at, OUTPUTS * j, member)
                    if not ONE_TURN:
                        pass_turn(gCounts, of_dq)
                        wait_turn(gCounts, of_dk, member)
                    store_output(out, gDK, at, OUTPUTS * j + 1, member)
                    pass_turn(gCounts, of_dq if ONE_TURN else of_dk)
            else:
                gates.send_key_sums(gate_args, vectors, value_sums, key_sums, walk)
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            walk = walk_of_block(seq_layout, 0, length, segments, heads)
            for j in range(walk.n):
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
                sums = row_sums.claim_key_sums(key_sums, j)
                row_sums.store_dots(sums, QUERY_DOTS, dq, queries)
                warpgroup.store(out.claim(OUTPUTS * j), dq)
                out.publish(OUTPUTS * j, fenced=False)
                dk_write = warpgroup.mm_AB(e.wait(j), ds.wait(j))
                dk_read = warpgroup.wait(dk_read, newer=1)
                factors = chunk_vectors.decay_rows(chunk_vectors.rows(vector_tile, BETA), vector_tile, DECAY_TO_END)
                dk_write = warpgroup.wait(dk_write) * factors
                e.release(j)
                ds.release(j)
                row_sums.store_dots(sums, CARRIED_DOTS, dk_write, keys)
                dk_write = warpgroup.mma_AtB(warpgroup.mma_AtB(dk_write, dp, queries), g, keys)
                dk_write = warpgroup.wait(dk_write)
                scores.release(j)
                row_sums.store_dots(sums, KEY_DOTS, dk_write - dk_read, keys)
                row_sums.publish_key_sums(key_sums, j)
                vectors.release(j)  # its fence is that of all loads of this warp
                q.release(j)
                k.release(j)
                warpgroup.store(out.claim(OUTPUTS * j + 1), dk_write + dk_read)
                out.publish(OUTPUTS * j + 1, fenced=False)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            walk = walk_of_block(seq_layout, 0, length, segments, heads)
            row = int32(COLUMNS * wg + 16 * warpgroup.rank())
            ds_t = load(gSegmentStates, STATE, (walk.slot, walk.head, row, 0), aligned=True)
            for j in range(walk.n):
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
                    row_sums.store_beta_dots(sums, score)
                    factors, diagonal = 0.0 - beta, -1
                score = chunk_vectors.decay_scores(score, vector_tile, factors)
                warpgroup.store(subtile(scores.claim(j), CHUNK, wg), INPUT(warpgroup.causal(score, diagonal, 0.0)))
                scores.publish(j)  # its fence is that of loads of dO, too
                do.release(j)
                e.release(j)
                dv_t = fp32(warpgroup.load_transposed(subtile(dvs, CHUNK, 0, COLUMNS, wg), TRANSPOSED, fenced=False))
                dv_t = INPUT(dv_t * chunk_vectors.decay_cols(-1.0, vector_tile, DECAY))
                row_sums.store_state_dots(sums, ds_t, s, j, wg)
                value_sums.publish(j)
                ds_t = chunk_vectors.decay_state(ds_t, vector_tile)
                vectors.release(j)  # its fence is that of loads of dV and S, too
                dv.release(j)
                row_sums.release_states(s, j)
                ds_t = warpgroup.mma_AB(ds_t, do_t, q.wait(j))
                ds_t = warpgroup.wait(warpgroup.mma_AB(ds_t, dv_t, k.wait(j)))
                q.release(j)
                k.release(j)

    return differentiate, smem
