"""Which query rows a tile has and which blocks of keys they see: the same for every family and every variant of attention."""

import functools
import math
from typing import Any, NamedTuple

from numpy import int32

from ops import exp2, rasterize, right_fill, warpgroup
from tiles import inlined, static
from tiles.lengths import follows

from .variants import Variant

SHARING = 6  # multiprocessors that should read one pair's keys at a time: 4 to 8 are as good (bench/notes/forward.md)


@follows
def band_of(grid: int, processors: int, nbytes: float, cache: int, uneven: bool) -> int:
    """How many pairs of head and batch are gone through at once, query block by query block. uneven: some query blocks of a
    pair take longer than others, as causal ones do, or a last one that has few rows; else a pair at a time will do.

    With all pairs at once every query block would fetch its keys and values from memory anew, and nothing else would set the
    speed. A grid of more blocks than processors goes through as many pairs as leave several multiprocessors to each: what one
    reads comes from L2 for the others. A persistent grid is for short problems, whose keys and values, of `nbytes` a pair, can
    stay in half of the L2 `cache` until the band's last query block has read them. There an even number of bands' rows should
    fill the grid, so that the order of tiles, which turns back after every round, gives each block as much work as the others;
    pair by pair the same multiprocessors would get all last blocks, wherever the number of blocks divides the grid."""
    if not uneven:
        return 1
    if grid > processors:
        return max(1, processors // SHARING)
    return next((n for n in _halves(grid) if n * nbytes <= cache // 2), 1)


@follows
def even(band: int, batch_heads: int, always: bool) -> int:
    """As many pairs to a band, in as many bands, so that none is shorter than the others: always, or where the last one has
    less than a quarter of a band, whose few long tiles would leave most of the GPU idle (bench/notes/parallel.md)."""
    bands = (batch_heads + band - 1) // band
    last = batch_heads - band * (bands - 1)
    return (batch_heads + bands - 1) // bands if always or 4 * last < band else band


@functools.cache
def _halves(grid: int) -> list[int]:
    """The numbers that divide a grid an even number of times, greatest first."""
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
    edge of a window. unseen_ahead: how many keys at the beginning of the last masked block no query sees. unseen_behind: how
    many keys at the end of the first block no query sees. The values of such keys are zeroed before the product, because a
    weight of 0 times NaN is NaN. Both counts may be negative, which means 0."""

    first: Any
    n: Any
    masked_right: Any
    masked: Any
    unseen_ahead: Any
    unseen_behind: Any

    @inlined
    def clear(self, tile, i, groups):
        """Zero the unseen keys of the i-th block, a shared tile. The CTA's first `groups` warpgroups do it together."""
        if i == max(1, self.masked) - 1:
            zero_first_keys(tile, self.unseen_ahead, groups)
        if i == 0:
            zero_last_keys(tile, self.unseen_behind, groups)


@static
class Tiling:
    """For kernels whose tiles have `rows` query rows, and whose key blocks have `kv` keys, under a variant."""

    rows: int
    kv: int
    variant: Variant

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def ends_within(self) -> bool:
        """Does the variant mask the keys of a block behind the last key?"""
        return self.variant.ends_at_last_key

    @inlined
    def place(self, tile, blocks, batch_heads, band):
        """The tile's (query block, pair of head and batch): one band of pairs after the other (see `band_of`); where later rows
        see more keys a band's longest blocks first."""
        batch_head, block = rasterize(tile, batch_heads, blocks, band)
        if self.variant.monotonic:
            return blocks - 1 - block, batch_head
        else:
            return block, batch_head

    @inlined
    def key_blocks(self, row, ctx):
        """The Blocks of a tile whose first query is `row`. One is counted even if there is no need to: kernels begin
        with it."""
        keys = self.variant.key_range(row, row + self.rows - 1, ctx)
        first, end = 0 if self.variant.starts_at_zero else keys.first // self.kv, keys.end
        if self.variant.may_end_early:
            end = min(end, self.variant.key_range(0, ctx.seqlen_q - 1, ctx).end)  # not all rows of a tile need be queries
        n = max(1, (end + self.kv - 1) // self.kv - first)
        right = 1 if self.variant.sees_all_keys else n - max(0, keys.inner_end // self.kv - first)
        behind = self.unseen_behind(int32((first + n) * self.kv), ctx)
        if self.variant.starts_at_zero:
            return KeyBlocks(int32(0), int32(n), int32(right), int32(right), int32(0), behind)
        else:
            left = min(n - right, max(0, (keys.inner_first + self.kv - 1) // self.kv - first))
            ahead = self.unseen_ahead(int32(first * self.kv), ctx)
            return KeyBlocks(int32(first), int32(n), int32(right), int32(right + left), ahead, behind)

    @inlined
    def key(self, blocks, i, ctx):
        """The first key of the i-th block to be worked on: those that the mask cuts, from the last one on, and then the others,
        from the last one on. A list of blocks (key_block_lists.py) has the same order, so that a mask in Python gives the same
        bits."""
        if self.variant.starts_at_zero:
            return int32((blocks.n - 1 - i) * self.kv)
        else:
            on_right, inner = blocks.n - 1 - i, blocks.n - 1 - i + blocks.masked - blocks.masked_right
            block = on_right if i < blocks.masked_right else blocks.masked - 1 - i if i < blocks.masked else inner
            return int32((blocks.first + block) * self.kv)

    @inlined
    def unseen_ahead(self, key, ctx):
        """How many of the keys from `key` on no query of the sequence sees, because all windows begin behind them; 0 or less if
        there are none."""
        if self.variant.starts_at_zero:
            return int32(0)
        else:
            return int32(self.variant.key_range(0, ctx.seqlen_q - 1, ctx).first - key)

    @inlined
    def unseen_behind(self, end, ctx):
        """The same of the keys up to `end`, because all windows end ahead of them."""
        if self.variant.may_end_early:
            return int32(end - self.variant.key_range(0, ctx.seqlen_q - 1, ctx).end)
        else:
            return int32(0)

    @inlined
    def score(self, s, ctx, key):
        """What the variant makes of a tile of scores."""
        return self.variant.score(s, ctx, key)

    @inlined
    def weights(self, s, lse, cut, ctx, key, scale):
        """exp2(scale s - lse), the weights of scores s once more, if the variant has bent them, lse being their rows'
        log-sum-exp; marked where it drops them. cut: must they be masked? What is added here, not to scores at first, takes no
        registers while these wait for products."""
        if self.variant.has_row_offset:
            lse = lse + self.variant.row_offset(s, ctx, int32(key + s.cols // 2)) * scale
        if cut:
            s = self.mask(s, ctx, key)
        if self.variant.adds_late:
            p = exp2(s * scale - (lse - self.variant.late_term(s, ctx, key, scale)))
        else:
            p = exp2(s * scale - lse)
        return self.variant.mark_dropped(p, ctx, key)

    @inlined
    def mask(self, s, ctx, key):
        """-inf for the scores that must not be seen, of keys from `key` on."""
        if not self.ends_within:
            s = right_fill(s, ctx.seqlen_k - key, -math.inf)
        return self.variant.mask(s, ctx, key, -math.inf)
