"""Block-sparse masks that a caller passes as lists of blocks, such as FlexAttention's BlockMask.

For each block of queries there are two lists of key blocks: partial ones, in which the mask function is evaluated, and full
ones. Their block sizes differ from a kernel's tiles, so a small kernel (`make`) writes a map first: a class for each block, 0
for one that is not listed. The map makes a variant, from which lists of a kernel's key blocks follow as from any mask function
(key_block_lists.py)."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, where
from tiles import inlined, static
from tiles.launching.arguments import INT, record
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.targets import Target

from .variant import DataDependentMask

FIELDS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"  # a BlockMask's, besides BLOCK_SIZE
PARTIAL, FULL_BLOCK = 1, 2  # classes of blocks
MARKS, COUNTS, INDICES = types.Array(types.int8, 4, "A"), types.Array(types.int32, 3, "A"), types.Array(types.int32, 4, "A")
MAX_WARP_ROWS, KEYS = 32, 128  # the most query rows of a warp in forward, and the most keys of a tile
WARPS = 4  # of a CTA, each of which writes a row of the map


@static
class BlockSparseMask(DataDependentMask):
    """Queries see only keys in listed blocks. rows, cols: queries and keys of such a block. warp_rows: the most query rows of a
    warp's tile, whose first row is a multiple of that number."""

    rows: int
    cols: int
    warp_rows: int

    @property
    def params(self) -> dict[str, Any]:
        """marks: the classes, (batch, head, query block, key block)."""
        return {"marks": MARKS}

    @property
    def large(self) -> bool:
        """Are a warp's rows always in one block, and a tile's keys in at most two?"""
        return self.rows % self.warp_rows == 0 and self.cols >= KEYS

    @inlined
    def classes(self, s, i, j, ctx, key):
        """The classes of the blocks of queries i and keys j: a tile, or for large blocks a row vector."""
        marks = ctx.params.marks
        if self.large:
            row, end = min(ctx.row // self.rows, marks.shape[2] - 1), marks.shape[3] - 1  # tiles may begin behind both
            first, last = min(int32(key) // self.cols, end), min((int32(key) + s.cols - 1) // self.cols, end)
            return where(j < last * self.cols, marks[ctx.batch, ctx.head, row, first], marks[ctx.batch, ctx.head, row, last])
        else:
            return marks[ctx.batch, ctx.head, i // self.rows, j // self.cols]

    @inlined
    def mask(self, s, ctx, key, hidden):
        i, j = ctx.rows(s), ctx.columns(s, key)
        return where(self.classes(s, i, j, ctx, key) > 0, s, hidden)


@static
class BlockSparseMaskMod(BlockSparseMask):
    """Queries see only keys in listed blocks and, in partial ones, only those for which function(b, h, i, j, *aux) is true."""

    function: Callable

    @inlined
    def mask(self, s, ctx, key, hidden):
        i, j = ctx.rows(s), ctx.columns(s, key)
        classes = self.classes(s, i, j, ctx, key)
        visible = (classes == FULL_BLOCK) | ((classes == PARTIAL) & self.function(ctx.batch, ctx.head, i, j, *ctx.aux))
        return where(visible, s, hidden)


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that writes the map of blocks."""

    @property
    def threads(self):
        """The number of threads of a CTA."""
        return LANES * WARPS

    @property
    def rows(self):
        """Rows of the map that a CTA writes."""
        return WARPS

    def __str__(self):
        return "classes of blocks"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The one configuration that there is."""
    yield Config()


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PARAMS = record(**dict.fromkeys(FIELDS[::2], COUNTS), **dict.fromkeys(FIELDS[1::2], INDICES), marks=MARKS)

    @inlined
    def mark(classes, counts, indices, batch, head, row, cols, kind):
        """Write the class `kind` into the map for all blocks of a list."""
        for n in range(counts[batch, head, row]):
            col = indices[batch, head, row, n]
            if 0 <= col < cols:
                classes[batch, head, row, col] = kind

    @inlined
    def mark_all(params, batch, head, row, cols):
        """Write the classes of a row of the map."""
        for col in range(cols):
            params.marks[batch, head, row, col] = 0
        cuda.syncwarp()
        mark(params.marks, params.kv_num_blocks, params.kv_indices, batch, head, row, cols, PARTIAL)
        cuda.syncwarp()
        if params.full_kv_num_blocks.shape[2] > 0:
            mark(params.marks, params.full_kv_num_blocks, params.full_kv_indices, batch, head, row, cols, FULL_BLOCK)

    @cuda.jit
    def classify(params: PARAMS, rows: INT, cols: INT, heads: INT):
        """Write the map for each batch and head that has lists. rows, cols: how many blocks there are."""
        batch_head, group = divmod(cuda.blockIdx.x, (rows + WARPS - 1) // WARPS)
        batch, head = divmod(batch_head, heads)
        row = int32(group * WARPS + cuda.threadIdx.x // LANES)
        if row < rows:
            mark_all(params, batch, head, row, cols)

    return classify, None
