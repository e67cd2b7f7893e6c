"""The terms of the delta rule's gradients that come from pairs of tokens of a chunk, where each channel of the keys has a
decay, as products of two blocks of 32 tokens each (delta_channel_block_gradients_hopper.py has the equations)."""

from ops import column, cumsum, exp2, subtile, turned, warpgroup
from tiles import fp32, inlined

from .token_channels import BLOCK, TokenChannels
from .tokens import CHUNK


class TokenPairs(TokenChannels):
    """The pairs of a chunk's tokens, in a warp's channels. tiles: shared ones of the chunk, Q^, K* and K^."""

    @inlined
    def load(self, tile, block):
        """A block of a shared tile, transposed, in float32."""
        return fp32(self.load_block(tile, block))

    @inlined
    def store(self, tile, block, x):
        """Write a block of a shared tile, x transposed."""
        warpgroup.store_transposed(subtile(tile, BLOCK, block), self.dtype(x), True)

    @inlined
    def factor(self, tiles, b, r, block):
        """Write Q^ over q, K* over k, and K^, in a block."""
        (queries, keys, read_keys), decay = tiles, exp2(b - r)
        self.store(queries, block, self.load(queries, block) * decay)
        key = self.load(keys, block)
        self.store(read_keys, block, key * decay)
        self.store(keys, block, key * exp2(r - b))

    @inlined
    def add_pairs(self, first, second, tiles, scores, root):
        """(X, Y, W) of both blocks with the pairs of tokens, from what goes through states. scores: dP above G. root: of D."""
        (x_0, y_0, w_0), (x_1, y_1, w_1), (queries, keys, read_keys) = first, second, tiles
        dp, g = subtile(scores, CHUNK, 0), subtile(scores, CHUNK, 1)
        queries_1, keys_0, read_1 = subtile(queries, BLOCK, 1), subtile(keys, BLOCK, 0), subtile(read_keys, BLOCK, 1)
        x_1 = warpgroup.mma_AtBt(x_1, keys_0, subtile(dp, BLOCK, 1, BLOCK, 0))
        y_1 = warpgroup.mma_AtBt(y_1, keys_0, subtile(g, BLOCK, 1, BLOCK, 0))
        w_0 = warpgroup.mma_AtB(w_0, queries_1, subtile(dp, BLOCK, 1, BLOCK, 0))
        w_0 = warpgroup.mma_AtB(w_0, read_1, subtile(g, BLOCK, 1, BLOCK, 0))
        x_0 = warpgroup.mma_AtBt(x_0, keys_0, subtile(dp, BLOCK, 0, BLOCK, 0))
        y_0 = warpgroup.mma_AtBt(y_0, keys_0, subtile(g, BLOCK, 0, BLOCK, 0))
        w_1 = warpgroup.mma_AtB(w_1, queries_1, subtile(dp, BLOCK, 1, BLOCK, 1))
        w_1 = warpgroup.mma_AtB(w_1, read_1, subtile(g, BLOCK, 1, BLOCK, 1))
        x_1, y_1 = warpgroup.wait(x_1, newer=7), warpgroup.wait(y_1, newer=6)
        keys_1, queries_0, read_0 = subtile(keys, BLOCK, 1), subtile(queries, BLOCK, 0), subtile(read_keys, BLOCK, 0)
        x_1 = warpgroup.mma_AtBt(x_1 * root * root, keys_1, subtile(dp, BLOCK, 1, BLOCK, 1))
        y_1 = warpgroup.mma_AtBt(y_1 * root * root, keys_1, subtile(g, BLOCK, 1, BLOCK, 1))
        w_0 = warpgroup.wait(w_0, newer=6) * root * root
        w_0 = warpgroup.mma_AtB(w_0, queries_0, subtile(dp, BLOCK, 0, BLOCK, 0))
        w_0 = warpgroup.mma_AtB(w_0, read_0, subtile(g, BLOCK, 0, BLOCK, 0))
        x_0, y_0 = warpgroup.wait(x_0, newer=7), warpgroup.wait(y_0, newer=6)
        w_1 = warpgroup.wait(w_1, newer=4)
        x_1, y_1, w_0 = warpgroup.wait(x_1, newer=3), warpgroup.wait(y_1, newer=2), warpgroup.wait(w_0)
        return (x_0, y_0, w_0), (x_1, y_1, w_1)

    @inlined
    def finish_block(self, gradients, tiles, b, r, block):
        """(dQ, dK, each token's part of the gates' gradients) of a block, from X, Y and W."""
        (x, y, w), (queries, keys, read_keys) = gradients, tiles
        dots = x * self.load(queries, block) + y * self.load(read_keys, block) - w * self.load(keys, block)
        decay = exp2(b - r)
        return self.dtype(x * decay), self.dtype(y * decay + w * exp2(r - b)), dots

    @inlined
    def sum_later(self, dots, carried):
        """(the sums over each token and all later ones, the sum over all), `carried` included."""
        sums = turned(cumsum(turned(dots)))
        total = column(sums, BLOCK - 1) + carried
        return total - sums + dots, total
