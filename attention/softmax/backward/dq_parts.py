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
class RowParts:
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
    def part_columns(self) -> int:
        """Columns of a part."""
        return self.columns

    @property
    def part_tile(self) -> st:
        """A part in shared memory."""
        return st(ROWS * self.part_columns // LINE, LINE, fp32)

    @property
    def sum_columns(self) -> int:
        """Columns of the sums."""
        return LINE

    @property
    def sum_rows(self) -> int:
        """Rows of a tile's sums."""
        return self.count * self.part_tile.rows

    @inlined
    def start_dq(self, n, ds, keys):
        """Part n, pending."""
        return warpgroup.mm_AB(part_of(ds, ROWS, n), keys)

    @property
    def warp_tiles(self) -> int:
        """How many warps share the work of finishing a tile of queries."""
        return self.count * ROWS // BAND

    @property
    def warp_tile(self) -> rt:
        """The type of what one of these warps finishes."""
        return rt(BAND, self.part_columns, fp32)

    @inlined
    def load(self, gDQAccum, pair, tile, n):
        """What one of these warps finishes: 16 rows of a tile's parts."""
        row = self.sum_rows * tile + BAND * self.part_columns // LINE * n
        return load_held(gDQAccum, self.warp_tile, (pair, int32(row), 0), QUAD)

    @inlined
    def finish(self, gDQ, x, batch, row, head, n, result):
        """Write these rows to dQ. row: the tile's first query. result: see results.py."""
        result.store(gDQ, x, (batch, row + BAND * n, head, 0), True)


class ColumnParts(RowParts):
    """Parts are 64 columns of dQ each, computed as dQ^T = K^T dS^T: for any number of queries."""

    @property
    def count(self) -> int:
        return self.columns // ROWS

    @property
    def part_columns(self) -> int:
        return self.queries

    @inlined
    def start_dq(self, n, ds, keys):
        return warpgroup.mm_AtBt(part_of(keys, self.keys, 0, ROWS, n), ds)

    @inlined
    def finish(self, gDQ, x, batch, row, head, n, result):
        result.store(gDQ, transpose(result.dtype(x)), (batch, row, head, BAND * n), True)


@static
class WarpParts(RowParts):
    """Parts are 16 queries and 64 columns of dQ each, which warps add without TMA. piece: the bytes that the address and
    strides of dQ are multiples of. elements_per_add: how many of its elements a lane adds at once."""

    piece: int
    elements_per_add: int

    @property
    def count(self) -> int:
        return self.queries * self.columns // (BAND * PANEL)

    @property
    def array(self) -> Any:
        """The type of the array to which parts are added."""
        return array(3)

    @inlined
    def add(self, gDQAccum, part, pair, tile, n, unit):
        """Add part n of a tile of queries to its sums."""
        add_held(gDQAccum, part, self.sum_index(pair, tile, n), self.elements_per_add)

    @property
    def sum_columns(self) -> int:
        return self.columns

    @property
    def sum_rows(self) -> int:
        return self.queries

    @property
    def warp_tiles(self) -> int:
        return self.count

    @inlined
    def sum_index(self, pair, tile, n):
        """The index of part n of a tile of queries among the sums."""
        return pair, int32(self.queries * tile + BAND * PANEL // self.columns * n), 0

    @property
    def warp_tile(self) -> rt:
        return rt(BAND, PANEL, fp32)

    @inlined
    def load(self, gDQAccum, pair, tile, n):
        return load_held(gDQAccum, self.warp_tile, self.sum_index(pair, tile, n), self.elements_per_add)

    @inlined
    def finish(self, gDQ, x, batch, row, head, n, result):
        down, right = divmod(n, self.columns // PANEL)
        result.store(gDQ, x, (batch, row + BAND * down, head, PANEL * right), self.piece)


@static
class DirectParts(WarpParts):
    """The same where a block has all keys: its parts are all there is of dQ, and are written at once, times `unit`. result: see
    results.py."""

    result: Any

    @property
    def array(self) -> Any:
        return array(4, self.result.dtype)

    @inlined
    def add(self, gDQ, part, pair, tile, n, unit):
        batch, head = divmod(pair, int32(gDQ.shape[2]))
        self.finish(gDQ, part * unit, batch, int32(self.queries * tile), head, n, self.result)


def parts_of(queries: int, keys: int, columns: int, dtype: dtype, consumers: int) -> RowParts:
    """By rows if that gives all consumers the same work, else by columns."""
    return (ColumnParts if queries % (consumers * ROWS) else RowParts)(queries, keys, columns, dtype)
