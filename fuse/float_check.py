"""What identity testing cannot see: two terms that are equal as formulas, computed with floats of a finite range.

    softmax(s) = exp(s) / sum(exp(s))      is true, and overflows at scores of 89
    x * y / y = x                          is true, but for y = 0, where one is NaN
    mean(x * x) - mean(x) ** 2 = var(x)    is true, and has no digit left where x is 4000 +- 1

So both terms are computed in float64 and in float32, on rows of many KINDS at once and on rows of the size of each constant,
where it counts, with other arrays, such as weights, of the kinds OTHERS. Of each row of a result, e is the greatest element and
d the greatest error of the definition in float32.

    value    in float64 both are finite at the same places, and differ by no more than 2^-16 d + 2^-30 e
    range    if the definition keeps its digits in float32, d <= 2^-10 e, the rewritten term is wrong by 16 d + 2^-8 e at most

A row in which the definition itself overflows or has no digits left in float32 says nothing about range. What differs in value
at MODERATE numbers, or at those of the size of a constant, is wrong; elsewhere something was lost, as in float32. Rounding to
16 bits is not looked into here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import graph
from .axes import Axis, base_axes
from .axes import extent as extent_of
from .evaluate import NumPyArithmetic, evaluate
from .functions import FP8
from .graph import walk
from .identity import extent_in
from .terms import Term

KINDS: dict[str, Callable] = {  # of rows, made of normally distributed numbers
    "normal": lambda x: x,
    "positive": abs,
    "negative": lambda x: -abs(x),
    "zero": lambda x: x * 0.0,
    "equal": lambda x: x * 0.0 + 1.5,
    "far from 0": lambda x: 4000.0 + x,
    "one great": lambda x: np.where(np.arange(x.shape[-1]) == 1, 2.0**10, x),
    **{f"of 2^{n}": functools.partial(np.multiply, 2.0**n) for n in (-100, -60, -20, 10, 20, 60, 100)},
}
MODERATE = "normal", "positive", "negative", "zero", "equal", "with zeros"  # kinds of what is neither great nor tiny
OTHERS: dict[str, Callable] = {  # of arrays without rows, and of numbers: the n-th of them
    "normal": lambda x, n: x,
    "with zeros": lambda x, n: np.where(np.arange(x.size).reshape(x.shape) % 3 == 1, 0.0, x),
    "of 2^-40": lambda x, n: x * 2.0**-40,
    "of 2^40": lambda x, n: x * 2.0**40,
    "of 2^60 and 2^-60 in turn": lambda x, n: x * 2.0 ** (-60 if n % 2 else 60),
    "of 2^-60 and 2^60 in turn": lambda x, n: x * 2.0 ** (60 if n % 2 else -60),
}
CONSTANTS = 4  # whose sizes rows have, at most
EXTENTS = 4, 6, 5, 7, 8, 9  # of axes that are no rows
TINY = 2.0**-120  # an error below this is none: float32 ends at 2^-126 where its units flush to 0


@dataclass(frozen=True)
class FloatCheck:
    """The result of the comparison in floats. kinds: how many kinds of rows were looked at. wrong: where values differ. lost:
    where the rewritten term loses range or digits that the definition keeps. declared: what the rules that were used say
    that they may lose."""

    kinds: int
    wrong: tuple[str, ...]
    lost: tuple[str, ...]
    declared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Are values equal, and nothing lost but what a rule declares?"""
        return not self.wrong and not (self.lost and not self.declared)

    def __str__(self):
        rows = f"at {self.kinds} kinds of rows, of zeros, from 2^-100 to 2^100 and of the size of constants among them"
        if self.wrong:
            return f"floats: {rows}, the rewritten term is NOT the definition: {_some(self.wrong)}"
        if not self.lost:
            return f"floats: {rows}, the rewritten term is equal in float64 and keeps float32's range and digits"
        verdict = f"as declared: {'; '.join(self.declared)}" if self.declared else "which NO rule declares"
        return f"floats: {rows}, the rewritten term is equal in float64; in float32 it LOSES {_some(self.lost)}, {verdict}"


def _some(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


class SizedArithmetic(NumPyArithmetic):
    """NumPy's arithmetic, for arrays of other extents than those that the terms were traced with."""

    def __init__(self, dtype: Any, sizes: Mapping[Axis, int]):
        super().__init__(dtype)
        self.sizes = sizes

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.wide(extent if axis is None else extent_of(axis, self.sizes))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent if axis is None else extent_of(axis, self.sizes)


def compare_in_floats(definition: Sequence[Term], rewritten: Sequence[Term], declared: Sequence[str] = ()) -> FloatCheck:
    """Compare two lists of terms over the same inputs in float64 and float32; see the module. declared: what the rules that
    led from one to the other say that they lose."""
    every = list(walk(*definition, *rewritten))
    of_constants = _of_constants(every)
    kinds, moderate = KINDS | of_constants, {*MODERATE, *of_constants}
    rows = {x.axes[-2].root for x in definition if x.ndim > 1 and x.axes[-2] is not None}
    extents = {axis: EXTENTS[n % len(EXTENTS)] for n, axis in enumerate(base_axes(name for x in every for name in x.axes))}
    extents |= {axis: 2 for axis in extents if axis.tiled_axis is not None} | {axis: len(kinds) for axis in base_axes(rows)}
    found: dict[bool, dict[str, None]] = {True: {}, False: {}}  # is something wrong, or lost? where
    for others, of_rows, given in _draws(every, rows, kinds, extents, all(_has_rows(x, rows) for x in definition)):
        (ref, other), (low, narrow) = (
            _both(definition, rewritten, given, SizedArithmetic(t, extents)) for t in (np.float64, np.float32)
        )
        for x, *values in zip(definition, ref, other, low, narrow):
            if not _has_rows(x, rows) and len(of_rows) > 1:
                continue
            for moderate_alone, bad in zip((True, False), _verdicts(*values)):
                for at in np.argwhere(bad):
                    kind = of_rows[at[-2] % len(of_rows)]
                    title = f"rows {kind}" + f" with other arrays {others}" * (others != "normal")
                    found[moderate_alone and {kind, others} <= moderate][title] = None
    wrong, lost = map(tuple, found.values())
    return FloatCheck(len(kinds), wrong, lost, tuple(declared) if lost else ())


def _has_rows(x: Term, rows: set[Axis]) -> bool:
    return x.ndim > 1 and x.axes[-2] is not None and x.axes[-2].root in rows


def _verdicts(ref: Any, other: Any, low: Any, narrow: Any) -> tuple[np.ndarray, np.ndarray]:
    """(whether a row has a wrong value, whether it has lost range or digits), as arrays with one column. ref and low: the
    definition in float64 and float32; other and narrow: the rewritten term."""
    ref, other, low, narrow = (np.atleast_2d(np.asarray(x, np.float64)) for x in (ref, other, low, narrow))
    if ref.shape != other.shape:
        return np.ones((*ref.shape[:-1], 1), bool), np.zeros((*ref.shape[:-1], 1), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        same = np.isfinite(ref) == np.isfinite(other)
        e = np.where(np.isfinite(ref), abs(ref), 0).max(-1, keepdims=True, initial=0)
        d, off, lost = (_difference(x, ref).max(-1, keepdims=True, initial=0) for x in (low, other, narrow))
        wrong = ~same.all(-1, keepdims=True) | ~(off <= d / 2**16 + e / 2**30 + TINY)
        return wrong, (d <= e / 2**10 + TINY) & ~(lost <= 16 * d + e / 2**8 + TINY)


def _difference(x: Any, ref: Any) -> Any:
    """|x - ref| where ref is finite, infinite where x alone is not; 0 where ref is not."""
    return np.where(np.isfinite(ref), np.where(np.isfinite(x), abs(x - ref), math.inf), 0)


def _both(
    definition: Sequence[Term], rewritten: Sequence[Term], given: Mapping[str, Any], arithmetic: SizedArithmetic
) -> tuple[Any, Any]:
    """The values of both lists of terms. What they share is computed once."""
    with np.errstate(all="ignore"):
        values = evaluate([*definition, *rewritten], {key: _in(x, arithmetic.dtype) for key, x in given.items()}, arithmetic)
    return values[: len(definition)], values[len(definition) :]


def _in(x: Any, dtype: Any) -> Any:
    return x if np.asarray(x).dtype.kind == "i" else np.asarray(x, dtype)


def _of_constants(every: Sequence[Term]) -> dict[str, Any]:
    """Kinds of rows whose numbers, or their squares, are as great as a constant of these terms."""
    found = sorted({abs(x.attr) for x in every if x.operation == "number" and 1e-30 < abs(x.attr) < 1e30 and abs(x.attr) != 1})
    sizes = {f"of {c:.3g}": c for c in found[:CONSTANTS]} | {f"of {c:.3g} ** 0.5": c**0.5 for c in found[:CONSTANTS]}
    return {name: functools.partial(np.multiply, size) for name, size in sizes.items()}


def _draws(
    every: Sequence[Term], rows: set[Axis], kinds: Mapping[str, Any], extents: Mapping[Axis, int], apart: bool
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(the kind of the arrays without rows, the kinds of the rows, the arguments): all kinds of rows with each of OTHERS.
    apart: has each result rows? If not, rows would meet in it, so there are arguments with each kind alone, too."""
    rng, indices = np.random.default_rng(0), graph.indices(every)
    probabilities = {x.args[1] for x in every if x.operation == "dropout"}
    draws = [(others, [*kinds]) for others in OTHERS]
    if not apart:
        draws += [("normal", [kind]) for kind in kinds] + [(others, ["normal"]) for others in OTHERS]
    for others, of_rows in draws:
        given, count = dict[str, Any](), 0
        for x in (x for x in every if x.operation == "input"):
            shape = tuple(extent_in(axis, extents) for axis in x.axes)
            if np.dtype(x.attr[1]).kind == "i":
                axis = indices[x][0] if x in indices else None
                given[x.attr[0]] = rng.integers(-1, extent_in(axis, extents), shape)
                continue
            drawn = rng.standard_normal(shape) if shape else np.asarray(rng.uniform(0.25, 1))
            if _has_rows(x, rows):
                each = [kinds[of_rows[n % len(of_rows)]](drawn[..., n : n + 1, :]) for n in range(shape[-2])]
                drawn = np.concatenate(each, -2)
            elif x not in probabilities:
                drawn, count = OTHERS[others](drawn, count), count + 1
            given[x.attr[0]] = _held(drawn, x.attr[1])
        yield others, of_rows, given


def _held(x: Any, dtype: str) -> Any:
    """float64 numbers that the dtype has; what is too great for it is its greatest number."""
    if dtype == FP8:
        x = np.clip(x, -448, 448)
    greatest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -greatest, greatest).astype(dtype).astype(np.float64)
