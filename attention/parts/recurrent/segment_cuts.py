"""Which tokens a thread block of a recurrence goes through, forward in time or in reverse: a whole sequence, or one of its
segments, where what is beyond a few further chunks counts for nothing, because states decay."""

from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, warpgroup, zeros
from tiles import inlined, static
from tiles.launching.arguments import INT, array, record

from .tokens import CHUNK, TokenRange

FORWARD, REVERSE = 0, 1  # directions of gOverlaps
UNCUT = -1.0  # stands for more chunks across the edge of a segment than a block counts, or for all of the sequence


class RecurrenceSpan(NamedTuple):
    """The tokens of a block. seq: their range; a recurrence in reverse has its chunks in reverse order. overlap: how many of
    its first chunks belong to other segments, and are not stored. begins, ends: does it begin, and end, where the recurrence
    does?"""

    seq: Any
    overlap: Any
    begins: Any
    ends: Any


class SegmentBounds(NamedTuple):
    """The segments of sequences of `length` tokens, which are not packed."""

    length: Any
    segments: Any

    @inlined
    def start(self, segment):
        """The first token of a segment, or the end of the last one."""
        chunks, _ = divmod(int32((self.length + CHUNK - 1) // CHUNK) + self.segments - 1, self.segments)
        return int32(min(self.length, CHUNK * chunks * segment))


@static
class WholeSequences:
    """A block has a whole sequence."""

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
    def forward_span(self, seq_layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        """The RecurrenceSpan of a block in the order of time. head_sequence: sequence * heads + head."""
        return RecurrenceSpan(seq_layout.sequence_tokens(gCuSeqlens, sequence, length), 0, True, True)

    @inlined
    def reverse_span(self, seq_layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        """The RecurrenceSpan of a block from the last token on; see forward_span."""
        return RecurrenceSpan(seq_layout.sequence_tokens(gCuSeqlens, sequence, length).backwards(), 0, True, True)

    @inlined
    def is_overlap(self, span, j):
        """Does the j-th chunk of a RecurrenceSpan belong to another segment?"""
        return False

    @inlined
    def load_state(self, gState, tile, at, span):
        """The transposed state with which a RecurrenceSpan begins."""
        return warpgroup.load(gState, tile, at, aligned=False)

    @inlined
    def store_state(self, gState, state, at, span):
        """Store the transposed state with which a recurrence ends, if this RecurrenceSpan does."""
        warpgroup.store(gState, state, at, aligned=False)


class CutSequences(WholeSequences):
    """A block has one of the `segments` of a sequence, and begins with the chunks before it that still count there. If these
    are more than channel_history.py counts, the segment belongs to the block of the one before it, and its own block has
    nothing to do."""

    def params(self):
        """gOverlaps: (direction, sequence times heads, segment): see delta_channel_cuts_hopper.py."""
        return record(gOverlaps=array(3), segments=INT)

    def __str__(self):
        return "cut"

    @inlined
    def split(self, index, args):
        return divmod(index, args.segments)

    @inlined
    def load_overlap(self, args, direction, head_sequence, segment):
        """How many chunks count across the first token of a segment; less than 0 if they are too many."""
        return int32(args.gOverlaps[direction, head_sequence, segment])

    @inlined
    def forward_span(self, seq_layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        bounds, overlap, end = SegmentBounds(length, args.segments), int32(0), int32(segment + 1)
        if segment > 0:
            overlap = self.load_overlap(args, FORWARD, head_sequence, segment)
        while end < args.segments and self.load_overlap(args, FORWARD, head_sequence, end) < 0:
            end = int32(end + 1)
        first_token, end_token = int32(bounds.start(segment) - CHUNK * overlap), bounds.start(end)
        if overlap < 0:
            end_token = first_token
        return RecurrenceSpan(TokenRange(first_token, end_token, sequence), overlap, segment == 0, end == args.segments)

    @inlined
    def reverse_span(self, seq_layout, gCuSeqlens, sequence, length, head_sequence, segment, args):
        bounds, overlap, first, end = SegmentBounds(length, args.segments), int32(0), int32(segment), int32(segment + 1)
        if end < args.segments:
            overlap = self.load_overlap(args, REVERSE, head_sequence, end)
        while first > 0 and self.load_overlap(args, REVERSE, head_sequence, first) < 0:
            first = int32(first - 1)
        first_token, end_token = bounds.start(first), int32(min(length, bounds.start(end) + CHUNK * overlap))
        if overlap < 0:
            first, end_token = int32(1), first_token
        return RecurrenceSpan(
            TokenRange(first_token, end_token, sequence).backwards(), overlap, end == args.segments, first == 0
        )

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
