"""What a walk along a sequence reads of the delta rule's chunks (chunk_factors.py), of all chunks at once, for Hopper, with
decays that are one number a token and head (or none):

    k~ = exp(b_last - b) T^T K        P~ = scale tril(M * Q K^T) T        T = (I + stril(beta M * K K^T))^-1 beta

with M = exp(b_i - b_j), b the cumulative sum of the chunk's gates. No exponent is positive, so no chunk is strong. Beside
them the kernel stores exp(b), and the factors of k S and q S: exp(b), times the inverse norm of the key or query if these are
divided by their L2 norms (l2norm.py).

A worker is one warpgroup and has some chunks, one after the other (chunk_order.py). Each of its warps computes the vectors of
one chunk in four. The next chunk is loaded while this one's triangle is inverted. k~ takes the place of the keys."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import exp2, load, store, subtile, tile_min, tma_store, transpose, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE, inverse_transposed
from tiles import bf16, inlined, ring, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.chunk_factors import TokenFactors
from ..parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, SUM
from ..parts.recurrent.delta_tiles import RawTiles, delta_sizes
from ..parts.recurrent.gate_formulas import FORMULAS, BetaFormula
from ..parts.recurrent.gates import CHUNK_COL_VEC, COL_VEC
from ..parts.recurrent.l2norm import L2Norm
from ..parts.recurrent.tokens import CHUNK, SequenceLayout

CTAS_PER_SM = 3  # blocks of one warpgroup for which shared memory has room
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(RawTiles):
    """A kernel's configuration, whose fields are those of RawTiles, and order: of the chunks."""

    order: HeadMajor = field(default=HeadMajor(), kw_only=True)
    label = "factors of chunks"

    @property
    def threads(self):
        """The threads of a block, those of its workers."""
        return warpgroup.THREADS * self.order.copies

    @property
    def ctas_per_sm(self):
        """How many thread blocks shared memory has room for."""
        return CTAS_PER_SM // self.order.copies


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for size in delta_sizes(everything):
            for varlen in (False, True) if everything or size[0] == max(KEY_DIMS) else (False,):
                yield from (Config(*size, gated, varlen) for gated in (False, True))
        yield from (Config(max(KEY_DIMS), bf16, True, formula=formula, beta=BetaFormula(1.0)) for formula in FORMULAS)
        yield from (Config(key_dim, bf16, gated, l2norm=True) for key_dim, gated in zip(KEY_DIMS, (False, True), strict=True))
        yield from (Config(max(KEY_DIMS), bf16, gated, order=ChunkMajor(CTAS_PER_SM)) for gated in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    GATED, BETA_FORMULA, INPUT, PANELS = config.gated, config.beta, config.dtype, config.key_dim // CHUNK
    chunk_vectors, decay, seq_layout, factors = config.vectors, config.decay, SequenceLayout(config.varlen), TokenFactors()
    norm, PARAMS = L2Norm(config.l2norm, config.key_dim), config.decay.params()
    chunk_order, ORDER = config.order, config.order.params()
    KEYS, CHUNK_KEYS, CHUNK_SQUARE = tiled(config.key, unit=1), tiled(config.key, rows=2), tiled(config.square, rows=2)
    smem = shared(
        q=ring(config.key, 1, WARPS),
        k=ring(config.key, 2, WARPS),
        vectors=ring(chunk_vectors.spec, WARPS, WARPS, writers=1),
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
        square=config.square,
        factor_vectors=factors.vectors,
        **norm.rings(1, k_norms=WARPS),
    ).per_warpgroup(chunk_order.copies)

    @inlined
    def fill(ring, source, j, n, at):
        """Have TMA load the queries or keys of the j-th of n chunks, if there is one."""
        if j < n:
            ring.fill(j, source, (at.seq.batch, at.token, at.key_head))

    @inlined
    def load_gates(gGates, at):
        """Start to load the gates of a chunk, and return them."""
        return decay.load_gates(gGates, at.seq, (at.seq.batch, at.token, at.head))

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

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def transform(
        gQ: KEYS, gK: KEYS, gBeta: array(3), gGates: array(3), gSolvedKeys: CHUNK_KEYS, gSolvedScores: CHUNK_SQUARE,
        gVectors: tiled(factors.vectors, 3, None, 2), gCuSeqlens: ENDS, length: INT, order: ORDER, heads: INT, group: INT,
        scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """gSolvedKeys, gSolvedScores: the same array, which has k~ and beside it P~^T, of each chunk and head. gVectors: those
        of TokenFactors. order: see chunk_order.py. `group` value heads share a key head."""
        tiles = smem.open()
        q, k, vectors, high, low, square, factor_vectors = tiles[:7]
        norm_rings = tiles[7:]
        chunks = chunk_order.begin(seq_layout, gCuSeqlens, length, heads, group, order)
        chunks.release()
        n, chunk, warp = chunks.n, chunks.first(), warpgroup.rank()
        fill(q, gQ, int32(0), n, chunk)
        fill(k, gK, int32(0), n, chunk)
        betas, last = truncate(gBeta, 1, chunks.end()), int32(max(0, n - 1))
        gates = load_gates(gGates, chunks.next_chunk(min(warp, last), chunk))
        for j in range(n):
            if j % WARPS == 0:
                of_warp = chunks.next_chunk(min(int32(j + warp), last), chunk)
                beta = load(betas, CHUNK_COL_VEC, (of_warp.seq.batch, of_warp.token, of_warp.head), cols=1)
                if j + warp < n:
                    sums = decay.cumsum(gates, decay.load_rate_and_bias(params, of_warp.head), of_warp.remaining)
                    publish_vectors(vectors, int32(j + warp), transpose(BETA_FORMULA.compute(beta)), sums)
                gates = load_gates(gGates, chunks.next_chunk(min(int32(j + warp + WARPS), last), chunk))
            keys, queries = k.wait(j), q.wait(j)
            seq_layout.zero_other_rows(keys, chunk.remaining)
            key_norms, query_norms = norm.publish(norm_rings, 0, j, keys), norm.load_norms(queries)
            a, scores = warpgroup.mm_ABt(keys, keys), warpgroup.mm_ABt(queries, keys)
            a, scores = warpgroup.wait(a, newer=1), warpgroup.wait(scores)
            q.release(j)
            vector_tile = vectors.wait(j)
            scores = norm.scale_rows(chunk_vectors.decay_scores(scores, vector_tile, scale), query_norms)
            next_chunk = chunks.locate_next(chunk)
            warpgroup.store_wait()  # of the chunk before
            warpgroup.sync()
            if j > 0:
                k.release(j - 1)
            fill(q, gQ, int32(j + 1), n, next_chunk)
            fill(k, gK, int32(j + 1), n, next_chunk)
            chunks.count_previous(chunk, warp)
            decays = chunk_vectors.decay_rows(zeros(COL_VEC) + 1.0, vector_tile, DECAY)
            key_factors, query_factors = norm.scale_rows(decays, key_norms), norm.scale_rows(decays * scale, query_norms)
            factors.store(factor_vectors, key_factors, query_factors, decays)
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
            warpgroup.sync()  # and the keys
            warpgroup.store(keys, solved)
            warpgroup.sync()
            if warp == 0:
                tma_store(gSolvedKeys, (chunk.number, chunk.head), keys)
                tma_store(gSolvedScores, (chunk.number, chunk.head, 0, PANELS), square)
                tma_store(gVectors, (chunk.number, chunk.head), factor_vectors)
            chunk = next_chunk
        chunks.finish(warp)

    return transform, smem
