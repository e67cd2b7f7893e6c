"""The query tiles that see a key block, read from lists (query_tile_lists.py builds these; listed_keys.py is the same for
forward)."""

from typing import Any

from numpy import int32

from tiles import inlined

from ..listed_keys import HEAD, LISTS
from .query_tiling import QueryTiles, QueryTiling, SplitQueryTiling


@inlined
def class_of_group(classes, batch, head, group, tile, block):
    """The class of a query tile and a key block for `group` heads together, from head `head` on."""
    visible, full = int32(0), int32(0)
    for h in range(group):
        one = classes[batch, head + h, tile, block]
        visible, full = int32(visible + (one > 0)), int32(full + (one == 2))
    return int32(0) if visible == 0 else int32(2) if full == group else int32(1)


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
        place = HEAD + place if place < q_tiles.inner_first else lists.shape[3] - 1 - place + q_tiles.inner_first
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
