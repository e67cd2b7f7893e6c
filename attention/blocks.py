"""Which query rows a tile has and which key blocks they see: the same for every family."""

from numpy import int32

from ops import split
from tiles import inlined


def walk(config):
    """(place, key_blocks) of a configuration with `rows` query rows and `kv` key rows a block, causal or not."""
    KV, ROWS, CAUSAL = config.kv, config.rows, config.causal

    @inlined
    def place(tile, blocks, pairs):
        """The tile's (query block, pair of head and batch). Causal: the longest blocks of all pairs first."""
        if CAUSAL:
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
