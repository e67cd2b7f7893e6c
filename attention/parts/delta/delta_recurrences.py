"""Which of the delta rule's recurrences delta_chains_hopper.py runs, as objects with the same methods: that of the states and
that of their gradients side by side, for gradients of a call that stored nothing; in training's forward pass that of the
states, with the outputs O = scale exp(b) Q S + P (beta E); in its backward pass that of the gradients."""

from ops import divmod, warpgroup
from tiles import dtype, inlined, ring, static
from tiles.launching.arguments import SEMAPHORES, array, record, tiled

from ..recurrent.tokens import send_tile
from .delta_chunks import DECAY, ChunkVectors
from .delta_gradient_config import clear_counts

# The recurrences: the reverse one, of gradients, takes longer, so that its blocks come first
REVERSE, FORWARD = range(2)


@static
class BothRecurrences:
    """The recurrences of S and dS side by side. count: how many recurrences a head has. query_stages: chunks in flight of Q and
    P. products: how many products of outputs are under way behind that which the recurrence of the states waits for."""

    count, query_stages, products = 2, 3, 0

    def __str__(self):
        return ""

    def params(self, values):
        """The further parameters of a kernel, as a record. values: the tile of a block's columns of values."""
        return record()

    def rings(self, values):
        """The further members of the shared storage."""
        return {}

    @inlined
    def locate(self, index, sequences):
        """(the recurrence of a thread block, its sequence). index: of both."""
        return divmod(index, sequences)

    @inlined
    def load_queries(self, memory, j, gQ, gScores, at, chunk, head):
        """The loader fills the queries and P of the j-th chunk for outputs. at: (batch, token, head of keys)."""

    @inlined
    def multiply_queries(self, memory, j, rounded):
        """Q S of the j-th chunk, pending, transposed, of the state `rounded`."""
        return 0.0

    @inlined
    def finish_queries(self, o, memory, j):
        """Wait for Q S, and give the queries back."""
        return o

    @inlined
    def decay(self, o, vectors, scale):
        """scale exp(b) Q S. vectors: of the chunk's tokens."""
        return o

    @inlined
    def add_errors(self, o, memory, j, e, beta):
        """O of the j-th chunk, pending."""
        return o

    @inlined
    def store_outputs(self, o, memory, j):
        """The consumer passes O of the j-th chunk on to the warp that stores it."""

    @inlined
    def send_outputs(self, memory, j, params, at):
        """A warp stores O of the j-th chunk. at: (batch, token, head, block of columns)."""

    @inlined
    def store_last_state(self, params, s_t, at):
        """The consumer stores the state after the last token."""

    @inlined
    def clear_counts(self, params, chunk, key_head, member, block):
        """A warp sets the counts of a chunk and head of keys to 0, once for all value heads and columns."""


@static
class StatesWithOutputs(BothRecurrences):
    """The recurrence of S alone, and O. dtype: of inputs. chunk_vectors: of a chunk's tokens."""

    dtype: dtype
    chunk_vectors: ChunkVectors
    count, query_stages, products = 1, 2, 1

    def __str__(self):
        return "states, with outputs"

    def params(self, values):
        """gO: outputs, of tokens. gFinalState: transposed, if it is wanted."""
        return record(gO=tiled(values, unit=1), gFinalState=array(4))

    def rings(self, values):
        return {"outputs": ring(values, 1, 1, writers=warpgroup.WARPGROUP)}

    @inlined
    def locate(self, index, sequences):
        return FORWARD, index

    @inlined
    def load_queries(self, memory, j, gQ, gScores, at, chunk, head):
        memory.q.fill(j, gQ, at)
        memory.p.fill(j, gScores, (chunk, head))

    @inlined
    def multiply_queries(self, memory, j, rounded):
        return warpgroup.mm_ABt(rounded, memory.q.wait(j))

    @inlined
    def finish_queries(self, o, memory, j):
        o = warpgroup.wait(o)
        memory.q.release(j)
        return o

    @inlined
    def decay(self, o, vectors, scale):
        return self.chunk_vectors.decay_cols(o * scale, vectors, DECAY)

    @inlined
    def add_errors(self, o, memory, j, e, beta):
        return warpgroup.mma_ABt(o, self.dtype(e * beta), memory.p.wait(j))

    @inlined
    def store_outputs(self, o, memory, j):
        o = warpgroup.wait(o)
        memory.p.release(j)
        warpgroup.store_transposed(memory.outputs.claim(j), o)
        memory.outputs.publish(j)

    @inlined
    def send_outputs(self, memory, j, params, at):
        send_tile(memory.outputs, j, params.gO, at)

    @inlined
    def store_last_state(self, params, s_t, at):
        warpgroup.store(params.gFinalState, s_t, at, aligned=False)


class GradientsAlone(BothRecurrences):
    """The recurrence of dS alone. There is no launch before it that sets the counts of delta_segment_gradients_hopper.py to 0:
    it does so."""

    count = 1

    def __str__(self):
        return "gradients"

    def params(self, values):
        """gCounts: for each chunk two of each head of keys."""
        return record(gCounts=SEMAPHORES)

    @inlined
    def locate(self, index, sequences):
        return REVERSE, index

    @inlined
    def clear_counts(self, params, chunk, key_head, member, block):
        if member == 0 and block == 0:
            clear_counts(params.gCounts, chunk, key_head)


BOTH, GRADIENTS_ALONE = BothRecurrences(), GradientsAlone()
