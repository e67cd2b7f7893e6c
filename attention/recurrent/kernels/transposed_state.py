"""What a consumer does with a state that it holds transposed, 64 value columns x Dk: U and
O are then transposed as well, and the product of one step, rounded, is the left operand of the next."""

from ops import columns, right_fill, subtile, truncate, warpgroup
from tiles import dtype, inlined, rt

from .tokens import CHUNK, COLUMNS


def turned(key_dim: int, of: dtype, varlen: bool):
    """For keys of key_dim, as padded, and tiles of dtype `of`:

    read(s_t, keys, queries): (S^T K^T, S^T Q^T).
    without_others(v_t, rows): the values of a chunk, transposed, with 0 for the tokens from `rows` on.
    hand_out(gO, mine, o, batch, token, end, head, block): write the outputs of the chunk that begins at `token`, by way of the
    consumer's shared tile `mine`."""
    TURNED = rt(16, CHUNK, of)

    @inlined
    def part(tile, i):
        """The i-th 64 columns of a tile of Q or K."""
        return subtile(tile, CHUNK, 0, 64, i)

    @inlined
    def read(s_t, keys, queries):
        """By 64 columns of S^T at a time: registers for all of them, rounded, there are not."""
        state = of(columns(s_t, 64, 0))
        u, o = warpgroup.mm_ABt(state, part(keys, 0)), warpgroup.mm_ABt(state, part(queries, 0))
        u, o = warpgroup.wait(u, newer=1), warpgroup.wait(o)
        if key_dim > 64:
            state = of(columns(s_t, 64, 1))
            u, o = warpgroup.mma_ABt(u, state, part(keys, 1)), warpgroup.mma_ABt(o, state, part(queries, 1))
            u, o = warpgroup.wait(u, newer=1), warpgroup.wait(o)
        return u, o

    @inlined
    def without_others(v_t, rows):
        if varlen:
            return right_fill(v_t, rows, 0.0)
        else:
            return v_t

    @inlined
    def hand_out(gO, mine, o, batch, token, end, head, block):
        """TMA would write past the end of a sequence among others."""
        warpgroup.store_wait()
        warpgroup.sync()
        warpgroup.store_transposed(mine, o)
        if varlen:
            warpgroup.sync()
            o = warpgroup.load(mine, TURNED)
            warpgroup.store(truncate(gO, 1, end), o, (batch, token, head, COLUMNS * block), 1, 3, True)
        else:
            warpgroup.tma_store(gO, (batch, token, head, block), mine)

    return read, without_others, hand_out
