"""The tile scheduler of forward: the order of query tiles, and which key blocks a tile reads, for every family and variant.
The variant says which they are, or lists do (ListedTiling)."""

import functools
import math
from typing import Any, NamedTuple

from numpy import int32, uint32

from ops import exp2, persistent_tile, rasterize, right_fill, warpgroup
from tiles import inlined, static
from tiles.launching.lengths import watched_function
from tiles.numba_names import types

from .part import KernelPart
from .sequences import BatchedLayout
from .variant import Variant

# SMs that should read the keys of one (batch, head) pair at a time: 4 to 8 are as fast (bench/notes/forward.md)
SMS_PER_HEAD = 6


def choose_raster_group(grid: int, processors: int, nbytes: float, cache: int, uneven: bool) -> int:
    """The size of a raster group: how many (batch, head) pairs a grid of so many CTAs goes through at once, query block by
    query block. uneven: do some query blocks of a pair take longer than others, as in causal attention, or because the last one
    has few rows? Otherwise one pair at a time is best.

    With all pairs at once every query block would load its keys and values from memory anew, and memory would set the speed. A
    grid of more CTAs than SMs goes through as many pairs as leave several SMs to each, so that most loads hit L2. A persistent
    grid is for short problems, whose keys and values (`nbytes` a pair) stay in half of the L2 `cache` until the group's
    last query block has read them. There an even number of groups' rows should fill the grid: the order of tiles reverses after
    each wave, which then gives every CTA equal work. Pair by pair the same CTAs would get all last blocks, wherever the number
    of blocks divides the grid."""
    return _choose_pairs(grid, processors, cache // 2 // nbytes) if uneven and nbytes else 1


@watched_function  # a function of lengths calls it again (tiles/launching/lengths.py)
def _choose_pairs(grid: int, processors: int, most: float) -> int:
    """The size of a raster group of uneven query blocks, at most `most` on a persistent grid."""
    if grid > processors:
        return max(1, processors // SMS_PER_HEAD)
    return next((n for n in _halves(grid) if n <= most), 1)


@watched_function
def balance_raster_groups(raster_group: int, batch_heads: int, always: bool) -> int:
    """The raster group size for as many groups of equal size: `always`, or where the last group would have less than a quarter
    of the pairs of the others, so that its few long tiles would leave most of the GPU idle (bench/notes/parallel.md)."""
    groups = (batch_heads + raster_group - 1) // raster_group
    last = batch_heads - raster_group * (groups - 1)
    return (batch_heads + groups - 1) // groups if always or 4 * last < raster_group else raster_group


@functools.cache
def _halves(grid: int) -> list[int]:
    """The numbers n with 2 n dividing `grid`, greatest first."""
    return [n for n in range(grid // 2, 0, -1) if grid % (2 * n) == 0]


@inlined
def zero_first_keys(tile, count, groups):
    """Zero the first `count` rows of a shared tile. The CTA's first `groups` warpgroups do it together."""
    if count > 0:
        warpgroup.zero_first_rows(tile, count, groups)


@inlined
def zero_last_keys(tile, count, groups):
    """Zero the last `count` rows of a shared tile. The CTA's first `groups` warpgroups do it together."""
    if count > 0:
        warpgroup.zero_rows(tile, int32(tile.rows - count), groups)


class KeyBlocks(NamedTuple):
    """The n key blocks that a query tile reads, from block `first` on, in the order in which it reads them (`Tiling.key`). The
    first `masked` ones need the mask: the last blocks of the sequence, `masked_right` of them, and then the blocks at the left
    edge of a window. unseen_at_start: how many keys at the beginning of the last masked block no query sees. unseen_at_end: how
    many keys at the end of the first block no query sees. The values of such keys are zeroed before the product, because a
    weight of 0 times NaN is NaN. Both counts may be negative, which means 0."""

    first: Any
    n: Any
    masked_right: Any
    masked: Any
    unseen_at_start: Any
    unseen_at_end: Any

    @inlined
    def clear(self, tile, i, groups):
        """Zero the unseen keys of the i-th block, a shared tile. The CTA's first `groups` warpgroups do it together."""
        if i == max(1, self.masked) - 1:
            zero_first_keys(tile, self.unseen_at_start, groups)
        if i == 0:
            zero_last_keys(tile, self.unseen_at_end, groups)


@static
class Tiling(KernelPart):
    """The tile scheduler for query tiles of `rows` rows and key blocks of `kv` keys, under a variant."""

    rows: int
    kv: int
    variant: Variant

    @property
    def masks_end(self) -> bool:
        """Does the variant's mask hide what comes after the last key?"""
        return self.variant.ends_at_last_key

    @inlined
    def locate_block(self, tile, blocks, batch_heads, raster_group):
        """(query block, (batch, head) pair) of a tile: one raster group after the other (see `choose_raster_group`); in causal
        attention the longest tiles of a group first."""
        batch_head, block = rasterize(tile, batch_heads, blocks, raster_group)
        if self.variant.monotonic:
            return blocks - 1 - block, batch_head
        else:
            return block, batch_head

    @inlined
    def key_blocks(self, row, ctx):
        """The KeyBlocks of a tile whose first query is `row`. There is at least one, because kernels peel the first."""
        keys = self.variant.key_range(row, row + self.rows - 1, ctx)
        first, end = 0 if self.variant.starts_at_zero else keys.first // self.kv, keys.end
        if self.variant.may_end_early:
            end = min(end, self.variant.key_range(0, ctx.seqlen_q - 1, ctx).end)  # not all rows of a tile need be queries
        n = max(1, (end + self.kv - 1) // self.kv - first)
        right = 1 if self.variant.sees_all_keys else n - max(0, keys.inner_end // self.kv - first)
        unseen_at_end = self.unseen_at_end(int32((first + n) * self.kv), ctx)
        if self.variant.starts_at_zero:
            return KeyBlocks(int32(0), int32(n), int32(right), int32(right), int32(0), unseen_at_end)
        else:
            left = min(n - right, max(0, (keys.inner_first + self.kv - 1) // self.kv - first))
            unseen_at_start = self.unseen_at_start(int32(first * self.kv), ctx)
            return KeyBlocks(int32(first), int32(n), int32(right), int32(right + left), unseen_at_start, unseen_at_end)

    @inlined
    def key(self, blocks, i, ctx):
        """The first key of the i-th block that the tile reads: first the blocks that need the mask, then the others, both from
        the last one on. Lists of blocks (key_block_lists.py) have the same order, so that a mask function gives the same
        bits."""
        if self.variant.starts_at_zero:
            return int32((blocks.n - 1 - i) * self.kv)
        else:
            on_right, inner = blocks.n - 1 - i, blocks.n - 1 - i + blocks.masked - blocks.masked_right
            block = on_right if i < blocks.masked_right else blocks.masked - 1 - i if i < blocks.masked else inner
            return int32((blocks.first + block) * self.kv)

    @inlined
    def unseen_at_start(self, key, ctx):
        """How many of the keys from `key` on no query of the sequence sees, because all windows begin later; 0 or less if there
        are none."""
        if self.variant.starts_at_zero:
            return int32(0)
        else:
            return int32(self.variant.key_range(0, ctx.seqlen_q - 1, ctx).first - key)

    @inlined
    def unseen_at_end(self, end, ctx):
        """How many of the keys before `end` no query of the sequence sees, because all windows end earlier; 0 or less if there
        are none."""
        if self.variant.may_end_early:
            return int32(end - self.variant.key_range(0, ctx.seqlen_q - 1, ctx).end)
        else:
            return int32(0)

    @inlined
    def change_scores(self, s, prefetched, ctx, key):
        """(the variant's scores for raw scores of a block that needs no mask, their row offset). prefetched: what
        variant.prefetch read."""
        s = self.variant.score_by(s, prefetched, ctx, key)
        return s, self.variant.row_offset(s, ctx, key)

    @inlined
    def change_edge_scores(self, s, prefetched, ctx, key):
        """`change_scores` for a block that needs the mask: hidden scores are -inf."""
        s = self.mask(self.variant.score_in_edge_block_by(s, prefetched, ctx, key), ctx, key)
        return s, self.variant.row_offset_in_edge_block(s, ctx, key)

    @inlined
    def weights(self, s, lse, masked, ctx, key, scale):
        """exp2(scale s - lse), the recomputed weights of changed scores s, with negative signs for dropped ones. masked: does
        the block need the mask? The variant's late term is added here, so that it takes no registers while wgmma runs."""
        if self.variant.has_row_offset:
            lse = lse + self.variant.row_offset(s, ctx, int32(key + s.cols // 2)) * scale
        if masked:
            s = self.mask(s, ctx, key)
        if self.variant.adds_late:
            p = exp2(s * scale - (lse - self.variant.late_term(s, ctx, key, scale)))
        else:
            p = exp2(s * scale - lse)
        return self.variant.mark_dropped(p, ctx, key)

    @inlined
    def mask(self, s, ctx, key):
        """The scores of keys from `key` on, with -inf for those that a row's query does not see."""
        if not self.masks_end:
            s = right_fill(s, ctx.seqlen_k - key, -math.inf)
        return self.variant.mask(s, ctx, key, -math.inf)


class TileGrid(NamedTuple):
    """The query tiles of a launch: `blocks` for each of `batch_heads` (batch, head) pairs, in raster groups of `raster_group`
    pairs. heads: of a batch."""

    blocks: Any
    heads: Any
    batch_heads: Any
    raster_group: Any


@static
class OneTileScheduler:
    """Each CTA has one query tile."""

    tiling: Tiling
    sequences: BatchedLayout

    @inlined
    def find_tile(self, r, grid, params):
        """(query block, sequence, head) of the CTA's r-th tile."""
        block, batch_head = self.tiling.locate_block(persistent_tile(r), grid.blocks, grid.batch_heads, grid.raster_group)
        return self.sequences.find_tile(block, batch_head, grid.heads, params)

    @inlined
    def has_tile(self, r, grid, params):
        """Does the CTA have an r-th tile?"""
        if self.sequences.bounded_by_array or r > 0:
            return r == 0
        else:
            block, batch, _ = self.find_tile(0, grid, params)
            return r == 0 and self.sequences.has_tile(block, batch, params)


class PersistentScheduler(OneTileScheduler):
    """Each SM has one CTA, and each CTA every gridDim-th query tile."""

    @inlined
    def has_tile(self, r, grid, params):
        return persistent_tile(r) < grid.blocks * grid.batch_heads


LIST_HEADER = 4  # integers of a list before the block numbers
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
        place = LIST_HEADER + i if i < blocks.masked else ctx.params.lists.shape[3] - 1 - i + blocks.masked
        batch, head, tile = uint32(ctx.batch), uint32(ctx.head), uint32(ctx.row // self.rows)
        return int32(ctx.params.lists[batch, head, tile, uint32(place)] * self.kv)
