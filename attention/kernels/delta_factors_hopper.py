"""What a walk along a sequence reads of the delta rule's chunks (chunk_factors.py), of all chunks at once, for Hopper, with
decays that are one number a token and head (or none):

    k~ = exp(b_last - b) T^T K        P~ = scale tril(M * Q K^T) T        T = (I + stril(beta M * K K^T))^-1 beta

with M = exp(b_i - b_j), b the cumulative sum of the chunk's gates. No exponent is positive, so no chunk is strong. Beside
them the kernel stores exp(b), and the factors of k S and q S: exp(b), times the inverse norm of the key or query if these are
divided by their L2 norms (l2norm.py).

A block is one warpgroup and has some chunks of a head, one after the other. Each of its warps computes the vectors of one chunk
in four. The next chunk's queries are loaded while this one's triangle is inverted, its keys when T^T K is there."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, subtile, tile_min, transpose, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE, inverse_transposed
from tiles import bf16, inlined, ring, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.chunk_factors import TokenFactors
from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, SUM
from ..parts.recurrent.delta_tiles import RawTiles, delta_sizes
from ..parts.recurrent.gate_formulas import FORMULAS, BetaFormula
from ..parts.recurrent.gates import CHUNK_COL_VEC, COL_VEC
from ..parts.recurrent.l2norm import L2Norm
from ..parts.recurrent.tokens import CHUNK, SequenceLayout, block_coord

CTAS_PER_SM = 3
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(RawTiles):
    """A kernel's configuration, whose fields are those of RawTiles."""

    label, threads, ctas_per_sm = "factors of chunks", warpgroup.THREADS, CTAS_PER_SM


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
    GATED, BETA_FORMULA, INPUT, PANELS = config.gated, config.beta, config.dtype, config.key_dim // CHUNK
    chunk_vectors, decay, seq_layout, factors = config.vectors, config.decay, SequenceLayout(config.varlen), TokenFactors()
    norm, PARAMS = L2Norm(config.l2norm, config.key_dim), config.decay.params()
    KEYS, CHUNK_KEYS, CHUNK_SQUARE = tiled(config.key, unit=1), tiled(config.key, rows=2), tiled(config.square, rows=2)
    smem = shared(
        q=ring(config.key, 1, WARPS),
        k=ring(config.key, 1, WARPS),
        vectors=ring(chunk_vectors.spec, WARPS, WARPS, writers=1),
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
        solved_keys=config.key,
        square=config.square,
        **norm.rings(1, k_norms=WARPS),
    )

    @inlined
    def publish_vectors(vectors, j, beta, sums):
        """One warp stores the vectors of the j-th chunk in its ring."""
        target = vectors.claim(j)
        store(subtile(target, CHUNK, BETA), beta)
        if GATED:
            store(subtile(target, CHUNK, SUM), sums)
            store(subtile(target, CHUNK, DECAY), exp2(sums))
            store(subtile(target, CHUNK, DECAY_TO_END), exp2(tile_min(sums) - sums))
        vectors.publish(j)

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM), fastmath=True)
    def transform(
        gQ: KEYS, gK: KEYS, gBeta: array(3), gGates: array(3), gSolvedKeys: CHUNK_KEYS, gSolvedScores: CHUNK_SQUARE,
        gVectors: array(3), gCuSeqlens: ENDS, length: INT, parts: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """Each of the `parts` blocks of a head of a sequence has as many of its chunks. gSolvedKeys, gSolvedScores: the same
        array, which has k~ and beside it P~^T, of each chunk and head. gVectors: those of TokenFactors. `group` value heads
        share a key head."""
        tiles = smem.open()
        q, k, vectors, high, low, solved_keys, square = tiles[:7]
        norm_rings = tiles[7:]
        _, part, head, sequence = block_coord(cuda.blockIdx.x, 1, parts, heads * group)
        key_head, _ = divmod(head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, part, parts)
        n, first, warp = seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length), warpgroup.rank()
        betas, rate_and_bias = truncate(gBeta, 1, seq.end), decay.load_rate_and_bias(params, head)
        at = seq.batch, seq.chunk_start(warp), head
        beta, gates = load(betas, CHUNK_COL_VEC, at, cols=1), decay.load_gates(gGates, seq, at)
        if n > 0:
            k.fill(0, gK, (seq.batch, seq.start, key_head))
            q.fill(0, gQ, (seq.batch, seq.start, key_head))
        for j in range(n):
            if j % WARPS == 0:
                warp_chunk = int32(j + warp)
                if warp_chunk < n:
                    sums = decay.cumsum(gates, rate_and_bias, seq.remaining(warp_chunk))
                    publish_vectors(vectors, warp_chunk, transpose(BETA_FORMULA.compute(beta)), sums)
                at = seq.batch, seq.chunk_start(warp_chunk + WARPS), head
                beta, gates = load(betas, CHUNK_COL_VEC, at, cols=1), decay.load_gates(gGates, seq, at)
            keys, queries, chunk = k.wait(j), q.wait(j), int32(first + j)
            seq_layout.zero_other_rows(keys, seq.remaining(j))
            key_norms, query_norms = norm.publish(norm_rings, 0, j, keys), norm.load_norms(queries)
            a, scores = warpgroup.mm_ABt(keys, keys), warpgroup.mm_ABt(queries, keys)
            a, scores = warpgroup.wait(a, newer=1), warpgroup.wait(scores)
            q.release(j)
            if j + 1 < n:
                q.fill(j + 1, gQ, (seq.batch, seq.chunk_start(j + 1), key_head))
            vector_tile = vectors.wait(j)
            decays = chunk_vectors.decay_rows(zeros(COL_VEC) + 1.0, vector_tile, DECAY)
            key_factors, query_factors = norm.scale_rows(decays, key_norms), norm.scale_rows(decays, query_norms)
            factors.store(gVectors, chunk, head, key_factors, query_factors, decays)
            scores = norm.scale_rows(chunk_vectors.decay_scores(scores, vector_tile, scale), query_norms)
            warpgroup.store_wait()  # of the chunk before
            warpgroup.sync()
            warpgroup.store(square, warpgroup.causal(scores, 0, 0.0))
            beta_rows = chunk_vectors.rows(vector_tile, BETA)
            a = norm.scale_rows(chunk_vectors.decay_scores(a, vector_tile, 1.0) * beta_rows, key_norms)
            t_transposed = inverse_transposed(norm.scale_columns(a, norm_rings, 0, j), high, low) * beta_rows
            t_transposed = norm.scale_columns(t_transposed, norm_rings, 0, j)
            norm.release(norm_rings, 0, j)
            solved_scores = warpgroup.wait(warpgroup.mm_ABt(INPUT(t_transposed), square))
            solved = warpgroup.mm_AB(INPUT(chunk_vectors.decay_cols(t_transposed, vector_tile, DECAY_TO_END)), keys)
            vectors.release(j)
            warpgroup.sync()  # all warps' products have read the scores
            warpgroup.store(square, solved_scores)
            solved = warpgroup.wait(solved)
            k.release(j)
            if j + 1 < n:
                k.fill(j + 1, gK, (seq.batch, seq.chunk_start(j + 1), key_head))
            warpgroup.store(solved_keys, solved)
            warpgroup.tma_store(gSolvedKeys, (chunk, head), solved_keys)
            warpgroup.tma_store(gSolvedScores, (chunk, head, 0, PANELS), square)
        warpgroup.store_wait()

    return transform, smem
