"""What gradients of the delta rule need of each chunk before its state is known, of all chunks at once, for Hopper
(parts/delta/delta_chunks.py has the equations): the vectors of its tokens, L^T and P. A beta counts as LEAST_BETA if it is
less, as delta_segment_gradients_hopper.py divides by it.

A warpgroup has a chunk of one value head, or of two that share a key head: these have the products with its keys in common.
delta_chains_hopper.py, whose steps wait for one another, then finds everything in memory."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE
from tiles import fp32, ring, shared, sv
from tiles.launching.arguments import FLOAT, INT, SEMAPHORES, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunk_solver import ChunkSolver
from ...parts.delta.delta_chunks import LEAST_BETA, TwoParts
from ...parts.delta.delta_config import DeltaConfig, delta_sizes
from ...parts.delta.delta_gradient_config import clear_counts
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

CTAS_PER_SM = 4
VALUE_HEADS = 1, 2  # of a block
VECTOR_WARPS = 2  # for a value head: one stores decays, the other beta


@dataclass(frozen=True)
class Config(DeltaConfig):
    """A kernel's configuration. value_heads: how many of those that share a key head a block has, one for each 64 channels of
    keys at most, as what it stores takes the place of Q and K."""

    value_heads: int = 1
    label, threads = "inverses", warpgroup.THREADS


def possible_value_heads(key_dim: int, group: int) -> list[int]:
    """How many value heads a block may have, where `group` share a key head. key_dim: the channels of keys, padded."""
    return [heads for heads in VALUE_HEADS if group % heads == 0 and heads * CHUNK <= key_dim]


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        for (key_dim, dtype), gated in itertools.product(delta_sizes(everything), (False, True)):
            yield from (Config(key_dim, dtype, gated, heads) for heads in possible_value_heads(key_dim, max(VALUE_HEADS)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, KEY, SCORES, SINGLE = config.dtype, config.key, config.square, 0
    HEADS, VECTORS = config.value_heads, config.vectors.spec.length
    seq_layout, chunk_vectors = SequenceLayout(), config.vectors
    solver = ChunkSolver(chunk_vectors, TwoParts(INPUT), LEAST_BETA[INPUT])
    smem = shared(
        q=ring(KEY, 1),
        k=ring(KEY, 1),
        vectors=sv(HEADS * VECTORS, fp32),
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
    )

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM), fastmath=True)
    def invert(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gBeta: array(3), gGates: array(3), gSolutions: tiled(SCORES, rows=2),
        gScores: tiled(SCORES, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gCounts: SEMAPHORES, length: INT,
        chunks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has one of the `chunks` of a sequence. gSolutions: -L^T, high above low. gScores: P. gCounts: see
        delta_gradient_config.py."""
        q, k, vectors, high, low = smem.open()
        index, first = divmod(cuda.blockIdx.x, heads // HEADS)
        sequence, j = divmod(index, chunks)
        first = int32(HEADS * first)
        key_head, member = divmod(first, group)
        seq = seq_layout.sequence_tokens(0, sequence, length)
        token = seq.chunk_start(j)
        chunk = seq_layout.chunk_index(token, sequence, length)
        k.fill(SINGLE, gK, (seq.batch, token, key_head))
        q.fill(SINGLE, gQ, (seq.batch, token, key_head))
        warp = warpgroup.rank()
        if warp < VECTOR_WARPS * HEADS:
            n, task = divmod(warp, VECTOR_WARPS)
            vector_tile = subtile(vectors, VECTORS, n)
            if task == 0:
                solver.store_decays(vector_tile, gGates, seq, token, int32(first + n))
            else:
                solver.store_beta(vector_tile, gBeta, seq, token, int32(first + n))
        if member == 0 and warp == 0:
            clear_counts(gCounts, chunk, key_head)
        keys, queries = k.wait(SINGLE), q.wait(SINGLE)
        s, s_qk = warpgroup.mm_ABt(keys, keys), warpgroup.mm_ABt(queries, keys)
        s = warpgroup.wait(s, newer=1)
        s_qk = warpgroup.wait(s_qk)
        warpgroup.sync()
        for n in range(HEADS):
            p = chunk_vectors.decay_scores(s_qk, subtile(vectors, VECTORS, n), scale)
            warpgroup.store(subtile(queries, CHUNK, 0, CHUNK, n), INPUT(warpgroup.causal(p, 0, 0.0)))
        warpgroup.sync()
        if warp == 0:
            for n in range(HEADS):
                tma_store(gScores, (chunk, int32(first + n)), subtile(queries, CHUNK, 0, CHUNK, n))
                tma_store(gVectors, (chunk, int32(first + n)), subtile(vectors, VECTORS, n))
        for n in range(HEADS):
            vector_tile, head = subtile(vectors, VECTORS, n), int32(first + n)
            high_part, low_part = solver.split_solution(solver.solve(s, vector_tile, (high, low)), vector_tile)
            if warp == 0:
                store_wait()  # for P in this place
            warpgroup.sync()
            warpgroup.store(subtile(queries, CHUNK, 0, CHUNK, n), high_part)
            warpgroup.store(subtile(keys, CHUNK, 0, CHUNK, n), low_part)
            warpgroup.sync()
            if warp == 0:
                tma_store(gSolutions, (chunk, head), subtile(queries, CHUNK, 0, CHUNK, n))
                tma_store(gSolutions, (chunk, head, 1), subtile(keys, CHUNK, 0, CHUNK, n))
        if warp == 0:
            store_wait()

    return invert, smem
