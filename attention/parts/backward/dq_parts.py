"""The parts of the product dQ = dS K of a query tile: computed one after the other, or one by each consumer, and summed over
key blocks in global memory. One class for each way of dividing it, with the same methods. The sums are float32, in the order of
the registers of a tensor core's product (ops/memory/lane_order.py): an array (batch and head, row, column), in which each
query tile has the rows of all its parts."""

from typing import Any

from numpy import int32

from ops import add_fragment, divmod, load_fragment, subtile, transpose, warpgroup
from ops.memory.lane_order import QUAD
from tiles import dtype, fp32, inlined, rt, st, static
from tiles.launching.arguments import array

ROWS, WARP_ROWS, PANEL = warpgroup.ROWS, 16, 64  # rows of a part; rows of a warp; columns of a part that a warp adds
TMA_COLUMNS = 32  # columns of the shared tiles from which TMA adds parts


@static
class RowParts:
    """Each part has 64 rows of dQ, and all columns. queries: of a tile. keys: of a block. columns: of a head, padded."""

    queries: int
    keys: int
    columns: int
    dtype: dtype

    @property
    def count(self) -> int:
        """The number of parts of a query tile."""
        return self.queries // ROWS

    @property
    def part_columns(self) -> int:
        """The number of columns of the product that is a part."""
        return self.columns

    @property
    def part_tile(self) -> st:
        """The type of a part in shared memory."""
        return st(ROWS * self.part_columns // TMA_COLUMNS, TMA_COLUMNS, fp32)

    @property
    def sum_columns(self) -> int:
        """The number of columns of the array of sums."""
        return TMA_COLUMNS

    @property
    def sum_rows(self) -> int:
        """The number of rows of a query tile in the array of sums."""
        return self.count * self.part_tile.rows

    @inlined
    def start_dq(self, n, ds, k):
        """Part n of ds k, of tiles in shared memory; pending until warpgroup.wait."""
        return warpgroup.mm_AB(subtile(ds, ROWS, n), k)

    @property
    def warp_tiles(self) -> int:
        """The number of warp tiles in which the kernel of backward_convert_dq.py converts a query tile."""
        return self.count * ROWS // WARP_ROWS

    @property
    def warp_tile(self) -> rt:
        """The type of such a warp tile."""
        return rt(WARP_ROWS, self.part_columns, fp32)

    @inlined
    def load_sums(self, gDQAccum, batch_head, tile, n):
        """Warp tile n of the sums of a query tile."""
        row = self.sum_rows * tile + WARP_ROWS * self.part_columns // TMA_COLUMNS * n
        return load_fragment(gDQAccum, self.warp_tile, (batch_head, int32(row), 0), QUAD)

    @inlined
    def store_dq(self, gDQ, x, batch, row, head, n, result):
        """Store x, warp tile n of a query tile whose first row is `row`, in dQ. result: see gradient_outputs.py."""
        result.store(gDQ, x, (batch, row + WARP_ROWS * n, head, 0), True)


class ColumnParts(RowParts):
    """Each part has 64 columns of dQ, computed as dQ^T = K^T dS^T: for any number of queries in a tile."""

    @property
    def count(self) -> int:
        return self.columns // ROWS

    @property
    def part_columns(self) -> int:
        return self.queries

    @inlined
    def start_dq(self, n, ds, k):
        return warpgroup.mm_AtBt(subtile(k, self.keys, 0, ROWS, n), ds)

    @inlined
    def store_dq(self, gDQ, x, batch, row, head, n, result):
        result.store(gDQ, transpose(result.dtype(x)), (batch, row, head, WARP_ROWS * n), True)


@static
class WarpParts(RowParts):
    """Each part has 16 rows and 64 columns of dQ, and a warp adds it without TMA. vector_bytes: the bytes that the address and
    strides of dQ are multiples of. elements_per_add: how many adjacent elements a lane adds at once."""

    vector_bytes: int
    elements_per_add: int

    @property
    def count(self) -> int:
        return self.queries * self.columns // (WARP_ROWS * PANEL)

    @property
    def accum_array(self) -> Any:
        """The type of the array that parts are added to."""
        return array(3)

    @inlined
    def add(self, gDQAccum, part, batch_head, tile, n, unit):
        """Add part n of a query tile to its sums."""
        add_fragment(gDQAccum, part, self.sum_index(batch_head, tile, n), self.elements_per_add)

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
    def sum_index(self, batch_head, tile, n):
        """The index of part n of a query tile in the array of sums."""
        return batch_head, int32(self.queries * tile + WARP_ROWS * PANEL // self.columns * n), 0

    @property
    def warp_tile(self) -> rt:
        return rt(WARP_ROWS, PANEL, fp32)

    @inlined
    def load_sums(self, gDQAccum, batch_head, tile, n):
        return load_fragment(gDQAccum, self.warp_tile, self.sum_index(batch_head, tile, n), self.elements_per_add)

    @inlined
    def store_dq(self, gDQ, x, batch, row, head, n, result):
        down, right = divmod(n, self.columns // PANEL)
        result.store(gDQ, x, (batch, row + WARP_ROWS * down, head, PANEL * right), self.vector_bytes)


@static
class DirectParts(WarpParts):
    """WarpParts where a thread block has all keys: its parts are all of dQ, and are stored in dQ itself, times `unit`. result:
    see gradient_outputs.py."""

    result: Any

    @property
    def accum_array(self) -> Any:
        return array(4, self.result.dtype)

    @inlined
    def add(self, gDQ, part, batch_head, tile, n, unit):
        batch, head = divmod(batch_head, int32(gDQ.shape[2]))
        self.store_dq(gDQ, part * unit, batch, int32(self.queries * tile), head, n, self.result)


def parts_of(queries: int, keys: int, columns: int, dtype: dtype, consumers: int) -> RowParts:
    """RowParts if these give all consumers the same work, else ColumnParts."""
    return (ColumnParts if queries % (consumers * ROWS) else RowParts)(queries, keys, columns, dtype)
