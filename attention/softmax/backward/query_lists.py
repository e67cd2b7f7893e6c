"""Lists of the query tiles that see a key block: key_block_lists.py, seen from the keys.

The same survey finds the class of each query tile with each key block: no key visible, some, or all. `BuildQueryLists` then
goes through the query tiles of a key block, for all query heads that share its key head, and writes its list, a row of
integers: how many query tiles see some of its keys; how many of them must be masked; how many keys at the block's beginning,
and at its end, no query sees; the indices of the tiles that must be masked, and backwards from the end of the row the indices
of the others, each from the first on.

Thread blocks that add to dQ in a fixed order (dq_order.py) must also know how many key blocks add to a tile before theirs:
those whose lists contain the tile. `RankKeyBlocks` goes through the key blocks of a query tile and counts them."""

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod
from tiles import inlined
from tiles.arguments import INT, Record, record
from tiles.arrays import Operand
from tiles.layout import LANES

from ..assembled import VariantSpec
from ..key_block_lists import AHEAD, BEHIND, BOTH, CLASSES, HEAD, LISTS, MOST, WARPS, Survey
from ..launches import Before
from ..variants import ScoreContext, Variant
from .tiling import QueryTiles, QueryTiling, SplitQueryTiling

MAX_SURVEY_QUERIES = 128  # queries for which a warp of the survey evaluates the mask at once, at most


@inlined
def class_of_group(classes, batch, head, group, tile, block):
    """The class of a query tile and a key block for `group` heads together, from head `head` on."""
    visible, full = int32(0), int32(0)
    for h in range(group):
        one = classes[batch, head + h, tile, block]
        visible, full = int32(visible + (one > 0)), int32(full + (one == 2))
    return int32(0) if visible == 0 else int32(2) if full == group else int32(1)


class ListedQueryTiling(QueryTiling):
    """A list says which tiles of queries see a block of keys: params.lists, by batch, head of keys and block. ctx.head: the
    first of the query heads that share the head of keys."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS}

    @inlined
    def query_tiles(self, key, ctx, group):
        lists, head, block = ctx.params.lists, ctx.head // group, key // self.kv
        n, masked = int32(lists[ctx.batch, head, block, 0]), int32(lists[ctx.batch, head, block, 1])
        ahead, behind = int32(lists[ctx.batch, head, block, 2]), int32(lists[ctx.batch, head, block, 3])
        return QueryTiles(int32(0), n, masked, int32(0), ahead, behind)

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


@dataclass(frozen=True)
class BuildQueryLists:
    """The configuration of the kernel that writes lists: of a variant, tiles of `rows` queries and blocks of `kv` keys."""

    variant: Variant
    rows: int
    kv: int
    threads = LANES

    @property
    def params(self) -> Record:
        """The kernel's parameters: the survey's results, the lists, and the parameters of the variant."""
        return record(classes=CLASSES, unseen=CLASSES, lists=LISTS, **self.variant.params)

    @staticmethod
    @functools.cache
    def make(config: "BuildQueryLists"):
        """(kernel, shared memory) of a configuration."""
        KV, PARAMS, tiling = config.kv, config.params, QueryTiling(config.rows, config.kv, config.variant)

        @cuda.jit
        def build_query_lists(params: PARAMS, q_len: INT, kv_len: INT, blocks: INT, heads: INT, group: INT):
            """The list of one of the `blocks` key blocks of one of `heads` heads, which `group` heads of the classes share."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, group * head, int32(0), kv_len - q_len, q_len, kv_len, params, 0, 0)
            q_tiles = tiling.query_tiles(int32(KV * block), ctx, group)
            masked, full, ahead, behind = int32(0), int32(0), int32(MOST), int32(MOST)
            for i in range(q_tiles.n):
                tile = int32(q_tiles.first + i)
                visibility = class_of_group(ctx.params.classes, batch, group * head, group, tile, block)
                for h in range(group * head, group * head + group):
                    ahead = int32(min(ahead, ctx.params.unseen[batch, h, tile, BOTH * block + AHEAD]))
                    behind = int32(min(behind, ctx.params.unseen[batch, h, tile, BOTH * block + BEHIND]))
                if visibility > 0:
                    place = HEAD + masked if visibility == 1 else ctx.params.lists.shape[3] - 1 - full
                    ctx.params.lists[batch, head, block, place] = tile
                masked, full = int32(masked + (visibility == 1)), int32(full + (visibility == 2))
            ctx.params.lists[batch, head, block, 0] = masked + full
            ctx.params.lists[batch, head, block, 1] = masked
            ctx.params.lists[batch, head, block, 2] = ahead
            ctx.params.lists[batch, head, block, 3] = behind

        return build_query_lists, None


class RankKeyBlocks(BuildQueryLists):
    """The configuration of the kernel that counts, for each query tile and key block, the earlier key blocks whose lists have
    the tile. It has the fields of BuildQueryLists."""

    @property
    def params(self) -> Record:
        """The kernel's parameters: the classes, the ranks, and the parameters of the variant."""
        return record(classes=CLASSES, ranks=LISTS, **self.variant.params)

    @staticmethod
    @functools.cache
    def make(config: "RankKeyBlocks"):
        """(kernel, shared memory) of a configuration."""
        KV, PARAMS, tiling = config.kv, config.params, QueryTiling(config.rows, config.kv, config.variant)

        @cuda.jit
        def rank_key_blocks(params: PARAMS, q_len: INT, kv_len: INT, tiles: INT, blocks: INT, heads: INT, group: INT):
            """The ranks of `blocks` key blocks for one of the `tiles` query tiles of one of `heads` heads."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, group * head, int32(0), kv_len - q_len, q_len, kv_len, params, 0, 0)
            rank = int32(0)
            for block in range(blocks):
                ctx.params.ranks[batch, head, tile, block] = rank
                q_tiles = tiling.query_tiles(int32(KV * block), ctx, group)
                if q_tiles.first <= tile < q_tiles.first + q_tiles.n:
                    visibility = class_of_group(ctx.params.classes, batch, group * head, group, tile, int32(block))
                    rank = int32(rank + (visibility > 0))

        return rank_key_blocks, None


def launch_query_lists(
    before: Before, spec: VariantSpec, varies: tuple[bool, bool], config: Any, args: dict[str, Any], aux: dict[str, Any]
) -> dict[str, Operand]:
    """Adds launches to `before` that build the lists of query tiles of all key blocks. Returns the lists, the classes that they
    were built from, and with deterministic sums the ranks. varies: do lists differ by batch, by head? args: of the variant and
    of sequences. aux: the arrays that the variant's functions read."""
    batch, heads, kv_heads, q_len, kv_len = before.problem("BHGST")
    batches, by_head = batch if varies[0] else 1, varies[1]
    tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    class_heads, list_heads = (heads, kv_heads) if by_head else (1, 1)
    classes = before.memory((batches, class_heads, tiles, blocks), "int8")
    shape = spec.variant, config.rows, config.kv
    unseen = before.memory((batches, class_heads, tiles, BOTH * blocks), "int8")
    results = {"lists": before.memory((batches, list_heads, blocks, HEAD + tiles), "int32"), "classes": classes}
    survey, build, rank = Survey(*shape, config.axes), BuildQueryLists(*shape), RankKeyBlocks(*shape)
    groups = -(-blocks // WARPS)
    survey_args = {"classes": classes, "unseen": unseen, "groups": groups, "blocks": tiles, "heads": class_heads}
    before.launch(survey, survey, batches * class_heads * tiles * groups, **survey_args, **args, **aux)
    extents = {"blocks": blocks, "heads": list_heads, "group": class_heads // list_heads}
    before.launch(build, build, batches * list_heads * blocks, unseen=unseen, **results, **extents, **args)
    if config.deterministic:
        results["ranks"] = before.memory((batches, list_heads, tiles, blocks), "int32")
        rank_args = {"classes": classes, "ranks": results["ranks"], "tiles": tiles}
        before.launch(rank, rank, batches * list_heads * tiles, **rank_args, **extents, **args)
    return results
