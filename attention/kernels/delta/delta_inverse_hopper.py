"""What gradients of the delta rule need of each chunk before its state is known, of all chunks at once, for Hopper
(parts/delta/delta_chunks.py has the equations): the vectors of its tokens, L^T and P. A beta counts as LEAST_BETA if it is
less, as delta_segment_gradients_hopper.py divides by it.

A warpgroup has a chunk of a head. delta_chains_hopper.py, whose steps wait for one another, then finds everything in memory."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE
from tiles import ring, shared
from tiles.launching.arguments import FLOAT, INT, SEMAPHORES, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunk_solver import ChunkSolver
from ...parts.delta.delta_chunks import LEAST_BETA, TwoParts
from ...parts.delta.delta_config import DeltaConfig, delta_sizes
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

CTAS_PER_SM = 4


@dataclass(frozen=True)
class Config(DeltaConfig):
    """A kernel's configuration, whose fields are those of DeltaConfig."""

    label, threads = "inverses", warpgroup.THREADS


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        yield from (Config(*size, gated) for size, gated in itertools.product(delta_sizes(everything), (False, True)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, KEY, SCORES, SINGLE = config.dtype, config.key, config.square, 0
    seq_layout, chunk_vectors = SequenceLayout(), config.vectors
    solver = ChunkSolver(chunk_vectors, TwoParts(INPUT), LEAST_BETA[INPUT])
    smem = shared(
        q=ring(KEY, 1),
        k=ring(KEY, 1),
        p=SCORES,
        vectors=chunk_vectors.spec,
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
    )

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM), fastmath=True)
    def invert(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gBeta: array(3), gGates: array(3), gSolutions: tiled(SCORES, rows=2),
        gScores: tiled(SCORES, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gCounts: SEMAPHORES, length: INT,
        chunks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has one of the `chunks` of a sequence, of one head. gSolutions: -L^T, high above low. gScores: P.
        gCounts: set to 0, for each chunk two of each key head."""
        q, k, p, vectors, high, low = smem.open()
        index, head = divmod(cuda.blockIdx.x, heads)
        sequence, j = divmod(index, chunks)
        key_head, member = divmod(head, group)
        seq = seq_layout.sequence_tokens(0, sequence, length)
        token = seq.chunk_start(j)
        chunk = seq_layout.chunk_index(token, sequence, length)
        k.fill(SINGLE, gK, (seq.batch, token, key_head))
        q.fill(SINGLE, gQ, (seq.batch, token, key_head))
        if warpgroup.rank() == 0:
            solver.store_decays(vectors, gGates, seq, token, head)
        elif warpgroup.rank() == 1:
            solver.store_beta(vectors, gBeta, seq, token, head)
            if member == 0:
                gCounts[chunk, int32(2 * key_head)] = int32(0)
                gCounts[chunk, int32(2 * key_head + 1)] = int32(0)
        keys, queries = k.wait(SINGLE), q.wait(SINGLE)
        s, s_qk = warpgroup.mm_ABt(keys, keys), warpgroup.mm_ABt(queries, keys)
        s = warpgroup.wait(s, newer=1)
        s_qk = warpgroup.wait(s_qk)
        warpgroup.sync()
        s_qk = chunk_vectors.decay_scores(s_qk, vectors, scale)
        warpgroup.store(p, INPUT(warpgroup.causal(s_qk, 0, 0.0)))
        solution = solver.solve(s, vectors, (high, low))
        first, second = solver.split_solution(solution, vectors)
        # whose products are done
        high_part, low_part = subtile(queries, CHUNK, 0, CHUNK, 0), subtile(keys, CHUNK, 0, CHUNK, 0)
        warpgroup.store(high_part, first)
        warpgroup.store(low_part, second)
        warpgroup.sync()
        if warpgroup.rank() == 0:
            tma_store(gScores, (chunk, head), p)
            tma_store(gVectors, (chunk, head), vectors)
            tma_store(gSolutions, (chunk, head), high_part)
            tma_store(gSolutions, (chunk, head, 1), low_part)
            store_wait()

    return invert, smem
