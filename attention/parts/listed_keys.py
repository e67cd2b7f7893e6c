"""Key blocks by lists: the tiling of a query tile whose key blocks a list names, and what a list holds."""

from typing import Any

from numpy import int32, uint32

from tiles import inlined, static
from tiles.numba_names import types

from .tiling import KeyBlocks, Tiling

HEAD = 4  # integers of a list before the block numbers
LISTS, CLASSES = types.Array(types.int32, 4, "A"), types.Array(types.int8, 4, "A")
# Counts of unseen keys, an int8 each: COUNTS of them for each block, at its start and at its end
AT_START, AT_END, COUNTS, MAX_COUNT = 0, 1, 2, 127


@static
class ListedTiling(Tiling):
    """A Tiling whose key blocks are listed in params.lists, by batch, head and query block. Indices are unsigned: one that may
    be negative is compared with 0, and takes two registers."""

    @property
    def params(self) -> dict[str, Any]:
        return {"lists": LISTS}

    @property
    def masks_end(self) -> bool:
        """False: some lists name a block after the last key."""
        return False

    @inlined
    def key_blocks(self, row, ctx):
        lists, batch, head, tile = ctx.params.lists, uint32(ctx.batch), uint32(ctx.head), uint32(row // self.rows)
        n, masked = lists[batch, head, tile, 0], lists[batch, head, tile, 1]
        unseen_at_start, unseen_at_end = lists[batch, head, tile, 2], lists[batch, head, tile, 3]
        return KeyBlocks(int32(0), int32(n), int32(0), int32(masked), int32(unseen_at_start), int32(unseen_at_end))

    @inlined
    def key(self, blocks, i, ctx):
        i = min(i, blocks.n - 1)  # kernels prefetch after the last
        place = HEAD + i if i < blocks.masked else ctx.params.lists.shape[3] - 1 - i + blocks.masked
        batch, head, tile = uint32(ctx.batch), uint32(ctx.head), uint32(ctx.row // self.rows)
        return int32(ctx.params.lists[batch, head, tile, uint32(place)] * self.kv)
