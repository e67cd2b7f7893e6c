"""Which tiles of queries see a block of keys: softmax/tiling.py, seen from the keys."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, rasterize, right_fill
from tiles import inlined, static

from ..tiling import Tiling, clear_ahead, clear_behind


class QueryTiles(NamedTuple):
    """The tiles of queries that see a block of keys: n of them, from tile `first` on. Those from the left-th to before the
    right-th need no mask. ahead, behind: how many of the block's first keys, and of its last ones, no query sees, so that they
    must not be multiplied: see tiling.Blocks."""

    first: Any
    n: Any
    left: Any
    right: Any
    ahead: Any
    behind: Any

    @inlined
    def clear(self, tile, groups):
        """Zero these keys in a shared tile of the block. Done by the thread block's first `groups` warpgroups together."""
        clear_ahead(tile, self.ahead, groups)
        clear_behind(tile, self.behind, groups)


@static
class QueryTiling(Tiling):
    """For kernels whose blocks have `kv` keys and whose tiles have `rows` queries, under a variant. apart: every block has keys
    that queries may see."""

    apart: bool = True

    @inlined
    def place(self, block, blocks, pairs, raster_group):
        """The (block of keys, pair of share and batch) of a thread block: one band of pairs after the other. The first keys,
        which most queries see where later queries see more, come first."""
        pair, block = rasterize(block, pairs, blocks, raster_group)
        return block, pair

    @inlined
    def tiles(self, key, at, group):
        """The Tiles of the keys from `key` on; `group` query heads share their head."""
        seen = self.variant.seers(key, key + self.kv - 1, at)
        first = seen.first // self.rows
        n = max(0, (min(seen.end, at.queries) + self.rows - 1) // self.rows - first)
        left = max(0, (seen.inner_first + self.rows - 1) // self.rows - first)
        right = n if seen.inner_end >= at.queries else seen.inner_end // self.rows - first
        if not self.variant.within and key + self.kv > at.keys:  # what lies behind the last key must be masked, too
            left = n
        if not self.apart and key >= at.keys:
            n = 0
        return QueryTiles(
            int32(first), int32(n), int32(left), int32(right), self.unseen_ahead(key, at), self.unseen_behind(key + self.kv, at)
        )

    @inlined
    def take_split(self, tiles, number, splits):
        """What a thread block takes of the Tiles: all of them."""
        return tiles

    @inlined
    def tile_index(self, tiles, i, key, at, group):
        """The number of the i-th of these tiles."""
        return int32(tiles.first + i)

    @inlined
    def tile_at(self, tiles, place, key, at, group):
        """The number of the tile at a place in their row, which begins at tiles.first: see dq_order.py."""
        return place

    @inlined
    def blocks_before(self, block, tile, at, group):
        """How many blocks of keys that a tile of queries sees come before this one."""
        if self.variant.from_first:
            return block
        else:
            row = self.rows * tile
            return int32(block - self.variant.keys(row, row + self.rows - 1, at).first // self.kv)

    @inlined
    def end_block(self, tile, at):
        """The number behind that of the last block of keys that a tile of queries sees."""
        row = self.rows * tile
        return (self.variant.keys(row, row + self.rows - 1, at).end + self.kv - 1) // self.kv

    @inlined
    def needs_mask(self, tiles, i):
        """Must the i-th of these tiles be masked?"""
        if self.variant.from_first:
            return i < tiles.left
        else:
            return i < tiles.left or i >= tiles.right

    @inlined
    def mask(self, s, at, key):
        """-inf for the scores that must not be seen, of keys from `key` on."""
        if not self.variant.within:
            s = right_fill(s, at.keys - key, -math.inf)
        return self.variant.mask(s, at, key, -math.inf)


class SplitQueryTiling(QueryTiling):
    """The same for thread blocks that take one of several spans of the tiles each: see shares.py."""

    @inlined
    def take_split(self, tiles, number, splits):
        """One of `spans` spans, of as many tiles each, but for the last ones."""
        each, _ = divmod(int32(tiles.n + splits - 1), splits)
        first = min(each * number, tiles.n)
        n = min(each, tiles.n - first)
        left, right = int32(tiles.left - first), int32(tiles.right - first)
        return tiles._replace(first=int32(tiles.first + first), n=int32(n), left=left, right=right)
