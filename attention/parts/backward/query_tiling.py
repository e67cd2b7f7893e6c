"""Which query tiles see a key block: parts/tiling.py, seen from the keys. Lists of them are built by query_tile_lists.py."""

from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, rasterize
from tiles import inlined, static

from ..tiling import LIST_HEADER, LISTS, Tiling, zero_first_keys, zero_last_keys


class QueryTiles(NamedTuple):
    """The query tiles that see a key block: n of them, from tile `first` on. Those from number inner_first to before inner_end,
    counted from `first`, need no mask. unseen_at_start, unseen_at_end: how many of the block's first keys, and of its last
    ones, no query sees. Such keys must not be multiplied: see parts/tiling.py."""

    first: Any
    n: Any
    inner_first: Any
    inner_end: Any
    unseen_at_start: Any
    unseen_at_end: Any

    @inlined
    def clear(self, tile, groups):
        """Zero the keys that no query sees in a shared tile of the key block. The first `groups` warpgroups of the thread block
        call this together."""
        zero_first_keys(tile, self.unseen_at_start, groups)
        zero_last_keys(tile, self.unseen_at_end, groups)


@static
class QueryTiling(Tiling):
    """The tiling of kernels whose thread blocks have `kv` keys each and go through tiles of `rows` queries, under a variant.
    always_visible: does every key block have keys that queries may see?"""

    always_visible: bool = True

    @inlined
    def locate_block(self, number, blocks, batch_heads, raster_group):
        """The (key block, batch and partial) of thread block `number`: `raster_group` pairs of batch and partial at a time, and
        of these the first key blocks first, because most queries see them where later queries see more."""
        batch_head, block = rasterize(number, batch_heads, blocks, raster_group)
        return block, batch_head

    @inlined
    def query_tiles(self, key, ctx, group):
        """The QueryTiles of the block of keys from `key` on. `group` query heads share a key head."""
        queries = self.variant.query_range(key, key + self.kv - 1, ctx)
        first = queries.first // self.rows
        n = max(0, (min(queries.end, ctx.seqlen_q) + self.rows - 1) // self.rows - first)
        inner_first = max(0, (queries.inner_first + self.rows - 1) // self.rows - first)
        inner_end = n if queries.inner_end >= ctx.seqlen_q else queries.inner_end // self.rows - first
        if not self.variant.ends_at_last_key and key + self.kv > ctx.seqlen_k:  # keys after the last one must be masked, too
            inner_first = n
        if not self.always_visible and key >= ctx.seqlen_k:
            n = 0
        first, n, inner_first, inner_end = int32(first), int32(n), int32(inner_first), int32(inner_end)
        unseen_at_start, unseen_at_end = self.unseen_at_start(key, ctx), self.unseen_at_end(key + self.kv, ctx)
        return QueryTiles(first, n, inner_first, inner_end, unseen_at_start, unseen_at_end)

    @inlined
    def take_split(self, q_tiles, split, splits):
        """The QueryTiles that a thread block works on: all, as queries are not split."""
        return q_tiles

    @inlined
    def tile_index(self, q_tiles, i, key, ctx, group):
        """The index of the i-th of these tiles among all query tiles of a head."""
        return int32(q_tiles.first + i)

    @inlined
    def tile_at(self, q_tiles, place, key, ctx, group):
        """The index of the tile at `locate_block`, a number that UnorderedAdds.next_tile counts, which begins at
        q_tiles.first."""
        return place

    @inlined
    def blocks_before(self, block, tile, ctx, group):
        """The number of key blocks before this one that a query tile sees."""
        if self.variant.starts_at_zero:
            return block
        else:
            row = self.rows * tile
            return int32(block - self.variant.key_range(row, row + self.rows - 1, ctx).first // self.kv)

    @inlined
    def end_block(self, tile, ctx):
        """The index after the last key block that a query tile sees."""
        row = self.rows * tile
        return (self.variant.key_range(row, row + self.rows - 1, ctx).end + self.kv - 1) // self.kv

    @inlined
    def needs_mask(self, q_tiles, i):
        """Must the i-th of these tiles be masked?"""
        if self.variant.starts_at_zero:
            return i < q_tiles.inner_first
        else:
            return i < q_tiles.inner_first or i >= q_tiles.inner_end


class SplitQueryTiling(QueryTiling):
    """QueryTiling for thread blocks that each take one of several parts of the query tiles: see backward_combine.py."""

    @inlined
    def take_split(self, q_tiles, split, splits):
        """The `split`-th of `splits` parts, which have the same number of tiles, except for the last ones."""
        length, _ = divmod(int32(q_tiles.n + splits - 1), splits)
        first = min(length * split, q_tiles.n)
        n = min(length, q_tiles.n - first)
        inner_first, inner_end = int32(q_tiles.inner_first - first), int32(q_tiles.inner_end - first)
        return q_tiles._replace(first=int32(q_tiles.first + first), n=int32(n), inner_first=inner_first, inner_end=inner_end)


class ListedQueryTiling(QueryTiling):
    """QueryTiling in which a list says which query tiles see a key block. params.lists: by batch, key head and key block; see
    query_tile_lists.py. ctx.head: the first of the query heads that share the key head."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS}

    @inlined
    def query_tiles(self, key, ctx, group):
        lists, head, block = ctx.params.lists, ctx.head // group, key // self.kv
        n, masked = int32(lists[ctx.batch, head, block, 0]), int32(lists[ctx.batch, head, block, 1])
        unseen_at_start, unseen_at_end = int32(lists[ctx.batch, head, block, 2]), int32(lists[ctx.batch, head, block, 3])
        return QueryTiles(int32(0), n, masked, int32(0), unseen_at_start, unseen_at_end)

    @inlined
    def tile_index(self, q_tiles, i, key, ctx, group):
        return self.tile_at(q_tiles, max(0, min(i, q_tiles.n - 1)), key, ctx, group)  # kernels ask for one tile too many

    @inlined
    def tile_at(self, q_tiles, place, key, ctx, group):
        lists = ctx.params.lists
        place = LIST_HEADER + place if place < q_tiles.inner_first else lists.shape[3] - 1 - place + q_tiles.inner_first
        return int32(lists[ctx.batch, ctx.head // group, key // self.kv, place])

    @inlined
    def needs_mask(self, q_tiles, i):
        return i < q_tiles.inner_first


class RankedQueryTiling(ListedQueryTiling):
    """ListedQueryTiling for thread blocks that add to dQ in a fixed order. params.ranks, by batch, key head, query tile and key
    block: how many earlier key blocks have the tile in their lists."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS, "ranks": LISTS}

    @inlined
    def blocks_before(self, block, tile, ctx, group):
        return int32(ctx.params.ranks[ctx.batch, ctx.head // group, tile, block])


def query_tiling(by_list: bool, deterministic: bool, splits_queries: bool) -> type[QueryTiling]:
    """The class that says which query tiles a thread block works on: from a list; or from the variant, all or some of them."""
    if by_list:
        return RankedQueryTiling if deterministic else ListedQueryTiling
    return SplitQueryTiling if splits_queries else QueryTiling
