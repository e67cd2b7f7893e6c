"""Where a kernel loads keys and values from, as objects with the same methods, which fill the stages of its rings (by TMA) and
pipelines (by cp.async). Which rows belong to a sequence, and how many of its keys are in use, follows from sequences.py."""

from typing import Any

from numpy import int32

from ops import wait_count
from tiles import inlined, static
from tiles.launching.arguments import ENDS, INT, tiled
from tiles.numba_names import types
from tiles.types import gl, st

from .part import KernelPart

PAGE_TABLE = types.Array(types.int32, 2, "A")
BLOCK = 128  # keys that are copied from another rank together: see StreamingBuffers
ALL_ARRIVED = 2**30  # a count of copies that is as great as any


@static
class OneBuffer(KernelPart):
    """Keys and values are in arrays like those of queries: in the batch, and at the rows, that the Sequence says."""

    paged = False

    def source(self, tile: st) -> gl:
        """The declaration of a kernel's array of keys or values, from which TMA loads tiles of this type."""
        return tiled(tile, unit=1)

    @inlined
    def begin_tile(self, params):
        """How many copies have arrived when the producer begins a query tile: see `wait_for_block`."""
        return int32(0)

    @inlined
    def wait_for_block(self, arrived, key, params):
        """Wait until the block of keys from `key` on, and its values, have arrived. arrived: how many copies are known to have
        arrived. Returns how many are known afterwards."""
        return arrived

    @inlined
    def fill(self, ring, j, source, seq, sequence, key, head, params):
        """Fill stage j of a ring with the keys from row `key` on of the Sequence `seq`, the `sequence`-th of the call."""
        ring.fill(j, source, (seq.batch, key, head))

    @inlined
    def fill_values(self, ring, j, source, seq, sequence, key, head, params):
        """Fill stage j of a ring with the values of these keys."""
        self.fill(ring, j, source, seq, sequence, key, head, params)

    @inlined
    def copy(self, pipe, j, source, seq, sequence, key, head, n, params, vector_bytes):
        """Start the cp.async copies of tile j of `n` into a pipeline, `vector_bytes` bytes each."""
        pipe.fill(j, source, (seq.batch, key, head, 0), 1, 3, n, vector_bytes)


@static
class TwoBuffers(OneBuffer):
    """Keys of two spans are in arrays of their own, local_k and local_v, one span after the other; all other keys are in the
    kernel's arrays gK and gV. So the keys of one rank and those of others need not be copied together. Spans begin and end at a
    multiple of BLOCK, or at the last key. key, value: the types of the tiles of a block."""

    key: st
    value: st

    @property
    def params(self) -> dict[str, Any]:
        arrays = {"local_k": tiled(self.key, unit=1), "local_v": tiled(self.value, unit=1)}
        return arrays | dict.fromkeys(("span0_first", "span0_end", "span1_first", "span1_end"), INT)

    def __str__(self):
        return " two buffers"

    @inlined
    def find_row(self, key, params):
        """(whether a key and its block are in one of the spans, the row of the array that holds it)"""
        first = min(max(key, params.span0_first), params.span0_end) - params.span0_first  # keys of the spans before this one
        second = min(max(key, params.span1_first), params.span1_end) - params.span1_first
        in_first = key >= params.span0_first and key < params.span0_end
        local = in_first or (key >= params.span1_first and key < params.span1_end)
        before = int32(first + second)
        return local, before if local else int32(key - before)

    @inlined
    def fill_from(self, ring, j, local_source, source, seq, key, head, params):
        """Fill stage j of a ring from the array of the spans, or from the kernel's."""
        local, row = self.find_row(key, params)
        if local:
            ring.fill(j, local_source, (seq.batch, row, head))
        else:
            ring.fill(j, source, (seq.batch, row, head))

    @inlined
    def fill(self, ring, j, source, seq, sequence, key, head, params):
        self.fill_from(ring, j, params.local_k, source, seq, key, head, params)

    @inlined
    def fill_values(self, ring, j, source, seq, sequence, key, head, params):
        self.fill_from(ring, j, params.local_v, source, seq, key, head, params)


@static
class StreamingBuffers(TwoBuffers):
    """Two buffers, while keys of other ranks are still being copied to gK and gV. params.arrived[0] counts the copies that are
    done. Keys BLOCK n to BLOCK (n + 1) may be read when params.required[n] copies are; the last element of params.required is
    the number of all copies. The copies must not need an SM, because CTAs on all SMs may be waiting for them."""

    @property
    def params(self) -> dict[str, Any]:
        return super().params | {"arrived": ENDS, "required": ENDS}

    def __str__(self):
        return " streaming"

    @inlined
    def begin_tile(self, params):
        """How many copies have arrived when the producer begins a query tile; ALL_ARRIVED if none is missing. Then no block
        looks up params.required, which would delay the TMA loads."""
        arrived, total = int32(params.arrived[0]), int32(params.required[params.required.shape[0] - 1])
        if arrived >= total:
            wait_count(params.arrived, (int32(0),), total)  # it returns at once, and fences
            arrived = int32(ALL_ARRIVED)
        return arrived

    @inlined
    def wait_for_block(self, arrived, key, params):
        if arrived < ALL_ARRIVED:
            required = int32(params.required[key // BLOCK])
            if arrived < required:
                wait_count(params.arrived, (int32(0),), required)
                arrived = required
        return arrived


@static
class IndexedCache(OneBuffer):
    """Sequence n is in the cache's batch params.batch_index[n], or in batch n if batch_index is empty."""

    @property
    def params(self) -> dict[str, Any]:
        return {"batch_index": ENDS}

    def __str__(self):
        return " cached"

    @inlined
    def batch(self, sequence, params):
        """The cache's batch for a sequence."""
        return int32(params.batch_index[sequence]) if params.batch_index.shape[0] > 0 else int32(sequence)

    @inlined
    def fill(self, ring, j, source, seq, sequence, key, head, params):
        ring.fill(j, source, (self.batch(sequence, params), key, head))

    @inlined
    def copy(self, pipe, j, source, seq, sequence, key, head, n, params, vector_bytes):
        pipe.fill(j, source, (self.batch(sequence, params), key, head, 0), 1, 3, n, vector_bytes)


@static
class PagedKeys(OneBuffer):
    """Sequence n is in the pages params.pages[n] (the page table) of an array (page, row, head, column). Page numbers become
    coordinates in ring.fill_pages (tiles/ring.py) for TMA, and addresses in tiles/paged_copies.py for cp.async.

    parts: TMA loads a tile in so many boxes, each inside one page, where sequences begin with a page. left: do all queries see
    only keys from params.left places before their own on? Pages before these may have been given to other sequences: neither
    they nor their numbers are read."""

    paged = True

    parts: int
    left: bool = False

    def source(self, tile: st) -> gl:
        return tiled(st(tile.rows // self.parts, tile.cols, tile.dtype), unit=1)

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": PAGE_TABLE, "page_size": INT}

    def __str__(self):
        return " paged" + f" in {self.parts} parts" * (self.parts > 1)

    @inlined
    def first_key(self, seq, params):
        """The first key of a Sequence that any of its queries sees; None if that is the first one."""
        if self.left:
            return int32(seq.offset_k + max(0, seq.seqlen_k - seq.seqlen_q - params.left))
        else:
            return None

    @inlined
    def fill(self, ring, j, source, seq, sequence, key, head, params):
        """Fill stage j of a ring from the pages of these keys. Rows after the last key become zeros, and neither keys nor page
        numbers are read there."""
        at, end = (int32(sequence), int32(key), int32(head)), seq.offset_k + seq.seqlen_k
        ring.fill_pages(j, source, params.pages, params.page_size, at, end, self.parts, self.first_key(seq, params))

    @inlined
    def copy(self, pipe, j, source, seq, sequence, key, head, n, params, vector_bytes):
        """Start the cp.async copies of tile j from the pages of these keys. For a tile that does not exist the first pages are
        looked up."""
        end = seq.offset_k + seq.seqlen_k
        pages = pipe.look_up(params.pages, source.shape[1], (sequence, int32(max(key, 0))), end, self.first_key(seq, params))
        pipe.fill_pages(j, source, pages, (key, head, 0), end, n, vector_bytes)
