"""How a walk through segments of sequences (delta_segment_gradients_hopper.py) follows the recurrence that computes what it
reads (delta_chains_hopper.py), as objects with the same methods, which both kernels have.

The recurrence has two blocks a head of a sequence, of 64 columns of values each, which go through the whole sequence from its
end, chunk after chunk. With few heads half of the GPU or more is idle meanwhile. So the walk may run beside it (programmatic
dependent launch): each block of the recurrence counts its segments in memory, and a block of the walk, of which those of the
last segments come first, waits for those of its head."""

from numpy import int32

from ops import count_up, divmod, grid, reset_count, stores_done
from tiles import inlined, static
from tiles.launching.arguments import ENDS, record

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

    @inlined
    def begin(self, params, block):
        """A warp of the recurrence's block with this index, the one that counts, lets the walk begin, once all have done so."""

    @inlined
    def count_chunk(self, params, block, number, chunks, segments):
        """That warp has stored what the walk reads of a chunk with this number, and of those behind it. It counts a segment if
        the chunk is the first of one. chunks: of a sequence, in so many `segments`."""

    @inlined
    def wait(self, params, walk, heads, head, columns, length, segments):
        """A warp waits until its HeadWalk's segment of another head of this sequence, or of its own, is there in these columns,
        0 or 1. length: of a sequence, in so many `segments`."""

    @inlined
    def wait_for_head(self, params, walk, heads, length, segments):
        """A warp waits until its HeadWalk's segment is there in all columns."""

    @inlined
    def finish(self):
        """A warp waits at the end of the walk's block until the recurrence is done: whoever comes later relies on that."""


@static
class OverlappingGrids(SeparateGrids):
    """The walk runs beside the recurrence. Sequences are not packed."""

    overlaps = True

    def __str__(self):
        return "overlapping"

    def params(self):
        """gWalked: how many segments each block of the recurrence has walked."""
        return record(gWalked=ENDS)

    @inlined
    def begin(self, params, block):
        reset_count(params.gWalked, (block,))
        grid.release()

    @inlined
    def count_chunk(self, params, block, number, chunks, segments):
        segment_chunks, _ = divmod(int32(chunks + segments - 1), segments)
        _, rest = divmod(number, segment_chunks)
        if rest == 0:
            stores_done()
            count_up(params.gWalked, (block,))

    @inlined
    def wait(self, params, walk, heads, head, columns, length, segments):
        chunks, _ = divmod(int32(length + CHUNK - 1), CHUNK)
        segment_chunks, _ = divmod(int32(chunks + segments - 1), segments)
        segments_with_chunks, _ = divmod(int32(chunks + segment_chunks - 1), segment_chunks)
        later = int32(segments * (walk.sequence + 1) - 1 - walk.slot)  # those that the recurrence comes to after this one
        block = int32(CONSUMERS * (heads * walk.sequence + head) + columns)
        grid.wait_count(params.gWalked, (block,), int32(segments_with_chunks - later))

    @inlined
    def wait_for_head(self, params, walk, heads, length, segments):
        for columns in range(CONSUMERS):
            self.wait(params, walk, heads, walk.head, columns, length, segments)

    @inlined
    def finish(self):
        grid.wait()


SEPARATE_GRIDS, OVERLAPPING_GRIDS = SeparateGrids(), OverlappingGrids()
