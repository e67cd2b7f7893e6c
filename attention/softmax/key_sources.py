"""Where keys and values lie, as objects with the same methods: what fills the stages of a kernel's rings (by TMA) and pipelines
(by cp.async). How sequences lie, and which keys of theirs count, sequences.py says."""

from typing import Any

from numba.cuda import types
from numpy import int32

from ops import wait_count
from tiles import inlined, static
from tiles.arguments import ENDS, INT, tiled
from tiles.types import gl, st

TABLE = types.Array(types.int32, 2, "A")  # of pages' numbers
BLOCK, ALL = 128, 2**30  # keys that come together, and how much has come if nothing is awaited: see Arriving


@static
class Along:
    """In the batch and at the places that the Sequence says, as queries do."""

    paged = False

    def source(self, tile: st) -> gl:
        """What a kernel says of keys and values, of which it takes such tiles by TMA."""
        return tiled(tile, unit=1)

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    def __str__(self):
        return ""

    @inlined
    def here(self, given):
        """How much of them has come before a tile of queries begins: see `come`."""
        return int32(0)

    @inlined
    def come(self, seen, key, given):
        """The block of keys from `key` on is here, and its values: how much has come by now, of which `seen` was known."""
        return seen

    @inlined
    def fill(self, ring, j, source, own, number, key, head, given):
        """Fill tile j of a ring: from place `key` on of a Sequence, which has that number."""
        ring.fill(j, source, (own.batch, key, head))

    @inlined
    def fill_values(self, ring, j, source, own, number, key, head, given):
        """The same of values."""
        self.fill(ring, j, source, own, number, key, head, given)

    @inlined
    def copy(self, pipe, j, source, own, number, key, head, n, given, piece):
        """Start copying tile j of `n` of a pipeline, `piece` bytes at once."""
        pipe.fill(j, source, (own.batch, key, head, 0), 1, 3, n, piece)


@static
class Apart(Along):
    """Those of two spans in arrays of their own, one span behind the other, and all others one behind the other in the
    kernel's: nobody has to put them together. Spans begin and end with a block of keys, or where keys end. key, value: a block
    of them."""

    key: st
    value: st

    @property
    def given(self) -> dict[str, Any]:
        arrays = {"own_k": tiled(self.key, unit=1), "own_v": tiled(self.value, unit=1)}
        return arrays | dict.fromkeys(("own_first", "own_end", "own_second", "own_second_end"), INT)

    def __str__(self):
        return " apart"

    @inlined
    def place(self, key, given):
        """(do a key and its block lie in one of the spans, in which row of the arrays that have it)"""
        first = min(max(key, given.own_first), given.own_end) - given.own_first  # keys of the spans that come before it
        second = min(max(key, given.own_second), given.own_second_end) - given.own_second
        in_first = key >= given.own_first and key < given.own_end
        mine = in_first or (key >= given.own_second and key < given.own_second_end)
        before = int32(first + second)
        return mine, before if mine else int32(key - before)

    @inlined
    def fill_from(self, ring, j, mine, source, own, key, head, given):
        """Fill tile j of a ring from an array of the spans, or from the kernel's."""
        in_span, row = self.place(key, given)
        if in_span:
            ring.fill(j, mine, (own.batch, row, head))
        else:
            ring.fill(j, source, (own.batch, row, head))

    @inlined
    def fill(self, ring, j, source, own, number, key, head, given):
        self.fill_from(ring, j, given.own_k, source, own, key, head, given)

    @inlined
    def fill_values(self, ring, j, source, own, number, key, head, given):
        self.fill_from(ring, j, given.own_v, source, own, key, head, given)


@static
class Arriving(Apart):
    """The same, the others' being copied to their place meanwhile, some after the others. given.arrived[0] counts the copies
    that are done; given.awaits[n] of them must be before keys BLOCK n to BLOCK n + BLOCK are here, and its last number is how
    many there are. Whoever copies must need no multiprocessor: all of them may be waiting here."""

    @property
    def given(self) -> dict[str, Any]:
        return super().given | {"arrived": ENDS, "awaits": ENDS}

    def __str__(self):
        return " arriving"

    @inlined
    def here(self, given):
        """See Along. When all have come no block of keys asks again: to look up what it awaits would keep TMA waiting."""
        seen, every = int32(given.arrived[0]), int32(given.awaits[given.awaits.shape[0] - 1])
        if seen >= every:
            wait_count(given.arrived, (int32(0),), every)  # for its fence
            seen = int32(ALL)
        return seen

    @inlined
    def come(self, seen, key, given):
        if seen < ALL:
            awaited = int32(given.awaits[key // BLOCK])
            if seen < awaited:
                wait_count(given.arrived, (int32(0),), awaited)
                seen = awaited
        return seen


@static
class InCaches(Along):
    """In the cache that has the sequence's number, or given.batch_index names."""

    @property
    def given(self) -> dict[str, Any]:
        return {"batch_index": ENDS}

    def __str__(self):
        return " cached"

    @inlined
    def batch(self, number, given):
        """The number of a sequence's cache."""
        return int32(given.batch_index[number]) if given.batch_index.shape[0] > 0 else int32(number)

    @inlined
    def fill(self, ring, j, source, own, number, key, head, given):
        ring.fill(j, source, (self.batch(number, given), key, head))

    @inlined
    def copy(self, pipe, j, source, own, number, key, head, n, given, piece):
        pipe.fill(j, source, (self.batch(number, given), key, head, 0), 1, 3, n, piece)


@static
class InPages(Along):
    """In pages of an array (page, row, head, column), whose numbers are given.pages[n]. parts: TMA brings a tile in so many,
    each of which lies in one page, where sequences begin with a page."""

    paged = True

    parts: int

    def source(self, tile: st) -> gl:
        return tiled(st(tile.rows // self.parts, tile.cols, tile.dtype), unit=1)

    @property
    def given(self) -> dict[str, Any]:
        return {"pages": TABLE, "page_size": INT}

    def __str__(self):
        return " paged" + f" in {self.parts} parts" * (self.parts > 1)

    @inlined
    def fill(self, ring, j, source, own, number, key, head, given):
        """See Along. What lies behind the last key is zeros: neither it nor its page's number is read."""
        at = int32(number), int32(key), int32(head)
        ring.fill_pages(j, source, given.pages, given.page_size, at, own.key + own.keys, self.parts)

    @inlined
    def copy(self, pipe, j, source, own, number, key, head, n, given, piece):
        """See Along. Of a tile that there is not the first pages are looked up."""
        end = own.key + own.keys
        found = pipe.look_up(given.pages, source.shape[1], (number, int32(max(key, 0))), end)
        pipe.fill_pages(j, source, found, (key, head, 0), end, n, piece)
