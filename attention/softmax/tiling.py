"""Which query rows a tile has and which key blocks they see: the same for every family."""

import functools

from numpy import int32

from ops import divmod, rasterize
from tiles import inlined

SHARING = 6  # multiprocessors that should read one pair's keys and values at a time: 4 to 8 are as good (bench/NOTES.md)


def band_of(grid: int, processors: int, nbytes: float, cache: int) -> int:
    """How many pairs causal attention goes through at once, longest query blocks first. With all at once every query block
    would fetch its keys and values from memory anew, and nothing else would set the speed.

    A grid of more blocks than processors goes through as many pairs as leave several multiprocessors to each: what one reads
    comes from L2 for the others. A persistent grid is for short problems, whose keys and values, of `nbytes` a pair, can stay
    in half of the L2 `cache` until the band's last query block has read them. There an even number of bands' rows should fill
    the grid, so that the snake, which turns back after every round, gives each block as much work as the others."""
    if grid > processors:
        return max(1, processors // SHARING)
    return next((n for n in _halves(grid) if n * nbytes <= cache // 2), 1)


@functools.cache
def _halves(grid: int) -> list[int]:
    """The numbers that divide a grid an even number of times, greatest first."""
    return [n for n in range(grid // 2, 0, -1) if grid % (2 * n) == 0]


def walk(config):
    """(place, key_blocks) of a configuration with `rows` query rows and `kv` key rows a block, causal or not."""
    KV, ROWS, CAUSAL = config.kv, config.rows, config.causal

    @inlined
    def place(tile, blocks, pairs, band):
        """The tile's (query block, pair of head and batch). Causal: one band of pairs after the other, its longest blocks
        first (see `band_of`)."""
        if CAUSAL:
            pair, done = rasterize(tile, pairs, blocks, band)
            return blocks - 1 - done, pair
        else:
            quotient, remainder = divmod(tile, blocks)
            return remainder, quotient

    @inlined
    def key_blocks(diagonal, kv_len):
        """How many key blocks the query rows see, and how many of them, counted from the last, must be masked. The last is
        counted even if the first row already sees all of it: kernels begin with it, and mask it."""
        if CAUSAL:
            n = max(1, (min(kv_len, ROWS + diagonal) + KV - 1) // KV)
            return int32(n), int32(max(1, n - max(0, diagonal + 1) // KV))
        else:
            return int32((kv_len + KV - 1) // KV), int32(1)

    return place, key_blocks
