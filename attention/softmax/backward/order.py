"""In which order blocks of keys add to dQ: two objects with the same methods, one a way."""

from typing import Any

from numpy import int32

from ops import count_stored, count_up, stores_done, wait_count
from tiles import inlined, static
from tiles.arguments import TURNS


@static
class Unordered:
    """As they come: dQ's last bits differ from call to call."""

    def __str__(self):
        return ""

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @inlined
    def nth(self, n, i):
        """Which of the n tiles of queries that see them a block of keys takes as its i-th."""
        return i

    @inlined
    def start(self, tiles):
        """The tile that it takes first, of Tiles in a row."""
        return int32(tiles.first)

    @inlined
    def following(self, tiles, head, tile):
        """The head and the tile behind this one: behind a head's last tile the next head's first. (It counts, for a division
        takes the producer's time, and a loop in a loop its registers.)"""
        tile = int32(tile + 1)
        if tile == tiles.first + tiles.n:
            head, tile = int32(head + 1), int32(tiles.first)
        return head, tile

    @inlined
    def begin(self, given, pair, tile):
        """Before all of them, for a tile of queries: the work of one warp."""

    @inlined
    def take(self, given, pair, tile, line, behind):
        """Until a warp may add its parts to a tile of queries, of a pair of head and batch; `behind` so many blocks of keys."""

    @inlined
    def give(self, given, pair, tile, line):
        """It has."""


@static
class Ordered(Unordered):
    """One after the other, from the first keys to the last, so that dQ's bits are the same in every call. Of kernels in which
    so many `warps` of a block add to a tile, `in_bulk` by TMA or by themselves. The parts of a tile may stand in several
    `lines`: each is added to in order, and none waits for another.

    given.turns: how many warps have added to a tile, (pair of head and batch, line).

    A block waits for those of earlier keys alone, which have begun before it: there is no deadlock, however few run at once.
    Every block takes its queries from the last to the first. All that see later keys see the last queries, too, so those that
    begin at once wait when they begin, each for the tile of the one before it, and then follow at that distance. (From the
    first query to the last, where later queries see more keys, each would wait until the one before it has come to where it
    begins itself.) That line is short if there are several pairs at once: launches.band_of. Where lists say which tiles see a
    block, only blocks whose lists have a tile count, and a block waits for these alone: lists.Ranking."""

    warps: int
    in_bulk: bool
    lines: int = 1

    def __str__(self):
        return " ordered"

    @property
    def given(self) -> dict[str, Any]:
        """See Unordered."""
        return {"turns": TURNS}

    @inlined
    def nth(self, n, i):
        """See Unordered."""
        return int32(n - 1 - i)

    @inlined
    def start(self, tiles):
        """See Unordered."""
        return int32(tiles.first + tiles.n - 1)

    @inlined
    def following(self, tiles, head, tile):
        """See Unordered."""
        tile = int32(tile - 1)
        if tile < tiles.first:
            head, tile = int32(head + 1), int32(tiles.first + tiles.n - 1)
        return head, tile

    @inlined
    def begin(self, given, pair, tile):
        """See Unordered."""
        for line in range(self.lines):
            given.turns[pair, self.lines * tile + line] = int32(0)

    @inlined
    def take(self, given, pair, tile, line, behind):
        """See Unordered."""
        wait_count(given.turns, (pair, int32(self.lines * tile + line)), int32(self.warps * behind))

    @inlined
    def give(self, given, pair, tile, line):
        """See Unordered."""
        turn = pair, int32(self.lines * tile + line)
        if self.in_bulk:
            stores_done()
            count_stored(given.turns, turn)
        else:
            count_up(given.turns, turn)


UNORDERED = Unordered()
