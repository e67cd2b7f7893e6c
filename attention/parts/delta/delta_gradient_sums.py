"""Sums of rows in the kernels that compute gradients of the delta rule on Hopper: DeltaGradientSums has those of the walks
(delta_gradients_hopper.py, delta_segment_gradients_hopper.py). dbeta and the gradients of gates are made of them
(delta_gate_sums.py). Consumers leave them in shared vectors; warps of the producer store them, as nobody else is to wait for
memory."""

from numpy import int32

from ops import col_index, columns, equal, load, row_sum, store, subtile, truncate, warpgroup, where
from tiles import dtype, fp32, inlined, rt, static, sv

from ..recurrent.gates import COL_VEC, TILE
from ..recurrent.tokens import CHUNK, COLUMNS
from .delta_chunks import BETA
from .delta_gate_sums import STATE_WARPS, WARPS, NoGateSums

PANEL = 64  # columns that are multiplied at once


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
    """The sums of a kernel whose keys have `key_dim` channels, padded, and a dtype. gates: what becomes of those that gates'
    gradients are made of. Of each chunk there are value sums, which consumers write, beta dbeta of its tokens and parts of
    <S, dS>, and key sums, which the warpgroup for dQ and dK writes."""

    key_dim: int
    dtype: dtype
    gates: NoGateSums

    @property
    def value_sums(self):
        """The shared vector of a chunk's value sums."""
        return sv(CHUNK + 16 * self.state_warps, fp32)

    @property
    def key_sums(self):
        """The shared vector of a chunk's key sums."""
        return sv(CHUNK * 3, fp32)

    @property
    def state_warps(self):
        """How many warps of consumers read S to multiply it by dS."""
        return STATE_WARPS if self.gates.wanted else 0

    @inlined
    def store_beta_dots(self, sums, score):
        """Write beta dbeta, the diagonal of dV E^T, to a chunk's value sums."""
        warpgroup.store(subtile(sums, CHUNK, 0), diagonal(score))

    @inlined
    def store_state_dots(self, sums, ds_t, s, j, consumer):
        """Write this warp's part of <S, dS> to the j-th chunk's value sums. ds_t: its rows of dS, transposed. The loads of S
        have no fence, so that what is given back next must have one."""
        if self.gates.wanted:
            self._store_state_part(sums, self.dot_rows(ds_t, subtile(s.wait(j), COLUMNS, consumer)), consumer)

    @inlined
    def store_state_dots_of_tiles(self, sums, s, ds, j):
        """store_state_dots, where dS is in shared memory."""
        if self.gates.wanted:
            consumer = warpgroup.id()  # found anew: what is held over the loop would spill registers
            states, gradients = subtile(s.wait(j), COLUMNS, consumer), subtile(ds.wait(j), COLUMNS, consumer)
            self._store_state_part(sums, self.dot_rows_of_tiles(states, gradients), consumer)

    @inlined
    def _store_state_part(self, sums, dots, consumer):
        store(subtile(sums, 16, int32(WARPS + WARPS * consumer + warpgroup.rank())), dots)

    @inlined
    def release_states(self, ring, j):
        """Give back S or dS, if consumers have read it for these sums."""
        if self.gates.wanted:
            ring.release(j)

    @inlined
    def claim_key_sums(self, key_sums, j):
        """The shared vector for the key sums of the j-th chunk, to be written."""
        if self.gates.wanted:
            return key_sums.claim(j)
        else:
            return 0

    @inlined
    def store_dots(self, sums, index, x, tile):
        """Write rowsum(x * tile), by its index, to a chunk's key sums."""
        if self.gates.wanted:
            warpgroup.store(subtile(sums, CHUNK, index), self.dot_rows(x, tile))

    @inlined
    def publish_key_sums(self, key_sums, j):
        """The j-th chunk's key sums are there."""
        if self.gates.wanted:
            key_sums.publish(j)

    @inlined
    def send_value_sums(self, vectors, value_sums, gDBeta, gate_args, walk):
        """One warp stores dbeta of the chunks of a HeadWalk, and what `gates` stores of <S, dS>. vectors: a ring of their
        ChunkVectors. gate_args: the parameters of `gates`."""
        for j in range(walk.n):
            chunk, head, _, token, seq = walk.place(j)
            vector_tile, parts = vectors.wait(j), value_sums.wait(j)
            store_beta_gradients(gDBeta, seq, head, token, parts, subtile(vector_tile, CHUNK, BETA))
            self.gates.store_state_dots(gate_args, chunk, head, parts)
            vectors.release(j)
            value_sums.release(j)

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
