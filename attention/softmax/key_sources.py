"""Where keys and values come from, as objects with the same methods, which fill the stages of a kernel's rings (by TMA) and
pipelines (by cp.async). How sequences lie, and which of their keys count, is said by sequences.py."""

from typing import Any

from numba.cuda import types
from numpy import int32

from ops import wait_count
from tiles import inlined, static
from tiles.arguments import ENDS, INT, tiled
from tiles.types import gl, st

TABLE = types.Array(types.int32, 2, "A")  # page numbers
BLOCK, ALL = 128, 2**30  # keys that arrive together; the count that means that all have arrived: see Arriving


@static
class Along:
    """In arrays like that of the queries: in the batch, and at the rows, that the Sequence says."""

    paged = False

    def source(self, tile: st) -> gl:
        """The declaration of a kernel's array of keys or values, from which TMA takes tiles of this type."""
        return tiled(tile, unit=1)

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    def __str__(self):
        return ""

    @inlined
    def here(self, params):
        """The count of what has arrived before a tile of queries begins: see `come`."""
        return int32(0)

    @inlined
    def come(self, seen, key, params):
        """Wait until the block of keys from `key` on, and its values, have arrived. Returns the count of what has arrived by
        now; `seen` is the count that was known."""
        return seen

    @inlined
    def fill(self, ring, j, source, seq, number, key, head, params):
        """Fill tile j of a ring with keys, from key `key` on of the Sequence `own`, whose number is `number`."""
        ring.fill(j, source, (seq.batch, key, head))

    @inlined
    def fill_values(self, ring, j, source, seq, number, key, head, params):
        """The same of values."""
        self.fill(ring, j, source, seq, number, key, head, params)

    @inlined
    def copy(self, pipe, j, source, seq, number, key, head, n, params, piece):
        """Start copying tile j of `n` of a pipeline, `piece` bytes at a time."""
        pipe.fill(j, source, (seq.batch, key, head, 0), 1, 3, n, piece)


@static
class Apart(Along):
    """Keys of two spans lie in arrays of their own, one span behind the other; all other keys lie in the kernel's arrays. So
    nobody has to put them together. Spans begin and end at a multiple of BLOCK, or where keys end. key, value: tiles of a
    block."""

    key: st
    value: st

    @property
    def params(self) -> dict[str, Any]:
        arrays = {"own_k": tiled(self.key, unit=1), "own_v": tiled(self.value, unit=1)}
        return arrays | dict.fromkeys(("own_first", "own_end", "own_second", "own_second_end"), INT)

    def __str__(self):
        return " apart"

    @inlined
    def place(self, key, params):
        """(whether a key and its block lie in one of the spans, the row of the array that holds it)"""
        first = min(max(key, params.own_first), params.own_end) - params.own_first  # keys of the spans that come before it
        second = min(max(key, params.own_second), params.own_second_end) - params.own_second
        in_first = key >= params.own_first and key < params.own_end
        mine = in_first or (key >= params.own_second and key < params.own_second_end)
        before = int32(first + second)
        return mine, before if mine else int32(key - before)

    @inlined
    def fill_from(self, ring, j, mine, source, seq, key, head, params):
        """Fill tile j of a ring from the array of the spans, or from the kernel's."""
        in_span, row = self.place(key, params)
        if in_span:
            ring.fill(j, mine, (seq.batch, row, head))
        else:
            ring.fill(j, source, (seq.batch, row, head))

    @inlined
    def fill(self, ring, j, source, seq, number, key, head, params):
        self.fill_from(ring, j, params.own_k, source, seq, key, head, params)

    @inlined
    def fill_values(self, ring, j, source, seq, number, key, head, params):
        self.fill_from(ring, j, params.own_v, source, seq, key, head, params)


@static
class Arriving(Apart):
    """The same while other ranks' keys are still being copied to the kernel's arrays. params.arrived[0] counts the copies that
    are done. params.awaits[n] of them must be done before keys BLOCK n to BLOCK n + BLOCK are here; its last number is the
    number of all copies. The copies must not need a multiprocessor: all multiprocessors may be waiting here."""

    @property
    def params(self) -> dict[str, Any]:
        return super().params | {"arrived": ENDS, "awaits": ENDS}

    def __str__(self):
        return " arriving"

    @inlined
    def here(self, params):
        """See Along. Once all have arrived, no block of keys asks again: looking up what it awaits would keep TMA waiting."""
        seen, every = int32(params.arrived[0]), int32(params.awaits[params.awaits.shape[0] - 1])
        if seen >= every:
            wait_count(params.arrived, (int32(0),), every)  # it has happened; the wait also fences
            seen = int32(ALL)
        return seen

    @inlined
    def come(self, seen, key, params):
        if seen < ALL:
            awaited = int32(params.awaits[key // BLOCK])
            if seen < awaited:
                wait_count(params.arrived, (int32(0),), awaited)
                seen = awaited
        return seen


@static
class InCaches(Along):
    """In the cache whose number is the sequence's, or params.batch_index[n]."""

    @property
    def params(self) -> dict[str, Any]:
        return {"batch_index": ENDS}

    def __str__(self):
        return " cached"

    @inlined
    def batch(self, number, params):
        """The number of a sequence's cache."""
        return int32(params.batch_index[number]) if params.batch_index.shape[0] > 0 else int32(number)

    @inlined
    def fill(self, ring, j, source, seq, number, key, head, params):
        ring.fill(j, source, (self.batch(number, params), key, head))

    @inlined
    def copy(self, pipe, j, source, seq, number, key, head, n, params, piece):
        pipe.fill(j, source, (self.batch(number, params), key, head, 0), 1, 3, n, piece)


@static
class InPages(Along):
    """In pages of an array (page, row, head, column), whose numbers are params.pages[n]. parts: TMA brings a tile in so many,
    each of which lies in one page, where sequences begin with a page. left: do all queries see keys from params.left places
    before their own on alone? Pages ahead of these may be another's by now, and neither they nor their numbers are read."""

    paged = True

    parts: int
    left: bool = False

    def source(self, tile: st) -> gl:
        return tiled(st(tile.rows // self.parts, tile.cols, tile.dtype), unit=1)

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": TABLE, "page_size": INT}

    def __str__(self):
        return " paged" + f" in {self.parts} parts" * (self.parts > 1)

    @inlined
    def begin(self, seq, params):
        """The first key of a Sequence that any of its queries sees; None if that is the first one."""
        if self.left:
            return int32(seq.offset_k + max(0, seq.seqlen_k - seq.seqlen_q - params.left))
        else:
            return None

    @inlined
    def fill(self, ring, j, source, seq, number, key, head, params):
        """See Along. Behind the last key there are zeros; neither keys nor page numbers are read there."""
        at, end = (int32(number), int32(key), int32(head)), seq.offset_k + seq.seqlen_k
        ring.fill_pages(j, source, params.pages, params.page_size, at, end, self.parts, self.begin(seq, params))

    @inlined
    def copy(self, pipe, j, source, seq, number, key, head, n, params, piece):
        """See Along. For a tile that does not exist the first pages are looked up."""
        end = seq.offset_k + seq.seqlen_k
        found = pipe.look_up(params.pages, source.shape[1], (number, int32(max(key, 0))), end, self.begin(seq, params))
        pipe.fill_pages(j, source, found, (key, head, 0), end, n, piece)
