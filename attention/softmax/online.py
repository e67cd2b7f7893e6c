"""The softmax of scores that come block by block, as a value: what has been seen of some query rows, and what to do with more.

    seen = Softmax(O).begin(lowest)                        # no key yet, and where the maximum starts
    seen = seen.moved(s, None, scale, slack)               # a block of scores: the maximum
    p = seen.weights(s, None, scale)                       # ... their weights
    seen = seen.add(p)                                     # ... in the sum that O will be divided by
    seen = seen._replace(o=mma_AB(seen.rescaled(), p, values))
    out, lse = seen.finish(scale, variant, at)

exp2(scale (s - m)) may use any m near a row's maximum, for the factor cancels in O / l: m moves only when the maximum has grown
by more than `slack`, and most blocks rescale nothing.

A row that has seen no key keeps the finite maximum LOWEST while its masked scores are -inf: exp2 gives exact zeros, and neither
a loop nor the end needs a test for it.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ops import exp2, finish_sum, full, lane_sum, lazy_maximum, log2, maximum, rescale, row_max, zeros
from tiles import inlined, rt, static

LOWEST, TINY, LN2 = -1e30, 1e-30, math.log(2)
LOG2_E = 1 / LN2
SLACK = 8.0  # how far, in powers of 2, the maximum may grow before O is rescaled: P stays below 2**8


class Seen(NamedTuple):
    """What query rows have seen: o, the sum of their weights times values, but for a factor `lag`; m, about the greatest score;
    l, each lane's share of the sum of weights. Weights are exp2(scale (s - m))."""

    o: Any
    m: Any
    l: Any
    lag: Any

    @inlined
    def moved(self, s, below, scale, slack):
        """The same with a maximum for a block of scores, too; O then lags behind. below: what is to be subtracted from all of a
        row's scores, if anything is."""
        return self.raised(row_max(s) if below is None else row_max(s) - below, scale, slack)

    @inlined
    def raised(self, top, scale, slack):
        """The same where a block's greatest scores are known."""
        m = lazy_maximum(self.m, maximum(self.m, top), slack)
        return Seen(self.o, m, self.l, exp2((self.m - m) * scale))

    @inlined
    def follow(self, m, scale):
        """The same with a maximum that others have found, who keep the sum of that block's weights; O then lags behind."""
        lag = exp2((self.m - m) * scale)
        return Seen(self.o, m, self.l * lag, lag)

    @inlined
    def weights(self, s, below, scale):
        """Those of a block of scores: exp2(scale (s - below - m))."""
        m = self.m if below is None else self.m + below
        return exp2(s * scale - m * scale)

    @inlined
    def add(self, p):
        """With these weights, of the last block, in their sum."""
        return Seen(self.o, self.m, self.l * self.lag + lane_sum(p), self.lag)

    @inlined
    def plus(self, l):
        """The same where each lane's share of that sum is known."""
        return Seen(self.o, self.m, self.l * self.lag + l, self.lag)

    @inlined
    def rescaled(self):
        """O by weights that count from the last m: what the last block's are added to."""
        return rescale(self.o, self.lag)

    @inlined
    def merge(self, other, scale):
        """What both have seen, of keys that they do not share; neither lags."""
        m = maximum(self.m, other.m)
        mine, its = exp2((self.m - m) * scale), exp2((other.m - m) * scale)
        return Seen(self.o * mine + other.o * its, m, self.l * mine + other.l * its, self.lag)

    @inlined
    def finish(self, scale, variant, at):
        """softmax(S) V, and the logarithm of the sum of exp(score); 0 and -inf for a row that has seen no key. What joins the
        sum, and what becomes of the output, the variant says."""
        l = variant.total(finish_sum(self.l), self.m, scale, at)
        return variant.output(self.o / maximum(l, TINY), at), (self.m * scale + log2(l)) * LN2


@static
class Softmax:
    """Of rows of a tile O."""

    tile: rt

    @inlined
    def begin(self, lowest):
        """What they have seen before the first key; the maximum starts at `lowest`."""
        return Seen(zeros(self.tile), full(self.tile.col_vec, lowest), lane_sum(zeros(self.tile)), zeros(self.tile.col_vec))

    @inlined
    def resume(self, o, lse, lowest, scale):
        """What rows have seen whose mean of values and logarithm of the sum of weights these are: as if it were one key, of
        weight 1, or 0 of rows that have seen none."""
        m = maximum(lse * (LOG2_E / scale), lowest)
        weight = exp2(lse * LOG2_E - m * scale)
        return Seen(o * weight, m, lane_sum(full(self.few, 1.0 / self.few.cols)) * weight, zeros(self.tile.col_vec))

    @property
    def few(self) -> rt:
        """A tile of as many rows, and few columns."""
        return replace(self.tile, cols=16)
