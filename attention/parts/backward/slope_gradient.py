"""The gradient of ALiBi's slopes, computed by the main kernel, where dS is in registers anyway.

    dslope[head] = -sum over i, j of dS[i, j] |i + shift - j|

One class for kernels that compute it and one for kernels that do not, with the same methods. It costs two instructions a score
here; a kernel of its own, which computes scores once more, takes two fifths of the time of backward. A warp stores one number
for each head that it has gone through, and element_gradients.SumElementRows adds these rows of numbers in a fixed order."""

from typing import Any

from numpy import int32

from ops import finish_sum, lane_moment, lane_sum, row_index, tile_sum, turned, zeros
from tiles import inlined, static
from tiles.launching.arguments import array

from ..part import KernelPart


@static
class NoSlopeGradient(KernelPart):
    """The kernel computes no gradient of slopes."""

    @inlined
    def init(self, scores):
        """A warp's dslope before the first tile of a head. scores: the type of its tiles, keys by queries."""
        return 0

    @inlined
    def add(self, dslope, ds, ctx, key):
        """A warp's dslope after one more tile of dS, queries by keys, from key `key` on."""
        return dslope

    @inlined
    def store(self, dslope, params, ctx, row):
        """Store a warp's dslope of the head `ctx.head`, in row `row` of the sums."""


@static
class SlopeGradient(NoSlopeGradient):
    """The kernel computes the gradient of slopes that all sequences share, under a mask that hides later keys.

    params.slope_sums: (a warp of a key block of a batch, head), zeros before the kernel runs."""

    def __str__(self):
        return " dalibi"

    @property
    def params(self) -> dict[str, Any]:
        return {"slope_sums": array(2)}

    @inlined
    def init(self, scores):
        return lane_sum(zeros(scores))

    @inlined
    def add(self, dslope, ds, ctx, key):
        ds = turned(ds)
        distances = int32(ctx.row + ctx.shift - key) - row_index(ds.col_vec)  # of the first query from each key
        return dslope + lane_moment(ds) + lane_sum(ds) * distances

    @inlined
    def store(self, dslope, params, ctx, row):
        params.slope_sums[row, ctx.head] = -tile_sum(finish_sum(dslope))


NO_SLOPE_GRADIENT, SLOPE_GRADIENT = NoSlopeGradient(), SlopeGradient()
