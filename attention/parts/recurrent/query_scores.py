"""The scores of a chunk's queries alone, with references of 16 tokens (SteppedFactors in two_block_scores.py), by two
warpgroups: a preparer decays tokens, and a scorer multiplies them (gla_hopper.py)."""

from typing import Any, NamedTuple

from numpy import int32

from ops import column, columns, exp2, hstack, load, ones, store, subtile, warpgroup
from tiles import fp16, fp32, inlined, rt, static, sv

from .two_block_scores import BLOCK, SteppedFactors


class QueryScoreTiles(NamedTuple):
    """The shared tiles of a chunk's QueryScores, of a chunk's rows each, Q_i and K*_i being those of the i-th 16 tokens.

    queries: q, then Q_0  Q_1  at the reference of the first 16 tokens, Q_2  Q_3 at that of the third, then q~.
    keys: k, then k~.
    block_writes: K*_0  K*_1  K*_2 at the reference of the third 16 tokens, and K*_0 at its own.
    near: K*_1  Q_1  K*_3  Q_3, each at its own reference; their place may be that of b from the second block on.
    to_start: the shared vector exp(r) of both blocks."""

    queries: Any
    keys: Any
    block_writes: Any
    near: Any
    to_start: Any


@static
class QueryScores(SteppedFactors):
    """The scores of a chunk's queries. One product of 64 rows and columns has what is read at the references of blocks, two of
    16 columns what 16 tokens read of themselves. Then the scorer decays queries to the start of the chunk."""

    @property
    def to_start(self):
        """The vector exp(r) of both blocks."""
        return sv(2 * self.key_dim, fp32)

    @inlined
    def factor(self, tiles, sums, warp):
        """Write all of the QueryScoreTiles, but for q~. sums: the tile of b."""
        b = self.load_replaced_sums(sums, 1, warp)
        b_2, b_3, end = columns(b, self.step, 0), columns(b, self.step, 1), column(b, BLOCK - 1)
        r_2 = self.reference(b_2)
        self.store(tiles.block_writes, self.factor_earlier(tiles, b_2, r_2, end, 2, warp), 2, warp)
        self.factor_later(tiles, b_3, r_2, end, 3, warp)
        b = self.load_sums(sums, 0, warp)
        b_0, b_1 = columns(b, self.step, 0), columns(b, self.step, 1)
        r_0 = self.reference(b_0)
        self.store_to_start(tiles, r_0, 0, warp)
        self.store_to_start(tiles, r_2, 1, warp)
        key, root = self.factor_earlier(tiles, b_0, r_0, end, 0, warp), self.root(r_2 - r_0)
        self.store(tiles.block_writes, key, 3, warp)
        self.store(tiles.block_writes, key * root * root, 0, warp)
        key, r_1 = self.factor_later(tiles, b_1, r_0, end, 1, warp)
        root = self.root(r_2 - r_1)
        self.store(tiles.block_writes, key * root * root, 1, warp)

    @inlined
    def store_to_start(self, tiles, r, block, warp):
        """Write exp(r) of a block."""
        channels = self.warp_tile.cols
        store(subtile(tiles.to_start, channels, int32(block * warpgroup.WARPGROUP + warp)), exp2(r))

    @inlined
    def factor_earlier(self, tiles, b, r, end, i, warp):
        """Write Q and k~ of the earlier 16 tokens of a block. Returns their K*. Keys are loaded when queries are done with."""
        c = b - r
        self.store(tiles.queries, self.dtype(self.load(tiles.queries, i, warp) * exp2(c)), i, warp)
        return self.factor_keys(tiles, c, end - r, i, warp)

    @inlined
    def factor_later(self, tiles, b, block_r, end, i, warp):
        """Write Q, k~ and K* of the later 16 tokens of a block, and what they read with at the reference of the earlier ones.
        Returns (K*, the reference)."""
        r = self.reference(b)
        c, root = b - r, self.root(r - block_r)
        query = self.dtype(self.load(tiles.queries, i, warp) * exp2(c))
        self.store(tiles.near, query, i, warp)
        self.store(tiles.queries, query * root * root, i, warp)
        key = self.factor_keys(tiles, c, end - r, i, warp)
        self.store(tiles.near, key, i - 1, warp)
        return key, r

    @inlined
    def factor_keys(self, tiles, c, to_end, i, warp):
        """K* of 16 tokens; writes their k~."""
        key = self.load(tiles.keys, i, warp) * exp2(-c)
        self.store(tiles.keys, self.dtype(key * exp2(to_end)), i, warp)
        return self.dtype(key)

    @inlined
    def score(self, tiles, warp):
        """A warp's rows of scores; what stands above the diagonal is not for use."""
        blocks, step = warpgroup.mm_ABt(tiles.queries, tiles.block_writes), self.step
        near_1 = warpgroup.mm_ABt(tiles.near, subtile(tiles.near, step, 0))
        near_3 = warpgroup.mm_ABt(tiles.near, subtile(tiles.near, step, 2))
        blocks, near_1, near_3 = warpgroup.wait(blocks, newer=2), warpgroup.wait(near_1, newer=1), warpgroup.wait(near_3)
        first = hstack(columns(blocks, step, 3), near_1) if warp < 2 else columns(blocks, BLOCK, 0)
        return hstack(first, hstack(columns(blocks, step, 2), near_3))

    @inlined
    def decay_to_start(self, tiles, warp):
        """Decay a warp's rows of queries to the start of the chunk: q~."""
        block, operand = warp // 2, rt(self.step, self.warp_tile.cols, self.dtype)
        for i in range(warpgroup.WARPGROUP):  # the channels of each warp
            part = self.group_part(tiles.queries, warp, i)
            decay = load(self.reference_part(tiles.to_start, block, i), self.warp_tile.row_vec)
            x = load(part, operand, fenced=False)
            if self.dtype is fp16:
                store(part, self.dtype(fp32(x) * decay))
            else:
                store(part, x * self.dtype(ones(self.warp_tile) * decay))
