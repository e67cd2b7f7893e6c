"""Queries and keys that chunk kernels divide by their lengths, x / sqrt(sum(x^2) + 1e-6), instead of a pass before them.

Kernels of channel decays, whose preparer rewrites the tiles of q and k anyhow, do so in shared memory (`normalize`). Those of
the delta rule leave the tiles as they are and multiply what follows, with l_q and l_k the inverse lengths of a chunk's queries
and keys:

    A = l_k l_k^T * tril(beta K K^T, -1)       T' = l_k T         U' = T' (V - l_k K S) = l_k U
    O = l_q (Q S + tril(Q K^T) U')             S' = S + K^T U'

The solver computes l_k, the scorer l_q; both pass them to consumers through rings (`publish`). Q K^T is rounded before it is
multiplied, so this is for bfloat16, which has float32's range."""

from ops import load, row_sum, rsqrt, store, subtile, warpgroup, zeros
from tiles import fp32, inlined, ring, rt, static, sv

from ...gates import L2NORM_EPSILON
from .tokens import CHUNK

ROWS = 16  # of a warp
ROW_VEC = rt(16, CHUNK, fp32).row_vec


@static
class L2Norm:
    """used: are queries and keys divided by their lengths? key_dim: their channels. columns: of a panel of their tiles, which a
    warp loads at once."""

    used: bool
    key_dim: int
    columns: int = 64

    @property
    def part(self):
        """A register tile of 16 tokens and the channels of a panel."""
        return rt(16, self.columns, fp32)

    def rings(self, stages: int, **readers: int) -> dict:
        """Members of shared memory: a ring of inverse lengths for each of these numbers of warps that read them."""
        vectors = sv(CHUNK, fp32)
        return {name: ring(vectors, stages, n, writers=warpgroup.WARPGROUP) for name, n in readers.items()} if self.used else {}

    @inlined
    def inverse_lengths(self, tile, warp, fenced=True):
        """1 / sqrt(sum(x^2) + 1e-6) of a warp's 16 rows of a chunk's tile. fenced: as in ops.load."""
        squares = zeros(self.part.col_vec)
        for i in range(self.key_dim // self.columns):
            x = load(subtile(tile, ROWS, warp, self.columns, i), self.part, fenced=fenced)
            squares = squares + row_sum(x * x)
        return rsqrt(squares + L2NORM_EPSILON)

    @inlined
    def normalize(self, tile, warp):
        """Divide a chunk's rows by their lengths in shared memory, 16 in each warp of a warpgroup, which then synchronises."""
        if self.used:
            inverse = self.inverse_lengths(tile, warp)
            for i in range(self.key_dim // self.columns):
                part = subtile(tile, ROWS, warp, self.columns, i)
                store(part, load(part, self.part, fenced=False) * inverse)

    @inlined
    def sync(self):
        """Wait until other warps of the warpgroup may read the rows that `normalize` wrote."""
        if self.used:
            warpgroup.sync()

    @inlined
    def publish(self, rings, which, j, tile):
        """Write the inverse lengths of a chunk's rows to the j-th slot of a ring, 16 by each warp, and return those of the
        warp's rows."""
        if self.used:
            inverse = self.inverse_lengths(tile, warpgroup.rank())
            store(subtile(rings[which].claim(j), ROWS, warpgroup.rank()), inverse)
            rings[which].publish(j)
            return inverse
        else:
            return 0.0

    @inlined
    def scale_rows(self, x, inverse):
        """The scores of a warp's rows, times their inverse lengths."""
        if self.used:
            return x * inverse
        else:
            return x

    @inlined
    def scale_columns(self, x, rings, which, j):
        """What has a column for each token, times their inverse lengths in the j-th slot of a ring."""
        if self.used:
            return x * load(rings[which].wait(j), ROW_VEC)
        else:
            return x

    @inlined
    def release(self, rings, which, j):
        """Release the j-th slot of a ring."""
        if self.used:
            rings[which].release(j)
