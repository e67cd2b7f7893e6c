"""Gradients of the delta rule for Hopper: one walk over the chunks of a head, from the last one to the first
(parts/delta/delta_chunks.py has the equations),

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

from ops import divmod, load, store, subtile, warpgroup
from tiles import fp32, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import BETA, DECAY, DECAY_TO_END, TwoParts
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
)
from ...parts.delta.delta_gradient_sums import DeltaGradientSums
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, walk_of_block

P_CONSUMER, G_CONSUMER = range(CONSUMERS)  # the consumer that computes P, and that which computes G


@dataclass(frozen=True)
class Config(DeltaGradientConfig):
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)?"""

    varlen: bool = False
    label = "gradients"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays or without, in bf16, packed if gates have gradients. everything:
    fp16 too, all packed, and those that store gates' sums."""
    if target.has_wgmma:
        for size, gates in itertools.product(delta_sizes(everything), (*GATE_FIELDS, *(DOT_FIELDS,) * everything)):
            yield from (Config(*size, *gates, varlen) for varlen in ((False, True) if everything else (gates[1].wanted,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, chunk_vectors, two_parts = config.dtype, config.vectors, TwoParts(config.dtype)
    STATE, TRANSPOSED = rt(16, config.key_dim, fp32), rt(16, CHUNK, INPUT)
    gates = config.gates
    row_sums, GATES = DeltaGradientSums(config.key_dim, INPUT, gates), gates.params()
    seq_layout = SequenceLayout(config.varlen, reversed=True)
    KEYS, ALL_VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS, DKDQ_REGISTERS = REGISTERS
    all_warps, consumer_warps = (CONSUMERS + 1) * WARPS, CONSUMERS * WARPS
    smem = shared(
        q=ring(config.key, 1, all_warps),
        k=ring(config.key, 2, all_warps),
        do=ring(config.values, 1, all_warps),
        e=ring(config.values, 1, 2 * WARPS),
        s=ring(config.state, 1, WARPS + row_sums.state_warps),
        p=ring(config.square, 1, consumer_warps, writers=WARPS),
        x=ring(two_parts.square, 1, consumer_warps),
        vectors=ring(chunk_vectors.spec, 2, all_warps + 1 + gates.readers),
        ds=ring(config.state, 1, WARPS + row_sums.state_warps, writers=consumer_warps),
        dv=ring(config.values, 1, 2 * WARPS + 1, writers=consumer_warps),
        g=ring(config.square, 1, WARPS, writers=WARPS),
        value_sums=ring(row_sums.value_sums, 1, 1 + gates.readers, writers=consumer_warps),
        key_sums=ring(row_sums.key_sums, 1, 1, writers=WARPS),
        out=ring(config.key, 1, 1, writers=WARPS),
        dp=config.square,
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: KEYS, gK: KEYS, gDOut: ALL_VALUES, gErrors: tiled(config.values, rows=2),
        gStates: tiled(config.state, rows=2), gSolutions: tiled(two_parts.square, rows=2),
        gVectors: tiled(chunk_vectors.spec, 3, None, 2), gLastState: array(4), gFirstState: array(4), gDQ: KEYS, gDK: KEYS,
        gDV: ALL_VALUES, gDBeta: array(3), gTailQ: KEYS, gTailK: KEYS, gTailDOut: ALL_VALUES, gTailDQ: KEYS, gTailDK: KEYS,
        gTailDV: ALL_VALUES, gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        gate_args: GATES,
    ):  # fmt: skip
        """A block has a head of a sequence. gErrors .. gVectors: of each chunk and head, as delta_chunk_states_hopper.py stores
        them. gLastState, gFirstState: the gradients of the states after and before each sequence, transposed. gTailQ ..
        gTailDV: see packed_tails.py. segments: 1; without this number registers spill where sequences are packed."""
        q, k, do, e, s, p, x, vectors, ds, dv, g, value_sums, key_sums, out, dp_tile = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            if warpgroup.rank() == LOADER:
                key_head, _ = divmod(walk.head, group)
                for j in range(walk.n):
                    place = walk.place(j)
                    coord = place.chunk, walk.head
                    seq_layout.fill_chunk(k, j, gK, gTailK, place, key_head)
                    seq_layout.fill_chunk(do, j, gDOut, gTailDOut, place, walk.head)
                    vectors.fill(j, gVectors, coord)
                    seq_layout.fill_chunk(q, j, gQ, gTailQ, place, key_head)
                    x.fill(j, gSolutions, coord)
                    e.fill(j, gErrors, coord)
                    s.fill(j, gStates, coord)
            elif warpgroup.rank() == VALUE_SUMS:
                row_sums.send_value_sums(vectors, value_sums, gDBeta, gate_args, walk)
            elif warpgroup.rank() == GRADIENTS:
                for j in range(walk.n):
                    place = walk.place(j)
                    seq_layout.send_chunk(dv, j, gDV, gTailDV, place)
                    seq_layout.send_chunk(out, OUTPUTS * j, gDQ, gTailDQ, place)
                    seq_layout.send_chunk(out, OUTPUTS * j + 1, gDK, gTailDK, place)
            else:
                gates.send_key_sums(gate_args, vectors, value_sums, key_sums, walk)
                gates.clear_padding(gate_args, walk.head, seq_layout.padding_tokens(gCuSeqlens, walk.sequence, length))
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            for j in range(walk.n):
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
                sums = row_sums.claim_key_sums(key_sums, j)
                row_sums.store_dots(sums, CARRIED_DOTS, dk_write, keys)
                dk_write = warpgroup.mma_AtB(dk_write, dp_tile, queries)
                states = s.wait(j)
                dq = warpgroup.mm_AB(douts, states)
                dk_write = warpgroup.wait(dk_write, newer=1)
                dq = warpgroup.wait(dq) * chunk_vectors.decay_rows(scale, vector_tile, DECAY)
                do.release(j)
                dq = warpgroup.wait(warpgroup.mma_AB(dq, dp_tile, keys))
                row_sums.store_dots(sums, QUERY_DOTS, dq, queries)
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
                row_sums.store_dots(sums, KEY_DOTS, dk_write - dk_read, keys)
                row_sums.publish_key_sums(key_sums, j)
                vectors.release(j)  # its fence is that of all loads of this warp
                k.release(j)
                warpgroup.store(out.claim(OUTPUTS * j + 1), dk_write + dk_read)
                out.publish(OUTPUTS * j + 1, fenced=False)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            row = int32(COLUMNS * wg + 16 * warpgroup.rank())
            ds_t = load(gLastState, STATE, (walk.slot, walk.head, row, 0), aligned=False)
            for j in range(walk.n):
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
                    p.publish(j, fenced=False)
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
                parts = two_parts.split(du * chunk_vectors.cols(vector_tile, BETA))
                solution = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                z = warpgroup.wait(two_parts.mma_ABt(du, parts, solution))
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
                    row_sums.store_beta_dots(sums, score)
                    score = chunk_vectors.decay_scores(score, vector_tile, 0.0 - chunk_vectors.cols(vector_tile, BETA))
                    warpgroup.store(g.claim(j), INPUT(warpgroup.causal(score, -1, 0.0)))
                    g.publish(j)
                row_sums.store_state_dots_of_tiles(sums, s, ds, j)
                value_sums.publish(j)
                vectors.release(j)  # its fence is that of all loads of this warp
                row_sums.release_states(s, j)
                row_sums.release_states(ds, j)
                ds_t = warpgroup.wait(ds_t)
                k.release(j)
            row = int32(COLUMNS * warpgroup.id() + 16 * warpgroup.rank())  # anew, to save registers
            store(gFirstState, ds_t, (walk.sequence, walk.head, row, 0), aligned=False)

    return differentiate, smem
