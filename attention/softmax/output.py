"""How the output of a tile is written: an object for each way, with the same methods."""

import math
from typing import Any

from numpy import int32

from ops import full, truncate, warpgroup, zeros
from tiles import dtype, fp32, inlined, st, static
from tiles.arguments import array, tiled


@static
class StoreOutput:
    """The consumers write the output, 16 bytes a lane. The slot of a tile's queries is free once its last scores are computed.
    apart: do rows beyond a sequence's last query belong to no other sequence?"""

    apart: bool

    def declared(self, value_dim: int, of: dtype) -> Any:
        """How a kernel declares the output."""
        return array(4, of)

    @inlined
    def begin(self, softmax, variant, ctx, gO, gLse, seq, row, scale):
        """What a consumer's rows of a tile, from `row` on, of a Sequence have seen before their first key."""
        return softmax.init(variant.initial_max(ctx, variant.max_floor))

    @inlined
    def store(self, gO, o, queries, seq, row, head):
        """Write a consumer's rows of a tile, from `row` on, of a Sequence."""
        at = seq.batch, seq.offset_q + row, head, 0
        if self.apart:
            self.write(gO, o, at)
        else:
            self.write(truncate(gO, 1, seq.offset_q + seq.seqlen_q), o, at)

    @inlined
    def write(self, gO, o, at):
        """Write the rows from `at` on, wherever they end."""
        warpgroup.store(gO, o, at, rows=1, cols=3, aligned=True)

    @inlined
    def store_sums(self, gLse, lse, seq, row, head):
        """Write the log-sum-exp of these rows."""
        at = seq.batch, head, seq.offset_q + row
        if self.apart:
            warpgroup.store(gLse, lse, at)
        else:
            warpgroup.store(truncate(gLse, 2, seq.offset_q + seq.seqlen_q), lse, at)

    @inlined
    def clear(self, tile, gO, gLse, row, head):
        """Write what belongs to nobody, a consumer's rows from `row` of the batch on: 0, and -inf like that of a row which sees
        no key. tile: the type of a tile of output."""
        self.write(gO, zeros(tile), (int32(0), row, head, 0))
        warpgroup.store(gLse, full(tile.col_vec, -math.inf), (int32(0), head, row))

    @inlined
    def release(self, q, r):
        """Called when the scores of the r-th tile have been computed."""
        q.release(r)

    @inlined
    def release_last(self, q, r):
        """Called when the output of the r-th tile is on its way."""

    @inlined
    def end(self):
        """Called when there are no more tiles."""


class StoreFloat32(StoreOutput):
    """The same in float32, for callers that go on adding to it."""

    def declared(self, value_dim: int, of: dtype) -> Any:
        return array(4, fp32)

    @inlined
    def write(self, gO, o, at):
        warpgroup.store(gO, o, at, rows=1, cols=3)


class AccumulateOutput(StoreFloat32):
    """The same for queries that have seen other keys before; the arrays hold the result for those."""

    @inlined
    def clear(self, tile, gO, gLse, row, head):
        """See Stored: what is nobody's stays as it is."""

    @inlined
    def begin(self, softmax, variant, ctx, gO, gLse, seq, row, scale):
        """See Stored. If the variant changes the output, it changes the whole of it."""
        end = seq.offset_q + seq.seqlen_q
        gO, gLse, row = truncate(gO, 1, end), truncate(gLse, 2, end), seq.offset_q + row
        o = warpgroup.load(gO, softmax.tile, (seq.batch, row, ctx.head, 0), 1, 3, False)
        lse = warpgroup.load(gLse, softmax.tile.col_vec, (seq.batch, ctx.head, row))
        return softmax.resume(o / variant.output(1.0, ctx), lse, variant.initial_max(ctx, variant.max_floor), scale)


class TmaStoreOutput(StoreOutput):
    """TMA writes the output, from the shared memory of the tile's queries, while the next tile begins. No other sequence may
    follow, because it would be overwritten."""

    def declared(self, value_dim: int, of: dtype) -> Any:
        """How a kernel declares the output."""
        return tiled(st(warpgroup.ROWS, value_dim, of), unit=1)

    @inlined
    def store(self, gO, o, queries, seq, row, head):
        warpgroup.store(queries, queries.dtype(o))
        warpgroup.tma_store(gO, (seq.batch, seq.offset_q + row, head), queries)

    @inlined
    def release(self, q, r):
        """Called when the scores of the r-th tile have been computed: its output is then written where its queries lie."""

    @inlined
    def release_last(self, q, r):
        """Called when the output of the r-th tile is on its way: the one before has been read from shared memory."""
        if r > 0:
            warpgroup.store_wait()
            q.release(r - 1)

    @inlined
    def end(self):
        """Called when there are no more tiles."""
        warpgroup.store_wait()
