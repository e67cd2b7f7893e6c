"""Sums of rows in the kernels that compute gradients of the delta rule on Hopper: DeltaGradientSums has those of the walks
(delta_gradients_hopper.py, delta_segment_gradients_hopper.py). dbeta and the gradients of gates are made of them
(kernels/gate_gradient.py). Consumers leave them in shared vectors; warps of the producer store them, as nobody else is to wait
for memory."""

from numpy import int32

from ops import col_index, columns, equal, load, row_sum, store, subtile, truncate, warpgroup, where, zeros
from tiles import dtype, fp32, inlined, rt, static

from .gates import COL_VEC, TILE
from .tokens import CHUNK

WARPS, PANEL = warpgroup.WARPGROUP, 64  # warps that share the rows of a chunk; columns that are multiplied at once


@inlined
def diagonal(scores):
    """The diagonal of a warpgroup's scores: that of dV E^T is beta dbeta."""
    return row_sum(where(equal(warpgroup.row_index(TILE.col_vec), col_index(TILE.row_vec)), scores, 0.0))


@inlined
def store_beta_gradients(gDBeta, seq, head, token, products, betas):
    """Store dbeta of the chunk that begins at `token`. products: a shared vector that begins with beta dbeta, betas: with
    beta."""
    for i in range(WARPS):
        at = seq.batch, int32(token + 16 * i), head
        dbeta = load(subtile(products, 16, i), COL_VEC) / load(subtile(betas, 16, i), COL_VEC)
        store(truncate(gDBeta, 1, seq.end), dbeta, at, cols=1)


@static
class DeltaGradientSums:
    """The sums of a kernel whose keys have `key_dim` channels, padded, and a dtype."""

    key_dim: int
    dtype: dtype

    @inlined
    def load_panel(self, tile, panel):
        """This warp's rows of 64 columns of a shared tile, without a fence, which follows before it is given back."""
        return fp32(warpgroup.load(subtile(tile, CHUNK, 0, PANEL, panel), rt(16, PANEL, self.dtype), fenced=False))

    @inlined
    def dot_rows(self, x, tile):
        """rowsum(x * tile), of a register tile and a shared one, by panels of 64 columns."""
        dots = row_sum(columns(x, PANEL, 0) * self.load_panel(tile, 0))
        if self.key_dim > PANEL:
            dots = dots + row_sum(columns(x, PANEL, 1) * self.load_panel(tile, 1))
        return dots

    @inlined
    def dot_rows_of_tiles(self, x, y):
        """rowsum(x * y) of this warp's rows of two shared tiles."""
        dots = row_sum(self.load_panel(x, 0) * self.load_panel(y, 0))
        if self.key_dim > PANEL:
            dots = dots + row_sum(self.load_panel(x, 1) * self.load_panel(y, 1))
        return dots

    @inlined
    def add_up(self, parts, first, count):
        """The sum of `count` parts of 16 numbers of a shared vector, from the part `first` on."""
        total = zeros(COL_VEC)
        for part in range(count):
            total = total + load(subtile(parts, 16, int32(first + part)), COL_VEC)
        return total

    @inlined
    def store_differences(self, gDots, seq, head, token, parts):
        """Store, of the chunk that begins at `token`, the first 64 numbers of `parts` less the next 64."""
        for i in range(WARPS):
            at = seq.batch, int32(token + 16 * i), head
            dots = load(subtile(parts, 16, i), COL_VEC) - load(subtile(parts, 16, int32(WARPS + i)), COL_VEC)
            store(truncate(gDots, 1, seq.end), dots, at, cols=1)
