"""The UT transform of all chunks of the delta rule at once, for Hopper: the part of delta_walk_hopper.py's computation that
does not depend on states.

    A = stril(beta M * K K^T)        T = (I + A)^-1 beta

or if keys are divided by their L2 norms (l2norm.py), with l the inverse norms,

    A = stril(beta l^2 M * K K^T)    T = (I + A)^-1 beta l

with M = exp(b_i - b_j), b the cumulative sum of the chunk's gates. Beside T^T the kernel stores b, the decays exp(b) and
exp(b_last - b), and if keys are divided by their L2 norms (l2norm.py) the factor of k S, exp(b) times the inverse norm.
With gates it also stores by how much each chunk multiplies a state at most (delta_recent_chunks.py).

A block is one warpgroup and has some chunks of a head, one after the other. Each of its warps computes the vectors of one chunk
in four; all four warps invert, while TMA brings the keys of the next chunk."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, store, subtile, tile_min, warpgroup
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE, inverse_transposed
from tiles import bf16, inlined, ring, shared
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, SUM
from ...parts.delta.delta_config import RawDeltaConfig, delta_sizes
from ...parts.recurrent.gate_formulas import FORMULAS, BetaFormula
from ...parts.recurrent.gates import load_line
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.tokens import CHUNK, SequenceLayout, block_coord

CTAS_PER_SM = 4
WARPS = warpgroup.WARPGROUP
VECTORS = 2 * WARPS  # chunks whose vectors are in shared memory: two for each warp


@dataclass(frozen=True)
class Config(RawDeltaConfig):
    """A kernel's configuration, whose fields are those of RawDeltaConfig."""

    label, threads, ctas_per_sm = "UT transforms", warpgroup.THREADS, CTAS_PER_SM


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for size in delta_sizes(everything):
            for varlen in (False, True) if everything or size[0] == max(KEY_DIMS) else (False,):
                yield from (Config(*size, gated, varlen) for gated in (False, True))
        yield from (Config(max(KEY_DIMS), bf16, True, formula=formula, beta=BetaFormula(1.0)) for formula in FORMULAS)
        yield from (Config(key_dim, bf16, gated, l2norm=True) for key_dim, gated in zip(KEY_DIMS, (False, True), strict=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    GATED, NORMED, BETA_FORMULA, INPUT = config.gated, config.l2norm, config.beta, config.dtype
    READS_SQUARES = GATED or NORMED  # of keys
    chunk_vectors, decay, seq_layout = config.vectors, config.decay, SequenceLayout(config.varlen)
    norm, PARAMS = L2Norm(config.l2norm, config.key_dim), config.decay.params()
    recent, RECENT_PARAMS = config.recent_chunks, config.recent_chunks.params()
    smem = shared(
        k=ring(config.key, 1, WARPS),
        vectors=ring(chunk_vectors.spec, VECTORS, WARPS, writers=1),
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
        out=config.square,
        **recent.scratch(),
    )

    @inlined
    def store_vector(target, gVectors, at, index, vector):
        """One warp stores one of a chunk's vectors, by its index, in shared memory and in memory. at: (chunk, head)."""
        chunk, head = at
        store(subtile(target, CHUNK, index), vector)
        store(gVectors, vector, (chunk, head, CHUNK * index), aligned=True)

    @inlined
    def publish_vectors(vectors, gVectors, j, at, beta, sums):
        """One warp stores the vectors of the j-th chunk in its ring and, but for beta, in memory. at: (chunk, head)."""
        target = vectors.claim(j)
        store(subtile(target, CHUNK, BETA), beta)
        if GATED:
            decay_to_start, decay_to_end = exp2(sums), exp2(tile_min(sums) - sums)
            store_vector(target, gVectors, at, SUM, sums)
            store_vector(target, gVectors, at, DECAY, decay_to_start)
            store_vector(target, gVectors, at, DECAY_TO_END, decay_to_end)
        vectors.publish(j)

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM), fastmath=True)
    def invert(
        gK: tiled(config.key, unit=1), gBeta: array(3), gGates: array(3), gTransforms: tiled(config.square, rows=2),
        gVectors: array(3), gCuSeqlens: ENDS, length: INT, parts: INT, heads: INT, group: INT, params: PARAMS,
        recent_params: RECENT_PARAMS,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gTransforms: T^T of each chunk and
        head; gVectors: the factor of k S, b, exp(b) and exp(b_last - b). recent_params: see delta_recent_chunks.py. `group`
        value heads share a key head."""
        tiles = smem.open()
        k, vectors, high, low, out = tiles[:5]
        growths = tiles[-1]
        _, part, head, sequence = block_coord(cuda.blockIdx.x, 1, parts, heads * group)
        key_head, _ = divmod(head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, part, parts)
        n, first, warp = seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length), warpgroup.rank()
        rate_and_bias = decay.load_rate_and_bias(params, head)
        at = seq.batch, seq.chunk_start(warp), head
        beta, gates = load_line(gBeta, seq.end, at), decay.load_gates(gGates, seq, at)
        if n > 0:
            k.fill(0, gK, (seq.batch, seq.start, key_head))
        for j in range(n):
            if j % WARPS == 0:
                warp_chunk = int32(j + warp)
                if warp_chunk < n:
                    sums = decay.cumsum(gates, rate_and_bias, seq.remaining(warp_chunk))
                    coord, betas = (int32(first + warp_chunk), head), BETA_FORMULA.compute(beta)
                    publish_vectors(vectors, gVectors, warp_chunk, coord, betas, sums)
                at = seq.batch, seq.chunk_start(warp_chunk + WARPS), head
                beta, gates = load_line(gBeta, seq.end, at), decay.load_gates(gGates, seq, at)
            keys, chunk = k.wait(j), int32(first + j)
            seq_layout.zero_other_rows(keys, seq.remaining(j))
            s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
            k.release(j)
            if j + 1 < n:
                k.fill(j + 1, gK, (seq.batch, seq.chunk_start(j + 1), key_head))
            squares = warpgroup.diagonal(s) if READS_SQUARES else 0.0
            inverse_norms = norm.invert_squares(squares)
            vector_tile = vectors.wait(j)
            factors = chunk_vectors.rows(vector_tile, BETA) * inverse_norms
            recent.store_growths(growths, squares * factors * inverse_norms)
            a = chunk_vectors.decay_scores(s, vector_tile, 1.0, factors * inverse_norms)
            t_transposed = inverse_transposed(a, high, low) * factors
            recent.store_exponent(recent_params, chunk, head, growths, vector_tile)
            if NORMED:
                state_factor = chunk_vectors.decay_rows(inverse_norms, vector_tile, DECAY)
                store(gVectors, state_factor, (chunk, head, int32(CHUNK * BETA + 16 * warp)))
            vectors.release(j)
            warpgroup.send(gTransforms, (chunk, head), out, INPUT(t_transposed))
        warpgroup.store_wait()

    return invert, smem
