"""How the product dQ = dS K is cut into parts of 64 rows, one after the other or one a consumer: objects with the same
methods, one a way. Parts are summed in global memory, in float32 and as the lanes hold them (ops/memory/held.py): an array of
(pair of head and batch, row, column), in which a tile of queries has the rows of all its parts."""

from numpy import int32

from ops import add_held, divmod, load_held, transpose, warpgroup
from ops import subtile as part_of
from ops.memory.held import QUAD
from tiles import dtype, fp32, inlined, rt, st, static

ROWS, BAND, PANEL = warpgroup.ROWS, 16, 64  # rows of a part; rows of a warp; columns of a part that a warp adds
LINE = 32  # columns of the shared tiles that parts go through


@static
class ByRows:
    """Of dQ, each with 64 queries. Of kernels whose tiles have `queries` queries, and blocks `keys` keys, of `columns`."""

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
        """Columns of one."""
        return self.columns

    @property
    def tile(self) -> st:
        """One of them in shared memory."""
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
        """How many warps can finish a tile of queries together."""
        return self.count * ROWS // BAND

    @inlined
    def load(self, gSum, pair, tile, band):
        """What one of them finishes: 16 rows of a tile's parts."""
        row = self.rows * tile + BAND * self.across // LINE * band
        return load_held(gSum, rt(BAND, self.across, fp32), (pair, int32(row), 0), QUAD)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band, result):
        """To where they belong in dQ; `row`: the tile's first query; result: see results.py."""
        result.store(gDQ, x, (batch, row + BAND * band, head, 0), True)


class ByColumns(ByRows):
    """Of dQ^T = K^T dS^T, each with 64 columns of dQ: for any number of queries."""

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
    """Of dQ, each with 16 queries and 64 columns, which warps add themselves. piece: the bytes that dQ's address and strides
    are multiples of; together: how many of a lane's elements they add at once."""

    piece: int
    together: int

    @property
    def count(self) -> int:
        return self.queries * self.columns // (BAND * PANEL)

    @inlined
    def add(self, gSum, part, pair, tile, n):
        """Part n of a tile of queries to its sums."""
        add_held(gSum, part, self.place(pair, tile, n), self.together)

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
    def place(self, pair, tile, n):
        """Of part n of a tile of queries."""
        return pair, int32(self.queries * tile + BAND * PANEL // self.columns * n), 0

    @inlined
    def load(self, gSum, pair, tile, band):
        return load_held(gSum, rt(BAND, PANEL, fp32), self.place(pair, tile, band), self.together)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band, result):
        down, right = divmod(band, self.columns // PANEL)
        result.store(gDQ, x, (batch, row + BAND * down, head, PANEL * right), self.piece)


def parts_of(queries: int, keys: int, columns: int, dtype: dtype, consumers: int) -> ByRows:
    """By rows if that gives each consumer as much as the others, else by columns."""
    return (ByColumns if queries % (consumers * ROWS) else ByRows)(queries, keys, columns, dtype)
