"""The scores of a strong chunk (channel_decay.py) whose blocks of 16 tokens have a reference r each, the middle of their b.

The score of a query i of block m with a key j of block n <= m is

    q_i . (exp(b_i - b_j) k_j) = (q_i exp(b_i - r_m) exp(r_m - r_n)) . (k_j exp(r_n - b_j))

`factor_block_decays` has written q_i exp(b_i - r_m) in the queries' place, and the keys decayed to their own references. A warp
has the queries of one block, which take one more factor from each block of keys to the one before: exp(r_m - r_(m-1)), never
more than 1, and a power of 2, so that no product is rounded. It may be less than the dtype holds, so they are multiplied by its
root twice. Behind the first block they are decayed from the start of the chunk: q', which goes back to their place."""

from ops import hstack, load, mma_ABt, ones, store, warpgroup, zeros
from tiles import fp32, inlined, rt, static

from .channel_decay import TOKEN_GROUP, WarpChannels


@static
class BlockScores(WarpChannels):
    """The scores of a strong chunk by blocks of 16 tokens."""

    @property
    def operand(self):
        """A register tile of a block's tokens and a warp's channels, for a product."""
        return rt(TOKEN_GROUP, self.warp_tile.cols, self.dtype)

    @inlined
    def compute(self, tile, blocks, warp):
        """A warp's rows of scores, 0 in the blocks above the diagonal; the upper triangle of the diagonal's is not for use.
        tile: of the queries, decayed from their blocks' references, which q' overwrites. blocks: what `factor_block_decays`
        wrote."""
        block_keys, block_decays = blocks
        nothing = zeros(rt(TOKEN_GROUP, TOKEN_GROUP, fp32))
        s0, s1, s2, s3 = nothing, nothing, nothing, nothing
        for i in range(warpgroup.WARPGROUP):  # the channels of each warp
            part = self.group_part(tile, warp, i)
            x = load(part, self.operand, fenced=False)
            if warp == 3:
                s3 = mma_ABt(s3, x, self.block_part(block_keys, 3, i))
                x = self.decay_rows(x, block_decays, 3, i)
            if warp >= 2:
                s2 = mma_ABt(s2, x, self.block_part(block_keys, 2, i))
                x = self.decay_rows(x, block_decays, 2, i)
            if warp >= 1:
                s1 = mma_ABt(s1, x, self.block_part(block_keys, 1, i))
                x = self.decay_rows(x, block_decays, 1, i)
            s0 = mma_ABt(s0, x, self.block_part(block_keys, 0, i))
            store(part, self.decay_rows(x, block_decays, 0, i))
        return hstack(hstack(s0, s1), hstack(s2, s3))

    @inlined
    def decay_rows(self, x, block_decays, block, i):
        """Rows decayed from the reference of a block, decayed from that of the block before."""
        root = load(self.reference_part(block_decays, block, i), self.warp_tile.row_vec)
        root = self.dtype(ones(rt(TOKEN_GROUP, self.warp_tile.cols, fp32)) * root)
        return x * root * root
