"""Into how many parts a sequence's keys go: decided by shapes alone, never by lengths, so that a plan, and a CUDA graph, serves
sequences as they grow. In the kernel each sequence divides its own keys."""

import functools

from tiles.lengths import follows

MOST = 128  # parts
BEGIN, COMBINE = 1, 3  # what a block's beginning and end, and the launch that combines, take: so many tiles' time (a guess)


@follows
def parts_for(blocks: int, tiles: int, places: int) -> int:
    """The fewest that let `blocks` blocks without parts, which have up to `tiles` tiles of keys, end soonest, where so many are
    worked on at a time: what counts is how many a place gets."""
    return _soonest(blocks, tiles, places)


@functools.lru_cache(4096)
def _soonest(blocks, tiles, places):
    def time(parts):
        each = -(-tiles // parts) + BEGIN
        return -(-blocks * parts // places) * each + COMBINE * (parts > 1)

    return min(range(1, max(1, min(MOST, tiles)) + 1), key=time)
