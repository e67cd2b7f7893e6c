"""Lists of tiles of queries: key_block_lists.py, seen from the keys.

The same survey finds the classes of all tiles of queries and blocks of keys. `Gathering` then goes through those of a block of
keys, for all query heads that share its head, and writes its list, a row of integers: how many tiles of queries see some of its
keys; how many of them must be masked; how many keys at the block's beginning, and at its end, no query sees; the numbers of the
tiles that must be masked, and from the end of the row on backwards the numbers of the others, both from the first on.

Blocks that add to dQ in order (dq_order.py) must know how many blocks before them add to a tile, too: those whose lists have
it. `Ranking` goes through the blocks of keys for a tile of queries, and counts them."""

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
from .tiling import Facing, Spanning, Tiles

FACING = 128  # queries that a warp asks for at once, at most


@inlined
def class_of(classes, batch, head, group, tile, block):
    """The class of a tile and a block for `group` heads together, beginning with head `head`."""
    some, whole = int32(0), int32(0)
    for h in range(group):
        found = classes[batch, head + h, tile, block]
        some, whole = int32(some + (found > 0)), int32(whole + (found == 2))
    return int32(0) if some == 0 else int32(2) if whole == group else int32(1)


class Listed(Facing):
    """A list says which tiles of queries see a block of keys: params.lists, by batch, head of keys and block. ctx.head: the
    first of the query heads that share the head of keys."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS}

    @inlined
    def tiles(self, key, ctx, group):
        lists, head, block = ctx.params.lists, ctx.head // group, key // self.kv
        n, cut = int32(lists[ctx.batch, head, block, 0]), int32(lists[ctx.batch, head, block, 1])
        ahead, behind = int32(lists[ctx.batch, head, block, 2]), int32(lists[ctx.batch, head, block, 3])
        return Tiles(int32(0), n, cut, int32(0), ahead, behind)

    @inlined
    def tile(self, tiles, i, key, ctx, group):
        return self.number(tiles, max(0, min(i, tiles.n - 1)), key, ctx, group)  # kernels ask ahead

    @inlined
    def number(self, tiles, place, key, ctx, group):
        lists = ctx.params.lists
        place = HEAD + place if place < tiles.left else lists.shape[3] - 1 - place + tiles.left
        return int32(lists[ctx.batch, ctx.head // group, key // self.kv, place])

    @inlined
    def cut(self, tiles, i):
        return i < tiles.left


class Ranked(Listed):
    """The same for blocks that add to dQ in order: params.ranks says, by batch, head of keys, tile and block, how many earlier
    blocks have the tile in their lists."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS, "ranks": LISTS}

    @inlined
    def before(self, block, tile, ctx, group):
        return int32(ctx.params.ranks[ctx.batch, ctx.head // group, tile, block])


def facing(by_list: bool, ordered: bool, spans: bool) -> type[Facing]:
    """The class that says which tiles of queries see a block of keys: from a list, or from the variant, all or a span."""
    return (Ranked if ordered else Listed) if by_list else Spanning if spans else Facing


@dataclass(frozen=True)
class Gathering:
    """Lists from classes, of a variant, tiles of `rows` queries and blocks of `kv` keys."""

    variant: Variant
    rows: int
    kv: int
    threads = LANES

    @property
    def params(self) -> Record:
        """What the kernel is told of the variant, and where the survey's results and lists are."""
        return record(classes=CLASSES, unseen=CLASSES, lists=LISTS, **self.variant.params)

    @staticmethod
    @functools.cache
    def make(config: "Gathering"):
        """(kernel, shared memory) of a configuration."""
        KV, PARAMS, tiling = config.kv, config.params, Facing(config.rows, config.kv, config.variant)

        @cuda.jit
        def gathering(params: PARAMS, q_len: INT, kv_len: INT, blocks: INT, heads: INT, group: INT):
            """The list of one of the `blocks` blocks of keys of one of `heads` heads; `group` heads of the classes share it."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, group * head, int32(0), kv_len - q_len, q_len, kv_len, params, 0, 0)
            every = tiling.tiles(int32(KV * block), ctx, group)
            some, whole, ahead, behind = int32(0), int32(0), int32(MOST), int32(MOST)
            for i in range(every.n):
                tile = int32(every.first + i)
                found = class_of(ctx.params.classes, batch, group * head, group, tile, block)
                for h in range(group * head, group * head + group):
                    ahead = int32(min(ahead, ctx.params.unseen[batch, h, tile, BOTH * block + AHEAD]))
                    behind = int32(min(behind, ctx.params.unseen[batch, h, tile, BOTH * block + BEHIND]))
                if found > 0:
                    place = HEAD + some if found == 1 else ctx.params.lists.shape[3] - 1 - whole
                    ctx.params.lists[batch, head, block, place] = tile
                some, whole = int32(some + (found == 1)), int32(whole + (found == 2))
            ctx.params.lists[batch, head, block, 0] = some + whole
            ctx.params.lists[batch, head, block, 1] = some
            ctx.params.lists[batch, head, block, 2] = ahead
            ctx.params.lists[batch, head, block, 3] = behind

        return gathering, None


class Ranking(Gathering):
    """How many blocks of keys before each one have a tile of queries in their lists: from classes, of the same variant, tiles
    and blocks."""

    @property
    def params(self) -> Record:
        """What the kernel is told of the variant, and where classes and ranks are."""
        return record(classes=CLASSES, ranks=LISTS, **self.variant.params)

    @staticmethod
    @functools.cache
    def make(config: "Ranking"):
        """(kernel, shared memory) of a configuration."""
        KV, PARAMS, tiling = config.kv, config.params, Facing(config.rows, config.kv, config.variant)

        @cuda.jit
        def ranking(params: PARAMS, q_len: INT, kv_len: INT, tiles: INT, blocks: INT, heads: INT, group: INT):
            """Of one of the `tiles` tiles of queries of one of `heads` heads of `blocks` blocks of keys."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            ctx = ScoreContext(batch, group * head, int32(0), kv_len - q_len, q_len, kv_len, params, 0, 0)
            before = int32(0)
            for block in range(blocks):
                ctx.params.ranks[batch, head, tile, block] = before
                every = tiling.tiles(int32(KV * block), ctx, group)
                if every.first <= tile < every.first + every.n:
                    found = class_of(ctx.params.classes, batch, group * head, group, tile, int32(block))
                    before = int32(before + (found > 0))

        return ranking, None


def listed(
    before: Before, spec: VariantSpec, varies: tuple[bool, bool], config: Any, told: dict[str, Any], read: dict[str, Any]
) -> dict[str, Operand]:
    """The lists of tiles of queries of all blocks of keys, made before, the classes that they were made of, and if blocks add
    in order their ranks. varies: do they differ by batch, by head? told, read: what kernels are told of the variant and of
    sequences, and the arrays that its functions read."""
    batch, heads, kv_heads, q_len, kv_len = before.problem("BHGST")
    batches, by_head = batch if varies[0] else 1, varies[1]
    tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    many, of_keys = heads if by_head else 1, kv_heads if by_head else 1
    classes = before.memory((batches, many, tiles, blocks), "int8")
    made_of = spec.variant, config.rows, config.kv
    unseen = before.memory((batches, many, tiles, BOTH * blocks), "int8")
    found = {"lists": before.memory((batches, of_keys, blocks, HEAD + tiles), "int32"), "classes": classes}
    survey = Survey(*made_of, config.axes)
    groups = -(-blocks // WARPS)
    asked = {"classes": classes, "unseen": unseen, "groups": groups, "blocks": tiles, "heads": many}
    before.launch(survey, survey, batches * many * tiles * groups, **asked, **told, **read)
    numbers = {"blocks": blocks, "heads": of_keys, "group": many // of_keys}
    gathering, ranking = Gathering(*made_of), Ranking(*made_of)
    before.launch(gathering, gathering, batches * of_keys * blocks, unseen=unseen, **found, **numbers, **told)
    if config.ordered:
        found["ranks"] = before.memory((batches, of_keys, tiles, blocks), "int32")
        of_tiles = {"classes": classes, "ranks": found["ranks"], "tiles": tiles}
        before.launch(ranking, ranking, batches * of_keys * tiles, **of_tiles, **numbers, **told)
    return found
