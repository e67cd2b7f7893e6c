"""How the product dQ = dS K is cut into parts of 64 rows, which are computed one after the other or one by each consumer: an
object for each way, with the same methods. Parts are summed in global memory, in float32 and in the order in which lanes hold
them (ops/memory/held.py): an array (pair of head and batch, row, column), in which a tile of queries has the rows of all its
parts."""

from typing import Any

from numpy import int32

from ops import add_held, divmod, load_held, transpose, warpgroup
from ops import subtile as part_of
from ops.memory.held import QUAD
from tiles import dtype, fp32, inlined, rt, st, static
from tiles.arguments import array

ROWS, BAND, PANEL = warpgroup.ROWS, 16, 64  # rows of a part; rows of a warp; columns of a part that a warp adds
LINE = 32  # columns of the shared tiles that parts go through


@static
class ByRows:
    """Parts are 64 queries of dQ each. The kernel's tiles have `queries` queries, its blocks `keys` keys, heads `columns`
    columns."""

    queries: int
    keys: int
    columns: int
    dtype: dtype

    @property
    def count(self) -> int:
        """How many there are."""
        return self.queries // ROWS

    @property
    def across(self) -> int:
        """Columns of a part."""
        return self.columns

    @property
    def tile(self) -> st:
        """A part in shared memory."""
        return st(ROWS * self.across // LINE, LINE, fp32)

    @property
    def width(self) -> int:
        """Columns of the sums."""
        return LINE

    @property
    def rows(self) -> int:
        """Rows of a tile's sums."""
        return self.count * self.tile.rows

    @inlined
    def product(self, n, ds, keys):
        """Part n, pending."""
        return warpgroup.mm_AB(part_of(ds, ROWS, n), keys)

    @property
    def bands(self) -> int:
        """How many warps share the work of finishing a tile of queries."""
        return self.count * ROWS // BAND

    @property
    def finished(self) -> rt:
        """The type of what one of these warps finishes."""
        return rt(BAND, self.across, fp32)

    @inlined
    def load(self, gSum, batch_head, tile, band):
        """What one of these warps finishes: 16 rows of a tile's parts."""
        row = self.rows * tile + BAND * self.across // LINE * band
        return load_held(gSum, self.finished, (batch_head, int32(row), 0), QUAD)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band, result):
        """Write these rows to dQ. row: the tile's first query. result: see results.py."""
        result.store(gDQ, x, (batch, row + BAND * band, head, 0), True)


class ByColumns(ByRows):
    """Parts are 64 columns of dQ each, computed as dQ^T = K^T dS^T: for any number of queries."""

    @property
    def count(self) -> int:
        return self.columns // ROWS

    @property
    def across(self) -> int:
        return self.queries

    @inlined
    def product(self, n, ds, keys):
        return warpgroup.mm_AtBt(part_of(keys, self.keys, 0, ROWS, n), ds)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band, result):
        result.store(gDQ, transpose(result.dtype(x)), (batch, row, head, BAND * band), True)


@static
class Held(ByRows):
    """Parts are 16 queries and 64 columns of dQ each, which warps add without TMA. vector_bytes: the bytes that the address and
    strides of dQ are multiples of. together: how many of its elements a lane adds at once."""

    vector_bytes: int
    together: int

    @property
    def count(self) -> int:
        return self.queries * self.columns // (BAND * PANEL)

    @property
    def array(self) -> Any:
        """The type of the array to which parts are added."""
        return array(3)

    @inlined
    def add(self, gSum, part, batch_head, tile, n, unit):
        """Add part n of a tile of queries to its sums."""
        add_held(gSum, part, self.place(batch_head, tile, n), self.together)

    @property
    def width(self) -> int:
        return self.columns

    @property
    def rows(self) -> int:
        return self.queries

    @property
    def bands(self) -> int:
        return self.count

    @inlined
    def place(self, batch_head, tile, n):
        """The index of part n of a tile of queries among the sums."""
        return batch_head, int32(self.queries * tile + BAND * PANEL // self.columns * n), 0

    @property
    def finished(self) -> rt:
        return rt(BAND, PANEL, fp32)

    @inlined
    def load(self, gSum, batch_head, tile, band):
        return load_held(gSum, self.finished, self.place(batch_head, tile, band), self.together)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band, result):
        down, right = divmod(band, self.columns // PANEL)
        result.store(gDQ, x, (batch, row + BAND * down, head, PANEL * right), self.vector_bytes)


@static
class Direct(Held):
    """The same where a block has all keys: its parts are all there is of dQ, and are written at once, times `unit`. result: see
    results.py."""

    result: Any

    @property
    def array(self) -> Any:
        return array(4, self.result.dtype)

    @inlined
    def add(self, gDQ, part, batch_head, tile, n, unit):
        batch, head = divmod(batch_head, int32(gDQ.shape[2]))
        self.finish(gDQ, part * unit, batch, int32(self.queries * tile), head, n, self.result)


def parts_of(queries: int, keys: int, columns: int, dtype: dtype, consumers: int) -> ByRows:
    """By rows if that gives all consumers the same work, else by columns."""
    return (ByColumns if queries % (consumers * ROWS) else ByRows)(queries, keys, columns, dtype)
