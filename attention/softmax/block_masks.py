"""Lists of blocks that a caller has, FlexAttention's BlockMask for one: which keys they let a query see.

Such lists name blocks of keys for each block of queries, in two lists: one of blocks in which a mask is asked, and one of those
that are seen whole. Blocks of another size than a kernel's tiles, they become a map first, by the small kernel that `make`
gives: a class for each, 0 for a block that is not listed. What a query sees then is a variant as any other, from which the
lists of key blocks follow as from a mask in Python (key_block_lists.py)."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import col_index, divmod, row_index, where
from tiles import inlined, static
from tiles.arguments import INT, record
from tiles.layout import LANES
from tiles.numba_names import types

from .variants import DataDependentMask

FIELDS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"  # a BlockMask's, besides BLOCK_SIZE
PARTIAL, WHOLE = 1, 2  # classes of blocks: those of which the mask is asked, and those that are seen whole
MARKS, COUNTS, INDICES = types.Array(types.int8, 4, "A"), types.Array(types.int32, 3, "A"), types.Array(types.int32, 4, "A")
BAND, KEYS = 32, 128  # rows of a warp in forward, and keys of a tile, at most
WARPS = 4  # of a thread block, each of which marks a row of blocks


@static
class Blocked(DataDependentMask):
    """Only keys in blocks that a caller has listed are seen. rows, cols: queries and keys of such a block. band: the most
    queries for which a warp asks at once, beginning with a multiple of that number."""

    rows: int
    cols: int
    band: int

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. marks: the classes, (batch, head, block of queries, block of keys)."""
        return {"marks": MARKS}

    @property
    def large(self) -> bool:
        """Do a warp's rows always belong to one block, and a tile's keys to two at most?"""
        return self.rows % self.band == 0 and self.cols >= KEYS

    @inlined
    def classes(self, s, i, j, ctx, key):
        """The classes of the blocks that queries i and keys j belong to: a tile, or if blocks are large a vector with one for
        each key."""
        marks = ctx.params.marks
        if self.large:
            row, end = min(ctx.row // self.rows, marks.shape[2] - 1), marks.shape[3] - 1  # tiles may lie beyond both
            first, last = min(int32(key) // self.cols, end), min((int32(key) + s.cols - 1) // self.cols, end)
            return where(j < last * self.cols, marks[ctx.batch, ctx.head, row, first], marks[ctx.batch, ctx.head, row, last])
        else:
            return marks[ctx.batch, ctx.head, i // self.rows, j // self.cols]

    @inlined
    def mask(self, s, ctx, key, hidden):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        return where(self.classes(s, i, j, ctx, key) > 0, s, hidden)


@static
class BlockedMask(Blocked):
    """The same; in blocks that are listed as partial, only the keys for which function(b, h, i, j, *aux) holds are seen."""

    function: Callable

    @inlined
    def mask(self, s, ctx, key, hidden):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        found = self.classes(s, i, j, ctx, key)
        seen = (found == WHOLE) | ((found == PARTIAL) & self.function(ctx.batch, ctx.head, i, j, *ctx.aux))
        return where(seen, s, hidden)


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that makes the map of blocks."""

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * WARPS

    @property
    def rows(self):
        """Rows of blocks that a thread block works on."""
        return WARPS

    def __str__(self):
        return "classes of blocks"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The only configuration."""
    yield Config()


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PARAMS = record(**dict.fromkeys(FIELDS[::2], COUNTS), **dict.fromkeys(FIELDS[1::2], INDICES), marks=MARKS)

    @inlined
    def mark(classes, counts, indices, batch, head, row, cols, what):
        """Write a class into the map for all blocks of a list."""
        for n in range(counts[batch, head, row]):
            col = indices[batch, head, row, n]
            if 0 <= col < cols:
                classes[batch, head, row, col] = what

    @inlined
    def mark_all(params, batch, head, row, cols):
        """Write the classes of a row of blocks."""
        for col in range(cols):
            params.marks[batch, head, row, col] = 0
        cuda.syncwarp()
        mark(params.marks, params.kv_num_blocks, params.kv_indices, batch, head, row, cols, PARTIAL)
        cuda.syncwarp()
        if params.full_kv_num_blocks.shape[2] > 0:
            mark(params.marks, params.full_kv_num_blocks, params.full_kv_indices, batch, head, row, cols, WHOLE)

    @cuda.jit
    def classify(params: PARAMS, rows: INT, cols: INT, heads: INT):
        """Write the classes of all blocks, for each batch and head that has lists. rows, cols: how many blocks there are."""
        batch_head, group = divmod(cuda.blockIdx.x, (rows + WARPS - 1) // WARPS)
        batch, head = divmod(batch_head, heads)
        row = int32(group * WARPS + cuda.threadIdx.x // LANES)
        if row < rows:
            mark_all(params, batch, head, row, cols)

    return classify, None
