"""Where keys and values lie, as objects with the same methods: what fills the stages of a kernel's rings (by TMA) and pipelines
(by cp.async). How sequences lie, and which keys of theirs count, sequences.py says."""

from typing import Any

from numba.cuda import types
from numpy import int32

from tiles import inlined, static
from tiles.arguments import ENDS, INT, tiled
from tiles.types import gl, st

TABLE = types.Array(types.int32, 2, "A")  # of pages' numbers


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
    def fill(self, ring, j, source, own, number, key, head, given):
        """Fill tile j of a ring: from place `key` on of a Sequence, which has that number."""
        ring.fill(j, source, (own.batch, key, head))

    @inlined
    def copy(self, pipe, j, source, own, number, key, head, n, given, piece):
        """Start copying tile j of `n` of a pipeline, `piece` bytes at once."""
        pipe.fill(j, source, (own.batch, key, head, 0), 1, 3, n, piece)


@static
class InCaches(Along):
    """In the cache that has the sequence's number, or given.batch_index names."""

    @property
    def given(self) -> dict[str, Any]:
        """See Along."""
        return {"batch_index": ENDS}

    def __str__(self):
        return " cached"

    @inlined
    def batch(self, number, given):
        """The number of a sequence's cache."""
        return int32(given.batch_index[number]) if given.batch_index.shape[0] > 0 else int32(number)

    @inlined
    def fill(self, ring, j, source, own, number, key, head, given):
        """See Along."""
        ring.fill(j, source, (self.batch(number, given), key, head))

    @inlined
    def copy(self, pipe, j, source, own, number, key, head, n, given, piece):
        """See Along."""
        pipe.fill(j, source, (self.batch(number, given), key, head, 0), 1, 3, n, piece)


@static
class InPages(Along):
    """In pages of an array (page, row, head, column), whose numbers are given.pages[n]. parts: TMA brings a tile in so many,
    each of which lies in one page, where sequences begin with a page."""

    paged = True

    parts: int

    def source(self, tile: st) -> gl:
        """See Along."""
        return tiled(st(tile.rows // self.parts, tile.cols, tile.dtype), unit=1)

    @property
    def given(self) -> dict[str, Any]:
        """See Along."""
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
