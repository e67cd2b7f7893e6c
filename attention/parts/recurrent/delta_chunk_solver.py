"""The part of the delta rule's gradients on Hopper that depends on no state (delta_chunks.py has the equations): the vectors of
a chunk's tokens, and L. Two kernels compute it: delta_chunk_states_hopper.py a chunk ahead of the states,
delta_inverse_hopper.py for all chunks at once."""

from ops import cumsum, exp2, less, load, store, subtile, tile_min, transpose, truncate, warpgroup, where
from ops.for_attention.triangular_inverse import inverse_transposed
from tiles import inlined, static

from .delta_chunks import BETA, DECAY, DECAY_TO_END, SUM, ChunkVectors, TwoParts
from .gates import CHUNK_COL_VEC, LOG2_E, clamp_gates
from .tokens import CHUNK

TINY = 2.0**-40  # stands for smaller betas where L is divided by beta: that changes no digit of L


@inlined
def away_from_zero(beta, least=TINY):
    """A beta that may be a divisor: `least` where |beta| is less."""
    return where(less(beta * beta, least * least), least, beta)


@static
class ChunkSolver:
    """Computes the vectors, -L beta and R of a chunk. least_beta: stands for smaller betas; 0: betas stay as they are."""

    chunk_vectors: ChunkVectors
    two_parts: TwoParts
    least_beta: float = 0.0

    @inlined
    def store_vectors(self, target, gVectors, gBeta, gGates, seq, token, chunk, head):
        """One warp stores the vectors of the chunk that starts at `token`, in a shared vector and in memory."""
        at = seq.batch, token, head
        beta = transpose(load(truncate(gBeta, 1, seq.end), CHUNK_COL_VEC, at, cols=1))
        if self.least_beta:
            beta = away_from_zero(beta, self.least_beta)
        store(subtile(target, CHUNK, BETA), beta)
        store(gVectors, beta, (chunk, head, 0))
        if self.chunk_vectors.gated:
            gates = load(truncate(gGates, 1, seq.end), CHUNK_COL_VEC, at, cols=1)
            b = cumsum(clamp_gates(transpose(gates)) * LOG2_E)
            store(subtile(target, CHUNK, SUM), b)
            store(gVectors, b, (chunk, head, CHUNK * SUM))
            decay = exp2(b)
            store(subtile(target, CHUNK, DECAY), decay)
            store(gVectors, decay, (chunk, head, CHUNK * DECAY))
            decay = exp2(tile_min(b) - b)
            store(subtile(target, CHUNK, DECAY_TO_END), decay)
            store(gVectors, decay, (chunk, head, CHUNK * DECAY_TO_END))

    @inlined
    def solve(self, s, vectors, triangles):
        """(-L beta)^T, by a warpgroup. s: K K^T. vectors: the chunk's. triangles: two shared TRIANGLEs."""
        high, low = triangles
        a = self.chunk_vectors.decay_scores(s, vectors, away_from_zero(self.chunk_vectors.cols(vectors, BETA)))
        return warpgroup.triu(inverse_transposed(a, high, low), 1, 0.0)

    @inlined
    def split_solution(self, solution, vectors):
        """The two parts of -L^T, from what `solve` returns. Kernels that multiply by it apply beta themselves."""
        return self.two_parts.split(solution / away_from_zero(self.chunk_vectors.rows(vectors, BETA)))

    @inlined
    def split_reverse(self, solution, vectors):
        """The two parts of R^T, from what `solve` returns."""
        reverse = solution / away_from_zero(self.chunk_vectors.rows(vectors, BETA))
        return self.two_parts.split(reverse * self.chunk_vectors.cols(vectors, BETA))
