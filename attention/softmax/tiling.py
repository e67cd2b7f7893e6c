"""Which query rows a tile has and which keys they see: the same for every family, and one object a variant of attention."""

import functools
import math
from collections.abc import Callable

from numpy import int32

from ops import rasterize, right_fill
from tiles import inlined, static
from tiles.lengths import follows

SHARING = 6  # multiprocessors that should read one pair's keys and values at a time: 4 to 8 are as good (bench/NOTES.md)


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


@functools.cache
def _halves(grid: int) -> list[int]:
    """The numbers that divide a grid an even number of times, greatest first."""
    return [n for n in range(grid // 2, 0, -1) if grid % (2 * n) == 0]


@static
class Full:
    """Every query sees every key. Of kernels whose tiles have `rows` query rows, and whose key blocks have `kv` keys.
    triangle: the op `causal` of the scope that holds a tile of scores."""

    rows: int
    kv: int
    triangle: Callable

    @inlined
    def place(self, tile, blocks, pairs, band):
        """The tile's (query block, pair of head and batch): one band of pairs after the other (see `band_of`)."""
        pair, block = rasterize(tile, pairs, blocks, band)
        return block, pair

    @inlined
    def key_blocks(self, diagonal, kv_len):
        """How many key blocks a tile's query rows see, and how many of them, counted from the last, must be masked; `diagonal`
        is the last key that the first row may see. The last is counted even if that row sees all of it: kernels begin with it,
        and mask it."""
        return int32((kv_len + self.kv - 1) // self.kv), int32(1)

    @inlined
    def edge(self, diagonal, row, kv_len):
        """Where the mask cuts, for rows of the tile from `row` on."""
        return kv_len

    @inlined
    def mask(self, s, edge):
        """-inf for the scores that must not be seen, `edge` counting from the block's first key."""
        return right_fill(s, edge, -math.inf)


class Causal(Full):
    """A query sees the keys up to its own place."""

    @inlined
    def place(self, tile, blocks, pairs, band):
        """See Full: a band's longest blocks first."""
        pair, done = rasterize(tile, pairs, blocks, band)
        return blocks - 1 - done, pair

    @inlined
    def key_blocks(self, diagonal, kv_len):
        """See Full."""
        n = max(1, (min(kv_len, self.rows + diagonal) + self.kv - 1) // self.kv)
        return int32(n), int32(max(1, n - max(0, diagonal + 1) // self.kv))

    @inlined
    def edge(self, diagonal, row, kv_len):
        """See Full."""
        return diagonal + row

    @inlined
    def mask(self, s, edge):
        """See Full: right of the diagonal `edge`."""
        return self.triangle(s, edge, -math.inf)
