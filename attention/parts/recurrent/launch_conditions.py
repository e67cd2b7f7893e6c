"""Whether a grid of a call runs. Where it depends on the gates which of two ways of launches is the faster one, all are
launched: a grid that counts how many chunks before each segment still count there (delta_channel_cuts_hopper.py), then the
grids of both ways. All their blocks read the same counts, and those of one way end at once. So nothing waits for the host, and
equal inputs are computed the same way."""

from numpy import float32

from ops import grid, less, load, tile_sum, where
from tiles import fp32, inlined, rt, static
from tiles.launching.arguments import INT, array, record

TILE = rt(16, 16, fp32)  # of counts


@static
class NoCondition:
    """A grid that runs in each call."""

    overlaps = False  # may the grid begin while the one before still runs?

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def is_skipped(self, args):
        """Does the other way serve this call? Then the block has nothing to do. args: the record of `params`."""
        return False

    @inlined
    def follow(self):
        """Wait for the grid before this one, if that has not been done. Nothing is stored before."""

    def __str__(self):
        return ""


@static
class SuccessorGrid(NoCondition):
    """A grid that runs in each call, and begins while the one before it still runs, whose end it waits for before it stores
    anything."""

    overlaps = True

    @inlined
    def follow(self):
        grid.wait()

    def __str__(self):
        return "early launch"


@static
class HistoryCondition(NoCondition):
    """A grid of one of two ways. forgets: of the one that serves sequences of which few segments keep what is before them?
    beside: does it run beside the grid before it, which has this condition, too?"""

    forgets: bool
    beside: bool = False
    overlaps = True

    def params(self):
        """gHistories: gOverlaps of segment_spans.py, for one direction. max_kept: how many segments may have -1 there where
        sequences forget."""
        return record(gHistories=array(3), max_kept=INT)

    @inlined
    def is_skipped(self, args):
        if not self.beside:
            grid.wait()
        number = float32(0)
        for head_sequence in range(0, args.gHistories.shape[1], TILE.rows):
            for segment in range(1, args.gHistories.shape[2], TILE.cols):
                counts = load(args.gHistories, TILE, (0, head_sequence, segment))
                number = float32(number + tile_sum(where(less(counts, 0.0), 1.0, 0.0)))
        return (number <= float32(args.max_kept)) != self.forgets

    def __str__(self):
        return "if sequences forget" if self.forgets else "if sequences keep"
