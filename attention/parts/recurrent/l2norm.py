"""Queries and keys that chunk kernels divide by their L2 norms, x / sqrt(sum(x^2) + 1e-6), instead of a pass before them.

Kernels of channel decays, whose preparer rewrites the tiles of q and k anyhow, do so in shared memory (`normalize`). Those of
the delta rule leave the tiles as they are and multiply what follows, with l_q and l_k the inverse norms of a chunk's queries
and keys:

    A' = tril(beta l_k^2 K K^T, -1)            T' = (I + A')^-1 beta l_k = l_k T
    U' = T' (V - l_k K S) = l_k U              O = l_q (Q S + tril(Q K^T) U')         S' = S + K^T U'

All factors of A' and T' are those of a warp's rows of A'. The solver computes l_k from the diagonal of K K^T, the scorer l_q;
both pass them to consumers through rings (`publish`). Q K^T is rounded before it is
multiplied, so this is for bfloat16, which has float32's range."""

from ops import load, row_sum, rsqrt, store, subtile, warpgroup, zeros
from tiles import fp32, inlined, ring, rt, static, sv

from .tokens import CHUNK

L2NORM_EPSILON = 1e-6  # as in flash-linear-attention and transformers
ROWS = 16  # of a warp
ROW_VEC = rt(16, CHUNK, fp32).row_vec


@static
class L2Norm:
    """enabled: are queries and keys divided by their L2 norms? key_dim: their channels. columns: of a panel of their tiles,
    which a warp loads at once."""

    enabled: bool
    key_dim: int
    columns: int = 64

    @property
    def panel_tile(self):
        """A register tile of 16 tokens and the channels of a panel."""
        return rt(16, self.columns, fp32)

    def rings(self, stages: int, **readers: int) -> dict:
        """Members of shared memory: a ring of inverse norms for each of these numbers of warps that read them."""
        if not self.enabled:
            return {}
        return {name: ring(sv(CHUNK, fp32), stages, n, writers=warpgroup.WARPGROUP) for name, n in readers.items()}

    @inlined
    def inverse_norms(self, tile, warp, fenced=True):
        """1 / sqrt(sum(x^2) + 1e-6) of a warp's 16 rows of a chunk's tile. fenced: as in ops.load."""
        squares = zeros(self.panel_tile.col_vec)
        for i in range(self.key_dim // self.columns):
            x = load(subtile(tile, ROWS, warp, self.columns, i), self.panel_tile, fenced=fenced)
            squares = squares + row_sum(x * x)
        return rsqrt(squares + L2NORM_EPSILON)

    @inlined
    def normalize(self, tile, warp):
        """Divide a chunk's rows by their L2 norms in shared memory, 16 in each warp of a warpgroup, which then synchronises."""
        if self.enabled:
            inverse_norms = self.inverse_norms(tile, warp)
            for i in range(self.key_dim // self.columns):
                part = subtile(tile, ROWS, warp, self.columns, i)
                store(part, load(part, self.panel_tile, fenced=False) * inverse_norms)

    @inlined
    def sync(self):
        """Wait until other warps of the warpgroup may read the rows that `normalize` wrote."""
        if self.enabled:
            warpgroup.sync()

    @inlined
    def publish(self, rings, index, j, tile):
        """Write the inverse norms of a chunk's rows to the j-th slot of rings[index], 16 by each warp, and return those of the
        warp's rows."""
        if self.enabled:
            inverse_norms = self.inverse_norms(tile, warpgroup.rank())
            self.store_norms(rings, index, j, inverse_norms)
            return inverse_norms
        else:
            return 0.0

    @inlined
    def invert_squares(self, squares):
        """The inverse norms of rows whose squares of norms are known; 1 if they are not divided."""
        if self.enabled:
            return rsqrt(squares + L2NORM_EPSILON)
        else:
            return 1.0

    @inlined
    def store_norms(self, rings, index, j, inverse_norms):
        """Write the inverse norms of a chunk's rows to the j-th slot of rings[index], 16 by each warp."""
        if self.enabled:
            store(subtile(rings[index].claim(j), ROWS, warpgroup.rank()), inverse_norms)
            rings[index].publish(j)

    @inlined
    def scale_rows(self, x, inverse_norms):
        """The scores of a warp's rows, times their inverse norms."""
        if self.enabled:
            return x * inverse_norms
        else:
            return x

    @inlined
    def scale_columns(self, x, rings, index, j):
        """What has a column for each token, times their inverse norms in the j-th slot of rings[index]."""
        if self.enabled:
            return x * load(rings[index].wait(j), ROW_VEC)
        else:
            return x

    @inlined
    def release(self, rings, index, j):
        """Release the j-th slot of rings[index]."""
        if self.enabled:
            rings[index].release(j)
