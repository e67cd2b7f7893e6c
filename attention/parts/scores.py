"""Variants that change scores or add to the row sum: ALiBi, bias, score functions, sinks. score_mods.py has those that are
functions of a score alone."""

import math
from collections.abc import Callable
from typing import Any

from numpy import float32, int32

from ops import abs, col_index, exp2, full, load, maximum, minimum, where, zeros
from tiles import bf16, dtype, fp32, inlined, rt, static
from tiles.launching.arguments import FLOAT, array

from .variant import KeyRange, QueryRange, Variant

MAX_SCORE_GRAD = 2.0**15  # the largest derivative of a score: larger ones are not finite in fp16


@static
class Alibi(Variant):
    """ALiBi: score - slope |i + shift - j|, with a slope for each head. signed_distance: no query sees a key after its own
    position, so that the distance needs no absolute value. is_last: no score function follows, which would need the score
    itself. With both, the part of the distance that depends on i only is a row offset, and a score takes one addition where the
    distance takes two. What is added to a score and subtracted again is up to slope times the keys of a block, so the last
    digits are lost. Hence blocks that hold a query's own position, or keys that it does not see, count as edge blocks, and have
    the exact distance; in other blocks a key is at least one position away, and a steep slope makes its weight 0. Gradients,
    whose warps have 16 keys each, use the row offset in all blocks, counted from the warp's eighth key: weights are off by
    slope 2^-20 (2 % at 20000)."""

    signed_distance: bool
    is_last: bool

    @property
    def has_row_offset(self) -> bool:  # type: ignore[override]
        return self.signed_distance and self.is_last

    adds_late = has_row_offset
    fits_folded_backward = False
    fits_slope_gradient = True

    @property
    def params(self) -> dict[str, Any]:
        """slopes: (batch, head). per_slope: 1 / the unit of scores."""
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
        elif self.signed_distance:
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
    def score_in_edge_block_by(self, s, prefetched, ctx, key):
        return self.score_in_edge_block(s, ctx, key)

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
        """The head's slope, in units of scores."""
        return ctx.params.slopes[ctx.batch, ctx.head] * ctx.params.per_slope

    @inlined
    def aligned_position(self, s, ctx, key):
        """The positions of the rows' queries among keys, aligned bottom right and counted from `key`."""
        return ctx.positions(s, ctx.shift, key)

    @inlined
    def alibi_position(self, s, ctx, key):
        """The positions of the rows' queries in the formula of the distance, counted from `key`."""
        return self.aligned_position(s, ctx, key)


@static
class ScoreModAlibi(Alibi):
    """score + slope (j - i), or score - slope |i - j|, recognised in a score function. slope(b, h, *aux) is in units of 1, and
    i and j count from 0."""

    fits_slope_gradient = False

    slope: Callable

    @property
    def params(self) -> dict[str, Any]:
        """per_function_slope: 1 / the unit of scores, which may differ from that of `alibi` in the same call."""
        return {"per_function_slope": FLOAT}

    def bind_unit(self, unit: float) -> tuple[dict[str, float], float]:
        """({argument of the kernel: number}, the unit of the changed scores), for scores that come in this unit."""
        return {"per_function_slope": 1 / unit}, unit

    @inlined
    def precompute(self, ctx):
        return self.slope(ctx.batch, ctx.head, *ctx.aux) * ctx.params.per_function_slope

    @inlined
    def row_offset_in_edge_block(self, s, ctx, key):
        if self.has_row_offset:
            return zeros(s.col_vec) - float32(ctx.shift) * ctx.precomputed
        else:
            return None

    @inlined
    def alibi_position(self, s, ctx, key):
        """The positions of the rows' queries, counted from 0 as a score function counts them."""
        return ctx.positions(s, 0, key)


@static
class ScoreBias(Variant):
    """score + bias[b, h, i, j]. is_last: does no score function follow, which would need the score itself? in_units_of_one: are
    scores multiplied to units of 1, in which the lowest float of a bias stays finite? (Gradients need not.)"""

    reads_score_matrix = True
    fits_narrow_backward = fits_folded_backward = fits_wide_backward = False

    is_last: bool
    in_units_of_one: bool = False

    @property
    def allows_low_scores(self) -> bool:  # type: ignore[override]
        return self.in_units_of_one

    @property
    def adds_late(self) -> bool:  # type: ignore[override]
        return self.is_last

    @property
    def params(self) -> dict[str, Any]:
        """bias: (batch, head, query, key). per_bias: 1 / the unit of scores, or that unit if scores are multiplied to units
        of 1."""
        return {"bias": array(4), "per_bias": FLOAT}

    def bind_unit(self, unit: float) -> tuple[dict[str, float], float]:
        """({argument of the kernel: number}, the unit of the changed scores), for scores that come in this unit."""
        return ({"per_bias": unit}, 1.0) if self.in_units_of_one else ({"per_bias": 1 / unit}, unit)

    @inlined
    def bias_factor(self, ctx):
        """The factor of the bias."""
        if self.in_units_of_one:
            return 1.0
        else:
            return ctx.params.per_bias

    @inlined
    def in_bias_unit(self, s, ctx):
        """The scores in the unit in which the bias is added."""
        if self.in_units_of_one:
            return s * ctx.params.per_bias
        else:
            return s

    @inlined
    def score(self, s, ctx, key):
        return self.in_bias_unit(s, ctx) + self.late_term(s, ctx, key, 1.0)

    @inlined
    def late_term(self, s, ctx, key, scale):
        return ctx.load_tile(ctx.params.bias, s, key) * (self.bias_factor(ctx) * scale)


@static
class PrefetchedBias(ScoreBias):
    """score + bias[b, h, i, j], with the bias loaded while the tile's keys arrive (decoding)."""

    @inlined
    def prefetch(self, spec, ctx, key):
        return ctx.load_tile(ctx.params.bias, spec, key) * self.bias_factor(ctx)

    @inlined
    def score_by(self, s, prefetched, ctx, key):
        return self.in_bias_unit(s, ctx) + prefetched


@static
class KeyBias(PrefetchedBias):
    """score + bias[b, h, j], for a bias with one row for all queries. It is loaded once for each column of a tile, not once for
    each score. adjacent: is the row contiguous?"""

    prefetches_columns = fits_narrow_backward = fits_folded_backward = fits_wide_backward = True

    adjacent: bool = False

    @inlined
    def prefetch(self, spec, ctx, key):
        element = ctx.batch, ctx.head, int32(0), int32(key)
        return load(ctx.params.bias, spec.row_vec, element, 2, 3, aligned=self.adjacent) * self.bias_factor(ctx)

    @inlined
    def late_term(self, s, ctx, key, scale):
        return self.prefetch(rt(s.rows, s.cols, fp32, s.layout), ctx, key) * scale


@static
class TmaBias(ScoreBias):
    """score + bias[b, h, i, j], with tiles of the bias that TMA loads (bias_tiles.py): ctx.params.bias is the consumer's part,
    in registers. bias_dtype: the dtype of the bias."""

    reads_score_matrix, fits_narrow_backward = False, True

    bias_dtype: dtype = bf16

    @property
    def tma_bias(self) -> dtype:  # type: ignore[override]
        return self.bias_dtype

    @property
    def params(self) -> dict[str, Any]:
        return {"per_bias": FLOAT}

    @inlined
    def late_term(self, s, ctx, key, scale):
        return fp32(ctx.params.bias) * (self.bias_factor(ctx) * scale)


@static
class ScoreMod(Variant):
    """function(score, b, h, i, j, *aux), with a tile of scores in units of 1, a column vector i of queries and a row vector j
    of keys."""

    allows_low_scores = True
    fits_narrow_backward = fits_folded_backward = fits_wide_backward = False

    function: Callable

    @property
    def params(self) -> dict[str, Any]:
        """score_unit: the unit of the scores that come in."""
        return {"score_unit": FLOAT}

    def bind_unit(self, unit: float) -> tuple[dict[str, float], float]:
        """({argument of the kernel: number}, the unit of the changed scores), for scores that come in this unit."""
        return {"score_unit": unit}, 1.0

    @inlined
    def score(self, s, ctx, key):
        i, j = ctx.rows(s), ctx.columns(s, key)
        return self.function(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)


@static
class ScoreModInUnit(ScoreMod):
    """A score function that takes the scores times `factor`, and returns them in units of `unit`."""

    unit: float
    factor: float

    def bind_unit(self, unit: float) -> tuple[dict[str, float], float]:
        return {"score_unit": unit * self.factor}, self.unit


@static
class ScoreModWithGrad(ScoreMod):
    """A score function with its derivative, for gradients. with_grad: a function of the same arguments that returns (score,
    derivative by s). linear: is the derivative 1? A weight of 0 times the derivative must be finite, whatever the function
    returns for scores that no query sees. So the derivative is clamped to the range of fp16, and the scores of rows behind the
    last query are -inf."""

    with_grad: Callable
    linear: bool

    @property
    def nonlinear(self) -> bool:  # type: ignore[override]
        return not self.linear

    @inlined
    def score(self, s, ctx, key):
        i, j = ctx.rows(s), ctx.columns(s, key)
        s = self.function(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)
        return where(i < ctx.seqlen_q, s, -math.inf)

    @inlined
    def score_and_grad(self, s, ctx, key):
        i, j = ctx.rows(s), ctx.columns(s, key)
        tile = rt(s.rows, s.cols, fp32, s.layout)
        s, score_grad = self.with_grad(s * ctx.params.score_unit, ctx.batch, ctx.head, i, j, *ctx.aux)
        score_grad = maximum(minimum(full(tile, -0.0) + score_grad, MAX_SCORE_GRAD), -MAX_SCORE_GRAD)
        return where(i < ctx.seqlen_q, s, -math.inf), score_grad


class Sink(Variant):
    """An attention sink: exp(sink), with a logit for each head, is added to the row sum, like a key whose value is 0."""

    needs_raw_scores = fits_slope_gradient = True

    @property
    def params(self) -> dict[str, Any]:
        """sinks: (head). per_sink: 1 / the unit of scores."""
        return {"sinks": array(1), "per_sink": FLOAT}

    @inlined
    def initial_max(self, ctx, floor):
        """Where a row's maximum starts: at the sink or above, so that the sink's weight is at most 1."""
        return maximum(floor, ctx.params.sinks[ctx.head] * ctx.params.per_sink)

    @inlined
    def finish_row_sum(self, l, m, scale, ctx):
        return l + exp2((ctx.params.sinks[ctx.head] * ctx.params.per_sink - m) * scale)
