"""How many chunks of a segment still count at its end. What tokens add to a state decays with all gates after them, so of a
segment's local state only what its last chunks add is left, if its gates are not very slow. With decays of channels,
gla_recent_states_hopper.py finds out as it goes."""

from numpy import float32, int32

from ops import col_index, cumsum, less, load, tile_sum, where
from tiles import inlined

from .gates import ROW_VEC

LEAST_LOG2 = -150.0  # exp2 of less is 0 in fp32, also if denormal numbers are kept


@inlined
def count_recent_chunks(gChunkDecays, head, first_chunk, n, is_reversed, least_log2=LEAST_LOG2):
    """How many of a segment's n chunks still count: those after whose end the segment decays by no more than 2^least_log2, its
    last ones; or if states go from the last token to the first, its first ones. gChunkDecays: the sum of the gates of each
    head and chunk, in powers of 2; without them all chunks count. first_chunk: the index of the segment's first one. One warp
    reads as many decays at once as ROW_VEC has numbers."""
    count, left, decay = int32(0), int32(n), float32(0)
    goes_on = left > 0 and gChunkDecays.shape[0] > 0
    while goes_on:
        width = int32(min(left, ROW_VEC.length))
        start = int32(first_chunk + (n - left if is_reversed else left - width))
        decays = load(gChunkDecays, ROW_VEC, (head, start))
        decays = where(less(col_index(ROW_VEC), float32(width)), decays, 0.0)
        sums, total = cumsum(decays), tile_sum(decays)
        later = decay + (sums - decays if is_reversed else total - sums)
        counted = where(less(later, least_log2), 0.0, where(less(col_index(ROW_VEC), float32(width)), 1.0, 0.0))
        recent = int32(tile_sum(counted))
        count, left, decay = int32(count + recent), int32(left - width), float32(decay + total)
        goes_on = recent == width and left > 0
    return count if gChunkDecays.shape[0] > 0 else int32(n)
