"""Lists of key blocks: which ones a mask in Python lets a tile of queries see, found by asking it for every query and key.

A list is a row of integers: how many blocks there are; how many of them must be masked; the numbers of those, and from the end
of the row on backwards the numbers of the others. Of a tile that sees nothing it names the block behind the last key."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types
from numpy import int32

from ops import block, divmod, finish_sum, lane_sum, tile_sum, where, zeros
from tiles import fp32, inlined, rt, shared, static, sv
from tiles.arguments import INT, array, listed, record
from tiles.layout import LANES

from .tiling import Blocks, Tiling
from .variants import At, Variant

WARPS, ROWS = 8, 16  # warps of a thread block, each of which asks for a key block; rows that it asks for at once
HEAD = 2  # integers of a list before the blocks
LISTS = types.Array(types.int32, 4, "A")


@static
class Listed(Tiling):
    """Tiles whose key blocks a list says: given.lists, by batch, head and block of queries."""

    @property
    def given(self) -> dict[str, Any]:
        """See Tiling."""
        return {"lists": LISTS}

    @property
    def ends_within(self) -> bool:
        """See Tiling. Some lists name a block behind the last key."""
        return False

    @inlined
    def key_blocks(self, row, at):
        """See Tiling."""
        tile = row // self.rows
        n, cut = at.given.lists[at.batch, at.head, tile, 0], at.given.lists[at.batch, at.head, tile, 1]
        return Blocks(int32(0), int32(n), int32(0), int32(cut))

    @inlined
    def key(self, blocks, i, at):
        """See Tiling."""
        i = min(i, blocks.n - 1)  # kernels ask ahead
        place = HEAD + i if i < blocks.cut else at.given.lists.shape[3] - 1 - i + blocks.cut
        return int32(at.given.lists[at.batch, at.head, at.row // self.rows, place] * self.kv)


@dataclass(frozen=True)
class Config:
    """Of the kernel that makes lists: the variant, the rows of a tile of queries and of a block of keys, how many axes the
    arrays have that the variant's functions read."""

    variant: Variant
    rows: int
    kv: int
    axes: tuple[int, ...] = ()

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * WARPS

    @property
    def aux(self):
        """The arrays that the variant's functions read."""
        return listed(**{f"aux{n}": array(rank) for n, rank in enumerate(self.axes)})

    def __str__(self):
        return f"lists of {self.rows} x {self.kv}, {self.variant}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """None: what a mask in Python compiles to nobody knows before it is written."""
    return iter(())


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    TILE, KV, S = config.rows, config.kv, rt(ROWS, config.kv, fp32)
    tiling = Tiling(TILE, KV, config.variant)
    GIVEN, AUX = record(lists=LISTS, **config.variant.given), config.aux
    smem = shared(codes=sv(4 * WARPS, fp32))

    @cuda.jit
    def survey(given: GIVEN, aux: AUX, q_len: INT, kv_len: INT, blocks: INT, heads: INT):
        """The list of a tile. Each warp counts the scores of a key block that are seen; a code, 0 for none, 1 for some and 2
        for all, says what came of it, and the sum of the codes times powers of 4 tells the first warp those of all. A list
        begins with a block to be masked, though it be one that all see, or one that there is not."""
        (codes,) = smem.open()
        pair, tile = divmod(cuda.blockIdx.x, blocks)
        batch, head = divmod(pair, heads)
        warp, row = int32(cuda.threadIdx.x // 32), TILE * tile
        at = At(batch, head, row, kv_len - q_len, q_len, kv_len, given, aux, 0)
        every = tiling.key_blocks(row, at)
        some, whole, spare = int32(0), int32(0), int32((kv_len + KV - 1) // KV)
        for start in range(0, every.n, WARPS):
            key = int32((every.first + start + warp) * KV)
            seen = lane_sum(zeros(S))
            for band in range(0, TILE, ROWS):
                s = tiling.mask(zeros(S), at._replace(row=int32(row + band)), key)
                seen = seen + lane_sum(where(s < 0.0, zeros(S), 1.0))
            count = tile_sum(finish_sum(seen))
            code = 0 if count == 0.0 else 2 if count == TILE * KV else 1
            packed = int32(block.reduce_sum(code << 2 * warp, codes))
            for w in range(min(WARPS, every.n - start)):
                number, code = int32(every.first + start + w), (packed >> 2 * w) & 3
                if warp == 0 and code > 0:
                    place = HEAD + some if code == 1 else at.given.lists.shape[3] - 1 - whole
                    at.given.lists[batch, head, tile, place] = number
                some, whole = int32(some + (code == 1)), int32(whole + (code == 2))
                spare = number if code == 2 else spare
        if warp == 0:
            if some == 0:
                at.given.lists[batch, head, tile, HEAD] = spare
            at.given.lists[batch, head, tile, 0] = max(1, some + whole)
            at.given.lists[batch, head, tile, 1] = max(1, some)

    return survey, smem
