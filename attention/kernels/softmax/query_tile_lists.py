"""Lists of the query tiles that see a key block: key_block_lists.py, seen from the keys.

ClassifyBlocks of key_block_lists.py finds the class of each query tile with each key block: no key visible, some, or all.
`BuildQueryLists` then goes through the query tiles of a key block, for all query heads that share its key head, and writes its
list, a row of integers: how many query tiles see some of its keys; how many of them must be masked; how many keys at the
block's beginning, and at its end, no query sees; the indices of the tiles that must be masked, and backwards from the end of
the row the indices of the others, each from the first on.

Thread blocks that add to dQ in a fixed order (dq_order.py) must also know how many key blocks add to a tile before theirs:
those whose lists contain the tile. `RankKeyBlocks` goes through the key blocks of a query tile and counts them."""

import functools
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod
from tiles import inlined
from tiles.launching.arguments import INT, Record, record
from tiles.layout import LANES

from ...parts.backward.query_tiling import QueryTiling
from ...parts.tiling import AT_END, AT_START, CLASSES, COUNTS, LIST_HEADER, LISTS, MAX_COUNT
from ...parts.variant import ScoreContext, Variant

MAX_SURVEY_QUERIES = 128  # queries for which a warp of ClassifyBlocks evaluates the mask at once, at most


@inlined
def class_of_group(classes, batch, head, group, tile, block):
    """The class of a query tile and a key block for `group` heads together, from head `head` on."""
    visible, full = int32(0), int32(0)
    for h in range(group):
        one = classes[batch, head + h, tile, block]
        visible, full = int32(visible + (one > 0)), int32(full + (one == 2))
    return int32(0) if visible == 0 else int32(2) if full == group else int32(1)


@dataclass(frozen=True)
class BuildQueryLists:
    """The configuration of the kernel that writes lists: of a variant, tiles of `rows` queries and blocks of `kv` keys."""

    variant: Variant
    rows: int
    kv: int
    threads = LANES

    @property
    def params(self) -> Record:
        """The kernel's parameters: the results of ClassifyBlocks, the lists, and the parameters of the variant."""
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
            masked, full, unseen_at_start, unseen_at_end = int32(0), int32(0), int32(MAX_COUNT), int32(MAX_COUNT)
            for i in range(q_tiles.n):
                tile = int32(q_tiles.first + i)
                visibility = class_of_group(ctx.params.classes, batch, group * head, group, tile, block)
                for h in range(group * head, group * head + group):
                    unseen_at_start = int32(min(unseen_at_start, ctx.params.unseen[batch, h, tile, COUNTS * block + AT_START]))
                    unseen_at_end = int32(min(unseen_at_end, ctx.params.unseen[batch, h, tile, COUNTS * block + AT_END]))
                if visibility > 0:
                    place = LIST_HEADER + masked if visibility == 1 else ctx.params.lists.shape[3] - 1 - full
                    ctx.params.lists[batch, head, block, place] = tile
                masked, full = int32(masked + (visibility == 1)), int32(full + (visibility == 2))
            ctx.params.lists[batch, head, block, 0] = masked + full
            ctx.params.lists[batch, head, block, 1] = masked
            ctx.params.lists[batch, head, block, 2] = unseen_at_start
            ctx.params.lists[batch, head, block, 3] = unseen_at_end

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
