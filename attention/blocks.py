"""Which query rows a tile has and which key blocks they see: the same for every family."""

from numpy import int32

from ops import grouped, split
from tiles import inlined


def band_of(grid: int, nbytes: float, cache: int) -> int:
    """How many pairs a persistent grid of so many blocks goes through at once, longest query blocks first.

    nbytes: of a pair's keys and values. Those of a band should stay in half of the L2 `cache` until its last query block has
    read them: with all pairs at once every query block fetches them from memory again, which costs up to a quarter of the
    speed of short causal problems. And an even number of bands' rows should fill the grid, so that the snake, which turns
    back after every round, gives each block as much work as the others."""
    return max(n for n in range(1, grid + 1) if n == 1 or (grid % (2 * n) == 0 and n * nbytes <= cache // 2))


def walk(config):
    """(place, key_blocks) of a configuration with `rows` query rows and `kv` key rows a block, causal or not."""
    KV, ROWS, CAUSAL, PERSISTENT = config.kv, config.rows, config.causal, config.persistent

    @inlined
    def place(tile, blocks, pairs, band):
        """The tile's (query block, pair of head and batch). Causal: the longest blocks first, of all pairs or, in a persistent
        grid, of one band of pairs after the other (see `band_of`)."""
        if CAUSAL and PERSISTENT:
            pair, done = grouped(tile, pairs, blocks, band)
            return blocks - 1 - done, pair
        elif CAUSAL:
            pair, done = split(tile, pairs)
            return blocks - 1 - done, pair
        else:
            return split(tile, blocks)

    @inlined
    def key_blocks(diagonal, kv_len):
        """How many key blocks the query rows see, and how many of them, counted from the last, a mask cuts."""
        if CAUSAL:
            n = max(1, (min(kv_len, ROWS + diagonal) + KV - 1) // KV)
            return int32(n), int32(n - max(0, diagonal + 1) // KV)
        else:
            return int32((kv_len + KV - 1) // KV), int32(1)

    return place, key_blocks
