"""Segments of a walk with decays of channels, without the states before them. Where a few chunks before a segment leave
nothing of an older state (channel_history.py), a thread block of its own walks it, from those chunks on. Where something is
left, the block of the segment before goes on through this one. So sequences whose gates forget are walked by many blocks, and
others by one."""

from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import divmod, warpgroup
from tiles import inlined, static
from tiles.launching.arguments import INT, array, record

from .channel_history import ChannelHistory
from .tokens import SequenceLayout, TokenRange, block_coord


class WalkPart(NamedTuple):
    """What a block walks. seq: its tokens. early_chunks: how many chunks at their beginning lie before its first segment.
    is_first: do they begin with the sequence? is_last: do they end with it?"""

    seq: Any
    early_chunks: Any
    is_first: Any
    is_last: Any


@inlined
def locate_part(seq_layout, gEarlyChunks, gCuSeqlens, length, sequence, head, segment, segments):
    """The WalkPart of the block that has a segment; one without tokens if the segment before has no end there. gEarlyChunks: of
    each segment but the first ones, for each head, how many chunks before it count, or -1 if that is not known."""
    start, _, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
    first = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
    slot, count, end = int32(sequence * segments), int32(0), first.end
    if segment > 0:
        count = int32(gEarlyChunks[slot + segment, head])
    next_segment, goes_on = int32(segment + 1), count >= 0 and segment + 1 < segments
    while goes_on:
        goes_on = gEarlyChunks[slot + next_segment, head] < 0
        if goes_on:
            end = seq_layout.segment_tokens(gCuSeqlens, sequence, length, next_segment, segments).end
            next_segment = int32(next_segment + 1)
            goes_on = next_segment < segments
    history, is_walked, early_chunks = TokenRange(start, first.start, batch), count >= 0, int32(max(count, 0))
    begin = history.chunk_start(history.num_chunks() - early_chunks)
    tokens = TokenRange(begin, int32(end if is_walked else begin), batch)
    return WalkPart(tokens, early_chunks, begin == start, is_walked and next_segment == segments)


@static
class EarlyChunks:
    """The count of the chunks before segments, by blocks of the grid before the walk."""

    history: ChannelHistory
    seq_layout: SequenceLayout

    def params(self):
        """The further parameters of that grid's kernel, as a record. gEarlyChunks, segments: see locate_part. counts: how many
        blocks at the grid's beginning count; each has a segment that is not a sequence's first one."""
        return record(gEarlyChunks=array(2), segments=INT, counts=INT, **self.history.params().fields)

    @inlined
    def chunk_block(self, args, block_index):
        """The index of a block among those that have chunks; negative for those that count. args: the record of `params`."""
        return int32(block_index - args.counts)

    @inlined
    def store(self, args, params, gBeta, gCuSeqlens, length, heads, group, sums):
        """A block counts. args: the record of `params`; params: that of the gates' formula. heads: of keys, each of which
        `group` value heads share."""
        _, index, head, sequence = block_coord(cuda.blockIdx.x, 1, args.segments - 1, heads * group)
        key_head, _ = divmod(head, group)
        start, _, batch = self.seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        segment = self.seq_layout.segment_tokens(gCuSeqlens, sequence, length, int32(index + 1), args.segments)
        tokens = TokenRange(start, segment.start, batch)
        count = self.history.count(args, params, gBeta, tokens, head, key_head, sums)
        if warpgroup.rank() == 0:
            args.gEarlyChunks[sequence * args.segments + index + 1, head] = float32(count)
