"""How a walk through segments of sequences (delta_segment_gradients_hopper.py) follows the recurrences that compute what it
reads (delta_chains_hopper.py), as objects with the same methods, which both kernels have.

A recurrence has two blocks a head of a sequence, of 64 columns of values each, which go through the whole sequence, that of dS
from its end. With few heads half of the GPU or more is idle meanwhile. So the walk may run beside them (programmatic dependent
launch): each block of a recurrence counts its segments in memory, and a block of the walk waits for those of its head. Where
forward stored S, the walk's blocks come in the order in which the recurrence of dS finishes their segments; where both
recurrences run, from the middle of the sequence, where they meet, to both ends."""

from numpy import int32

from ops import count_up, divmod, grid, reset_count, stores_done
from tiles import inlined, static
from tiles.launching.arguments import ENDS, INT, record

from .delta_gradient_config import CONSUMERS
from .tokens import CHUNK


@static
class SeparateGrids:
    """The walk begins when the recurrence is done."""

    overlaps = False  # does it run beside the recurrence?

    def __str__(self):
        return ""

    def params(self):
        """The further parameters of both kernels, as a record."""
        return record()

    def recurrence_params(self):
        """The further parameters of the recurrences, as a record. gWalked: how many segments each of their blocks has
        walked."""
        return record()

    @inlined
    def begin(self, params, block):
        """A warp of the recurrence's block with this index, the one that counts, lets the walk begin, once all have done so."""

    @inlined
    def count_chunk(self, params, block, boundary, chunks, segments):
        """That warp has stored what the walk reads of all chunks up to a boundary between two chunks, or the sequence's start
        or end. It counts a segment if one ends there. chunks: of a sequence, in so many `segments`."""

    @inlined
    def order_block(self, params, block, segments, heads):
        """The index of the walk's block, as if the blocks of last segments came first, that comes at this place of the grid."""
        return block

    @inlined
    def wait(self, params, walk, heads, head, columns, length, segments):
        """A warp waits until dS after its HeadWalk's segment, and dV, of another head of this sequence, or of its own, are
        there in these columns, 0 or 1. length: of a sequence, in so many `segments`."""

    @inlined
    def wait_for_head(self, params, walk, heads, length, segments):
        """A warp waits until its HeadWalk's segment is there in all columns."""

    @inlined
    def wait_for_turns(self, params, walk, heads, member, length, segments):
        """A warp waits until the counts of turns of its HeadWalk's chunks are 0. member: which value head of its head of keys
        it has."""

    @inlined
    def finish(self):
        """A warp waits at the end of the walk's block until the recurrence is done: whoever comes later relies on that."""


@static
class OverlappingGrids(SeparateGrids):
    """The walk runs beside the recurrence of dS. Sequences are not packed."""

    overlaps = True

    def __str__(self):
        return "overlapping"

    def params(self):
        """gWalked: that of recurrence_params, which the walk reads."""
        return self.recurrence_params()

    def recurrence_params(self):
        return record(gWalked=ENDS)

    @inlined
    def begin(self, params, block):
        reset_count(params.gWalked, (block,))
        grid.release()

    @inlined
    def count_chunk(self, params, block, boundary, chunks, segments):
        segment_chunks, _ = divmod(int32(chunks + segments - 1), segments)
        _, rest = divmod(boundary, segment_chunks)
        if rest == 0 or boundary == chunks:
            stores_done()
            count_up(params.gWalked, (block,))

    @inlined
    def wait(self, params, walk, heads, head, columns, length, segments):
        _, later, count = self._place(walk, length, segments)
        block = int32(CONSUMERS * (heads * walk.sequence + head) + columns)
        grid.wait_count(params.gWalked, (block,), int32(count - later))

    @inlined
    def _place(self, walk, length, segments):
        """(how many of a sequence's segments up to that of a HeadWalk have chunks, how many come before it, how many of all
        have chunks)"""
        chunks, _ = divmod(int32(length + CHUNK - 1), CHUNK)
        segment_chunks, _ = divmod(int32(chunks + segments - 1), segments)
        count, _ = divmod(int32(chunks + segment_chunks - 1), segment_chunks)
        before = int32(segments * (walk.sequence + 1) - 1 - walk.slot)
        return int32(min(before + 1, count)), before, count

    @inlined
    def wait_for_head(self, params, walk, heads, length, segments):
        for columns in range(CONSUMERS):
            self.wait(params, walk, heads, walk.head, columns, length, segments)

    @inlined
    def wait_for_turns(self, params, walk, heads, member, length, segments):
        # the recurrence's block of the first of the value heads has set them to 0
        self.wait(params, walk, heads, int32(walk.head - member), 0, length, segments)

    @inlined
    def finish(self):
        grid.wait()


@static
class GridsFromMiddle(OverlappingGrids):
    """The walk runs beside both recurrences. Sequences are not packed."""

    def __str__(self):
        return "overlapping from the middle"

    def params(self):
        """gWalked: that of recurrence_params, which the walk reads. sequences: how many there are."""
        return record(sequences=INT, **self.recurrence_params().fields)

    @inlined
    def order_block(self, params, block, segments, heads):
        index, head = divmod(block, heads)
        place, sequence = divmod(index, params.sequences)
        half, later = divmod(int32(place + 1), 2)
        middle, _ = divmod(int32(segments - 1), 2)
        segment = int32(middle - half)
        if later == 0:
            segment = int32(middle + half)
        return int32((sequence * segments + segment) * heads + head)

    @inlined
    def wait_for_head(self, params, walk, heads, length, segments):
        count, _, _ = self._place(walk, length, segments)
        for columns in range(CONSUMERS):
            self.wait(params, walk, heads, walk.head, columns, length, segments)
            # the recurrence of S, whose blocks come behind those of dS
            block = int32(CONSUMERS * (heads * (params.sequences + walk.sequence) + walk.head) + columns)
            grid.wait_count(params.gWalked, (block,), count)

    @inlined
    def wait_for_turns(self, params, walk, heads, member, length, segments):
        pass


SEPARATE_GRIDS, OVERLAPPING_GRIDS, GRIDS_FROM_MIDDLE = SeparateGrids(), OverlappingGrids(), GridsFromMiddle()
