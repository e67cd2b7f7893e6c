"""The results that a walk over a sequence's chunks stores under the delta rule (delta_walk_ampere.py), as objects with the same
methods: states and errors for gradients, or outputs. S, E, U and O are transposed (delta_chunks.py has the equations)."""

from ops import mma_AB, mma_ABt, store, subtile, transpose, truncate, zeros
from tiles import dtype, fp32, inlined, rt, static
from tiles.launching.arguments import FLOAT, array, record

from ..recurrent.gates import TILE
from ..recurrent.state_panels import state_row
from ..recurrent.tokens import CHUNK, SequenceLayout
from .delta_chunks import WARP_COLUMNS, ChunkDecay

OUT = rt(CHUNK, WARP_COLUMNS, fp32)


@static
class ChunkErrors:
    """For gradients: the states before chunks and the errors E. matrices: how many 64 x 64 matrices the walk loads of a chunk:
    its inverse, high and low. reads_queries: does the walk load queries?"""

    dtype: dtype
    decay: ChunkDecay
    seq_layout: SequenceLayout
    vector_bytes: int
    matrices, reads_queries = 2, False
    label = "states before chunks"

    def params(self):
        """The further parameters of a kernel, as a record. gErrors: E of each chunk and head. gStates: S^T, at state_row."""
        return record(gErrors=array(4, self.dtype), gStates=array(4, self.dtype))

    @inlined
    def store_state(self, params, s_t, at):
        """Store the state before a chunk. at: (chunk, head, first column of the warp)."""
        chunk, head, column = at
        store(params.gStates, self.dtype(s_t), (chunk, head, state_row(column), 0), aligned=True)

    @inlined
    def store_tokens(self, params, chunk_results, q, matrices, seq, j, at):
        """Store the results of the j-th chunk. chunk_results: (S before it, E, U, all transposed, and b of its tokens).
        q: the pipeline of queries. matrices: of the chunk. at: as for store_state."""
        (chunk, head, column), (_, e_t, _, _) = at, chunk_results
        store(params.gErrors, transpose(self.dtype(e_t)), (chunk, head, 0, column), aligned=True)

    @inlined
    def finish(self, params, s_t, gCuSeqlens, sequence, length, head, column):
        """Store the state after the last token, and the outputs of padding."""


class ChunkOutputs(ChunkErrors):
    """O^T = S^T (scale exp(b) Q)^T + U^T P^T, and the state after the last token. Below a chunk's inverse lies P^T."""

    matrices, reads_queries = 3, True
    label = "outputs of chunks"

    def params(self):
        """gO: outputs. gFinalState: transposed, if it is wanted. scale: of queries."""
        return record(gO=array(4, self.dtype), gFinalState=array(4), scale=FLOAT)

    @inlined
    def store_state(self, params, s_t, at):
        pass

    @inlined
    def store_tokens(self, params, chunk_results, q, matrices, seq, j, at):
        (s_t, _, u_t, b), (_, head, column) = chunk_results, at
        o_t = mma_ABt(zeros(TILE), self.dtype(s_t), q.wait(j, 3))
        if not self.decay.queries_include_decay:
            o_t = o_t * (self.decay.exp(b) * params.scale)
        o_t = mma_AB(o_t, self.dtype(u_t), subtile(matrices, CHUNK, 2))
        at = seq.batch, seq.chunk_start(j), head, column
        store(truncate(params.gO, 1, seq.end), transpose(self.dtype(o_t)), at, 1, 3, self.vector_bytes)

    @inlined
    def finish(self, params, s_t, gCuSeqlens, sequence, length, head, column):
        store(params.gFinalState, s_t, (sequence, head, column, 0), aligned=False)
        if self.seq_layout.varlen:
            padding = self.seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(padding.num_chunks()):
                at = padding.batch, padding.chunk_start(j), head, column
                store(params.gO, zeros(OUT), at, 1, 3, self.vector_bytes)
