"""What becomes of a score, and what joins their sum: variants of attention that change weights."""

import math
from collections.abc import Callable
from typing import Any

from numpy import float32, int32

from ops import abs, col_index, exp2, full, load, maximum, minimum, row_index, tanh, where, zeros
from tiles import bf16, dtype, fp32, inlined, rt, static
from tiles.arguments import FLOAT, array

from .variants import KeyRange, QueryRange, Variant

STEEPEST = 2.0**15  # a derivative of a score: more would not be finite in fp16


class Capped(Variant):
    """cap tanh(score / cap), in units of the cap."""

    changes_scores = needs_raw_scores = nonlinear = True
    fits_folded_backward = False

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. per_cap: the unit of scores before, divided by the cap."""
        return {"per_cap": FLOAT}

    @inlined
    def score(self, s, ctx, key):
        return tanh(s * ctx.params.per_cap)

    @inlined
    def score_and_grad(self, s, ctx, key):
        """See Variant: cap tanh(x / cap) has the derivative 1 - tanh(x / cap)^2."""
        s = self.score(s, ctx, key)
        return s, 1.0 - s * s


@static
class Sloped(Variant):
    """score - slope |i + shift - j|, with a slope a head: ALiBi. ordered: no key is seen that comes after the query. last: no
    function follows that wants the score itself. With both, what depends on i is subtracted from all of a row's scores, and an
    addition a score is left where the distance takes two. What is added to a score and subtracted again is up to slope times
    the keys of a block, and its last digits are lost. So each score has its own distance in blocks with keys that a query does
    not see, or with the key where it stands: those count as cut. Other keys are a place away, and steep slopes leave them
    nothing. Gradients, whose warps have 16 keys each, add and subtract in all blocks, counted from the warp's eighth key:
    weights are off by slope 2^-20 (2 % at 20000)."""

    changes_scores = needs_raw_scores = True

    ordered: bool
    last: bool

    @property
    def has_row_offset(self) -> bool:  # type: ignore[override]
        """See Variant."""
        return self.ordered and self.last

    adds_late = has_row_offset
    fits_folded_backward = False

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. slopes: (batch, head). per_slope: 1 / the unit of scores."""
        return {"slopes": array(2), "per_slope": FLOAT}

    @inlined
    def key_range(self, first, last, ctx):
        return KeyRange(0, ctx.seqlen_k, 0, min(ctx.seqlen_k, first + ctx.shift) if self.has_row_offset else ctx.seqlen_k)

    @inlined
    def query_range(self, first, last, ctx):
        return QueryRange(0, ctx.seqlen_q, max(0, last - ctx.shift + 1) if self.has_row_offset else 0, ctx.seqlen_q)

    @inlined
    def score(self, s, ctx, key):
        if self.has_row_offset:
            return s + col_index(s.row_vec) * ctx.precomputed
        elif self.ordered:
            return s - (self.alibi_position(s, ctx, key) - col_index(s.row_vec)) * ctx.precomputed
        else:
            return s - abs(self.alibi_position(s, ctx, key) - col_index(s.row_vec)) * ctx.precomputed

    @inlined
    def score_in_edge_block(self, s, ctx, key):
        if self.has_row_offset:
            return s - (self.aligned_position(s, ctx, key) - col_index(s.row_vec)) * ctx.precomputed
        else:
            return self.score(s, ctx, key)

    @inlined
    def score_in_edge_block_by(self, s, fetched, ctx, key):
        return self.score_in_edge_block(s, ctx, key)

    @inlined
    def score_and_grad(self, s, ctx, key):
        return (s if self.adds_late else self.score(s, ctx, key)), 1.0

    @inlined
    def late_term(self, s, ctx, key, scale):
        return (col_index(s.row_vec) - float(s.cols // 2)) * (ctx.precomputed * scale)

    @inlined
    def row_offset(self, s, ctx, key):
        if self.has_row_offset:
            return self.alibi_position(s, ctx, key) * ctx.precomputed
        else:
            return None

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        if self.has_row_offset:
            return zeros(s.col_vec)
        else:
            return None

    @inlined
    def precompute(self, ctx):
        """See Variant: the head's slope, in units of scores."""
        return ctx.params.slopes[ctx.batch, ctx.head] * ctx.params.per_slope

    @inlined
    def aligned_position(self, s, ctx, key):
        """Where the rows' queries stand, counted from `key`."""
        return row_index(s.col_vec) + int32(ctx.row + ctx.shift - key)

    @inlined
    def alibi_position(self, s, ctx, key):
        """Where they stand in the formula."""
        return self.aligned_position(s, ctx, key)


@static
class SlopedBy(Sloped):
    """score + slope (j - i), or score - slope |i - j|, with a slope(b, h, *aux) in units of 1, i and j counted from 0."""

    slope: Callable

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. per_function_slope: 1 / the unit of scores, which may be another than that of `alibi` beside it."""
        return {"per_function_slope": FLOAT}

    def counted(self, unit: float) -> tuple[dict[str, float], float]:
        """(the numbers that the kernel gets, the unit of the scores after it), for scores that come in this unit."""
        return {"per_function_slope": 1 / unit}, unit

    @inlined
    def precompute(self, ctx):
        return self.score_grad(ctx.batch, ctx.head, *ctx.aux) * ctx.params.per_function_slope

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        if self.has_row_offset:
            return zeros(s.col_vec) - float32(ctx.shift) * ctx.precomputed
        else:
            return None

    @inlined
    def alibi_position(self, s, ctx, key):
        """See Sloped: a function's queries are counted from 0."""
        return row_index(s.col_vec) + int32(ctx.row - key)


@static
class Biased(Variant):
    """score + bias[b, h, i, j]. last: does no function follow that needs the score itself? whole: are scores brought to units
    of 1, in which the least number that a bias may have is finite? (Gradients need no such number.)"""

    changes_scores = needs_raw_scores = True
    reads_score_matrix = True
    fits_narrow_backward = fits_folded_backward = fits_wide_backward = False

    last: bool
    whole: bool = False

    @property
    def allows_low_scores(self) -> bool:  # type: ignore[override]
        """See Variant."""
        return self.whole

    @property
    def adds_late(self) -> bool:  # type: ignore[override]
        """See Variant."""
        return self.last

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. bias: (batch, head, query, key). per_bias: 1 / the unit of scores, or that unit if they are brought to
        units of 1."""
        return {"bias": array(4), "per_bias": FLOAT}

    def counted(self, unit: float) -> tuple[dict[str, float], float]:
        """(the numbers that the kernel gets, the unit of the scores after it), for scores that come in this unit."""
        return ({"per_bias": unit}, 1.0) if self.whole else ({"per_bias": 1 / unit}, unit)

    @inlined
    def per_unit(self, ctx):
        """What a bias is multiplied by."""
        if self.whole:
            return 1.0
        else:
            return ctx.params.per_bias

    @inlined
    def units(self, s, ctx):
        """The scores in the units of what is added."""
        if self.whole:
            return s * ctx.params.per_bias
        else:
            return s

    @inlined
    def score(self, s, ctx, key):
        return self.units(s, ctx) + self.late_term(s, ctx, key, 1.0)

    @inlined
    def score_and_grad(self, s, ctx, key):
        return (s if self.adds_late else self.score(s, ctx, key)), 1.0

    @inlined
    def late_term(self, s, ctx, key, scale):
        at_bias, unit = (ctx.batch, ctx.head, ctx.row, int32(key)), self.per_unit(ctx) * scale
        return load(ctx.params.bias, rt(s.rows, s.cols, fp32, s.layout), at_bias, 2, 3, aligned=False) * unit


@static
class BiasedByKey(Biased):
    """score + bias[b, h, j], for a bias with one row for all queries. It is read once for each column of a tile, not once for
    each score. adjacent: are its numbers contiguous?"""

    prefetches_columns = fits_narrow_backward = fits_folded_backward = fits_wide_backward = True

    adjacent: bool = False

    @inlined
    def prefetch(self, spec, ctx, key):
        at_bias = ctx.batch, ctx.head, int32(0), int32(key)
        return load(ctx.params.bias, spec.row_vec, at_bias, 2, 3, aligned=self.adjacent) * self.per_unit(ctx)

    @inlined
    def score_by(self, s, fetched, ctx, key):
        return self.units(s, ctx) + fetched

    @inlined
    def late_term(self, s, ctx, key, scale):
        return self.prefetch(rt(s.rows, s.cols, fp32, s.layout), ctx, key) * scale


@static
class BiasedByTile(Biased):
    """The same in tiles that TMA loads (bias_tiles.py): params.bias is the consumer's part, in registers."""

    loads, lean = False, True

    of: dtype = bf16

    @property
    def tma_bias(self) -> dtype:  # type: ignore[override]
        """See Variant."""
        return self.of

    @property
    def params(self) -> dict[str, Any]:
        return {"per_bias": FLOAT}

    @inlined
    def late_term(self, s, ctx, key, scale):
        return fp32(ctx.params.bias) * (self.per_unit(ctx) * scale)


@static
class Scored(Variant):
    """function(score, b, h, i, j, *aux), with scores in units of 1. It gets a tile of scores, a vector i of queries and a
    vector j of keys."""

    changes_scores = needs_raw_scores = allows_low_scores = True
    fits_narrow_backward = fits_folded_backward = fits_wide_backward = False

    function: Callable

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. score_unit: that of scores before."""
        return {"score_unit": FLOAT}

    def counted(self, unit: float) -> tuple[dict[str, float], float]:
        """(the numbers that the kernel gets, the unit of the scores after it), for scores that come in this unit."""
        return {"score_unit": unit}, 1.0

    @inlined
    def score(self, s, ctx, key):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        return self.function(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)


@static
class ScoredIn(Scored):
    """The same for a function that takes the scores times a factor, and returns them in a unit of its own."""

    unit: float
    factor: float

    def counted(self, unit: float) -> tuple[dict[str, float], float]:
        return {"score_unit": unit * self.factor}, self.unit


@static
class ScoredBack(Scored):
    """The same where the derivative is needed as well. both: a function (score, derivative with respect to s) of the same
    arguments. even: is the derivative 1? A weight of 0 must leave a finite derivative, whatever the function yields for scores
    that nobody sees. So the derivative is clamped to the range of 16 bits, and the scores of queries that do not exist are
    -inf."""

    both: Callable
    even: bool

    @property
    def nonlinear(self) -> bool:  # type: ignore[override]
        """See Variant."""
        return not self.even

    @inlined
    def score(self, s, ctx, key):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        s = self.function(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)
        return where(i < ctx.seqlen_q, s, -math.inf)

    @inlined
    def score_and_grad(self, s, ctx, key):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        tile = rt(s.rows, s.cols, fp32, s.layout)
        s, slope = self.both(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)
        slope = maximum(minimum(full(tile, -0.0) + slope, STEEPEST), -STEEPEST)
        return where(i < ctx.seqlen_q, s, -math.inf), slope


class Sunk(Variant):
    """exp(sink), a number for each head, is added to the sum of weights: like a key without a value."""

    needs_raw_scores = True

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. sinks: (head). per_sink: 1 / the unit of scores."""
        return {"sinks": array(1), "per_sink": FLOAT}

    @inlined
    def initial_max(self, ctx, floor):
        """See Variant: the maximum is not below the sink, whose weight is therefore never above 1."""
        return maximum(floor, ctx.params.sinks[ctx.head] * ctx.params.per_sink)

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        return l + exp2((ctx.params.sinks[ctx.head] * ctx.params.per_sink - m) * scale)
