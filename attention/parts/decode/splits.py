"""Split-KV: which tiles of keys a thread block works on, as classes with the same methods. What a block computes for a sequence
is a part of its output, and decode_combine.py merges the parts.

Lengths are on the device and the host never reads them, so that a plan, or a CUDA graph, serves sequences as they grow: each
block computes its work from all lengths."""

from typing import Any, NamedTuple

from numpy import int32

from ops import divmod
from tiles import inlined, static
from tiles.launching.lengths import watched_function
from tiles.layout import LANES

from ..part import KernelPart
from .key_window import KeyWindow

MAX_CHOSEN_SPLITS = 128  # of a sequence, when choose_split_count chooses their number
# A block's prologue and epilogue, and the combining launch, take as long as so many tiles (guesses)
BLOCK_TILES, COMBINE_TILES = 1, 3
COMBINED_AT_ONCE = 16  # parts that decode_combine.py adds in the time of COMBINE_TILES
LONG = 2048  # keys: with fewer, forward's tiles are as fast as split-KV
FORWARD_ROWS = 128  # queries of a tile of forward
MIN_UTILIZATION = 0.95  # the fraction of the places for blocks that a number of shares should use


class SplitWork(NamedTuple):
    """What a block works on next: tiles `tile` to `end_tile` of the `tiles` that a sequence has. part, part_batch: the first
    two indices of its result in the arrays of partial outputs. tiles_left: how many tiles the block still has to do, these
    included."""

    sequence: Any
    tile: Any
    end_tile: Any
    tiles: Any
    part: Any
    part_batch: Any
    tiles_left: Any


class SequenceParts(NamedTuple):
    """The `count` partial outputs of a sequence, from index `first` on, with index `part_batch` on the second axis."""

    sequence: Any
    first: Any
    part_batch: Any
    count: Any


@static
class FixedSplits(KernelPart):
    """Each sequence's tiles are divided evenly into params.splits parts, so its result has the same bits whatever other
    sequences there are. window: which keys are visible. kv: keys of a tile."""

    window: KeyWindow | None = None
    kv: int = 1

    def __str__(self):
        return "fixed splits"

    @inlined
    def count_tiles(self, sequence, tokens, params):
        """How many tiles of keys a sequence has: at least one, so that some block stores its output."""
        span = self.window.key_span(sequence, 0, tokens - 1, tokens, params)
        return int32(max(1, (span.end - span.first + self.kv - 1) // self.kv))

    @inlined
    def find_tiles(self, work, first_token, last_token, tokens, params):
        """(the first key of the block's tiles that these tokens see, how many tiles there are, the KeySpan of the tokens)"""
        seq_span = self.window.key_span(work.sequence, 0, tokens - 1, tokens, params)
        span = self.window.key_span(work.sequence, first_token, last_token, tokens, params)
        tile = int32(max(work.tile, (span.first - seq_span.first) // self.kv))
        first = int32(seq_span.first + self.kv * tile)
        return first, int32(max(0, min(work.end_tile - tile, (span.end - first + self.kv - 1) // self.kv))), span

    @inlined
    def first_work(self, number, splits, sequences, tokens, params):
        """The first SplitWork of block `number` of those with the same head and the same rows."""
        sequence, split = divmod(number, splits)
        tiles = self.count_tiles(sequence, tokens, params)
        split_tiles, _ = divmod(int32(tiles + splits - 1), splits)
        tile = int32(min(split_tiles * split, tiles))
        return SplitWork(sequence, tile, int32(min(tile + split_tiles, tiles)), tiles, split, sequence, int32(1))

    @inlined
    def next_work(self, work, tokens, params):
        """The SplitWork after this one; its tiles_left is 0 if there is none."""
        return work._replace(tiles_left=int32(0))

    @inlined
    def parts_of(self, number, splits, sequences, tokens, params):
        """The SequenceParts that block `number` of decode_combine.py merges."""
        return SequenceParts(number, int32(0), number, splits)


class StreamKSplits(FixedSplits):
    """Stream-K over keys: the tiles of all sequences, in order, are divided into equal shares, one for each block that runs at
    a time, so that no block with a long sequence runs on alone. A share begins and ends anywhere in a sequence. The part of
    share i of sequence n has index i + n: a sequence's parts are adjacent, and no two parts have the same index."""

    def __str__(self):
        return "stream-K"

    @property
    def params(self) -> dict[str, Any]:
        return self.window.params if self.window else {}

    @inlined
    def count_tiles_before(self, sequence, tokens, params):
        """The number of tiles of the sequences before this one."""
        end = int32(0)
        for first in range(0, sequence, LANES):
            _, _, end = self.window.line_up(self.kv, int32(first), sequence, end, int32(0), tokens, params)
        return end

    @inlined
    def find_sequence(self, tile, sequences, tokens, params):
        """(the sequence that has a tile of all sequences' tiles, the number of tiles of the sequences before it)"""
        sequence, begin, end = int32(0), int32(0), int32(0)
        for first in range(0, sequences, LANES):
            ended, last, total = self.window.line_up(self.kv, int32(first), sequences, end, tile, tokens, params)
            sequence, begin, end = int32(sequence + ended), last, total
            if end > tile:
                break
        return sequence, begin

    @inlined
    def share_size(self, shares, sequences, tokens, params):
        """(the number of tiles of a share, the number of tiles of all sequences)"""
        total = self.count_tiles_before(sequences, tokens, params)
        return divmod(int32(total + shares - 1), shares)[0], total

    @inlined
    def first_work(self, number, shares, sequences, tokens, params):
        share, total = self.share_size(shares, sequences, tokens, params)
        begin = int32(min(share * number, total - 1))
        sequence, tiles_before = self.find_sequence(begin, sequences, tokens, params)
        tiles, tile = self.count_tiles(sequence, tokens, params), int32(begin - tiles_before)
        tiles_left = int32(min(share, total - share * number))
        return SplitWork(
            sequence, tile, int32(min(tile + tiles_left, tiles)), tiles, int32(number + sequence), int32(0), tiles_left
        )

    @inlined
    def next_work(self, work, tokens, params):
        tiles_left, sequence, tiles = int32(work.tiles_left - (work.end_tile - work.tile)), work.sequence, work.tiles
        if tiles_left > 0:
            sequence = int32(sequence + 1)
            tiles = self.count_tiles(sequence, tokens, params)
        return SplitWork(sequence, int32(0), int32(min(tiles_left, tiles)), tiles, int32(work.part + 1), int32(0), tiles_left)

    @inlined
    def parts_of(self, number, shares, sequences, tokens, params):
        """The SequenceParts that block `number` of decode_combine.py merges. It has a block for each sequence or, if there are
        fewer shares than sequences, for the end of each share: the end of a share splits at most one sequence."""
        share_tiles, total = self.share_size(shares, sequences, tokens, params)
        sequence, tiles_before, end = number, int32(0), int32(share_tiles * (number + 1))
        if sequences <= shares:
            tiles_before = self.count_tiles_before(sequence, tokens, params)
        elif end < total:
            sequence, tiles_before = self.find_sequence(end, sequences, tokens, params)
        share, _ = divmod(tiles_before, share_tiles)
        last, _ = divmod(int32(tiles_before + self.count_tiles(sequence, tokens, params) - 1), share_tiles)
        count = int32(last - share + 1)
        if sequences > shares and (end >= total or share != number):
            count = int32(1)  # another block merges this sequence's parts, or it has only one
        return SequenceParts(sequence, int32(share + sequence), int32(0), count)


@watched_function
def choose_share_count(blocks: int, places: int) -> int:
    """The number of stream-K shares that leaves few of the `places` for blocks idle, if each share takes `blocks` blocks. Few
    shares are better, because each has a prologue and an epilogue."""

    def utilization(shares):
        total = shares * blocks
        return total / (-(-total // places) * places)

    counts = [max(1, rounds * places // blocks) for rounds in (1, 2, 3, 4)]
    return next((n for n in counts if utilization(n) >= MIN_UTILIZATION), max(counts, key=utilization))


def underfills_gpu(batch: int, queries: int, heads: int, keys: int, processors: int) -> bool:
    """Would forward's tiles of queries leave half of the multiprocessors idle, for longer than combining parts takes?"""
    return keys >= LONG and 2 * batch * heads * -(-queries // FORWARD_ROWS) <= processors


@watched_function
def choose_split_count(blocks: int, tiles: int, places: int, combined_at_once: int = COMBINED_AT_ONCE) -> int:
    """The smallest number of splits with which a call ends soonest, by shapes alone. blocks: without splits, each with up to
    `tiles` tiles of keys. places: blocks that run at a time. A multiprocessor runs at the speed of its share of memory
    bandwidth, with one block or several at a time, so what counts is how many blocks a place gets. combined_at_once: parts that
    are combined in the time of COMBINE_TILES."""

    def time(splits):
        block_tiles = -(-tiles // splits) + BLOCK_TILES
        return -(-blocks * splits // places) * block_tiles + COMBINE_TILES * -(-splits // combined_at_once) * (splits > 1)

    return min(range(1, max(1, min(MAX_CHOSEN_SPLITS, tiles)) + 1), key=time)
