"""Which tiles of queries see a block of keys: softmax/tiling.py, seen from the keys."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, rasterize, right_fill
from tiles import inlined, static

from ..tiling import Tiling, zero_first_keys, zero_last_keys


class Tiles(NamedTuple):
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
        zero_first_keys(tile, self.ahead, groups)
        zero_last_keys(tile, self.behind, groups)


@static
class Facing(Tiling):
    """For kernels whose blocks have `kv` keys and whose tiles have `rows` queries, under a variant. apart: every block has keys
    that queries may see."""

    apart: bool = True

    @inlined
    def place(self, block, blocks, batch_heads, band):
        """The (block of keys, pair of share and batch) of a thread block: one band of pairs after the other. The first keys,
        which most queries see where later queries see more, come first."""
        batch_head, block = rasterize(block, batch_heads, blocks, band)
        return block, batch_head

    @inlined
    def tiles(self, key, ctx, group):
        """The Tiles of the keys from `key` on; `group` query heads share their head."""
        seen = self.variant.query_range(key, key + self.kv - 1, ctx)
        first = seen.first // self.rows
        n = max(0, (min(seen.end, ctx.seqlen_q) + self.rows - 1) // self.rows - first)
        left = max(0, (seen.inner_first + self.rows - 1) // self.rows - first)
        right = n if seen.inner_end >= ctx.seqlen_q else seen.inner_end // self.rows - first
        if (
            not self.variant.ends_at_last_key and key + self.kv > ctx.seqlen_k
        ):  # what lies behind the last key must be masked, too
            left = n
        if not self.apart and key >= ctx.seqlen_k:
            n = 0
        return Tiles(
            int32(first),
            int32(n),
            int32(left),
            int32(right),
            self.unseen_ahead(key, ctx),
            self.unseen_behind(key + self.kv, ctx),
        )

    @inlined
    def span(self, tiles, number, spans):
        """What a thread block takes of the Tiles: all of them."""
        return tiles

    @inlined
    def tile(self, tiles, i, key, ctx, group):
        """The number of the i-th of these tiles."""
        return int32(tiles.first + i)

    @inlined
    def number(self, tiles, place, key, ctx, group):
        """The number of the tile at a place in their row, which begins at tiles.first: see dq_order.py."""
        return place

    @inlined
    def before(self, block, tile, ctx, group):
        """How many blocks of keys that a tile of queries sees come before this one."""
        if self.variant.starts_at_zero:
            return block
        else:
            row = self.rows * tile
            return int32(block - self.variant.key_range(row, row + self.rows - 1, ctx).first // self.kv)

    @inlined
    def end(self, tile, ctx):
        """The number behind that of the last block of keys that a tile of queries sees."""
        row = self.rows * tile
        return (self.variant.key_range(row, row + self.rows - 1, ctx).end + self.kv - 1) // self.kv

    @inlined
    def cut(self, tiles, i):
        """Must the i-th of these tiles be masked?"""
        if self.variant.starts_at_zero:
            return i < tiles.left
        else:
            return i < tiles.left or i >= tiles.right

    @inlined
    def mask(self, s, ctx, key):
        """-inf for the scores that must not be seen, of keys from `key` on."""
        if not self.variant.ends_at_last_key:
            s = right_fill(s, ctx.seqlen_k - key, -math.inf)
        return self.variant.mask(s, ctx, key, -math.inf)


class Spanning(Facing):
    """The same for thread blocks that take one of several spans of the tiles each: see shares.py."""

    @inlined
    def span(self, tiles, number, spans):
        """One of `spans` spans, of as many tiles each, but for the last ones."""
        each, _ = divmod(int32(tiles.n + spans - 1), spans)
        first = min(each * number, tiles.n)
        n = min(each, tiles.n - first)
        left, right = int32(tiles.left - first), int32(tiles.right - first)
        return tiles._replace(first=int32(tiles.first + first), n=int32(n), left=left, right=right)
