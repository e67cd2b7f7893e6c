"""Lists of key blocks: which ones a mask in Python lets a tile of queries see, found by asking it for every query and key.

Two kernels make them. `Survey` asks, a warp a block of keys, and notes a class: 0 where no query of the tile sees a key of the
block, 2 where all see all, else 1; and how many keys at the block's beginning, and at its end, none of them sees.
`Compaction` goes through a tile's classes and writes its list, a row of integers: how many blocks there are; how many of them
must be masked; how many keys at the beginning of the last of these, and at the end of the first one, no query of the tile sees
(see tiling.Blocks); the numbers of those, and from the end of the row on backwards the numbers of the others, both from the
last block on. Of a tile that sees nothing it names the block behind the last key.
"""

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types
from numpy import float32, int32, uint32

from ops import col_index, divmod, finish_sum, lane_sum, ones, row_index, tile_max, tile_sum, where, zeros
from tiles import fp32, inlined, rt, static
from tiles.arguments import INT, Record, record
from tiles.layout import LANES

from .tiling import Blocks, Tiling
from .variants import At, Variant, arrays_of

WARPS, ROWS = 4, 16  # warps of a thread block, each of which asks for a key block; what a tile's rows are a multiple of
AT_ONCE = 2 * ROWS  # rows that it asks for at once, where that divides a tile: what a mask reads for keys is read once for them
HEAD = 4  # integers of a list before the blocks
LISTS, CLASSES = types.Array(types.int32, 4, "A"), types.Array(types.int8, 4, "A")
AHEAD, BEHIND, BOTH, MOST = 0, 1, 2, 127  # the two numbers of unseen keys, which lie side by side; the most that int8 holds


@static
class Listed(Tiling):
    """A Tiling in which a list says which key blocks a tile works on: given.lists, by batch, head and block of queries. Indices
    are unsigned: one that might be negative is tested, and takes two registers."""

    @property
    def given(self) -> dict[str, Any]:
        return {"lists": LISTS}

    @property
    def ends_within(self) -> bool:
        """See Tiling. Some lists name a block beyond the last key."""
        return False

    @inlined
    def key_blocks(self, row, at):
        lists, batch, head, tile = at.given.lists, uint32(at.batch), uint32(at.head), uint32(row // self.rows)
        n, cut = lists[batch, head, tile, 0], lists[batch, head, tile, 1]
        ahead, behind = lists[batch, head, tile, 2], lists[batch, head, tile, 3]
        return Blocks(int32(0), int32(n), int32(0), int32(cut), int32(ahead), int32(behind))

    @inlined
    def key(self, blocks, i, at):
        i = min(i, blocks.n - 1)  # kernels ask ahead
        place = HEAD + i if i < blocks.cut else at.given.lists.shape[3] - 1 - i + blocks.cut
        batch, head, tile = uint32(at.batch), uint32(at.head), uint32(at.row // self.rows)
        return int32(at.given.lists[batch, head, tile, uint32(place)] * self.kv)


@dataclass(frozen=True)
class Survey:
    """The kernel that finds the class of each block of keys for a tile of queries: skipped, partial or full. rows, kv: queries
    of a tile, keys of a block. axes: how many axes each array of aux has."""

    variant: Variant
    rows: int
    kv: int
    axes: tuple[int, ...] = ()
    threads = LANES * WARPS

    @property
    def given(self) -> Record:
        """The record of what the kernel needs for the variant, and of what it writes, by batch, head, tile and block: classes,
        and the numbers of unseen keys."""
        return record(classes=CLASSES, unseen=CLASSES, **self.variant.given)

    @property
    def aux(self) -> Record:
        """The record of the arrays of aux."""
        return arrays_of(self.axes)

    @staticmethod
    @functools.cache
    def make(config: "Survey"):
        """(kernel, shared memory) of a configuration."""
        TILE, KV, EACH = config.rows, config.kv, ROWS if config.rows % AT_ONCE else AT_ONCE
        S = rt(EACH, KV, fp32)
        GIVEN, AUX, variant = config.given, config.aux, config.variant
        tiling = Tiling(TILE, KV, variant)

        @cuda.jit
        def survey(given: GIVEN, aux: AUX, q_len: INT, kv_len: INT, blocks: INT, heads: INT, groups: INT):
            """Find the classes of a few blocks of keys, for one of the `blocks` tiles of queries of a head. `groups` thread
            blocks together find all."""
            rest, group = divmod(cuda.blockIdx.x, groups)
            pair, tile = divmod(rest, blocks)
            batch, head = divmod(pair, heads)
            at = At(batch, head, TILE * tile, kv_len - q_len, q_len, kv_len, given, aux, 0)
            every = tiling.key_blocks(TILE * tile, at)
            block = WARPS * group + cuda.threadIdx.x // 32
            if block < every.n:
                seen, key = lane_sum(zeros(S)), int32((every.first + block) * KV)
                for band in range(0, TILE, EACH):
                    seen = seen + lane_sum(variant.mask(ones(S), at._replace(row=int32(TILE * tile + band)), key, 0.0))
                count, place = tile_sum(finish_sum(seen)), every.first + block
                all_of_it = count == TILE * KV and key + KV <= kv_len
                found = 0 if count == 0.0 else 2 if all_of_it else 1
                first = last = float32(KV if found == 2 else 0)  # KV, less the first key that is seen; the last one, and 1
                if found == 1:  # asked once more, for few blocks are cut
                    j = col_index(S.row_vec)
                    for band in range(0, TILE, EACH):
                        row = int32(TILE * tile + band)
                        s = variant.mask(ones(S), at._replace(row=row), key, 0.0)
                        s = where((row_index(S.col_vec) < q_len - row) & (j < kv_len - key), s, 0.0)  # those that exist
                        first, last = max(first, tile_max(s * (KV - j))), max(last, tile_max(s * (j + 1.0)))
                    found = 1 if first > 0.0 else 0
                at.given.classes[batch, head, tile, place] = found
                at.given.unseen[batch, head, tile, BOTH * place + AHEAD] = min(MOST, KV - int32(first))
                at.given.unseen[batch, head, tile, BOTH * place + BEHIND] = min(MOST, KV - int32(last))

        return survey, None


@dataclass(frozen=True)
class Compaction:
    """The kernel that makes lists from these classes."""

    variant: Variant
    rows: int
    kv: int
    threads = LANES

    @property
    def given(self) -> Record:
        """The record of what the kernel needs for the variant, of what the survey has found, and of the lists."""
        return record(classes=CLASSES, unseen=CLASSES, lists=LISTS, **self.variant.given)

    @staticmethod
    @functools.cache
    def make(config: "Compaction"):
        """(kernel, shared memory) of a configuration."""
        TILE, KV, GIVEN, tiling = config.rows, config.kv, config.given, Tiling(config.rows, config.kv, config.variant)

        @cuda.jit
        def compaction(given: GIVEN, q_len: INT, kv_len: INT, blocks: INT, heads: INT):
            """Make the list of one of the `blocks` tiles of queries of a head."""
            pair, tile = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(pair, heads)
            at = At(batch, head, TILE * tile, kv_len - q_len, q_len, kv_len, given, 0, 0)
            every = tiling.key_blocks(TILE * tile, at)
            some, whole, ahead, behind = int32(0), int32(0), int32(0), int32(0)
            for i in range(every.n):
                number = int32(every.first + every.n - 1 - i)
                found = at.given.classes[batch, head, tile, number]
                if found == 1:
                    ahead = int32(at.given.unseen[batch, head, tile, BOTH * number + AHEAD])
                    behind = int32(at.given.unseen[batch, head, tile, BOTH * number + BEHIND]) if some == 0 else behind
                if found > 0:
                    place = HEAD + some if found == 1 else at.given.lists.shape[3] - 1 - whole
                    at.given.lists[batch, head, tile, place] = number
                some, whole = int32(some + (found == 1)), int32(whole + (found == 2))
            if some + whole == 0:
                at.given.lists[batch, head, tile, HEAD] = (kv_len + KV - 1) // KV
                some = int32(1)
            at.given.lists[batch, head, tile, 0] = some + whole
            at.given.lists[batch, head, tile, 1] = some
            at.given.lists[batch, head, tile, 2] = ahead
            at.given.lists[batch, head, tile, 3] = behind

        return compaction, None
