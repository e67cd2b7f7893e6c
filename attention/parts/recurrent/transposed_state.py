"""A chunk state that a consumer holds transposed, S^T: 64 value columns x Dk. U and O are then transposed as well, and the
product of one step, rounded, is the left operand of the next one without leaving the registers."""

from numpy import float32

from ops import col_index, columns, equal, subtile, warpgroup, where, zeros
from tiles import dtype, fp32, inlined, rt, static

from .tokens import CHUNK, SequenceLayout


@static
class TransposedState:
    """States for keys of key_dim channels, padded, and shared tiles of this dtype."""

    key_dim: int
    dtype: dtype
    seq_layout: SequenceLayout

    @property
    def values(self):
        """The type of a warp's part of a chunk's values, transposed."""
        return rt(16, CHUNK, self.dtype)

    @inlined
    def start_transition(self, column, values):
        """A consumer's columns of [0 | I], from `column` on. values: the number of columns of 0."""
        tile = rt(16, self.key_dim, fp32)
        return where(equal(warpgroup.row_index(tile.col_vec) + float32(column - values), col_index(tile)), 1.0, zeros(tile))

    @inlined
    def apply(self, s_t, keys, queries):
        """(S^T K^T, S^T Q^T), computed from 64 columns of S^T at a time, because registers do not hold all of it rounded."""
        state = self.dtype(columns(s_t, 64, 0))
        s_k = warpgroup.mm_ABt(state, subtile(keys, CHUNK, 0, 64, 0))
        o = warpgroup.mm_ABt(state, subtile(queries, CHUNK, 0, 64, 0))
        s_k, o = warpgroup.wait(s_k, newer=1), warpgroup.wait(o)
        if self.key_dim > 64:
            state = self.dtype(columns(s_t, 64, 1))
            s_k = warpgroup.mma_ABt(s_k, state, subtile(keys, CHUNK, 0, 64, 1))
            o = warpgroup.mma_ABt(o, state, subtile(queries, CHUNK, 0, 64, 1))
            s_k, o = warpgroup.wait(s_k, newer=1), warpgroup.wait(o)
        if self.key_dim > 128:
            state = self.dtype(columns(s_t, 64, 2))
            s_k = warpgroup.mma_ABt(s_k, state, subtile(keys, CHUNK, 0, 64, 2))
            o = warpgroup.mma_ABt(o, state, subtile(queries, CHUNK, 0, 64, 2))
            s_k, o = warpgroup.wait(s_k, newer=1), warpgroup.wait(o)
            state = self.dtype(columns(s_t, 64, 3))
            s_k = warpgroup.mma_ABt(s_k, state, subtile(keys, CHUNK, 0, 64, 3))
            o = warpgroup.mma_ABt(o, state, subtile(queries, CHUNK, 0, 64, 3))
            s_k, o = warpgroup.wait(s_k, newer=1), warpgroup.wait(o)
        return s_k, o

    @inlined
    def store_output(self, gO, tile, o, seq, token, head, block):
        """Store the transposed outputs of the chunk that starts at `token`, through the consumer's shared tile."""
        warpgroup.store_wait()
        warpgroup.sync()
        warpgroup.store_transposed(tile, o)
        if self.seq_layout.varlen:
            warpgroup.sync()
            self.seq_layout.store_rows(gO, warpgroup.load(tile, self.values), seq, token, head, block)
        else:
            warpgroup.tma_store(gO, (seq.batch, token, head, block), tile)
