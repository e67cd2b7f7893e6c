"""What gradients of the delta rule need of each chunk before its state is known, of all chunks at once, for Hopper
(parts/recurrent/delta_chunks.py has the equations): the vectors of its tokens, L^T and P. A beta counts as LEAST_BETA if it is
less, as delta_segment_gradients_hopper.py divides by it.

A warpgroup has a chunk of a head, or several, one after the other. delta_chains_hopper.py, whose steps wait for one another,
finds everything in memory, after this kernel or, in training's forward pass, beside its end (chunk_order.py)."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE
from tiles import ring, shared
from tiles.launching.arguments import FLOAT, INT, SEMAPHORES, array, tiled
from tiles.targets import Target

from ..parts.recurrent.chunk_order import ChunkMajor, HeadMajor, SingleChunks
from ..parts.recurrent.delta_chunk_solver import ChunkSolver
from ..parts.recurrent.delta_chunks import KEY_DIMS, LEAST_BETA, TwoParts
from ..parts.recurrent.delta_config import DeltaConfig, delta_sizes
from ..parts.recurrent.tokens import CHUNK, SequenceLayout

CTAS_PER_SM = 4


@dataclass(frozen=True)
class Config(DeltaConfig):
    """A kernel's configuration. order: of the chunks."""

    order: HeadMajor = field(default=SingleChunks())
    label = "inverses"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return warpgroup.THREADS * self.order.block_workers


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        for size, gated in itertools.product(delta_sizes(everything), (False, True)):
            yield Config(*size, gated)
            if everything or (gated and size[0] == max(KEY_DIMS)):
                yield Config(*size, gated, ChunkMajor(CTAS_PER_SM))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, KEY, SCORES = config.dtype, config.key, config.square
    seq_layout, chunk_vectors, chunk_order = SequenceLayout(), config.vectors, config.order
    ORDER, AHEAD = chunk_order.params(), chunk_order.overlaps
    solver = ChunkSolver(chunk_vectors, TwoParts(INPUT), LEAST_BETA[INPUT])
    smem = shared(
        q=ring(KEY, 1, warpgroup.WARPGROUP),
        k=ring(KEY, 1, warpgroup.WARPGROUP),
        p=SCORES,
        vectors=chunk_vectors.spec,
        high=LOWER_TRIANGLE,
        low=LOWER_TRIANGLE,
    ).per_warpgroup(chunk_order.block_workers)

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM // chunk_order.block_workers), fastmath=True)
    def invert(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gBeta: array(3), gGates: array(3), gSolutions: tiled(SCORES, rows=2),
        gScores: tiled(SCORES, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gTurns: SEMAPHORES, length: INT,
        heads: INT, group: INT, scale: FLOAT, order_args: ORDER,
    ):  # fmt: skip
        """gSolutions: -L^T, high above low. gScores: P. gTurns: set to 0, for each chunk two of each key head, unless there is
        none. order_args: see chunk_order.py."""
        q, k, p, vectors, high, low = smem.open()
        key_heads, _ = divmod(heads, group)
        chunks = chunk_order.begin(cuda.blockIdx.x, seq_layout, 0, length, key_heads, group, order_args)
        warp = warpgroup.rank()
        chunks.let_next_grid_begin()
        for j in range(chunks.n):
            at = chunks.locate(j)
            seq, token, head, key_head, chunk = at.seq, at.token, at.head, at.key_head, at.chunk
            k.fill(j, gK, (seq.batch, token, key_head))
            q.fill(j, gQ, (seq.batch, token, key_head))
            if warp == 0:
                solver.store_decays(vectors, gGates, seq, token, head)
            elif warp == 1:
                solver.store_beta(vectors, gBeta, seq, token, head)
                if head == key_head * group and chunk < gTurns.shape[0]:
                    gTurns[chunk, int32(2 * key_head)] = int32(0)
                    gTurns[chunk, int32(2 * key_head + 1)] = int32(0)
            keys, queries = k.wait(j), q.wait(j)
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
            chunks.count_previous(at, warp)
            if warp == 0 and (not AHEAD or token < seq.end):  # the last chunk of an item may be none
                tma_store(gScores, (chunk, head), p)
                tma_store(gVectors, (chunk, head), vectors)
                tma_store(gSolutions, (chunk, head), high_part)
                tma_store(gSolutions, (chunk, head, 1), low_part)
                store_wait()
            if AHEAD:
                warpgroup.sync()  # all that the next chunk overwrites has been stored
                k.release(j)
                q.release(j)
        if AHEAD:
            chunks.finish(warp)

    return invert, smem
