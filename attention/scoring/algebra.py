"""Mask and score functions that are equal to built-in variants, or cost less in another form, recognised by algebra.

lambda b, h, i, j: (j <= i) & (i - j < 100)               # the window (99, 0): no lists of key blocks
lambda s, b, h, i, j: 30 * tanh(s / 30)                   # tanh(s / 30), in units of 30: one product less per score
lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j)     # ALiBi: a row offset instead of a term for each score
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from ..parts.scores import ScoreMod, ScoreModAlibi, ScoreModInUnit
from .symbolic import ScoreTerm, build_function, subterms, trace_function

NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


class RelativeWindow(NamedTuple):
    """A window relative to the query: key j is seen if i - left <= j <= i + right, both counted from 0. None: no limit."""

    left: int | None = None
    right: int | None = None

    def intersect(self, other: RelativeWindow) -> RelativeWindow:
        """The window of the keys that are in both."""
        return RelativeWindow(*(min_end(x, y) for x, y in zip(self, other)))


def min_end(x: Any, y: Any) -> Any:
    """The lesser of two limits; None is no limit."""
    return y if x is None else x if y is None else min(x, y)


def mask_bounds(mask: Callable, axes: Sequence[int]) -> RelativeWindow | None:
    """The window that a mask function is equal to, None if it is none. axes: how many axes each array of aux has."""
    try:
        return _bounds(trace_function(mask, axes, is_score=False).term)
    except TypeError:
        return None


def _bounds(x: Any) -> RelativeWindow | None:
    if not isinstance(x, ScoreTerm):
        return None
    if x.op == "and_":
        one, other = map(_bounds, x.args)
        return one.intersect(other) if one and other else None
    if x.op == "invert" and isinstance(x.args[0], ScoreTerm) and x.args[0].op in NEGATED:
        return _bounds(ScoreTerm(NEGATED[x.args[0].op], *x.args[0].args))
    if x.op not in MIRRORED:
        return None
    op, (one, other) = x.op, x.args
    if op in ("gt", "ge") or (isinstance(other, ScoreTerm) and other.op == "abs"):
        op, one, other = MIRRORED[op], other, one
    if isinstance(one, ScoreTerm) and one.op == "abs":
        inside, end = _offset(one.args[0]), _linear_form(other)
        if not inside or not end or end[:2] != (0, 0) or op not in ("lt", "le"):
            return None
        limit, shift = _max_integer(end[2], op), inside[0] * inside[1]
        return RelativeWindow(limit + shift, limit - shift)
    terms = _offset(ScoreTerm("sub", one, other))
    if not terms or op not in ("lt", "le", "eq"):
        return None
    sign, shift = terms
    limit = _max_integer(-shift, op)  # of sign (j - i)
    if op == "eq":
        return RelativeWindow(-sign * limit, sign * limit) if limit == -shift else None
    return RelativeWindow(right=limit) if sign > 0 else RelativeWindow(left=limit)


def _max_integer(end: Any, op: str) -> int:
    """The greatest integer n with n < end (op "lt") or n <= end."""
    return math.ceil(end) - 1 if op == "lt" else math.floor(end)


def _offset(x: Any) -> tuple[int, Any] | None:
    """(1, c) if the term is j - i + c, (-1, c) if it is i - j + c; otherwise None."""
    terms = _linear_form(x)
    return (terms[1], terms[2]) if terms and abs(terms[1]) == 1 and terms[0] == -terms[1] else None


def _linear_form(x: Any) -> tuple[Any, Any, Any] | None:
    """(m, n, c) if the term is m i + n j + c with integers m and n; otherwise None."""
    if isinstance(x, Real) and not isinstance(x, bool):
        return (0, 0, x) if isinstance(x, Integral) or math.isfinite(x) else None
    if not isinstance(x, ScoreTerm) or x.op in ("i", "j"):
        return (int(x.op == "i"), int(x.op == "j"), 0) if isinstance(x, ScoreTerm) else None
    if x.op == "neg":
        x = ScoreTerm("mul", -1, *x.args)
    if x.op not in ("add", "sub", "mul"):
        return None
    one, other = map(_linear_form, x.args)
    if one is None or other is None:
        return None
    if x.op == "mul":
        one, other = (other, one) if one[:2] == (0, 0) else (one, other)
        factor: Any = other[2]
        return (
            (one[0] * factor, one[1] * factor, one[2] * factor)
            if other[:2] == (0, 0) and isinstance(factor, Integral)
            else None
        )
    sign = 1 if x.op == "add" else -1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


def score_variant(score: Callable, axes: Sequence[int], signed_distance: bool) -> ScoreMod | ScoreModAlibi:
    """The variant for a score function: ALiBi or a scale factor become built-in variants, which cost less than the function.
    axes: how many axes each array of aux has. signed_distance: does no query see a key after its own position?"""
    try:
        traced = trace_function(score, axes, is_score=True)
        names, (s, *_) = traced.names, traced.arguments
        if slope := _alibi_slope(traced.term, s):
            slope_function, is_signed = slope
            return ScoreModAlibi(
                signed_distance or is_signed, True, build_function([*names[1:2], *names[2:3], *names[5:]], slope_function)
            )
        unit, x = _split_factor(traced.term)
        factor, inside = _score_factor(x, s)
        if unit == factor == 1:
            return ScoreMod(score)
        return ScoreModInUnit(build_function(names, _substitute(x, {y.number: s for y in inside})), unit, factor)
    except TypeError:
        return ScoreMod(score)


def alibi_slope_of(score: Callable, axes: Sequence[int]) -> Callable | None:
    """slope(b, h, *aux), if the score is s - slope (i - j) or s - slope |i - j| and the slope is an element of an array without
    arithmetic, so that it has the same bits on every rank. Otherwise None. axes: see score_variant."""
    try:
        traced = trace_function(score, axes, is_score=True)
        names, (s, *_) = traced.names, traced.arguments
        slope = _alibi_slope(traced.term, s)
        if slope is None or not isinstance(slope[0], ScoreTerm) or slope[0].op != "element":
            return None
        return build_function([*names[1:2], *names[2:3], *names[5:]], slope[0])
    except TypeError:
        return None


def _split_factor(x: Any) -> tuple[float, Any]:
    """(c, y) for a term c y, where c is a positive number; c is 1 if there is no such factor."""
    if isinstance(x, ScoreTerm) and x.op in ("mul", "product", "truediv"):
        one, other = x.args
        if x.op != "truediv" and _positive(one):
            return float(one), other
        if _positive(other):
            return 1 / float(other) if x.op == "truediv" else float(other), one
    return 1.0, x


def _score_factor(x: Any, s: ScoreTerm) -> tuple[float, list[ScoreTerm]]:
    """(c, the terms c s) if the term depends on the score s only by c s, where c is a positive number other than 1; otherwise
    (1.0, [])."""
    uses = [y for y in subterms(x) if any([z is s for z in y.args])]
    factors = {factor if rest is s else 1.0 for factor, rest in map(_split_factor, uses)}
    return (factors.pop(), uses) if len(factors) == 1 and factors != {1.0} else (1.0, [])


def _substitute(x: Any, other: dict[int, ScoreTerm]) -> Any:
    """The term with some of its subterms replaced. other: {number of a subterm: its replacement}."""
    if not isinstance(x, ScoreTerm) or x.number in other:
        return other[x.number] if isinstance(x, ScoreTerm) else x
    return ScoreTerm(x.op, *(_substitute(y, other) for y in x.args)) if x.args else x


def _positive(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and 2.0**-64 < float(x) < 2.0**64


def _alibi_slope(x: Any, s: ScoreTerm) -> tuple[Any, bool] | None:
    """(a, True) if the term is a score s + a (j - i), (a, False) if it is s - a |i - j|, where a does not depend on i and j;
    otherwise None."""
    if not isinstance(x, ScoreTerm) or x.op not in ("add", "sub") or not any([y is s for y in x.args]):
        return None
    one, other = x.args
    if one is not s and x.op == "sub":
        return None
    factor, rest = _split_distance(other if one is s else one)
    if rest is None:
        return None
    sign, is_signed = rest
    sign = sign if x.op == "add" else -sign
    if not is_signed:
        sign = -sign
    return factor if sign > 0 else ScoreTerm("neg", factor), is_signed


def _split_distance(x: Any) -> tuple[Any, Any]:
    """(a, (1 or -1, True)) if the term is a (j - i) or a (i - j); (a, (1, False)) if it is a |i - j|; otherwise (x, None)."""
    if not isinstance(x, ScoreTerm):
        return x, None
    terms = _offset(x)
    if terms and terms[1] == 0:
        return 1.0, (terms[0], True)
    if x.op == "abs":
        terms = _offset(x.args[0])
        return (1.0, (1, False)) if terms and terms[1] == 0 else (x, None)
    if x.op == "neg":
        factor, rest = _split_distance(x.args[0])
        return (ScoreTerm("neg", factor) if isinstance(factor, ScoreTerm) else -factor, rest) if rest else (x, None)
    if x.op in ("mul", "truediv"):
        one, other = x.args
        if x.op == "mul" and not _depends_on_position(one):
            one, other = other, one
        factor, rest = _split_distance(one)
        if rest and not _depends_on_position(other):
            if x.op == "mul" and not isinstance(factor, ScoreTerm) and factor == 1:
                return other, rest
            return ScoreTerm(x.op, factor, other), rest
    return x, None


def _depends_on_position(x: Any) -> bool:
    """Does the term depend on the query, the key or the score?"""
    return any([y.op in ("i", "j", "s") for y in subterms(x)])
