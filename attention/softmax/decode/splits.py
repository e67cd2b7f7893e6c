"""Which keys a block works on, as objects with the same methods. Keys come in tiles; what a block has seen of a sequence is a
part of it, and combine.py makes one of several parts.

Lengths lie on the device and are never read by the host, so that a plan, and a CUDA graph, serves sequences as they grow: each
block finds out for itself what it has to do, from all lengths."""

import functools
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod
from tiles import inlined, static
from tiles.layout import LANES
from tiles.lengths import follows

from .reach import Reach

MOST = 128  # parts
BEGIN, COMBINE = 1, 3  # what a block's beginning and end, and the launch that combines, take: so many tiles' time (a guess)
TOGETHER = 16  # parts that are combined in this time
LONG = 2048  # keys: with fewer, forward's tiles are as fast as parts of the keys
TILE = 128  # queries of one of forward's tiles
FULL = 0.95  # of the places that there are for blocks at a time, as many at least should have one


class Work(NamedTuple):
    """Tiles `tile` to before `end` of the `tiles` that a sequence has. left: how many the block has still to do, these among
    them. part, of: where what is seen of them goes in an array of parts, by its first two axes."""

    sequence: Any
    tile: Any
    end: Any
    tiles: Any
    part: Any
    of: Any
    left: Any


class Parts(NamedTuple):
    """Which parts make up a sequence: `count` from number `first` on, of number `of` on the second axis."""

    sequence: Any
    first: Any
    of: Any
    count: Any


@static
class Parted:
    """Each sequence's tiles in given.splits parts, as even as can be. The same bits, whatever other sequences there are. reach:
    which keys are seen. kv: keys of a tile."""

    reach: Reach | None = None
    kv: int = 1

    def __str__(self):
        return "parted"

    @property
    def given(self) -> dict[str, Any]:
        """What combine.py is told, so that it finds the parts."""
        return {}

    @inlined
    def tiles(self, sequence, tokens, given):
        """How many a sequence has: at least one, so that nobody's output is forgotten."""
        seen = self.reach.keys(sequence, 0, tokens - 1, tokens, given)
        return int32(max(1, (seen.end - seen.first + self.kv - 1) // self.kv))

    @inlined
    def first(self, number, splits, sequences, tokens, given):
        """The Work of block number `number`, of those that read the same head and the same rows."""
        sequence, split = divmod(number, splits)
        tiles = self.tiles(sequence, tokens, given)
        each, _ = divmod(int32(tiles + splits - 1), splits)
        tile = int32(min(each * split, tiles))
        return Work(sequence, tile, int32(min(tile + each, tiles)), tiles, split, sequence, int32(1))

    @inlined
    def next(self, work, tokens, given):
        """The Work that comes behind; nothing is left to do if its `left` is 0."""
        return work._replace(left=int32(0))

    @inlined
    def parts(self, number, splits, sequences, tokens, given):
        """The Parts of the sequence that block number `number` combines."""
        return Parts(number, int32(0), number, splits)


class Shares(Parted):
    """All sequences' tiles, one sequence behind the other, in equal shares, as many as blocks work at a time: nobody waits for
    a long sequence at the end. A share begins and ends anywhere. Share i's part of sequence n is part i + n: so a sequence's
    parts are neighbours, and no two have one number."""

    def __str__(self):
        return "shared"

    @property
    def given(self) -> dict[str, Any]:
        """See Parted."""
        return self.reach.given if self.reach else {}

    @inlined
    def before(self, sequence, tokens, given):
        """How many tiles the sequences before one have."""
        end = int32(0)
        for first in range(0, sequence, LANES):
            _, _, end = self.reach.line_up(self.kv, int32(first), sequence, end, int32(0), tokens, given)
        return end

    @inlined
    def find(self, tile, sequences, tokens, given):
        """(in which sequence a tile lies, how many tiles lie before that)"""
        sequence, begin, end = int32(0), int32(0), int32(0)
        for first in range(0, sequences, LANES):
            passed, last, every = self.reach.line_up(self.kv, int32(first), sequences, end, tile, tokens, given)
            sequence, begin, end = int32(sequence + passed), last, every
            if end > tile:
                break
        return sequence, begin

    @inlined
    def each(self, shares, sequences, tokens, given):
        """(tiles of a share, tiles of all sequences)"""
        every = self.before(sequences, tokens, given)
        return divmod(int32(every + shares - 1), shares)[0], every

    @inlined
    def first(self, number, shares, sequences, tokens, given):
        """See Parted."""
        each, every = self.each(shares, sequences, tokens, given)
        begin = int32(min(each * number, every - 1))
        sequence, before = self.find(begin, sequences, tokens, given)
        tiles, tile, left = self.tiles(sequence, tokens, given), int32(begin - before), int32(min(each, every - each * number))
        return Work(sequence, tile, int32(min(tile + left, tiles)), tiles, int32(number + sequence), int32(0), left)

    @inlined
    def next(self, work, tokens, given):
        """See Parted."""
        left, sequence, tiles = int32(work.left - (work.end - work.tile)), work.sequence, work.tiles
        if left > 0:
            sequence = int32(sequence + 1)
            tiles = self.tiles(sequence, tokens, given)
        return Work(sequence, int32(0), int32(min(left, tiles)), tiles, int32(work.part + 1), int32(0), left)

    @inlined
    def parts(self, number, shares, sequences, tokens, given):
        """See Parted. Blocks go by sequences, or if these are more by the ends of shares: at each ends one sequence at most."""
        each, every = self.each(shares, sequences, tokens, given)
        sequence, before, end = number, int32(0), int32(each * (number + 1))
        if sequences <= shares:
            before = self.before(sequence, tokens, given)
        elif end < every:
            sequence, before = self.find(end, sequences, tokens, given)
        share, _ = divmod(before, each)
        last, _ = divmod(int32(before + self.tiles(sequence, tokens, given) - 1), each)
        count = int32(last - share + 1)
        if sequences > shares and (end >= every or share != number):
            count = int32(1)  # another block's, or nobody's
        return Parts(sequence, int32(share + sequence), int32(0), count)


@follows
def shares_for(blocks: int, places: int) -> int:
    """How many shares, each of which `blocks` blocks work on, leave few of the places idle that there are for blocks at a time.
    Rather few: each begins and ends once."""
    return _few(blocks, places)


@functools.lru_cache(4096)
def _few(blocks, places):
    def used(shares):
        every = shares * blocks
        return every / (-(-every // places) * places)

    counts = [max(1, rounds * places // blocks) for rounds in (1, 2, 3, 4)]
    return next((n for n in counts if used(n) >= FULL), max(counts, key=used))


def idle(batch: int, queries: int, heads: int, keys: int, processors: int) -> bool:
    """Would forward's tiles of queries leave half of the multiprocessors idle, for longer than it takes to combine parts?"""
    return keys >= LONG and 2 * batch * heads * -(-queries // TILE) <= processors


@follows
def splits_for(blocks: int, tiles: int, processors: int) -> int:
    """The fewest that let `blocks` blocks without splits, which have up to `tiles` tiles of keys, end soonest. A multiprocessor
    works on its blocks at the speed that memory gives it, whether they are one or several at a time, so that what counts is how
    many it gets."""
    return _soonest(blocks, tiles, processors)


@functools.lru_cache(4096)
def _soonest(blocks, tiles, processors):
    def time(splits):
        each = -(-tiles // splits) + BEGIN
        return -(-blocks * splits // processors) * each + COMBINE * -(-splits // TOGETHER) * (splits > 1)

    return min(range(1, max(1, min(MOST, tiles)) + 1), key=time)
