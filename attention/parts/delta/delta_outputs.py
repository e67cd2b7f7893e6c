"""What a walk over the states of the delta rule on Hopper computes beside what gradients read (delta_chunk_states_hopper.py):
nothing, or in training's forward pass the outputs, as objects with the same methods. With S the state before a chunk, E its
errors, b the cumulative sum of its gates and P = scale M * Q K^T (delta_chunks.py),

    O = scale exp(b) Q S + P (beta E)

The solver, which is ahead of the states, computes P. Consumers multiply Q by the state from shared memory, where it lies for
the warp that stores it, as their registers are taken by S, E and O."""

from numba import cuda
from numpy import int32

from ops import divmod, store, subtile, warpgroup
from ops.for_attention.triangular_inverse import LOWER_TRIANGLE, TRIANGLE
from tiles import dtype, inlined, ring, static
from tiles.launching.arguments import FLOAT, array, record, tiled

from ..recurrent.tokens import CHUNK, COLUMNS
from .delta_chunks import DECAY, ChunkVectors

WARPS = warpgroup.WARPGROUP


@static
class StatesAlone:
    """For gradients of a call that stored nothing. value_stages: chunks in flight of values and queries. solutions: how many L
    are in shared memory, and vector_stages: of how many chunks the vectors. triangle: where the solver computes inverses.
    tiles_of_chunk: how many tiles a chunk has in the ring of results. products: how many a consumer has under way behind that
    for E. state_readers: how many warps of each consumer read the state from shared memory."""

    value_stages, solutions, vector_stages, triangle = 3, 2, 8, TRIANGLE
    tiles_of_chunk, products, state_readers = 1, 0, 0

    def __str__(self):
        return ""

    def params(self, key, values):
        """The further parameters of a kernel, as a record. key, values: its tiles of keys and values."""
        return record()

    def rings(self, key, square, consumers):
        """The further members of the shared storage. square: the tile of P."""
        return {}

    @inlined
    def load_queries(self, memory, j, params, layout, place, key_head):
        """The loader fills the queries of the j-th chunk, a ChunkPlace."""

    @inlined
    def release_early(self, ring, j):
        """The solver gives the j-th tile of a ring back when it needs no more of it for the inverse."""
        ring.release(j)

    @inlined
    def store_scores(self, memory, j, keys, vectors, params):
        """The solver stores P of the j-th chunk, and gives back what release_early has not. vectors: those of its tokens."""

    @inlined
    def multiply(self, memory, j, consumer, weighted, vectors, params):
        """O of the j-th chunk, pending, transposed, of a consumer's columns. weighted: beta E."""
        return 0.0

    @inlined
    def store(self, o, memory, j, consumer):
        """A consumer passes O of the j-th chunk on to the warp that stores it."""

    @inlined
    def send(self, memory, j, params, layout, place):
        """A warp stores O of the j-th chunk, a ChunkPlace."""

    @inlined
    def store_last_state(self, params, s_t, heads):
        """A consumer stores the state after the last token."""


@static
class DeltaOutputs(StatesAlone):
    """The outputs, and the state after the last token. dtype: of inputs. chunk_vectors: of a chunk's tokens."""

    dtype: dtype
    chunk_vectors: ChunkVectors
    value_stages, solutions, vector_stages, triangle = 2, 1, 4, LOWER_TRIANGLE
    tiles_of_chunk, products, state_readers = 2, 1, WARPS

    def __str__(self):
        return "with outputs"

    def params(self, key, values):
        """gQ, gO: of tokens. gTailQ, gTailO: see packed_tails.py. gFinalState: transposed, if it is wanted."""
        keys, all_values = tiled(key, unit=1), tiled(values, unit=1)
        arrays = {"gQ": keys, "gO": all_values, "gTailQ": keys, "gTailO": all_values}
        return record(**arrays, gFinalState=array(4), scale=FLOAT)

    def rings(self, key, square, consumers):
        readers = consumers * WARPS
        return {
            "q": ring(key, self.value_stages, readers + WARPS),
            "p": ring(square, self.value_stages, readers, writers=WARPS),
        }

    @inlined
    def load_queries(self, memory, j, params, layout, place, key_head):
        layout.fill_chunk(memory.q, j, params.gQ, params.gTailQ, place, key_head)

    @inlined
    def release_early(self, ring, j):
        pass

    @inlined
    def store_scores(self, memory, j, keys, vectors, params):
        s = warpgroup.wait(warpgroup.mm_ABt(memory.q.wait(j), keys))
        memory.q.release(j)
        memory.k.release(j)
        s = self.chunk_vectors.decay_scores(s, vectors, params.scale)
        warpgroup.store(memory.p.claim(j), self.dtype(warpgroup.causal(s, 0, 0.0)))
        memory.p.publish(j)
        memory.vectors.release(j)

    @inlined
    def multiply(self, memory, j, consumer, weighted, vectors, params):
        rounded = self.dtype(weighted)
        o = warpgroup.mm_ABt(subtile(memory.states.wait(j), COLUMNS, consumer), memory.q.wait(j))
        o = self.chunk_vectors.decay_cols(warpgroup.wait(o) * params.scale, vectors, DECAY)
        memory.states.release(j)
        memory.q.release(j)
        return warpgroup.mma_ABt(o, rounded, memory.p.wait(j))

    @inlined
    def store(self, o, memory, j, consumer):
        o = warpgroup.wait(o)
        memory.p.release(j)
        warpgroup.store_transposed(subtile(memory.out.claim(2 * j + 1), CHUNK, 0, COLUMNS, consumer), o)
        memory.out.publish(2 * j + 1)

    @inlined
    def send(self, memory, j, params, layout, place):
        layout.send_chunk(memory.out, 2 * j + 1, params.gO, params.gTailO, place)

    @inlined
    def store_last_state(self, params, s_t, heads):
        sequence, head = divmod(cuda.blockIdx.x, heads)  # anew, to save registers
        row = int32(COLUMNS * warpgroup.id() + 16 * warpgroup.rank())
        store(params.gFinalState, s_t, (sequence, head, row, 0), aligned=False)


STATES_ALONE = StatesAlone()
