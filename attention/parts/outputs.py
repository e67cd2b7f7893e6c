"""How consumers write the output of a query tile, as objects with the same methods."""

import math
from typing import Any

from numpy import int32

from ops import full, truncate, warpgroup, zeros
from tiles import dtype, fp32, inlined, st, static
from tiles.launching.arguments import array, tiled


@static
class StoreOutput:
    """The consumers store the output from registers, 16 bytes a lane. The stage of a tile's queries is released after its last
    scores. bounded_by_array: see sequences.BatchedLayout."""

    bounded_by_array: bool

    def declare(self, value_dim: int, input_dtype: dtype) -> Any:
        """The type of the kernel's parameter for the output."""
        return array(4, input_dtype)

    @inlined
    def init_state(self, softmax, variant, ctx, gO, gLse, seq, row, scale):
        """The softmax state of a consumer's rows, from `row` of the Sequence on, before their first key."""
        return softmax.init(variant.initial_max(ctx, softmax.lowest))

    @inlined
    def store(self, gO, o, queries, seq, row, head):
        """Store the output o of a consumer's rows, from `row` of the Sequence on."""
        at = seq.batch, seq.offset_q + row, head, 0
        if self.bounded_by_array:
            self.write(gO, o, at)
        else:
            self.write(truncate(gO, 1, seq.offset_q + seq.seqlen_q), o, at)

    @inlined
    def write(self, gO, o, at):
        """Store rows at the coordinates `at`, as far as the array goes."""
        warpgroup.store(gO, o, at, rows=1, cols=3, aligned=True)

    @inlined
    def store_lse(self, gLse, lse, seq, row, head):
        """Store the log-sum-exp of these rows."""
        at = seq.batch, head, seq.offset_q + row
        if self.bounded_by_array:
            warpgroup.store(gLse, lse, at)
        else:
            warpgroup.store(truncate(gLse, 2, seq.offset_q + seq.seqlen_q), lse, at)

    @inlined
    def clear_padding(self, tile, gO, gLse, sequences, block, batch, head, offset, params):
        """Store out = 0 and lse = -inf to a consumer's padding: the rows after the last sequence, if query tile `block` of a
        sequence has any, from the first one plus `offset` on. tile: the type of O."""
        has_padding, row = sequences.padding_rows(block, batch, params)
        if has_padding:
            row = int32(row + offset)
            self.write(gO, zeros(tile), (int32(0), row, head, 0))
            warpgroup.store(gLse, full(tile.col_vec, -math.inf), (int32(0), head, row))

    @inlined
    def release_queries(self, q, r):
        """Called after the last scores of the r-th tile: release its queries."""
        q.release(r)

    @inlined
    def release_previous_queries(self, q, r):
        """Called after the first scores of the r-th tile."""

    @inlined
    def finish(self):
        """Called after the last tile."""


class StoreFloat32(StoreOutput):
    """The consumers store the output in float32, for callers that combine it with others."""

    def declare(self, value_dim: int, input_dtype: dtype) -> Any:
        return array(4, fp32)

    @inlined
    def write(self, gO, o, at):
        warpgroup.store(gO, o, at, rows=1, cols=3)


class AccumulateOutput(StoreFloat32):
    """The consumers combine the output with that for other keys, which out and lse (both float32) already hold."""

    @inlined
    def clear_padding(self, tile, gO, gLse, sequences, block, batch, head, offset, params):
        """Padding keeps its values, so nothing is stored."""

    @inlined
    def init_state(self, softmax, variant, ctx, gO, gLse, seq, row, scale):
        """The softmax state after the other keys, from out and lse. If the variant scales the output, as dropout does, out is
        divided by that scale first."""
        end = seq.offset_q + seq.seqlen_q
        gO, gLse, row = truncate(gO, 1, end), truncate(gLse, 2, end), seq.offset_q + row
        o = warpgroup.load(gO, softmax.tile, (seq.batch, row, ctx.head, 0), 1, 3, False)
        lse = warpgroup.load(gLse, softmax.tile.col_vec, (seq.batch, ctx.head, row))
        return softmax.resume(o / variant.output(1.0, ctx), lse, variant.initial_max(ctx, softmax.lowest), scale)


class TmaStoreOutput(StoreOutput):
    """TMA stores the output from the shared memory of the tile's queries, while the next tile begins. No other sequence may
    follow in the batch, because its rows would be overwritten."""

    def declare(self, value_dim: int, input_dtype: dtype) -> Any:
        """The type of the kernel's parameter for the output."""
        return tiled(st(warpgroup.ROWS, value_dim, input_dtype), unit=1)

    @inlined
    def store(self, gO, o, queries, seq, row, head):
        warpgroup.store(queries, queries.dtype(o))
        warpgroup.tma_store(gO, (seq.batch, seq.offset_q + row, head), queries)

    @inlined
    def release_queries(self, q, r):
        """The stage stays, because the output of the r-th tile is staged where its queries were."""

    @inlined
    def release_previous_queries(self, q, r):
        """Wait until TMA has read the output of tile r - 1 from shared memory, and release that stage."""
        if r > 0:
            warpgroup.store_wait()
            q.release(r - 1)

    @inlined
    def finish(self):
        """Called after the last tile."""
        warpgroup.store_wait()
