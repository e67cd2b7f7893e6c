"""Segments of sequences that thread blocks go through side by side under the delta rule with decays of channels, without the
states before them. Where a few chunks before a segment, its overlap, leave nothing of an older state (channel_history.py), a
block of its own goes through it, from the overlap on. Where something is left, the block of the segment before goes on through
this one. So sequences whose gates forget are divided among many blocks, and others belong to one.

For recurrences in reverse, of gradients, segments are counted from the end of the sequence, and "before" means later tokens:
a SequenceLayout has the direction."""

from typing import Any, NamedTuple

from numpy import float32, int32

from ops import divmod, warpgroup, zeros
from tiles import inlined, static
from tiles.launching.arguments import INT, array, record

from .channel_history import ChannelHistory
from .tokens import SequenceLayout, block_coord


class SegmentSpan(NamedTuple):
    """The chunks that a block goes through. seq: their tokens. overlap: how many of the first ones lie before its segment, and
    are not stored. begins, ends: do they begin, and end, where the recurrence does?"""

    seq: Any
    overlap: Any
    begins: Any
    ends: Any


@static
class WholeSequences:
    """A block goes through a whole sequence."""

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    def __str__(self):
        return ""

    @inlined
    def split(self, index, args):
        """(the number of a block among those that have a segment in common, its segment). args: the record of `params`."""
        return index, 0

    @inlined
    def locate(self, layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        """The SegmentSpan of a block. layout: a SequenceLayout. head_sequence: sequence * heads + head."""
        seq = layout.sequence_tokens(gCuSeqlens, sequence, length)
        return SegmentSpan(seq.backwards() if layout.reversed else seq, 0, True, True)

    @inlined
    def is_overlap(self, span, j):
        """Does the j-th chunk of a SegmentSpan lie before its segment?"""
        return False

    @inlined
    def load_state(self, gState, tile, at, span):
        """The transposed state with which a SegmentSpan begins: 0 unless the recurrence does."""
        return warpgroup.load(gState, tile, at, aligned=False)

    @inlined
    def store_state(self, gState, state, at, span):
        """Store the transposed state with which a recurrence ends, if this SegmentSpan does."""
        warpgroup.store(gState, state, at, aligned=False)


class OverlappingSegments(WholeSequences):
    """A block goes through one of the `segments` of a sequence, after its overlap, and through those that follow it and have no
    block of their own."""

    def params(self):
        """gOverlaps (direction, sequence * heads + head, segment): how many chunks the overlap of each segment but the first
        ones has, in float32, or -1 if something is left of states before so many; see OverlapCounts."""
        return record(gOverlaps=array(3), segments=INT)

    def __str__(self):
        return "segments"

    @inlined
    def split(self, index, args):
        return divmod(index, args.segments)

    @inlined
    def load_overlap(self, args, layout, head_sequence, segment):
        """How many chunks the overlap of a segment has, or -1."""
        return int32(args.gOverlaps[int32(layout.reversed), head_sequence, segment])

    @inlined
    def locate(self, layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        overlap, next_segment = int32(0), int32(segment + 1)
        if segment > 0:
            overlap = self.load_overlap(args, layout, head_sequence, segment)
        while next_segment < args.segments and self.load_overlap(args, layout, head_sequence, next_segment) < 0:
            next_segment = int32(next_segment + 1)
        tokens = layout.segment_tokens(gCuSeqlens, sequence, length, segment, args.segments)
        last = layout.segment_tokens(gCuSeqlens, sequence, length, int32(next_segment - 1), args.segments)
        history = layout.tokens_before(gCuSeqlens, sequence, length, tokens)
        has_segment, count = overlap >= 0, int32(max(overlap, 0))
        seq = history.keep(count)
        if has_segment:
            seq = seq.extend(last)
        return SegmentSpan(seq, count, overlap == history.num_chunks(), has_segment and next_segment == args.segments)

    @inlined
    def is_overlap(self, span, j):
        return j < span.overlap

    @inlined
    def load_state(self, gState, tile, at, span):
        state = zeros(tile)
        if span.begins:
            state = warpgroup.load(gState, tile, at, aligned=False)
        return state

    @inlined
    def store_state(self, gState, state, at, span):
        if span.ends:
            warpgroup.store(gState, state, at, aligned=False)


@static
class OverlapCounts:
    """The counts of chunks in overlaps, by blocks of a grid before that which goes through the segments. layout: gives the
    direction of the recurrence."""

    history: ChannelHistory
    layout: SequenceLayout

    def params(self):
        """The further parameters of that grid's kernel, as a record; see OverlappingSegments and ChannelHistory."""
        return record(**OverlappingSegments().params().fields, **self.history.params().fields)

    @inlined
    def store(self, args, params, gBeta, gCuSeqlens, length, heads, group, index, sums):
        """A warpgroup, or a block with a BlockHistory, stores the count of one segment. args: the record of `params`; params:
        that of the gates' formula. heads: of keys, each of which `group` value heads share. index: which of the segments of all
        sequences and heads, without the first segments. sums: a vector for their sums."""
        _, index, head, sequence = block_coord(index, 1, args.segments - 1, heads * group)
        (key_head, _), segment = divmod(head, group), int32(index + 1)
        tokens = self.layout.segment_tokens(gCuSeqlens, sequence, length, segment, args.segments)
        history = self.layout.tokens_before(gCuSeqlens, sequence, length, tokens)
        count = self.history.count(args, params, gBeta, history, head, key_head, sums)
        if self.history.is_first_warp():
            args.gOverlaps[int32(self.layout.reversed), sequence * heads * group + head, segment] = float32(count)
