"""Is the rewritten term equal to the definition, and the kernel to both? Three answers, each with what it leaves open.

1. Identity testing: both terms are equal at random points of a large prime field (identity.py).
2. The kernel against the definition in float64, by the error rule of the tests, at lengths off all tiles' edges.
3. The same run in the interpreter, which stops at races, deadlocks and reads of what is in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiles.interpreter import Hazard
from tiles.testing import tolerance

from . import graph, module
from .axes import Axis, elementary
from .axes import extent as extent_of
from .candidates import Candidate, chosen
from .evaluate import InNumPy, evaluate
from .functions import FP8
from .graph import walk
from .identity import Identity, extent_in, identity
from .terms import Term
from .trace import Traced


@dataclass(frozen=True)
class Run:
    """A run of the kernels in the interpreter, on arrays of these extents. error: the greatest one. limit: the error that the
    rule allows. hazard: what stopped the run, "" if nothing did."""

    extents: dict[str, tuple[int, ...]]
    error: float
    limit: float
    hazard: str = ""

    @property
    def passed(self) -> bool:
        return not self.hazard and self.error <= self.limit

    def __str__(self):
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.extents.items())
        if self.hazard:
            return f"interpreter: at {shapes}: {self.hazard}"
        verdict = "" if self.passed else ", TOO MUCH"
        return (
            f"float64: at {shapes} the greatest error is {self.error:.2g}, where the rule allows {self.limit:.2g}{verdict}; "
            "not looked into: other numbers, and lengths at which 16 bits overflow\n"
            "interpreter: the same run had no race, no deadlock and no read of what is in flight; "
            "not looked into: other lengths, and schedules other than the latest that each wait allows"
        )


@dataclass(frozen=True)
class Proof:
    """What is known about the correctness of kernels: see the module."""

    identity: Identity
    run: Run

    @property
    def holds(self) -> bool:
        """Did both the identity test and the run pass?"""
        return self.identity.equal and self.run.passed

    def __str__(self):
        return f"{self.identity}\n{self.run}"


RAGGED = 19, 72, 40, 24, 56, 88  # extents of a run: of rows, which may be any, and of others, by which TMA steps


def proven(name: str, found: Traced, candidate: Candidate) -> Proof:
    """The proof of one way to compute what was traced."""
    return Proof(identity(found.roots, candidate.roots), checked(name, found, candidate))


def checked(name: str, found: Traced, candidate: Candidate, seed: int = 0) -> Run:
    """A run of a candidate's kernels in the interpreter, compared with the definition in float64, at lengths that are no
    multiples of the kernels' tiles."""
    extents = extents_of_run(found, candidate)
    given = _arguments(found, extents, seed)
    dtype = next(x.dtype for x in given.values() if hasattr(x, "dtype"))
    told = {key: x.shape for key, x in given.items() if hasattr(x, "shape")}
    sized = Sized(np.float64, extents), Sized(dtype, extents)
    ref, low = _of(found, given, sized)
    if _has_nan(*ref, *low):  # a root or a logarithm of what may be negative: now nothing is
        indices = graph.indices(found.roots)
        given = {key: given[key] if x in indices else abs(given[key]) for key, x in found.inputs}
        ref, low = _of(found, given, sized)
    if _has_nan(*ref, *low):
        return Run(told, math.inf, 0, "the definition gives NaN, of normally distributed numbers and of their absolute values")
    made = chosen(name, found, candidate)
    results = [np.full(_shape(x, extents), np.nan, x.held_as(dtype.name)) for x in (*found.roots, *made.scratch)]
    try:
        module.load(made.text, name).launch(*given.values(), *results)
    except Hazard as hazard:
        return Run(told, math.inf, 0, str(hazard))
    errors = [float(np.abs(np.asarray(y, np.float64) - x).max()) for y, x in zip(results, ref)]
    limits = [tolerance(x, y, z.dtype) for x, y, z in zip(ref, low, results)]
    worst = max(range(len(errors)), key=lambda n: errors[n] / limits[n] if errors[n] == errors[n] else math.inf)
    return Run(told, errors[worst], limits[worst])


def extents_of_run(found: Traced, candidate: Candidate) -> dict[Axis, int]:
    """The extents of the axes that a run has, off the edges of the kernels' tiles, but as the kernels' texts need them."""
    rows = {x.names[-2].root for x in found.roots if x.names[-2]}
    rows -= {x.names[-1].root for x in (*found.roots, *(x for _, x in found.inputs)) if x.ndim > 1 and x.names[-1]}
    most = min(kernel.most_rows for kernel in candidate.way.kernels)
    extents = {axis: n for kernel in candidate.way.kernels for axis, n in kernel.fixed.items()}
    every = [*walk(*found.roots), *(x for _, x in found.inputs)]  # some of which nobody may ask for
    traced = {axis.root: n for x in every for axis, n in zip(x.names, x.extents) if axis is not None}
    extents |= {part: traced[part] for axis in extents if axis.parts for part in elementary([axis])}
    few = [kernel.root.names[-2] for kernel in candidate.way.kernels if kernel.most_rows <= 64]
    extents |= {axis.root: 8 for axis in few if axis is not None and axis.root not in rows}
    of_bytes = elementary(name for _, x in found.inputs if x.held_as("") == FP8 for name in x.names)
    for axis in elementary(name for x in every for name in x.names):
        if axis not in extents:
            extents[axis] = min(RAGGED[0], most - 3) if axis in rows else RAGGED[1 + len(extents) % 5]
            extents[axis] = -(-extents[axis] // 16) * 16 if axis in of_bytes else extents[axis]
    return extents


def _arguments(found: Traced, extents: Mapping[Axis, int], seed: int) -> dict[str, Any]:
    """Random arguments, by name: arrays of these extents, indices of which some choose nothing, and numbers."""
    rng, given, indices = np.random.default_rng(seed), dict[str, Any](), graph.indices(found.roots)
    for key, x in found.inputs:
        shape, dtype = _shape(x, extents), np.dtype(x.what[1])
        if x in indices:
            given[key] = rng.integers(-1, extent_in(indices[x][0], extents), shape, dtype)
        else:
            given[key] = rng.standard_normal(shape).astype(dtype) if shape else float(rng.uniform(0.25, 1.0))
    return given


def _shape(x: Term, extents: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a term, by the extents of axes."""
    return tuple([extent_in(axis, extents) for axis in x.names])


def _of(found: Traced, given: dict[str, Any], sized: tuple[Sized, Sized]) -> list[list[Any]]:
    """(the results in float64, the results computed in the arrays' dtype)"""
    wide = {key: np.asarray(x, np.float64) for key, x in given.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        return [list(evaluate(found.roots, values, rounded)) for values, rounded in zip((wide, given), sized)]


def _has_nan(*arrays: Any) -> bool:
    return any(np.isnan(np.asarray(x, np.float64)).any() for x in arrays)


class Sized(InNumPy):
    """NumPy's arithmetic, for arrays of other extents than those that the terms were traced with."""

    def __init__(self, dtype: Any, sizes: Mapping[Axis, int]):
        super().__init__(dtype)
        self.sizes = sizes

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.wide(extent if axis is None else extent_of(axis, self.sizes))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent if axis is None else extent_of(axis, self.sizes)
