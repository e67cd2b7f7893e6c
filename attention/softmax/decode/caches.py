"""Where the keys and values of a sequence lie, as objects with the same methods, which fill the stages of a pipeline."""

from typing import Any

from numpy import int32

from ops import copy_async, copy_pages, load_pages, load_unordered, look_up, truncate
from tiles import inlined, static
from tiles.arguments import ENDS
from tiles.numba_names import types

TABLE = types.Array(types.int32, 2, "A")  # page numbers


@static
class DenseLoader:
    """Sequence n lies in batch n of an array (batch, row, head, column). vector_bytes: the number of bytes of which addresses
    are multiples."""

    vector_bytes: int

    label = "dense"

    def __str__(self):
        return self.label + f" by {self.vector_bytes} bytes" * (self.vector_bytes != 16)

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @inlined
    def look_up(self, pipe, source, sequence, key, end, params):
        """Look up where the rows of a tile of a pipeline lie, from `key` on and before `end`, for `fill`."""
        return int32(0)

    @inlined
    def fill(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        """Start copying tile j of `n` of a pipeline: the sequence's rows from `key` on, zeros from `end` on."""
        pipe.fill(j, truncate(source, 1, end), (sequence, key, head, 0), 1, 3, n, self.vector_bytes)

    @inlined
    def fill_descales(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        """The same for a pipeline of vectors, from an array without columns that lies in the same way. head: (its number,), or
        () if there are no heads."""
        pipe.fill(j, truncate(source, 1, end), (sequence, key) + head, cols=1, end=n)

    @inlined
    def look_up_rows(self, part, source, sequence, key, end, params):
        """The same as `look`, done by one warp for the rows of type `part` that it will `copy`."""
        return int32(0)

    @inlined
    def copy_rows(self, tile, source, lookup, sequence, key, col, end, params):
        """The same as `fill`, done by one warp: start copying rows of one head to a shared tile."""
        copy_async(tile, truncate(source, 1, end), (sequence, key, 0, col), 1, 3, self.vector_bytes)

    @inlined
    def load_fp8_rows(self, spec, source, lookup, sequence, key, col, end, params):
        """The same for fp8, to registers: a tile of type `spec`, with its columns in load_unordered's order. Addresses must be
        multiples of 16."""
        return load_unordered(truncate(source, 1, end), spec, (sequence, key, 0, col), 1, 3, True)

    @inlined
    def copy_descales(self, vector, source, lookup, sequence, key, end, params):
        """The same for a shared vector, from an array without heads."""
        copy_async(vector, truncate(source, 1, end), (sequence, key))


class IndexedLoader(DenseLoader):
    """Sequence n is batch params.batch_index[n]."""

    label = "indexed"

    @property
    def params(self) -> dict[str, Any]:
        return {"batch_index": ENDS}

    @inlined
    def fill(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        at = int32(params.batch_index[sequence]), key, head, 0
        pipe.fill(j, truncate(source, 1, end), at, 1, 3, n, self.vector_bytes)

    @inlined
    def fill_descales(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        pipe.fill(j, truncate(source, 1, end), (int32(params.batch_index[sequence]), key) + head, cols=1, end=n)

    @inlined
    def copy_rows(self, tile, source, lookup, sequence, key, col, end, params):
        copy_async(tile, truncate(source, 1, end), (int32(params.batch_index[sequence]), key, 0, col), 1, 3, self.vector_bytes)

    @inlined
    def load_fp8_rows(self, spec, source, lookup, sequence, key, col, end, params):
        return load_unordered(truncate(source, 1, end), spec, (int32(params.batch_index[sequence]), key, 0, col), 1, 3, True)

    @inlined
    def copy_descales(self, vector, source, lookup, sequence, key, end, params):
        copy_async(vector, truncate(source, 1, end), (int32(params.batch_index[sequence]), key))


class PagedLoader(DenseLoader):
    """Sequence n is in pages of an array (page, row, head, column): page i of it is params.pages[n, i]."""

    label = "paged"

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": TABLE}

    @inlined
    def look_up(self, pipe, source, sequence, key, end, params):
        return pipe.look_up(params.pages, source.shape[1], (sequence, key), end)

    @inlined
    def fill(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        pipe.fill_pages(j, source, lookup, (key, head, 0), end, n, self.vector_bytes)

    @inlined
    def fill_descales(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        pipe.fill_pages(j, source, lookup, (key,) + head, end, n)

    @inlined
    def look_up_rows(self, part, source, sequence, key, end, params):
        return look_up(part, params.pages, source.shape[1], (sequence, key), end)

    @inlined
    def copy_rows(self, tile, source, lookup, sequence, key, col, end, params):
        copy_pages(tile, source, lookup, (key, 0, col), end, self.vector_bytes)

    @inlined
    def load_fp8_rows(self, spec, source, lookup, sequence, key, col, end, params):
        return load_pages(source, spec, lookup, (key, 0, col), end)

    @inlined
    def copy_descales(self, vector, source, lookup, sequence, key, end, params):
        copy_pages(vector, source, lookup, (key,), end)
