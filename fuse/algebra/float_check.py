"""The float check sees what identity testing cannot: two terms that are equal as formulas may differ in floats of a finite
range.

    softmax(s) = exp(s) / sum(exp(s))      is true, and overflows at scores of 89
    x * y / y = x                          is true, but for y = 0, where one is NaN
    mean(x * x) - mean(x) ** 2 = var(x)    is true, and has no digit left where x is 4000 +- 1

So both terms are computed in float64 and in float32, on rows of many KINDS at once and on rows of the size of each constant,
where it counts, with other arrays, such as weights, of the kinds OTHERS. Of each row of a result, e is the greatest element and
d the greatest error of the definition in float32.

    value    in float64 both are finite at the same places, and differ by no more than 2^-16 d + 2^-30 e
    range    if the definition keeps its digits in float32, d <= 2^-10 e, the rewritten term is wrong by 16 d + 2^-8 e at most

A row in which the definition itself overflows or loses its digits in float32 tells nothing about range. A difference in value
is wrong at MODERATE numbers and at numbers of the size of a constant; elsewhere it counts as lost range, as in float32.
Rounding to 16 bits is not checked here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..language import graph
from ..language.axes import Axis, base_axes
from ..language.axes import extent as extent_of
from ..language.evaluate import NumPyArithmetic, evaluate
from ..language.graph import walk
from ..language.maps import BYTES
from ..language.terms import Term
from .identity import extent_in

KINDS: dict[str, Callable] = {  # kinds of rows, as functions of normally distributed numbers
    "normal": lambda x: x,
    "positive": abs,
    "negative": lambda x: -abs(x),
    "zero": lambda x: x * 0.0,
    "equal": lambda x: x * 0.0 + 1.5,
    "far from 0": lambda x: 4000.0 + x,
    "one great": lambda x: np.where(np.arange(x.shape[-1]) == 1, 2.0**10, x),
    **{f"of 2^{n}": functools.partial(np.multiply, 2.0**n) for n in (-100, -60, -20, 10, 20, 60, 100)},
}
MODERATE = "normal", "positive", "negative", "zero", "equal", "with zeros"  # kinds whose numbers are neither great nor tiny
OTHERS: dict[str, Callable] = {  # kinds of arrays without rows and of numbers, x being the n-th of them
    "normal": lambda x, n: x,
    "with zeros": lambda x, n: np.where(np.arange(x.size).reshape(x.shape) % 3 == 1, 0.0, x),
    "of 2^-40": lambda x, n: x * 2.0**-40,
    "of 2^40": lambda x, n: x * 2.0**40,
    "of 2^60 and 2^-60 in turn": lambda x, n: x * 2.0 ** (-60 if n % 2 else 60),
    "of 2^-60 and 2^60 in turn": lambda x, n: x * 2.0 ** (60 if n % 2 else -60),
}
CONSTANTS = 4  # at most so many constants have rows of their size
EXTENTS = 4, 6, 5, 7, 8, 9  # extents of axes other than rows
TINY = 2.0**-120  # errors below this are ignored: float32 ends at 2^-126 where subnormals flush to 0


@dataclass(frozen=True)
class FloatCheck:
    """The result of the comparison in floats. kinds: how many kinds of rows were tried. wrong: where values differ. lost: where
    the rewritten term loses range or digits that the definition keeps. declared: the losses that the rules used declare."""

    kinds: int
    wrong: tuple[str, ...]
    lost: tuple[str, ...]
    declared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Are values equal, and is nothing lost except as a rule declares?"""
        return not self.wrong and not (self.lost and not self.declared)

    def __str__(self):
        rows = f"at {self.kinds} kinds of rows, of zeros, from 2^-100 to 2^100 and of the size of constants among them"
        if self.wrong:
            return f"floats: {rows}, the rewritten term is NOT the definition: {_first_few(self.wrong)}"
        if not self.lost:
            return f"floats: {rows}, the rewritten term is equal in float64 and keeps float32's range and digits"
        verdict = f"as declared: {'; '.join(self.declared)}" if self.declared else "which NO rule declares"
        return f"floats: {rows}, the rewritten term is equal in float64; in float32 it LOSES {_first_few(self.lost)}, {verdict}"


def _first_few(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


class SizedArithmetic(NumPyArithmetic):
    """NumPy's arithmetic for other extents than those that the terms were traced with."""

    def __init__(self, dtype: Any, sizes: Mapping[Axis, int]):
        super().__init__(dtype)
        self.sizes = sizes

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.wide(extent if axis is None else extent_of(axis, self.sizes))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent if axis is None else extent_of(axis, self.sizes)


def compare_in_floats(definition: Sequence[Term], rewritten: Sequence[Term], declared: Sequence[str] = ()) -> FloatCheck:
    """Compare two lists of terms over the same inputs in float64 and float32; see the module. declared: the losses that the
    rules leading from one to the other declare."""
    nodes = list(walk(*definition, *rewritten))
    of_constants = _rows_of_constants(nodes)
    kinds, moderate = KINDS | of_constants, {*MODERATE, *of_constants}
    rows = {x.axes[-2].root for x in definition if x.ndim > 1 and x.axes[-2] is not None}
    extents = {axis: EXTENTS[n % len(EXTENTS)] for n, axis in enumerate(base_axes(name for x in nodes for name in x.axes))}
    extents |= {axis: 2 for axis in extents if axis.tiled_axis is not None} | {axis: len(kinds) for axis in base_axes(rows)}
    problems: dict[bool, dict[str, None]] = {True: {}, False: {}}  # is something wrong, or lost? where
    for others, row_kinds, arguments in _draw_arguments(
        nodes, rows, kinds, extents, all(_has_rows(x, rows) for x in definition)
    ):
        (ref, other), (low, narrow) = (
            _evaluate_both(definition, rewritten, arguments, SizedArithmetic(t, extents)) for t in (np.float64, np.float32)
        )
        for x, *values in zip(definition, ref, other, low, narrow):
            if not _has_rows(x, rows) and len(row_kinds) > 1:
                continue
            for moderate_alone, bad in zip((True, False), _verdicts(*values)):
                for at in np.argwhere(bad):
                    kind = row_kinds[at[-2] % len(row_kinds)]
                    title = f"rows {kind}" + f" with other arrays {others}" * (others != "normal")
                    problems[moderate_alone and {kind, others} <= moderate][title] = None
    wrong, lost = map(tuple, problems.values())
    return FloatCheck(len(kinds), wrong, lost, tuple(declared) if lost else ())


def _has_rows(x: Term, rows: set[Axis]) -> bool:
    return x.ndim > 1 and x.axes[-2] is not None and x.axes[-2].root in rows


def _verdicts(ref: Any, other: Any, low: Any, narrow: Any) -> tuple[np.ndarray, np.ndarray]:
    """(does a row have a wrong value, has it lost range or digits), as arrays with one column. ref and low: the definition in
    float64 and float32; other and narrow: the rewritten term."""
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


def _evaluate_both(
    definition: Sequence[Term], rewritten: Sequence[Term], arguments: Mapping[str, Any], arithmetic: SizedArithmetic
) -> tuple[Any, Any]:
    """The values of both lists of terms. Common subterms are computed once."""
    with np.errstate(all="ignore"):
        values = evaluate(
            [*definition, *rewritten], {key: _cast(x, arithmetic.dtype) for key, x in arguments.items()}, arithmetic
        )
    return values[: len(definition)], values[len(definition) :]


def _cast(x: Any, dtype: Any) -> Any:
    return x if np.asarray(x).dtype.kind == "i" else np.asarray(x, dtype)


def _rows_of_constants(nodes: Sequence[Term]) -> dict[str, Any]:
    """Kinds of rows whose numbers, or whose squares, are as great as a constant of these terms."""
    constants = sorted(
        {abs(x.attr) for x in nodes if x.operation == "number" and 1e-30 < abs(x.attr) < 1e30 and abs(x.attr) != 1}
    )
    sizes = {f"of {c:.3g}": c for c in constants[:CONSTANTS]} | {f"of {c:.3g} ** 0.5": c**0.5 for c in constants[:CONSTANTS]}
    return {name: functools.partial(np.multiply, size) for name, size in sizes.items()}


def _draw_arguments(
    nodes: Sequence[Term], rows: set[Axis], kinds: Mapping[str, Any], extents: Mapping[Axis, int], results_have_rows: bool
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(the kind of the arrays without rows, the kinds of the rows, the arguments): all kinds of rows with each of OTHERS.
    results_have_rows: does each result have rows? If not, rows of different kinds would be mixed in it, so each kind is also
    tried by itself."""
    rng, indices = np.random.default_rng(0), graph.indices(nodes)
    probabilities = {x.args[1] for x in nodes if x.operation == "dropout"}
    kinds_of_inputs = [(others, [*kinds]) for others in OTHERS]
    if not results_have_rows:
        kinds_of_inputs += [("normal", [kind]) for kind in kinds] + [(others, ["normal"]) for others in OTHERS]
    for others, row_kinds in kinds_of_inputs:
        arguments, count = dict[str, Any](), 0
        for x in (x for x in nodes if x.operation == "input"):
            shape = tuple(extent_in(axis, extents) for axis in x.axes)
            if np.dtype(x.attr[1]).kind == "i":
                axis = indices[x][0] if x in indices else None
                arguments[x.attr[0]] = rng.integers(-1, extent_in(axis, extents), shape)
                continue
            drawn = rng.standard_normal(shape) if shape else np.asarray(rng.uniform(0.25, 1))
            if _has_rows(x, rows):
                each = [kinds[row_kinds[n % len(row_kinds)]](drawn[..., n : n + 1, :]) for n in range(shape[-2])]
                drawn = np.concatenate(each, -2)
            elif x not in probabilities:
                drawn, count = OTHERS[others](drawn, count), count + 1
            arguments[x.attr[0]] = _round_to(drawn, x.attr[1])
        yield others, row_kinds, arguments


def _round_to(x: Any, dtype: str) -> Any:
    """float64 numbers rounded to a dtype, and clipped to its range."""
    if dtype in BYTES:
        return BYTES[dtype].round(x).astype(np.float64)
    greatest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -greatest, greatest).astype(dtype).astype(np.float64)
