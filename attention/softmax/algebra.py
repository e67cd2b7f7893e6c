"""Masks and scores in Python that say what is built in, or what costs less said in another way: found by algebra.

lambda b, h, i, j: (j <= i) & (i - j < 100)               # the window (99, 0): no lists of key blocks
lambda s, b, h, i, j: 30 * tanh(s / 30)                   # tanh(s / 30), in units of 30: a product a score less
lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j)     # ALiBi: rows are subtracted from maxima, not from scores
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from .scores import Scored, ScoredInUnit, SlopedBy
from .symbolic import ScoreTerm, build_function, subterms, trace_function

NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


class RelativeWindow(NamedTuple):
    """A window: key j is seen if i - left <= j <= i + right, both counted from 0. An end that is None is open."""

    left: int | None = None
    right: int | None = None

    def both(self, other: RelativeWindow) -> RelativeWindow:
        """The window of the keys that lie in both."""
        return RelativeWindow(*(min_end(x, y) for x, y in zip(self, other)))


def min_end(x: Any, y: Any) -> Any:
    """The lesser of two ends, of which either may be open (None)."""
    return y if x is None else x if y is None else min(x, y)


def mask_bounds(mask: Callable, axes: Sequence[int]) -> RelativeWindow | None:
    """The window that a mask is, if it says nothing else than bounds for j - i; otherwise None. axes: how many axes each array
    of aux has."""
    try:
        return _bounds(trace_function(mask, axes, scored=False).term)
    except TypeError:
        return None


def _bounds(x: Any) -> RelativeWindow | None:
    if not isinstance(x, ScoreTerm):
        return None
    if x.does == "and_":
        one, other = map(_bounds, x.of)
        return one.both(other) if one and other else None
    if x.does == "invert" and isinstance(x.of[0], ScoreTerm) and x.of[0].does in NEGATED:
        return _bounds(ScoreTerm(NEGATED[x.of[0].does], *x.of[0].of))
    if x.does not in MIRRORED:
        return None
    does, (one, other) = x.does, x.of
    if does in ("gt", "ge") or (isinstance(other, ScoreTerm) and other.does == "abs"):
        does, one, other = MIRRORED[does], other, one
    if isinstance(one, ScoreTerm) and one.does == "abs":
        inside, end = _offset(one.of[0]), _linear_form(other)
        if not inside or not end or end[:2] != (0, 0) or does not in ("lt", "le"):
            return None
        most, apart = _max_integer(end[2], does), inside[0] * inside[1]
        return RelativeWindow(most + apart, most - apart)
    found = _offset(ScoreTerm("sub", one, other))
    if not found or does not in ("lt", "le", "eq"):
        return None
    sign, apart = found
    most = _max_integer(-apart, does)  # of sign (j - i)
    if does == "eq":
        return RelativeWindow(-sign * most, sign * most) if most == -apart else None
    return RelativeWindow(right=most) if sign > 0 else RelativeWindow(left=most)


def _max_integer(end: Any, does: str) -> int:
    """The greatest whole number that is less than `end`, or less than or equal to it, as `does` says."""
    return math.ceil(end) - 1 if does == "lt" else math.floor(end)


def _offset(x: Any) -> tuple[int, Any] | None:
    """(1, c) if the term is j - i + c, (-1, c) if it is i - j + c; otherwise None."""
    found = _linear_form(x)
    return (found[1], found[2]) if found and abs(found[1]) == 1 and found[0] == -found[1] else None


def _linear_form(x: Any) -> tuple[Any, Any, Any] | None:
    """(m, n, c) if the term is m i + n j + c with whole numbers; otherwise None."""
    if isinstance(x, Real) and not isinstance(x, bool):
        return (0, 0, x) if isinstance(x, Integral) or math.isfinite(x) else None
    if not isinstance(x, ScoreTerm) or x.does in ("i", "j"):
        return (int(x.does == "i"), int(x.does == "j"), 0) if isinstance(x, ScoreTerm) else None
    if x.does == "neg":
        x = ScoreTerm("mul", -1, *x.of)
    if x.does not in ("add", "sub", "mul"):
        return None
    one, other = map(_linear_form, x.of)
    if one is None or other is None:
        return None
    if x.does == "mul":
        one, other = (other, one) if one[:2] == (0, 0) else (one, other)
        by: Any = other[2]
        return (one[0] * by, one[1] * by, one[2] * by) if other[:2] == (0, 0) and isinstance(by, Integral) else None
    sign = 1 if x.does == "add" else -1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


def score_variant(score: Callable, axes: Sequence[int], ordered: bool) -> Scored | SlopedBy:
    """The variant that does what a score in Python does. Scores that are slopes or factors become built-in variants, which
    cost less than the function. axes: how many axes each array of aux has. ordered: does no query see a key that comes after
    it?"""
    try:
        found = trace_function(score, axes, scored=True)
        names, (s, *_) = found.names, found.arguments
        if slope := _alibi_slope(found.term, s):
            by, straight = slope
            return SlopedBy(ordered or straight, True, build_function([*names[1:2], *names[2:3], *names[5:]], by))
        unit, x = _split_factor(found.term)
        factor, inside = _score_factor(x, s)
        if unit == factor == 1:
            return Scored(score)
        return ScoredInUnit(build_function(names, _substitute(x, {y.number: s for y in inside})), unit, factor)
    except TypeError:
        return Scored(score)


def alibi_slope_of(score: Callable, axes: Sequence[int]) -> Callable | None:
    """slope(b, h, *aux), if the score is s - slope (i - j) or s - slope |i - j| and the slope is an element of an array,
    without arithmetic, so that it is the same number wherever it is read. Otherwise None. axes: see score_of."""
    try:
        found = trace_function(score, axes, scored=True)
        names, (s, *_) = found.names, found.arguments
        slope = _alibi_slope(found.term, s)
        if slope is None or not isinstance(slope[0], ScoreTerm) or slope[0].does != "element":
            return None
        return build_function([*names[1:2], *names[2:3], *names[5:]], slope[0])
    except TypeError:
        return None


def _split_factor(x: Any) -> tuple[float, Any]:
    """(c, y) for a term c y, where c is a positive number; c is 1 if there is no such factor."""
    if isinstance(x, ScoreTerm) and x.does in ("mul", "product", "truediv"):
        one, other = x.of
        if x.does != "truediv" and _positive(one):
            return float(one), other
        if _positive(other):
            return 1 / float(other) if x.does == "truediv" else float(other), one
    return 1.0, x


def _score_factor(x: Any, s: ScoreTerm) -> tuple[float, list[ScoreTerm]]:
    """(c, the terms c s) if the term depends on the score s only by c s, where c is a positive number other than 1; otherwise
    (1.0, [])."""
    uses = [y for y in subterms(x) if any([z is s for z in y.of])]
    factors = {factor if rest is s else 1.0 for factor, rest in map(_split_factor, uses)}
    return (factors.pop(), uses) if len(factors) == 1 and factors != {1.0} else (1.0, [])


def _substitute(x: Any, other: dict[int, ScoreTerm]) -> Any:
    """The term with other terms in place of some of those that it is made of. other: by their numbers."""
    if not isinstance(x, ScoreTerm) or x.number in other:
        return other[x.number] if isinstance(x, ScoreTerm) else x
    return ScoreTerm(x.does, *(_substitute(y, other) for y in x.of)) if x.of else x


def _positive(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and 2.0**-64 < float(x) < 2.0**64


def _alibi_slope(x: Any, s: ScoreTerm) -> tuple[Any, bool] | None:
    """(a, True) if the term is a score s + a (j - i), (a, False) if it is s - a |i - j|, where a does not depend on i and j;
    otherwise None."""
    if not isinstance(x, ScoreTerm) or x.does not in ("add", "sub") or not any([y is s for y in x.of]):
        return None
    one, other = x.of
    if one is not s and x.does == "sub":
        return None
    factor, rest = _split_distance(other if one is s else one)
    if rest is None:
        return None
    sign, straight = rest
    sign = sign if x.does == "add" else -sign
    if not straight:
        sign = -sign
    return factor if sign > 0 else ScoreTerm("neg", factor), straight


def _split_distance(x: Any) -> tuple[Any, Any]:
    """(a, (1 or -1, True)) if the term is a (j - i) or a (i - j); (a, (1, False)) if it is a |i - j|; otherwise (x, None)."""
    if not isinstance(x, ScoreTerm):
        return x, None
    found = _offset(x)
    if found and found[1] == 0:
        return 1.0, (found[0], True)
    if x.does == "abs":
        found = _offset(x.of[0])
        return (1.0, (1, False)) if found and found[1] == 0 else (x, None)
    if x.does == "neg":
        factor, rest = _split_distance(x.of[0])
        return (ScoreTerm("neg", factor) if isinstance(factor, ScoreTerm) else -factor, rest) if rest else (x, None)
    if x.does in ("mul", "truediv"):
        one, other = x.of
        if x.does == "mul" and not _depends_on_position(one):
            one, other = other, one
        factor, rest = _split_distance(one)
        if rest and not _depends_on_position(other):
            if x.does == "mul" and not isinstance(factor, ScoreTerm) and factor == 1:
                return other, rest
            return ScoreTerm(x.does, factor, other), rest
    return x, None


def _depends_on_position(x: Any) -> bool:
    """Does the term depend on the query, the key or the score?"""
    return any([y.does in ("i", "j", "s") for y in subterms(x)])
