"""Is the rewritten term equal to the definition, and the kernel to both? Four answers, each with what it leaves open.

1. Identity testing: both terms are equal at random points of large random prime fields (identity.py).
2. Both terms in float64 and float32, at rows of zeros, of tiny and huge numbers and of the constants' size (float_check.py).
3. The kernel against the definition in float64, by the error rule of the tests, at lengths off all tiles' edges.
4. The same run in the interpreter, which stops at races, deadlocks and reads of what is in flight.

The proof of a gradient begins with a fifth: the definition is the derivative of the function (derivative_check.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiles.interpreter import Hazard
from tiles.testing import tolerance

from . import graph, module
from .axes import Axis, base_axes
from .candidates import Candidate, chosen
from .derivative_check import DerivativeCheck
from .evaluate import evaluate
from .float_check import FloatCheck, SizedArithmetic, compare_in_floats
from .functions import FP8
from .graph import walk
from .identity import IdentityCheck, extent_in, identity
from .terms import Term
from .trace import TracedDefinition


@dataclass(frozen=True)
class KernelRun:
    """A run of the kernels in the interpreter, on arrays of these extents. error: the greatest one. limit: the error that the
    rule allows. hazard: what stopped the run, "" if nothing did. scales: what some rows were multiplied by."""

    extents: dict[str, tuple[int, ...]]
    error: float
    limit: float
    hazard: str = ""
    scales: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.hazard and self.error <= self.limit

    def __str__(self):
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.extents.items())
        if self.hazard:
            return f"interpreter: at {shapes}: {self.hazard}"
        verdict = f"{self.limit:.2g}" if self.passed else f"{self.limit:.2g}, TOO MUCH"
        rows = f", rows times {' and '.join(f'{x:.2g}' for x in self.scales)} among them," if self.scales else ""
        return (
            f"kernel: at {shapes}{rows} the greatest error is {self.error:.2g}, where the rule allows {verdict}; "
            "not looked into: other numbers, and lengths at which 16 bits overflow\n"
            "interpreter: the same run had no race, no deadlock and no read of what is in flight; "
            "not looked into: other lengths, and schedules other than the latest that each wait allows"
        )


@dataclass(frozen=True)
class Proof:
    """What is known about the correctness of kernels: see the module."""

    identity: IdentityCheck
    floats: FloatCheck
    run: KernelRun
    derivative: DerivativeCheck | None = None

    @property
    def holds(self) -> bool:
        """Did the identity test, the comparison in floats, the run and, of a gradient, that with differences pass?"""
        derivative = self.derivative is None or self.derivative.passed
        return self.identity.equal and self.floats.passed and self.run.passed and derivative

    def __str__(self):
        parts = self.derivative, self.identity, self.floats, self.run
        return "\n".join([str(part) for part in parts if part is not None])


EVERY = 8  # rows of which one is multiplied by a number
RAGGED = 19, 72, 40, 24, 56, 88  # extents of a run: of rows, which may be any, and of others, by which TMA steps


def proven(name: str, found: TracedDefinition, candidate: Candidate, seed: int | None = None) -> Proof:
    """The proof of one way to compute what was traced. seed: of the identity test, a random one if it is None."""
    declared = [f"{rule.name} ({rule.loses} may leave its range)" for rule in candidate.rules if rule.loses]
    return Proof(
        identity(found.roots, candidate.roots, seed),
        compare_in_floats(found.roots, candidate.roots, declared),
        checked(name, found, candidate),
    )


def checked(name: str, found: TracedDefinition, candidate: Candidate, seed: int = 0) -> KernelRun:
    """A run of a candidate's kernels in the interpreter, compared with the definition in float64, at lengths that are no
    multiples of the kernels' tiles. Some rows are zero, and the squares of some are as small as the smallest constant, if
    the definition gives numbers for them; the error rule holds for these rows apart."""
    extents = extents_of_run(found, candidate)
    given = _arguments(found, extents, seed)
    dtype = next(x.dtype for x in given.values() if hasattr(x, "dtype"))
    told = {key: x.shape for key, x in given.items() if hasattr(x, "shape")}
    sized = SizedArithmetic(np.float64, extents), SizedArithmetic(dtype, extents)
    indices, scales = graph.indices(found.roots), _scales_of_rows(found)
    scaled = {key: given[key] if x in indices else _scaled(given[key], x, found, scales) for key, x in found.inputs}
    no_root = {key: given[key] if x in indices else abs(given[key]) for key, x in found.inputs}  # none of what may be negative
    for values, usable in ((scaled, np.isfinite), (given, _is_number), (no_root, _is_number)):
        ref, low = _of(found, values, sized)
        if all(usable(np.asarray(x, np.float64)).all() for x in (*ref, *low)):
            break
    else:
        return KernelRun(
            told, math.inf, 0, "the definition gives NaN, of normally distributed numbers and of their absolute values"
        )
    scales = scales if values is scaled else {}
    made = chosen(name, found, candidate)
    results = [np.full(_shape(x, extents), np.nan, x.stored_dtype(dtype.name)) for x in (*found.roots, *made.scratch)]
    try:
        module.load(made.text, name, made.code).launch(*values.values(), *results)
    except Hazard as hazard:
        return KernelRun(told, math.inf, 0, str(hazard))
    parts = [part for x, *y in zip(found.roots, results, ref, low) for part in _apart(x, y, found, scales)]
    errors = [_error(np.asarray(y, np.float64), x) for y, x, _ in parts]
    limits = [tolerance(x, z, y.dtype) for y, x, z in parts]
    shares = [x / (limit or math.ulp(0)) if x == x else math.inf for x, limit in zip(errors, limits)]
    worst = max(range(len(errors)), key=shares.__getitem__)
    return KernelRun(told, errors[worst], limits[worst], scales=tuple(scales.values()))


def _scales_of_rows(found: TracedDefinition) -> dict[int, float]:
    """{n: what the rows n, n + EVERY, n + 2 EVERY, ... are multiplied by}"""
    small = [x.attr for x in walk(*found.roots) if x.operation == "number" and 1e-12 < x.attr < 0.1]
    return {3: min(small, default=2.0**-12) ** 0.5, 5: 0.0}


def _has_rows(x: Term, found: TracedDefinition) -> bool:
    """Are the rows of a term those of a result?"""
    rows = {y.axes[-2].root for y in found.roots if y.axes[-2] is not None}
    return x.ndim > 1 and x.axes[-2] is not None and x.axes[-2].root in rows


def _scaled(x: Any, term: Term, found: TracedDefinition, scales: Mapping[int, float]) -> Any:
    """An argument with some of its rows multiplied."""
    if not _has_rows(term, found):
        return x
    by = np.ones((x.shape[-2], 1))
    for n, scale in scales.items():
        by[n::EVERY] = scale
    return (x.astype(np.float64) * by).astype(x.dtype)


def _apart(x: Term, arrays: Sequence[Any], found: TracedDefinition, scales: Mapping[int, float]) -> list[list[Any]]:
    """These arrays of one shape, that of a result x, cut into the rows that were multiplied and all others."""
    if not _has_rows(x, found) or not scales:
        return [list(arrays)]
    every = np.arange(arrays[0].shape[-2]) % EVERY
    places = [~np.isin(every, [*scales]), *(every == n for n in scales)]
    return [[y[..., rows, :] for y in arrays] for rows in places if rows.any()]


def extents_of_run(found: TracedDefinition, candidate: Candidate) -> dict[Axis, int]:
    """The extents of the axes that a run has, off the edges of the kernels' tiles, but as the kernels' texts need them."""
    rows = {x.axes[-2].root for x in found.roots if x.axes[-2]}
    rows -= {x.axes[-1].root for x in (*found.roots, *(x for _, x in found.inputs)) if x.ndim > 1 and x.axes[-1]}
    most = min(kernel.most_rows for kernel in candidate.plan.kernels)
    extents = {axis: n for kernel in candidate.plan.kernels for axis, n in kernel.fixed.items()}
    every = [*walk(*found.roots), *(x for _, x in found.inputs)]  # some of which nobody may ask for
    trace_definition = {axis.root: n for x in every for axis, n in zip(x.axes, x.extents) if axis is not None}
    extents |= {part: trace_definition[part] for axis in extents if axis.factors for part in base_axes([axis])}
    few = [kernel.root.axes[-2] for kernel in candidate.plan.kernels if kernel.most_rows <= 64]
    extents |= {axis.root: 8 for axis in few if axis is not None and axis.root not in rows}
    of_bytes = base_axes(name for _, x in found.inputs if x.stored_dtype("") == FP8 for name in x.axes)
    for axis in base_axes(name for x in every for name in x.axes):
        if axis not in extents:
            extents[axis] = min(RAGGED[0], most - 3) if axis in rows else RAGGED[1 + len(extents) % 5]
            extents[axis] = -(-extents[axis] // 16) * 16 if axis in of_bytes else extents[axis]
    return extents


def _arguments(found: TracedDefinition, extents: Mapping[Axis, int], seed: int) -> dict[str, Any]:
    """Random arguments, by name: arrays of these extents, indices of which some choose nothing, and numbers."""
    rng, given, indices = np.random.default_rng(seed), dict[str, Any](), graph.indices(found.roots)
    for key, x in found.inputs:
        shape, dtype = _shape(x, extents), np.dtype(x.attr[1])
        if x in indices:
            given[key] = rng.integers(-1, extent_in(indices[x][0], extents), shape, dtype)
        else:
            given[key] = rng.standard_normal(shape).astype(dtype) if shape else float(rng.uniform(0.25, 1.0))
    return given


def _shape(x: Term, extents: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a term, by the extents of axes."""
    return tuple([extent_in(axis, extents) for axis in x.axes])


def _of(found: TracedDefinition, given: dict[str, Any], sized: tuple[SizedArithmetic, SizedArithmetic]) -> list[list[Any]]:
    """(the results in float64, the results computed in the arrays' dtype)"""
    wide = {key: np.asarray(x, np.float64) for key, x in given.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        return [list(evaluate(found.roots, values, rounded)) for values, rounded in zip((wide, given), sized)]


def _is_number(x: Any) -> Any:
    return ~np.isnan(x)


def _error(x: Any, ref: Any) -> float:
    """The greatest difference, 0 between equal infinities; NaN if x has one."""
    with np.errstate(invalid="ignore"):
        return float(np.where(x == ref, 0, np.abs(x - ref)).max(initial=0))
