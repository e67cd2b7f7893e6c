"""How decode_ampere.py and the MLA kernels load rows of K and V by cp.async, by how the cache is laid out, as classes with the
same methods: `fill` fills a stage of a block's pipeline; `copy_rows` and `load_fp8_rows` load one warp's rows.

Of a paged cache, `look_up` reads page numbers from the page table, and `fill` starts copies from these pages: PagedLoader. How
a page number becomes an address stands in tiles/paged_copies.py."""

from typing import Any, NamedTuple

from numpy import int32

from ops import copy_async, copy_pages, load_pages, load_unordered, look_up, truncate
from tiles import inlined, static
from tiles.launching.arguments import ENDS

from ..key_sources import PAGE_TABLE
from ..part import KernelPart


@static
class DenseLoader(KernelPart):
    """Sequence n is batch n of an array (batch, row, head, column). vector_bytes: the bytes that addresses are multiples of."""

    vector_bytes: int

    label = "dense"

    def __str__(self):
        return self.label + f" by {self.vector_bytes} bytes" * (self.vector_bytes != 16)

    @inlined
    def look_up(self, pipe, source, sequence, key, end, params):
        """Look up where the rows of one of the pipeline's tiles are, from `key` on and before `end`, for `fill`."""
        return int32(0)

    @inlined
    def fill(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        """Start copying tile j of `n` of a pipeline: the sequence's rows from `key` on, zeros from `end` on. lookup: from
        look_up."""
        pipe.fill(j, truncate(source, 1, end), (sequence, key, head, 0), 1, 3, n, self.vector_bytes)

    @inlined
    def fill_descales(self, pipe, j, source, lookup, sequence, key, head, end, n, params):
        """Start copying vector j of `n` of a pipeline: the descales of the sequence's rows from `key` on, from an array laid
        out as the cache is, without columns. head: (its index,), or () if the array has no heads."""
        pipe.fill(j, truncate(source, 1, end), (sequence, key) + head, cols=1, end=n)

    @inlined
    def look_up_rows(self, part, source, sequence, key, end, params):
        """Look up where the rows of a warp's tile of type `part` are, for copy_rows, load_fp8_rows and copy_descales."""
        return int32(0)

    @inlined
    def copy_rows(self, tile, source, lookup, sequence, key, col, end, params):
        """Start copying a warp's rows of head 0 to a shared tile: the sequence's rows from `key` on, columns from `col` on."""
        copy_async(tile, truncate(source, 1, end), (sequence, key, 0, col), 1, 3, self.vector_bytes)

    @inlined
    def load_fp8_rows(self, spec, source, lookup, sequence, key, col, end, params):
        """Load a warp's fp8 rows of head 0 to registers, as a tile of type `spec` with its columns in load_unordered's order.
        Addresses must be multiples of 16."""
        return load_unordered(truncate(source, 1, end), spec, (sequence, key, 0, col), 1, 3, True)

    @inlined
    def copy_descales(self, vector, source, lookup, sequence, key, end, params):
        """Start copying a warp's descales to a shared vector, from an array without heads."""
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
    """Sequence n is in pages of an array (page, row, head, column): page i of it is params.pages[n, i], in the page table."""

    label = "paged"

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": PAGE_TABLE}

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


class KeyTiles(NamedTuple):
    """The n tiles of keys and values of a head that a block reads, before row `end` of a sequence: the pipelines k, v and
    descales, and the arrays from which they are filled."""

    k: Any
    v: Any
    descales: Any
    gK: Any
    gV: Any
    sequence: Any
    head: Any
    end: Any
    n: Any


class Lookups(NamedTuple):
    """Where the rows of the next tile of keys are; those of the tile after it, if they are looked up already; and the next
    tile's descales."""

    tile: Any
    next_tile: Any
    descales: Any


@static
class TileReader:
    """How a block of decode_ampere.py reads its KeyTiles of `kv` keys each: by a loader, and a product, which may have descales
    of keys (products.py). two_ahead: are rows looked up two tiles ahead, not one?"""

    cache: DenseLoader
    product: Any
    kv: int
    two_ahead: bool

    @inlined
    def look_up(self, key, tiles, params):
        """Where the rows of the tile from `key` on are."""
        return self.cache.look_up(tiles.k, tiles.gK, tiles.sequence, key, tiles.end, params)

    @inlined
    def look_up_descales(self, key, tiles, params):
        """Where the descales of the tile from `key` on are."""
        return self.product.look_up_descales(tiles.descales, self.cache, tiles.sequence, key, tiles.end, params)

    @inlined
    def look_up_first(self, key, tiles, params):
        """The Lookups of the first tile, whose first key is `key`."""
        tile = self.look_up(key, tiles, params)
        next_tile = self.look_up(int32(key + self.kv), tiles, params) if self.two_ahead else tile
        return Lookups(tile, next_tile, self.look_up_descales(key, tiles, params))

    @inlined
    def look_up_next(self, lookups, key, tiles, params):
        """The Lookups of the tile from `key` on, if those of the tile before it were `lookups`."""
        tile = lookups.next_tile
        next_tile = self.look_up(int32(key + self.kv if self.two_ahead else key), tiles, params)
        if not self.two_ahead:
            tile = next_tile
        return Lookups(tile, next_tile, self.look_up_descales(key, tiles, params))

    @inlined
    def copy_keys(self, i, key, lookups, tiles, params):
        """Start copying tile i's keys, from `key` on, and their descales."""
        at = tiles.sequence, key, tiles.head, tiles.end, tiles.n, params
        self.product.fill_k_descales(tiles.descales, i, self.cache, lookups.descales, *at)
        self.cache.fill(tiles.k, i, tiles.gK, lookups.tile, *at)

    @inlined
    def copy_values(self, i, key, lookups, tiles, params):
        """Start copying tile i's values, and their descales."""
        at = tiles.sequence, key, tiles.head, tiles.end, tiles.n, params
        self.product.fill_v_descales(tiles.descales, i, self.cache, lookups.descales, *at)
        self.cache.fill(tiles.v, i, tiles.gV, lookups.tile, *at)
