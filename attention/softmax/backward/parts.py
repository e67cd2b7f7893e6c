"""How the product dQ = dS K is cut into parts of 64 rows, one after the other or one a consumer: two objects with the same
methods, one a way. Parts are summed in global memory, in float32 and as the tensor cores give them: an array of (pair of head
and batch, row, column), in which a tile of queries has the rows of all its parts."""

from ops import store, transpose, warpgroup
from ops import subtile as part_of
from tiles import dtype, fp32, inlined, rt, st, static

ROWS = warpgroup.ROWS  # of a part


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
    def width(self) -> int:
        """Columns of one."""
        return self.columns

    @property
    def tile(self) -> st:
        """One of them in shared memory."""
        return st(ROWS, self.width, fp32)

    @property
    def rows(self) -> int:
        """Rows of all of them."""
        return ROWS * self.count

    @inlined
    def product(self, n, ds, keys):
        """Part n, pending."""
        return warpgroup.mm_AB(part_of(ds, ROWS, n), keys)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band):
        """16 rows of a tile's parts, from 16 * band on, to where they belong in dQ; `row`: the tile's first query."""
        store(gDQ, self.dtype(x), (batch, row + x.rows * band, head, 0), 1, 3, True)


class ByColumns(ByRows):
    """Of dQ^T = K^T dS^T, each with 64 columns of dQ: for any number of queries."""

    @property
    def count(self) -> int:
        """See ByRows."""
        return self.columns // ROWS

    @property
    def width(self) -> int:
        """See ByRows."""
        return self.queries

    @inlined
    def product(self, n, ds, keys):
        """See ByRows."""
        return warpgroup.mm_AtBt(part_of(keys, self.keys, 0, ROWS, n), ds)

    @inlined
    def finish(self, gDQ, x, batch, row, head, band):
        """See ByRows."""
        store(gDQ, transpose(self.dtype(x)), (batch, row, head, x.rows * band), 1, 3, True)


def parts_of(queries: int, keys: int, columns: int, dtype: dtype, consumers: int) -> ByRows:
    """By rows if that gives each consumer as much as the others, else by columns."""
    return (ByColumns if queries % (consumers * ROWS) else ByRows)(queries, keys, columns, dtype)


BAND = 16  # rows of a warp


def band_of(parts: ByRows) -> rt:
    """What a warp has of a part."""
    return rt(BAND, parts.width, fp32)
