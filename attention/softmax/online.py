"""The softmax of scores that come block by block, as a value: what has been seen of some query rows, and what to do with more.

    state = Softmax(O).init(lowest)                         # no key yet, and where the maximum starts
    seen = seen.moved(s, None, scale, slack)               # a block of scores: the maximum
    p = seen.weights(s, None, scale)                       # ... their weights
    seen = seen.add(p)                                     # ... in the sum that O will be divided by
    seen = seen._replace(o=mma_AB(seen.rescaled(), p, values))
    out, lse = seen.finish(scale, variant, at)

exp2(scale (s - m)) may use any m near a row's maximum, for the factor cancels in O / l: m moves only when the maximum has grown
by more than `slack`, and most blocks rescale nothing.

A row that has seen no key keeps the finite maximum that it began with while its masked scores are -inf: exp2 gives exact zeros,
and neither a loop nor the end needs a test for it. That maximum is LOWEST. Where a caller's numbers are added to scores, or
replace them, it is LOWEST_FLOAT: no score but -inf, however low, is like one that is masked ("deep").
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ops import exp2, finish_sum, full, lane_sum, lazy_maximum, log2, maximum, rescale, row_max, where, zeros
from tiles import inlined, rt, static

LOWEST, TINY, LN2 = -1e30, 1e-30, math.log(2)
LOWEST_FLOAT = -3.4028234e38  # of float32
DEEP = -(2.0**26)  # exponents, below which float32 has no digits behind the point
LOG2_E = 1 / LN2
SLACK = 8.0  # how far, in powers of 2, the maximum may grow before O is rescaled: P stays below 2**8


@inlined
def over_sum(o, l):
    """o / l; 0 for rows that have seen no key, and NaN where l is NaN, as a sink may be. (An l that counts a key is near 1 or
    more, and TINY does not change it.)"""
    return o / (l + TINY)


class SoftmaxState(NamedTuple):
    """What query rows have seen so far. o: the sum of weights times values, which lags behind by a factor `lag`. m: the
    greatest score, or a little less. l: each lane's share of the sum of weights. Weights are exp2(scale (s - m))."""

    o: Any
    m: Any
    l: Any
    o_scale: Any

    @inlined
    def update_max(self, s, below, scale, slack):
        """The same with the maximum raised for a block of scores; O then lags behind. below: what is subtracted from all scores
        of a row, or None."""
        return self.update_max_to(row_max(s) if below is None else row_max(s) - below, scale, slack)

    @inlined
    def update_max_to(self, top, scale, slack):
        """The same, given the greatest score of each row of the block."""
        m = lazy_maximum(self.m, maximum(self.m, top), slack)
        return SoftmaxState(self.o, m, self.l, exp2((self.m - m) * scale))

    @inlined
    def follow_max(self, m, scale):
        """The same with a maximum that other warps have found, which also keep the sum of that block's weights; O then lags
        behind."""
        o_scale = exp2((self.m - m) * scale)
        return SoftmaxState(self.o, m, self.l * o_scale, o_scale)

    @inlined
    def weights(self, s, below, scale, deep=False):
        """The weights of a block of scores: exp2(scale (s - below - m)). deep: may all scores of a row be so low that m times
        the scale is off by many powers of 2? In such a row they differ by many or not at all, and 1 does for the scale: a
        product with it is exact."""
        m = self.m if below is None else self.m + below
        if deep:
            by_row = where(m * scale > DEEP, scale, 1.0)
            return exp2(s * by_row - m * by_row)
        else:
            return exp2(s * scale - m * scale)

    @inlined
    def add(self, p):
        """The same with the weights of the last block added to the sum."""
        return SoftmaxState(self.o, self.m, self.l * self.o_scale + lane_sum(p), self.o_scale)

    @inlined
    def add_sums(self, l):
        """The same, given each lane's share of the sum of these weights."""
        return SoftmaxState(self.o, self.m, self.l * self.o_scale + l, self.o_scale)

    @inlined
    def rescale(self):
        """O, rescaled to the last m: what the product of the last block is added to."""
        return rescale(self.o, self.o_scale)

    @inlined
    def merge(self, other, scale):
        """What both have seen together, if their keys are different. Neither may lag behind."""
        m = maximum(self.m, other.m)
        mine, its = exp2((self.m - m) * scale), exp2((other.m - m) * scale)
        return SoftmaxState(self.o * mine + other.o * its, m, self.l * mine + other.l * its, self.o_scale)

    @inlined
    def finish(self, scale, variant, ctx):
        """(softmax(S) V, the logarithm of the sum of exp(score)); 0 and -inf for a row that has seen no key. The variant may
        add to the sum, and change the output."""
        l = variant.finish_row_sum(finish_sum(self.l), self.m, scale, ctx)
        o = variant.output(over_sum(self.o, l), ctx)
        if variant.allows_low_scores:
            return o, self.m * (scale * LN2) + log2(l) * LN2  # m times the scale may be no float32
        else:
            return o, (self.m * scale + log2(l)) * LN2


@static
class Softmax:
    """Makes values of SoftmaxState for tiles of output like O."""

    tile: rt

    @inlined
    def init(self, lowest):
        """Rows that have seen no key yet; the maximum starts at `lowest`."""
        return SoftmaxState(
            zeros(self.tile), full(self.tile.col_vec, lowest), lane_sum(zeros(self.tile)), zeros(self.tile.col_vec)
        )

    @inlined
    def resume(self, o, lse, lowest, scale):
        """Rows that have seen other keys before, given the mean of values and the logarithm of the sum of weights for those: as
        if that were a single key of weight 1, or of weight 0 for rows that have seen no key."""
        top = lse * (LOG2_E / scale)
        m = maximum(top, lowest)
        weight = exp2((top - m) * scale)
        return SoftmaxState(o * weight, m, lane_sum(full(self.few, 1.0 / self.few.cols)) * weight, zeros(self.tile.col_vec))

    @property
    def few(self) -> rt:
        """The type of a tile with as many rows as O, and few columns."""
        return replace(self.tile, cols=16)
