"""The proof of a candidate: is the rewritten term equal to the definition, and the kernel to both? Four checks, each with its
limits.

1. Identity testing: both terms are equal at random points of large random prime fields (algebra/identity.py). 2. Both terms in
float64 and float32, at rows of zeros, of tiny and huge numbers and of the constants' size (algebra/float_check.py). 3. The
kernel against the definition in float64, by the error rule of the tests, at lengths off all tiles' edges. 4. The same run in
the interpreter, which stops at races, deadlocks and reads of data in flight.

The proof of a gradient begins with a fifth: the definition is the derivative of the function (algebra/derivative_check.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiles.interpreter import Hazard
from tiles.testing import tolerance

from ..algebra.derivative_check import DerivativeCheck
from ..algebra.float_check import FloatCheck, SizedArithmetic, compare_in_floats
from ..algebra.identity import IdentityCheck, extent_in, identity
from ..language import graph
from ..language.axes import Axis, base_axes
from ..language.evaluate import evaluate
from ..language.graph import walk
from ..language.maps import BYTES
from ..language.terms import Term
from ..language.trace import TracedDefinition
from ..writing import module_text
from .candidates import Candidate
from .generated_module import generate_module


@dataclass(frozen=True)
class KernelRun:
    """A run of the kernels in the interpreter, on arrays of these extents. error: the greatest one. limit: the error that the
    rule allows. hazard: what stopped the run, "" if nothing did. scales: the factors that some rows were multiplied by.
    greatest: the greatest number among the results that have this error."""

    extents: dict[str, tuple[int, ...]]
    error: float
    limit: float
    hazard: str = ""
    scales: tuple[float, ...] = ()
    greatest: float = 0.0

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
            f"kernel: at {shapes}{rows} the greatest error is {self.error:.2g}, of results up to {self.greatest:.2g}, where "
            f"the rule allows {verdict}; "
            "not checked: other numbers, and lengths at which 16 bits overflow\n"
            "interpreter: the same run had no race, no deadlock and no read of what is in flight; "
            "not checked: other lengths, and schedules other than the latest that each wait allows"
        )


@dataclass(frozen=True)
class Proof:
    """The results of all checks of a candidate: see the module."""

    identity: IdentityCheck
    floats: FloatCheck
    run: KernelRun
    derivative: DerivativeCheck | None = None

    @property
    def holds(self) -> bool:
        """Did the identity test, the float check, the run and, for a gradient, the finite differences pass?"""
        derivative = self.derivative is None or self.derivative.passed
        return self.identity.equal and self.floats.passed and self.run.passed and derivative

    def __str__(self):
        parts = self.derivative, self.identity, self.floats, self.run
        return "\n".join([str(part) for part in parts if part is not None])


ROW_PERIOD = 8  # one row in so many is multiplied by each of the scales
RUN_EXTENTS = 19, 72, 40, 24, 56, 88  # extents of a run: of rows, which may be any, and of other axes, multiples of 8 for TMA


def prove(name: str, traced: TracedDefinition, candidate: Candidate, seed: int | None = None) -> Proof:
    """The proof of one candidate of a definition. seed: of the identity test, random if it is None."""
    declared = [f"{rule.name} ({rule.loses} may leave its range)" for rule in candidate.rules if rule.loses]
    return Proof(
        identity(traced.roots, candidate.roots, seed),
        compare_in_floats(traced.roots, candidate.roots, declared),
        check_kernels(name, traced, candidate),
    )


def check_kernels(name: str, traced: TracedDefinition, candidate: Candidate, seed: int = 0) -> KernelRun:
    """Run a candidate's kernels in the interpreter and compare them with the definition in float64, at lengths that are no
    multiples of the kernels' tiles. Some rows are zero, and the squares of some are as small as the smallest constant, if the
    definition is finite for them; the error rule is applied to these rows separately."""
    extents = extents_of_run(traced, candidate)
    arguments = _arguments(traced, extents, seed)
    dtype = next(x.dtype for x in arguments.values() if hasattr(x, "dtype"))
    shapes = {key: x.shape for key, x in arguments.items() if hasattr(x, "shape")}
    arithmetics = SizedArithmetic(np.float64, extents), SizedArithmetic(dtype, extents)
    indices, scales = graph.indices(traced.roots), _scales_of_rows(traced)
    scaled = {
        key: arguments[key] if x in indices else _scale_rows(arguments[key], x, traced, scales) for key, x in traced.inputs
    }
    absolute = {
        key: arguments[key] if x in indices else abs(arguments[key]) for key, x in traced.inputs
    }  # no root of a negative number
    for values, usable in ((scaled, np.isfinite), (arguments, _is_number), (absolute, _is_number)):
        ref, rounded_results = _reference_results(traced, values, arithmetics)
        if all(usable(np.asarray(x, np.float64)).all() for x in (*ref, *rounded_results)):
            break
    else:
        return KernelRun(
            shapes, math.inf, 0, "the definition gives NaN, of normally distributed numbers and of their absolute values"
        )
    scales = scales if values is scaled else {}
    generated = generate_module(name, traced, candidate)
    results = [np.full(_shape_of(x, extents), np.nan, x.stored_dtype(dtype.name)) for x in (*traced.roots, *generated.scratch)]
    try:
        module_text.load(generated.text, name, generated.code).launch(*values.values(), *results)
    except Hazard as hazard:
        return KernelRun(shapes, math.inf, 0, str(hazard))
    parts = [
        part for x, *y in zip(traced.roots, results, ref, rounded_results) for part in _split_scaled_rows(x, y, traced, scales)
    ]
    errors = [_error(np.asarray(y, np.float64), x) for y, x, _ in parts]
    limits = [tolerance(x, z, y.dtype) for y, x, z in parts]
    ratios = [x / (limit or math.ulp(0)) if x == x else math.inf for x, limit in zip(errors, limits)]
    worst = max(range(len(errors)), key=ratios.__getitem__)
    greatest = float(np.abs(parts[worst][1]).max(initial=0.0))
    return KernelRun(shapes, errors[worst], limits[worst], scales=tuple(scales.values()), greatest=greatest)


def _scales_of_rows(traced: TracedDefinition) -> dict[int, float]:
    """{n: the factor of the rows n, n + ROW_PERIOD, n + 2 ROW_PERIOD, ...}"""
    small = [x.attr for x in walk(*traced.roots) if x.operation == "number" and 1e-12 < x.attr < 0.1]
    return {3: min(small, default=2.0**-12) ** 0.5, 5: 0.0}


def _has_rows(x: Term, traced: TracedDefinition) -> bool:
    """Are the rows of a term those of a result?"""
    rows = {y.axes[-2].root for y in traced.roots if y.axes[-2] is not None}
    return x.ndim > 1 and x.axes[-2] is not None and x.axes[-2].root in rows


def _scale_rows(x: Any, term: Term, traced: TracedDefinition, scales: Mapping[int, float]) -> Any:
    """An argument with some of its rows multiplied by the scales."""
    if not _has_rows(term, traced):
        return x
    factors = np.ones((x.shape[-2], 1))
    for n, scale in scales.items():
        factors[n::ROW_PERIOD] = scale
    return (x.astype(np.float64) * factors).astype(x.dtype)


def _split_scaled_rows(
    x: Term, arrays: Sequence[Any], traced: TracedDefinition, scales: Mapping[int, float]
) -> list[list[Any]]:
    """These arrays, of the shape of a result x, split into the rows of each scale and all others."""
    if not _has_rows(x, traced) or not scales:
        return [list(arrays)]
    phase = np.arange(arrays[0].shape[-2]) % ROW_PERIOD
    places = [~np.isin(phase, [*scales]), *(phase == n for n in scales)]
    return [[y[..., rows, :] for y in arrays] for rows in places if rows.any()]


def extents_of_run(traced: TracedDefinition, candidate: Candidate) -> dict[Axis, int]:
    """The extents of the axes in a run, off the edges of the kernels' tiles, except where the kernels' texts fix them."""
    rows = {x.axes[-2].root for x in traced.roots if x.axes[-2]}
    rows -= {x.axes[-1].root for x in (*traced.roots, *(x for _, x in traced.inputs)) if x.ndim > 1 and x.axes[-1]}
    max_rows = min(kernel.most_rows for kernel in candidate.plan.kernels)
    extents = {axis: n for kernel in candidate.plan.kernels for axis, n in kernel.fixed_extents.items()}
    nodes = [*walk(*traced.roots), *(x for _, x in traced.inputs)]  # including axes that no term reads
    traced_extents = {axis.root: n for x in nodes for axis, n in zip(x.axes, x.extents) if axis is not None}
    extents |= {part: traced_extents[part] for axis in extents if axis.factors for part in base_axes([axis])}
    short_axes = [kernel.root.axes[-2] for kernel in candidate.plan.kernels if kernel.most_rows <= 64]
    extents |= {axis.root: 8 for axis in short_axes if axis is not None and axis.root not in rows}
    byte_axes = base_axes(name for _, x in traced.inputs if x.stored_dtype("") in BYTES for name in x.axes)
    for axis in base_axes(name for x in nodes for name in x.axes):
        if axis not in extents:
            extents[axis] = min(RUN_EXTENTS[0], max_rows - 3) if axis in rows else RUN_EXTENTS[1 + len(extents) % 5]
            extents[axis] = -(-extents[axis] // 16) * 16 if axis in byte_axes else extents[axis]
    return extents


def _arguments(traced: TracedDefinition, extents: Mapping[Axis, int], seed: int) -> dict[str, Any]:
    """Random arguments, by name: arrays of these extents, indices of which some choose nothing, and numbers."""
    rng, arguments, indices = np.random.default_rng(seed), dict[str, Any](), graph.indices(traced.roots)
    for key, x in traced.inputs:
        shape, dtype = _shape_of(x, extents), np.dtype(x.attr[1])
        if x in indices:
            arguments[key] = rng.integers(-1, extent_in(indices[x][0], extents), shape, dtype)
        else:
            drawn = rng.standard_normal(shape) * (32 if x.attr[1] == "int8" else 1)
            arguments[key] = drawn.astype(dtype) if shape else float(rng.uniform(0.25, 1.0))
    return arguments


def _shape_of(x: Term, extents: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a term, by the extents of axes."""
    return tuple([extent_in(axis, extents) for axis in x.axes])


def _reference_results(
    traced: TracedDefinition, arguments: dict[str, Any], arithmetics: tuple[SizedArithmetic, SizedArithmetic]
) -> list[list[Any]]:
    """(the results in float64, the results computed in the arrays' dtype)"""
    float64_arguments = {key: np.asarray(x, np.float64) for key, x in arguments.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        return [
            list(evaluate(traced.roots, values, rounded))
            for values, rounded in zip((float64_arguments, arguments), arithmetics)
        ]


def _is_number(x: Any) -> Any:
    return ~np.isnan(x)


def _error(x: Any, ref: Any) -> float:
    """The greatest difference, 0 between equal infinities; NaN if x has one."""
    with np.errstate(invalid="ignore"):
        return float(np.where(x == ref, 0, np.abs(x - ref)).max(initial=0))
