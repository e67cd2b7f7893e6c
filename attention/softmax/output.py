"""How the output of a tile is written: an object for each way, with the same methods."""

from typing import Any

from ops import truncate, warpgroup
from tiles import dtype, fp32, inlined, st, static
from tiles.arguments import array, tiled


@static
class Stored:
    """Written by the consumers, 16 bytes a lane. The slot of the queries is free once the last scores are computed. apart: rows
    behind a sequence's last query belong to no other sequence."""

    apart: bool

    def declared(self, value_dim: int, of: dtype) -> Any:
        """What the kernel says of the output."""
        return array(4, of)

    @inlined
    def begin(self, softmax, variant, at, gO, gLse, own, row, scale):
        """What a consumer's rows of a tile, from `row` on, of a Sequence have seen before their first key."""
        return softmax.begin(variant.lowest(at))

    @inlined
    def store(self, gO, o, queries, own, row, head):
        """Write a consumer's rows of a tile, from `row` on, of a Sequence."""
        at = own.batch, own.query + row, head, 0
        if self.apart:
            self.write(gO, o, at)
        else:
            self.write(truncate(gO, 1, own.query + own.queries), o, at)

    @inlined
    def write(self, gO, o, at):
        """Write them, wherever they end."""
        warpgroup.store(gO, o, at, rows=1, cols=3, aligned=True)

    @inlined
    def store_sums(self, gLse, lse, own, row, head):
        """Write the logarithms of their sums."""
        at = own.batch, head, own.query + row
        if self.apart:
            warpgroup.store(gLse, lse, at)
        else:
            warpgroup.store(truncate(gLse, 2, own.query + own.queries), lse, at)

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


class Unrounded(Stored):
    """The same in float32, for who goes on adding."""

    def declared(self, value_dim: int, of: dtype) -> Any:
        return array(4, fp32)

    @inlined
    def write(self, gO, o, at):
        warpgroup.store(gO, o, at, rows=1, cols=3)


class Joined(Unrounded):
    """The same of queries that have seen other keys: what of these, the arrays say."""

    @inlined
    def begin(self, softmax, variant, at, gO, gLse, own, row, scale):
        """See Stored. What the variant makes of the output it makes of all of it."""
        end = own.query + own.queries
        gO, gLse, row = truncate(gO, 1, end), truncate(gLse, 2, end), own.query + row
        o = warpgroup.load(gO, softmax.tile, (own.batch, row, at.head, 0), 1, 3, False)
        lse = warpgroup.load(gLse, softmax.tile.col_vec, (own.batch, at.head, row))
        return softmax.resume(o / variant.output(1.0, at), lse, variant.lowest(at), scale)


class Sent(Stored):
    """By TMA, from the place of its queries, while the next tile begins. No sequence follows, which it would overwrite."""

    def declared(self, value_dim: int, of: dtype) -> Any:
        """What the kernel says of the output."""
        return tiled(st(warpgroup.ROWS, value_dim, of), unit=1)

    @inlined
    def store(self, gO, o, queries, own, row, head):
        warpgroup.store(queries, queries.dtype(o))
        warpgroup.tma_store(gO, (own.batch, own.query + row, head), queries)

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
