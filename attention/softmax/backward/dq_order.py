"""In which order blocks of keys add to dQ: an object for each way, with the same methods."""

from typing import Any

from numpy import int32

from ops import count_stored, count_up, stores_done, tma_add, tma_store, wait_count
from tiles import inlined, static
from tiles.arguments import TURNS

SHARING = 6  # multiprocessors that work on one pair at a time, if later queries see more keys: see launches.band_of
GROUP = 3  # the same for Snaking; also the number of blocks of keys in one of its groups


@static
class Unordered:
    """Blocks add as they come, so the last bits of dQ differ from call to call."""

    sharing = SHARING

    def __str__(self):
        return ""

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def clears(self) -> bool:
        """Must sums be cleared before the first block adds to them?"""
        return True

    @inlined
    def place(self, tiling, number, blocks, batch_heads, band):
        """The (block of keys, pair of share and batch) of a thread block: see Facing."""
        return tiling.place(number, blocks, batch_heads, band)

    @inlined
    def nth(self, n, i):
        """Which of the n tiles of queries that see a block of keys is the i-th that the block works on."""
        return i

    @inlined
    def start(self, tiles):
        """The tile that it works on first, if the tiles stand in a row."""
        return int32(tiles.first)

    @inlined
    def following(self, tiles, head, tile):
        """(head, tile) behind this one; behind the last tile of a head comes the first of the next. (They are counted: a
        division would take the producer's time, a nested loop its registers.)"""
        tile = int32(tile + 1)
        if tile == tiles.first + tiles.n:
            head, tile = int32(head + 1), int32(tiles.first)
        return head, tile

    @inlined
    def behind(self, tiling, block, tile, ctx, group):
        """How many blocks add to a tile of queries before this block of keys does."""
        return tiling.before(block, tile, ctx, group)

    @inlined
    def begin(self, params, batch_head, tile):
        """Prepare a tile of queries, before any block adds to it; done by one warp."""

    @inlined
    def take(self, params, batch_head, tile, line, behind):
        """Wait until a warp may add its parts to a tile of queries of a pair of head and batch: until `behind` blocks have
        added."""

    @inlined
    def add(self, sums, at, part, behind):
        """Add a part of dQ to the sums at `at`, by TMA; done by one warp."""
        tma_add(sums, at, part)

    @inlined
    def give(self, params, batch_head, tile, line, behind):
        """Say that the warp has added its parts to the tile."""


@static
class Turns(Unordered):
    """What the ways below have in common: a counter for each tile says how often blocks of keys have added to it, and blocks
    wait for a value of it. `warps` warps of a block add to a tile, `in_bulk` by TMA or else by themselves. The parts of a tile
    may be divided into several `lines`, which are added to in order, each without waiting for the others. stores: the first
    block stores its parts, so nothing is cleared; this is for tiles that all see some key.

    params.turns: how many warps have added to a tile, (pair of head and batch, line).

    A warp counts when its bulk copies are done, which means not that they have been read, but that they have come to the L2,
    where the next ones are added. So the count behind an addition need not be a release. But a *store* must also be ordered
    before the additions of other blocks. So its count is a release. The counts that follow are part of its release sequence,
    and whoever waits acquires one of them before its own copies begin (with a fence of TMA's proxy behind the acquire:
    ops.wait_count)."""

    warps: int
    in_bulk: bool
    lines: int = 1
    stores: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return {"turns": TURNS}

    @property
    def clears(self) -> bool:
        return not self.stores

    @inlined
    def begin(self, params, batch_head, tile):
        for line in range(self.lines):
            params.turns[batch_head, self.lines * tile + line] = int32(0)

    @inlined
    def take(self, params, batch_head, tile, line, behind):
        wait_count(params.turns, (batch_head, int32(self.lines * tile + line)), int32(self.warps * behind))

    @inlined
    def add(self, sums, at, part, behind):
        if self.stores:
            if behind == 0:
                tma_store(sums, at, part)
            else:
                tma_add(sums, at, part)
        else:
            tma_add(sums, at, part)

    @inlined
    def give(self, params, batch_head, tile, line, behind):
        turn = batch_head, int32(self.lines * tile + line)
        if self.in_bulk:
            stores_done()
        if self.in_bulk and not (self.stores and behind == 0):
            count_stored(params.turns, turn)
        else:
            count_up(params.turns, turn)


@static
class Ordered(Turns):
    """Blocks add one after the other, from the first keys to the last, so that dQ has the same bits in every call.

    A block waits only for blocks of earlier keys, which have begun before it: there is no deadlock, however few run at once.
    Every block works on its queries from the last to the first, because the last query sees all keys that any query sees. So
    blocks that begin at the same time wait once, each for the first tile of the block before it, and then follow at that
    distance. (If they went from the first query to the last, and later queries see more keys, each would wait until the block
    before it comes to where it begins itself.) Few blocks stand in this line if several pairs are worked on at once:
    launches.band_of. If lists say which tiles see a block, a block waits only for blocks whose lists contain the tile:
    query_lists.Ranking."""

    def __str__(self):
        return " ordered" + " stores" * self.stores

    @inlined
    def nth(self, n, i):
        return int32(n - 1 - i)

    @inlined
    def start(self, tiles):
        return int32(tiles.first + tiles.n - 1)

    @inlined
    def following(self, tiles, head, tile):
        tile = int32(tile - 1)
        if tile < tiles.first:
            head, tile = int32(head + 1), int32(tiles.first + tiles.n - 1)
        return head, tile


@static
class Snaking(Ordered):
    """The same where later queries see more keys, and all see the first: in groups of GROUP blocks, in turns from the group's
    last keys to its first and from its first to its last.

        keys of a block     0  1  2 |  3  4  5 |  6  7 ..
        it begins, adds     2  1  0 |  3  4  5 |  8  7 ..

    So many begin at once, of a pair. All take their queries from the last to the first, so each must begin behind the one
    before it by the time that adding takes, and waits for that if they begin together. From the first keys to the last each is
    shorter than the one before it, and all of a group end together: the next group's would wait again. From the last keys to
    the first each is longer, and they end one after the other, by more than they began: so the next group's begin as they
    must, and if each of them is shorter, end so, too. Only the first group waits.

    Thread blocks begin in the order in which they add, so each waits for those alone that have begun before it, as in Ordered:
    no deadlock. Which block adds as which depends on the block's number, and on nothing else: the same bits for any heads."""

    sharing = GROUP

    def __str__(self):
        return " snaking" + " stores" * self.stores

    @inlined
    def place(self, tiling, number, blocks, batch_heads, band):
        block, batch_head = tiling.place(number, blocks, batch_heads, band)
        if block % (2 * GROUP) < GROUP:
            first = block - block % GROUP
            block = first + min(first + GROUP, blocks) - 1 - block
        return int32(block), batch_head

    @inlined
    def behind(self, tiling, block, tile, ctx, group):
        """See Unordered: of a group from its last keys on, those that come after this block and that the tile sees, too."""
        if block % (2 * GROUP) < GROUP:
            first = block - block % GROUP
            return int32(first + min(first + GROUP, tiling.end(tile, ctx)) - 1 - block)
        else:
            return int32(block)


@static
class Heading(Turns):
    """Blocks add as they come, except that the block with the last keys that a tile of queries sees stores its parts, before
    the others add. If later queries see more keys, those are the first tiles that a block works on. Blocks begin from the last
    keys to the first, so each waits only for blocks that have begun before it, for what these do first, and hardly ever long.
    The longest blocks come last, so this is for grids of few blocks. The last bits of dQ differ from call to call."""

    def __str__(self):
        return " heading"

    @inlined
    def place(self, tiling, number, blocks, batch_heads, band):
        block, batch_head = tiling.place(number, blocks, batch_heads, band)
        return int32(blocks - 1 - block), batch_head

    @inlined
    def behind(self, tiling, block, tile, ctx, group):
        """See Unordered: 0 of those that store, else 1."""
        return int32(block + 1 < tiling.end(tile, ctx))

    @inlined
    def give(self, params, batch_head, tile, line, behind):
        """See Unordered. Nobody waits for what is added, only for what is stored."""
        if behind == 0:
            stores_done()
            count_up(params.turns, (batch_head, int32(self.lines * tile + line)))


@static
class LastFirst(Unordered):
    """The same, each block from its last tile of queries to its first, as in Ordered. For blocks that have all keys, where the
    order matters: their dK and dV are sums in the order in which many blocks take them, each of which has some of the keys."""

    @inlined
    def nth(self, n, i):
        return int32(n - 1 - i)


UNORDERED, LAST_FIRST = Unordered(), LastFirst()
