"""The delta rule on few long sequences, for Hopper: a walk along each, with decays that are one number a token and head (or
none).

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t        o_t = scale q_t S_t

In a chunk of 64 tokens, with b the cumulative sum of the gates and M = exp(b_i - b_j) at most 1,

    U = T (V - exp(b) K S)        O = scale (exp(b) Q S + tril(M * Q K^T) U)        S = exp(b_last) S + (exp(b_last - b) K)^T U

Each chunk waits for the one before it, and no other work hides that: the time is the number of chunks times the latency of
three dependent products, K S, T (..) and K^T U. So delta_transform_hopper.py has computed T and the decays of all chunks
before, a block has 64 value columns only, as the columns of a state are independent, and its consumer has a multiprocessor's
tensor cores almost for itself. A scorer computes tril(M * Q K^T) a few chunks ahead, and a loader starts all TMA loads and
stores the outputs. Q S and the scores' product run while the consumer rounds the operand of the next dependent product.

The consumer holds the state transposed, 64 x Dk, and U and O as well: the product of one step, rounded, is the left operand of
the next one without leaving the registers. No exponent is positive, so nothing overflows and no chunk is strong."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store, subtile, truncate, warpgroup, zeros
from tiles import bf16, fp32, inlined, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import DECAY, DECAY_TO_END, KEY_DIMS, TransformVectors
from ...parts.delta.delta_config import DeltaConsumerConfig, delta_sizes
from ...parts.recurrent.l2norm import ROWS, L2Norm
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

SENDER = 1  # the loader's warp that stores outputs
REGISTERS = {1: (56, 128, 240), 2: (24, 72, 208)}  # consumers -> registers of a thread of loader, scorer and consumer
STAGES = {64: 4, 128: 3}  # padded key dim: chunks in flight
AHEAD = 2  # chunks by which the scorer may be ahead of the consumer
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(DeltaConsumerConfig):
    """A kernel's configuration, whose fields are those of DeltaConsumerConfig. The helpers are the scorer and the loader."""

    label = "walk"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for size in delta_sizes(everything):
            for varlen in (False, True) if everything or size[0] == max(KEY_DIMS) else (False,):
                counts = (1,) if varlen else REGISTERS
                yield from (Config(*size, gated, varlen, consumers=n) for n in counts for gated in (False, True))
        for key_dim, gated in zip(KEY_DIMS, (False, True), strict=True):
            yield from (Config(key_dim, bf16, gated, l2norm=True, consumers=n) for n in REGISTERS)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, OUTPUTS = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, fp32)
    seq_layout = SequenceLayout(config.varlen)
    chunk_vectors = TransformVectors(config.gated, config.l2norm)
    state, stages = TransposedState(config.key_dim, INPUT, seq_layout), STAGES[config.key_dim]
    norm, NORMED = L2Norm(config.l2norm, config.key_dim), config.l2norm
    CONSUMERS, (LOADER_REGISTERS, SCORER_REGISTERS, CONSUMER_REGISTERS) = config.consumers, REGISTERS[config.consumers]
    SCORER, LOADER = CONSUMERS, CONSUMERS + 1
    READERS, ALL_WARPS = CONSUMERS * WARPS, (CONSUMERS + 1) * WARPS  # warps of consumers; with those of the scorer
    smem = shared(
        q=ring(config.key, stages, ALL_WARPS),
        k=ring(config.key, stages, ALL_WARPS),
        v=ring(config.values, stages, READERS),
        t=ring(config.square, stages, READERS),
        vectors=ring(chunk_vectors.spec, stages, ALL_WARPS),
        p=ring(config.square, AHEAD, READERS, writers=WARPS),
        out=ring(config.values, AHEAD, 1, writers=READERS),
        **norm.rings(stages, q_norms=READERS),
    )

    @inlined
    def publish_output_factors(norm_rings, j, vector_tile, factors):
        """The scorer writes what the outputs Q S of a chunk are multiplied by to the ring. factors: without the decay, of a
        warp's rows."""
        if NORMED:
            (ring,) = norm_rings
            store(subtile(ring.claim(j), ROWS, warpgroup.rank()), chunk_vectors.decay_rows(factors, vector_tile, DECAY))
            ring.publish(j)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1),
        gTransforms: tiled(config.square, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2),
        gO: seq_layout.output_argument(config.values), gInitialState: array(4), gFinalState: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, segments: INT, first_state: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a segment, and after the last one the state. Each of the `segments` of a sequence has thread blocks of
        its own. gTransforms, gVectors: of each chunk and head. gInitialState: the state before each segment from the
        `first_state`-th on; those before it begin with 0. `group` value heads share a key head; each is `blocks` blocks of
        columns wide."""
        tiles = smem.open()
        q, k, v, t, vectors, p, out = tiles[:7]
        norm_rings = tiles[7:]
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, segments, heads * group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            key_head, _ = divmod(head, group)
            first = seq_layout.chunk_index(seq.start, sequence, length)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token, chunk = seq.chunk_start(j), int32(first + j)
                    k.fill(j, gK, (seq.batch, token, key_head))
                    q.fill(j, gQ, (seq.batch, token, key_head))
                    v.fill(j, gV, (seq.batch, token, head, block))
                    vectors.fill(j, gVectors, (chunk, head))
                    t.fill(j, gTransforms, (chunk, head))
            elif warpgroup.rank() == SENDER:
                for j in range(n):
                    seq_layout.send_rows(gO, out.wait(j), seq, seq.chunk_start(j), head, block)
                    out.release(j)
        elif wg == SCORER:
            warpgroup.release_registers(SCORER_REGISTERS)
            for j in range(n):
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), CONSUMERS + 1)
                queries = q.wait(j)
                s = warpgroup.mm_ABt(queries, keys)
                inverse_norms = norm.inverse_norms(queries, warpgroup.rank(), fenced=False) if NORMED else 1.0
                s = warpgroup.wait(s)
                k.release(j)
                vector_tile = vectors.wait(j)
                publish_output_factors(norm_rings, j, vector_tile, inverse_norms * scale)
                s = chunk_vectors.decay_scores(s, vector_tile, scale, inverse_norms)
                vectors.release(j)
                q.release(j)  # behind the fence of the vectors' release, which the loads of queries need, too
                warpgroup.store(p.claim(j), warpgroup.causal(s, 0, 0.0))
                p.publish(j)
            if segment == segments - 1:
                for panel in range(CONSUMERS):
                    seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, int32(CONSUMERS * block + panel))
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            column = COLUMNS * (CONSUMERS * block + wg)
            states = truncate(gInitialState, 3, gInitialState.shape[3] if segment >= first_state else 0)
            slot = int32(sequence * (segments - first_state) + max(0, segment - first_state))
            s_t = warpgroup.load(states, STATE, (slot, head, 0, column), 3, 2)
            rounded, outputs = INPUT(s_t), INPUT(zeros(OUTPUTS))
            for j in range(n):
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), CONSUMERS + 1)
                u = warpgroup.mm_ABt(rounded, keys)
                o = warpgroup.mm_ABt(rounded, q.wait(j))
                if j > 0:
                    warpgroup.store_transposed(subtile(out.claim(j - 1), CHUNK, 0, COLUMNS, wg), outputs)
                    out.publish(j - 1)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), state.values))
                v.release(j)
                values, vector_tile = seq_layout.zero_other_columns(values, seq.remaining(j)), vectors.wait(j)
                u = INPUT(values - chunk_vectors.scale_reads(warpgroup.wait(u, newer=1), vector_tile))
                u = warpgroup.mm_AB(u, t.wait(j))
                o = warpgroup.wait(o, newer=1)
                q.release(j)
                u = warpgroup.wait(u)
                t.release(j)
                s_t = chunk_vectors.decay_state(s_t, vector_tile)
                s_t = warpgroup.mma_AB(s_t, INPUT(chunk_vectors.decay_cols(u, vector_tile, DECAY_TO_END)), keys)
                if NORMED:
                    o = norm.scale_columns(o, norm_rings, 0, j)
                    norm.release(norm_rings, 0, j)
                else:
                    o = o * chunk_vectors.decay_cols(scale, vector_tile, DECAY)
                vectors.release(j)
                o = warpgroup.mma_ABt(o, INPUT(u), p.wait(j))
                s_t = warpgroup.wait(s_t, newer=1)
                k.release(j)
                rounded = INPUT(s_t)  # while the last product runs
                outputs = INPUT(warpgroup.wait(o))
                p.release(j)
            if n > 0:
                warpgroup.store_transposed(subtile(out.claim(n - 1), CHUNK, 0, COLUMNS, wg), outputs)
                out.publish(n - 1)
            if segment == segments - 1:
                warpgroup.store(gFinalState, s_t, (sequence, head, 0, column), 3, 2)

    return walk, smem
