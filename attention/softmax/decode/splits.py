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
BEGIN, COMBINE = 1, 3  # the time of a block's beginning and end, and of the launch that combines, in tiles (a guess)
TOGETHER = 16  # parts that are combined in this time
LONG = 2048  # keys: with fewer, forward's tiles are as fast as parts of the keys
TILE = 128  # queries of one of forward's tiles
FULL = 0.95  # at least this share of the places for blocks should be taken


class Work(NamedTuple):
    """Tiles `tile` to before `end` of the `tiles` that a sequence has. left: how many tiles the block still has to do, these
    included. part, of: the indices along the first two axes of an array of parts, to which the result goes."""

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
    """The tiles of each sequence are divided evenly into params.splits parts: the same bits, whatever else the batch holds.
    reach: which keys are seen. kv: keys of a tile."""

    reach: Reach | None = None
    kv: int = 1

    def __str__(self):
        return "parted"

    @property
    def params(self) -> dict[str, Any]:
        """{argument of combine.py's kernel: its type} of what it needs to find the parts."""
        return {}

    @inlined
    def tiles(self, sequence, tokens, params):
        """How many tiles a sequence has: at least one, so that its output is written."""
        seen = self.reach.keys(sequence, 0, tokens - 1, tokens, params)
        return int32(max(1, (seen.end - seen.first + self.kv - 1) // self.kv))

    @inlined
    def first(self, number, splits, sequences, tokens, params):
        """The first Work of block `number` among those with the same head and the same rows."""
        sequence, split = divmod(number, splits)
        tiles = self.tiles(sequence, tokens, params)
        each, _ = divmod(int32(tiles + splits - 1), splits)
        tile = int32(min(each * split, tiles))
        return Work(sequence, tile, int32(min(tile + each, tiles)), tiles, split, sequence, int32(1))

    @inlined
    def next(self, work, tokens, params):
        """The next Work; nothing is left to do if its `left` is 0."""
        return work._replace(left=int32(0))

    @inlined
    def parts(self, number, splits, sequences, tokens, params):
        """The Parts of the sequence that block number `number` combines."""
        return Parts(number, int32(0), number, splits)


class Shares(Parted):
    """The tiles of all sequences, one sequence behind the other, are divided into equal shares, as many as blocks run at a
    time: so no block with a long sequence is left at the end. A share begins and ends anywhere. The part of share i and
    sequence n has number i + n: so the parts of a sequence are neighbours, and no two parts have the same number."""

    def __str__(self):
        return "shared"

    @property
    def params(self) -> dict[str, Any]:
        return self.reach.params if self.reach else {}

    @inlined
    def before(self, sequence, tokens, params):
        """The number of tiles of the sequences before this one."""
        end = int32(0)
        for first in range(0, sequence, LANES):
            _, _, end = self.reach.line_up(self.kv, int32(first), sequence, end, int32(0), tokens, params)
        return end

    @inlined
    def find(self, tile, sequences, tokens, params):
        """(the sequence in which a tile lies, the number of tiles of the sequences before it)"""
        sequence, begin, end = int32(0), int32(0), int32(0)
        for first in range(0, sequences, LANES):
            passed, last, every = self.reach.line_up(self.kv, int32(first), sequences, end, tile, tokens, params)
            sequence, begin, end = int32(sequence + passed), last, every
            if end > tile:
                break
        return sequence, begin

    @inlined
    def each(self, shares, sequences, tokens, params):
        """(the number of tiles of a share, the number of tiles of all sequences)"""
        every = self.before(sequences, tokens, params)
        return divmod(int32(every + shares - 1), shares)[0], every

    @inlined
    def first(self, number, shares, sequences, tokens, params):
        each, every = self.each(shares, sequences, tokens, params)
        begin = int32(min(each * number, every - 1))
        sequence, before = self.find(begin, sequences, tokens, params)
        tiles, tile, left = self.tiles(sequence, tokens, params), int32(begin - before), int32(min(each, every - each * number))
        return Work(sequence, tile, int32(min(tile + left, tiles)), tiles, int32(number + sequence), int32(0), left)

    @inlined
    def next(self, work, tokens, params):
        left, sequence, tiles = int32(work.left - (work.end - work.tile)), work.sequence, work.tiles
        if left > 0:
            sequence = int32(sequence + 1)
            tiles = self.tiles(sequence, tokens, params)
        return Work(sequence, int32(0), int32(min(left, tiles)), tiles, int32(work.part + 1), int32(0), left)

    @inlined
    def parts(self, number, shares, sequences, tokens, params):
        """See Parted. There is a block for each sequence; or for the end of each share, if there are fewer shares than
        sequences, because the end of a share cuts at most one sequence."""
        each, every = self.each(shares, sequences, tokens, params)
        sequence, before, end = number, int32(0), int32(each * (number + 1))
        if sequences <= shares:
            before = self.before(sequence, tokens, params)
        elif end < every:
            sequence, before = self.find(end, sequences, tokens, params)
        share, _ = divmod(before, each)
        last, _ = divmod(int32(before + self.tiles(sequence, tokens, params) - 1), each)
        count = int32(last - share + 1)
        if sequences > shares and (end >= every or share != number):
            count = int32(1)  # it is another block's, or has one part only
        return Parts(sequence, int32(share + sequence), int32(0), count)


@follows
def shares_for(blocks: int, places: int) -> int:
    """How many shares leave few of the `places` for blocks idle, if `blocks` blocks work on each share. Preferably few, because
    each share has the cost of beginning and ending."""
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
def splits_for(blocks: int, tiles: int, places: int, together: int = TOGETHER) -> int:
    """The fewest splits with which a call ends soonest, by shapes alone. blocks: without splits, each of which has up to
    `tiles` tiles of keys. places: for blocks at a time. A multiprocessor works at the speed of its share of memory, on one
    block or several at a time, so what counts is how many blocks a place gets. together: parts that are combined in the time
    COMBINE."""
    return _soonest(blocks, tiles, places, together)


@functools.lru_cache(4096)
def _soonest(blocks, tiles, places, together):
    def time(splits):
        each = -(-tiles // splits) + BEGIN
        return -(-blocks * splits // places) * each + COMBINE * -(-splits // together) * (splits > 1)

    return min(range(1, max(1, min(MOST, tiles)) + 1), key=time)
