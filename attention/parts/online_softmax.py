"""The online softmax: a value that holds the output, row maximum and row sum of some query rows, block by block of keys.

    state = Softmax(O).init(lowest)                        # before the first key; the maximum starts at `lowest`
    state = state.update_max(s, None, scale, slack)        # a block of scores: the row maximum
    p = state.weights(s, None, scale)                      # ... its weights
    state = state.add(p)                                   # ... in the row sum
    state = state._replace(o=mma_AB(state.rescale(), p, values))
    out, lse = state.finish(scale, variant, ctx)

exp2(scale (s - m)) may use any m near the row maximum, because the factor cancels in O / l: m moves only when the maximum has
grown by more than `slack`, and most blocks rescale nothing.

A row that has seen no key keeps its finite initial maximum while its masked scores are -inf: exp2 gives exact zeros, and
neither the loop nor the epilogue tests for it. That maximum is LOWEST. Where a caller's numbers are added to scores, or replace
them, it is LOWEST_FLOAT, because any score but -inf may count then, however low (`allows_low_scores`).
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ops import exp2, finish_sum, full, lane_sum, lazy_maximum, log2, maximum, rescale, row_max, where, zeros
from tiles import inlined, rt, static

LOWEST, TINY, LN2 = -1e30, 1e-30, math.log(2)
LOWEST_FLOAT = -3.4028234e38  # of float32
COARSE_EXPONENT = -(2.0**26)  # below it neighbouring exponents in float32 differ by 4 or more
LOG2_E = 1 / LN2
SLACK = 8.0  # how many powers of 2 the maximum may grow before O is rescaled: P stays below 2**8


@inlined
def over_sum(o, l):
    """o / l; 0 for rows that have seen no key, NaN where l is NaN, as a sink may be. (An l that counts a key is about 1 or
    more, so that TINY does not change it.)"""
    return o / (l + TINY)


class SoftmaxState(NamedTuple):
    """The state of query rows. o: the sum of weights times values, still to be multiplied by o_scale. m: the row maximum, or a
    little less. l: each lane's part of the row sum. Weights are exp2(scale (s - m))."""

    o: Any
    m: Any
    l: Any
    o_scale: Any

    @inlined
    def update_max(self, s, row_offset, scale, slack):
        """The state with the maximum raised for a block of scores s; o_scale says by how much. row_offset: what is subtracted
        from all scores of a row, or None."""
        return self.update_max_to(row_max(s) if row_offset is None else row_max(s) - row_offset, scale, slack)

    @inlined
    def update_max_to(self, top, scale, slack):
        """The state with the maximum raised for a block whose row maxima are `top`."""
        m = lazy_maximum(self.m, maximum(self.m, top), slack)
        return SoftmaxState(self.o, m, self.l, exp2((self.m - m) * scale))

    @inlined
    def follow_max(self, m, scale):
        """The state with a maximum m that other warps have computed; those warps also keep the row sum of that block."""
        o_scale = exp2((self.m - m) * scale)
        return SoftmaxState(self.o, m, self.l * o_scale, o_scale)

    @inlined
    def raw_max(self, row_offset):
        """The row maximum of scores from which `row_offset` has not been subtracted."""
        return self.m if row_offset is None else self.m + row_offset

    @inlined
    def weights(self, s, row_offset, scale, low_scores=False):
        """exp2(scale (s - row_offset - m)), the weights of a block of scores. low_scores: may all scores of a row be so low
        that m times the scale is rounded to many powers of 2? In such a row scores differ by many or not at all, so that 1
        serves as the scale: a product with it is exact."""
        m = self.raw_max(row_offset)
        if low_scores:
            by_row = where(m * scale > COARSE_EXPONENT, scale, 1.0)
            return exp2(s * by_row - m * by_row)
        else:
            return exp2(s * scale - m * scale)

    @inlined
    def add(self, p):
        """The state with the weights p of the last block added to the row sum."""
        return SoftmaxState(self.o, self.m, self.l * self.o_scale + lane_sum(p), self.o_scale)

    @inlined
    def add_sums(self, l):
        """The state with l, each lane's part of the row sum of the last block, added to the row sum."""
        return SoftmaxState(self.o, self.m, self.l * self.o_scale + l, self.o_scale)

    @inlined
    def rescale(self):
        """o o_scale, to which the product of the last block is added."""
        return rescale(self.o, self.o_scale)

    @inlined
    def finish(self, scale, variant, ctx):
        """(softmax(S) V, log-sum-exp of the scores); (0, -inf) for a row that has seen no key. The variant may add to the row
        sum, and change the output."""
        l = variant.finish_row_sum(finish_sum(self.l), self.m, scale, ctx)
        o = variant.output(over_sum(self.o, l), ctx)
        if variant.allows_low_scores:
            return o, self.m * (scale * LN2) + log2(l) * LN2  # m times the scale may be no float32
        else:
            return o, (self.m * scale + log2(l)) * LN2


def lowest_max(variant: Any) -> float:
    """The `lowest` of Softmax for a Variant."""
    return LOWEST_FLOAT if variant.allows_low_scores else LOWEST


@static
class Softmax:
    """Makes the SoftmaxState of a tile of output. tile: the type of O. lowest: the lowest number at which a row's maximum
    starts."""

    tile: rt
    lowest: float = LOWEST

    @inlined
    def init(self, lowest):
        """The state before the first key; the maximum starts at `lowest`."""
        return SoftmaxState(
            zeros(self.tile), full(self.tile.col_vec, lowest), lane_sum(zeros(self.tile)), zeros(self.tile.col_vec)
        )

    @inlined
    def resume(self, o, lse, lowest, scale):
        """The state after other keys, whose output is o and whose log-sum-exp is lse: as if they were a single key of weight 1,
        or of weight 0 for rows that have seen no key."""
        top = lse * (LOG2_E / scale)
        m = maximum(top, lowest)
        weight = exp2((top - m) * scale)
        return SoftmaxState(
            o * weight, m, lane_sum(full(self.column_tile, 1.0 / self.column_tile.cols)) * weight, zeros(self.tile.col_vec)
        )

    @property
    def column_tile(self) -> rt:
        """The type of a tile with as many rows as O, and 16 columns."""
        return replace(self.tile, cols=16)
