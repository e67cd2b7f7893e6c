"""Streams fill the slots of a ring. A kernel's producer calls `keys.fill(k, j, source, at, rest)`, wherever the keys come from,
and its consumers call `k.wait(j)`.

    Dense()                             a tile is one box of an array: by TMA
    Paged(4)                            its rows are in 4 pages, which a table names: by TMA
    Ragged(K, rows=0, cols=2)           of one sequence of many in an array, zeros past its end: through registers
    Converted(K, fp8e4m3, 1, 3)         of an array of another dtype, times a factor: through registers

    keys = Paged(4)
    smem = shared(k=ring(K, STAGES, readers=8, writers=keys.writers))

All four are called by a whole warpgroup, one that has registers to spare where tiles go through them."""

from tiles import dtype, fp32, inlined, rt, st, static
from tiles.layout import WARPGROUP

from . import warpgroup
from .memory.global_elements import truncate


@static
class Dense:
    """Tiles that are boxes of an array. source: a tensor of the ring's tiles."""

    writers = 0

    @inlined
    def fill(self, ring, j, source, at, rest):
        """Load source[at] as tile j of the ring. rest: None."""
        ring.fill(j, source, at)


@static
class Paged:
    """Tiles whose rows lie in `pages` pages of equal size. source: a tensor of pages, (number, row, head, column) or
    (number, row, column)."""

    pages: int
    writers = 0

    @inlined
    def fill(self, ring, j, source, at, rest):
        """Load tile j of the ring. at: (sequence, which of its tiles), and a head if pages have heads. rest: the page table,
        (sequence, which of its pages); it must have entries for the whole tile past the sequence's end, too."""
        sequence, tile = at[0], at[1]
        for i in range(self.pages):
            ring.fill(j, source, (rest[sequence, self.pages * tile + i], 0, *at[2:]), i, self.pages)


@static
class Ragged:
    """Tiles of one of many packed sequences, which are one after the other in an array and begin at any row. source: the array;
    a tile lies along its axes `rows` and `cols`. aligned: as in ops.load."""

    tile: st
    rows: int
    cols: int
    aligned: bool | None = None
    writers = WARPGROUP

    @property
    def part(self):
        """The register tile of a warp's rows."""
        return rt(self.tile.rows // WARPGROUP, self.tile.cols, self.tile.dtype)

    @inlined
    def fill(self, ring, j, source, at, rest):
        """Load the rows from index `at` on as tile j of the ring. rest: the sequence's end, past which a tile is 0."""
        sequence = truncate(source, self.rows, rest)
        warpgroup.store(ring.claim(j), warpgroup.load(sequence, self.part, at, self.rows, self.cols, self.aligned))
        ring.publish(j)


@static
class Converted:
    """Tiles of an array of dtype `source_dtype`, times a factor. source, rows, cols, aligned: see Ragged."""

    tile: st
    source_dtype: dtype
    rows: int
    cols: int
    aligned: bool | None = None
    writers = WARPGROUP

    @property
    def part(self):
        """The register tile of a warp's rows, in the array's dtype."""
        return rt(self.tile.rows // WARPGROUP, self.tile.cols, self.source_dtype)

    @inlined
    def fill(self, ring, j, source, at, rest):
        """Load the elements from index `at` on as tile j of the ring. rest: the factor."""
        elements = warpgroup.load(source, self.part, at, self.rows, self.cols, self.aligned)
        warpgroup.store(ring.claim(j), fp32(elements) * rest)
        ring.publish(j)
