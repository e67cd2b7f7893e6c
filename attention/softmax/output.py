"""How a tile's output leaves the multiprocessor: two objects with the same methods, one a way."""

from typing import Any

from ops import warpgroup
from tiles import dtype, inlined, st, static
from tiles.arguments import array, tiled


@static
class Stored:
    """By the consumers, 16 bytes a lane; the queries' place is free once the last scores are made. rows: of a tile."""

    rows: int

    def declared(self, head_dim: int, of: dtype) -> Any:
        """What the kernel says of the output."""
        return array(4, of)

    @inlined
    def store(self, gO, o, queries, batch, block, head, me):
        """Write consumer `me`'s rows of a tile."""
        row = self.rows * block + warpgroup.ROWS * me
        warpgroup.store(gO, o, (batch, row, head, 0), rows=1, cols=3, aligned=True)

    @inlined
    def release(self, q, r):
        """The r-th tile's scores are made."""
        q.release(r)

    @inlined
    def release_last(self, q, r):
        """The r-th tile is under way."""

    @inlined
    def end(self):
        """There are no more tiles."""


@static
class Sent:
    """By TMA, from the place of its queries, while the next tile begins."""

    rows: int

    def declared(self, head_dim: int, of: dtype) -> Any:
        """What the kernel says of the output."""
        return tiled(st(warpgroup.ROWS, head_dim, of))

    @inlined
    def store(self, gO, o, queries, batch, block, head, me):
        """Write consumer `me`'s rows of a tile."""
        warpgroup.store(queries, queries.dtype(o))
        warpgroup.tma_store(gO, (batch, self.rows // warpgroup.ROWS * block + me, head), queries)

    @inlined
    def release(self, q, r):
        """The r-th tile's scores are made: its output comes where its queries lie."""

    @inlined
    def release_last(self, q, r):
        """The r-th tile is under way: the output before it has been read."""
        if r > 0:
            warpgroup.store_wait()
            q.release(r - 1)

    @inlined
    def end(self):
        """There are no more tiles."""
        warpgroup.store_wait()
