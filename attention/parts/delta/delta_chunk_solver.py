"""The part of the delta rule's gradients on Hopper that depends on no state (delta_chunks.py has the equations): the vectors of
a chunk's tokens, and L. Two kernels compute it: delta_chunk_states_hopper.py a chunk ahead of the states,
delta_inverse_hopper.py for all chunks at once."""

from ops import cumsum, exp2, less, store, subtile, tile_min, warpgroup, where
from ops.for_attention.triangular_inverse import inverse_transposed
from tiles import inlined, static

from ..recurrent.gates import LOG2_E, clamp_gates, load_line
from ..recurrent.tokens import CHUNK
from .delta_chunks import BETA, DECAY, DECAY_TO_END, SUM, ChunkVectors, TwoParts

TINY = 2.0**-40  # stands for smaller betas where L is divided by beta: that changes no digit of L


@inlined
def away_from_zero(beta, least=TINY):
    """A beta that may be a divisor: `least` where |beta| is less."""
    return where(less(beta * beta, least * least), least, beta)


@static
class ChunkSolver:
    """Computes the vectors and L of a chunk. least_beta: stands for smaller betas, as L is divided by beta."""

    chunk_vectors: ChunkVectors
    two_parts: TwoParts
    least_beta: float

    @inlined
    def store_beta(self, target, gBeta, seq, token, head):
        """One warp stores beta of the chunk that starts at `token` among the chunk's vectors, a shared vector."""
        beta = load_line(gBeta, seq.end, (seq.batch, token, head))
        store(subtile(target, CHUNK, BETA), away_from_zero(beta, self.least_beta))

    @inlined
    def store_decays(self, target, gGates, seq, token, head):
        """One warp stores the sums of the chunk's gates and the decays there, if it has gates."""
        if self.chunk_vectors.gated:
            b = cumsum(clamp_gates(load_line(gGates, seq.end, (seq.batch, token, head))) * LOG2_E)
            store(subtile(target, CHUNK, SUM), b)
            store(subtile(target, CHUNK, DECAY), exp2(b))
            store(subtile(target, CHUNK, DECAY_TO_END), exp2(tile_min(b) - b))

    @inlined
    def solve(self, s, vectors, triangles):
        """(-L beta)^T, by a warpgroup. s: K K^T. vectors: the chunk's. triangles: two shared TRIANGLEs."""
        high, low = triangles
        a = self.chunk_vectors.decay_scores(s, vectors, self.chunk_vectors.cols(vectors, BETA))
        return warpgroup.triu(inverse_transposed(a, high, low), 1, 0.0)

    @inlined
    def split_solution(self, solution, vectors):
        """The two parts of -L^T, from what `solve` returns. Kernels that multiply by it apply beta themselves."""
        return self.two_parts.split(solution / self.chunk_vectors.rows(vectors, BETA))
