"""A finite-difference check of the chain rule. Along a random direction v of each argument, in float64:

    sum(dy * (f(x + h v) - f(x - h v))) / 2 h  =  sum(dx * v),  to DIGITS of the sum of all |dx * v|

Arguments are normally distributed, so that no maximum has a tie and no argument is at a kink. A cast has slope 1, and rounds
nothing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..language import graph
from ..language.axes import base_axes
from ..language.evaluate import evaluate
from ..language.graph import walk
from ..language.maps import CASTS
from ..language.terms import Term
from .float_check import EXTENTS, SizedArithmetic
from .identity import extent_in

STEP, DIGITS, NOISE = 1e-6, 1e-5, 1e-8  # h; relative tolerance; tolerance relative to the results, for cancellation


class UnroundedArithmetic(SizedArithmetic):
    """Arithmetic in float64 in which a cast rounds nothing."""

    def map(self, name: str, *operands: Any) -> Any:
        return operands[0] if name in CASTS else super().map(name, *operands)


@dataclass(frozen=True)
class DerivativeCheck:
    """The result of the check. arguments: those whose gradients were compared. wrong: those whose gradients differ, with both
    sums. nowhere: did the function give NaN, so that nothing was compared?"""

    arguments: tuple[str, ...]
    wrong: tuple[str, ...]
    nowhere: bool = False

    @property
    def passed(self) -> bool:
        """Do the gradients of all arguments agree with differences?"""
        return not self.wrong and not self.nowhere

    def __str__(self):
        if self.nowhere:
            return "differences: NONE, the function gives NaN of normally distributed numbers and of their absolute values"
        if self.wrong:
            return f"differences: what the chain rule made is NOT the gradient: {', '.join(self.wrong)}"
        message = f"differences: the gradients by {', '.join(self.arguments)} agree with differences of the function in float64"
        return f"{message} to {DIGITS:.0e}; not checked: kinks, ties, and numbers that are not normally distributed"


def compare_with_differences(
    results: Sequence[Term], result_gradients: Sequence[Term], gradients: Mapping[Term, Term], seed: int = 0
) -> DerivativeCheck:
    """Compare gradients with finite differences (see the module). result_gradients: the gradient with respect to each result.
    gradients: the claimed gradient of each argument. All of these are terms over the same inputs."""
    nodes = list(walk(*results, *result_gradients, *gradients, *gradients.values()))
    extents = {axis: EXTENTS[n % len(EXTENTS)] for n, axis in enumerate(base_axes(name for x in nodes for name in x.axes))}
    rng, indices, arithmetic = np.random.default_rng(seed), graph.indices(nodes), UnroundedArithmetic(np.float64, extents)
    arguments = dict[str, Any]()
    for x in (x for x in nodes if x.operation == "input"):
        shape = tuple(extent_in(axis, extents) for axis in x.axes)
        if np.dtype(x.attr[1]).kind == "i":
            axis = indices[x][0] if x in indices else None
            arguments[x.attr[0]] = rng.integers(0, extent_in(axis, extents), shape)
        else:
            arguments[x.attr[0]] = rng.standard_normal(shape) if shape else np.asarray(rng.uniform(0.25, 1))

    def values(roots: Sequence[Term], **changed: Any) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return [np.asarray(x, np.float64) for x in evaluate(roots, arguments | changed, arithmetic)]

    if not _finite(values(results)):  # perhaps a root or a logarithm of negative numbers: take absolute values
        arguments = {key: abs(x) for key, x in arguments.items()}
    if not _finite(values(results)):
        return DerivativeCheck((), (), nowhere=True)
    weights, wrong = values(result_gradients), []
    noise = sum(abs(dy * y).sum() for dy, y in zip(weights, values(results)))
    for (x, _), dx in zip(gradients.items(), values([*gradients.values()])):
        name = x.attr[0]
        v = rng.standard_normal(arguments[name].shape)
        values_after, values_before = (values(results, **{name: arguments[name] + h * v}) for h in (STEP, -STEP))
        difference = sum((dy * (a - b)).sum() for dy, a, b in zip(weights, values_after, values_before)) / (2 * STEP)
        claimed = dx.reshape(v.shape) * v
        if not abs(claimed.sum() - difference) <= DIGITS * abs(claimed).sum() + NOISE * noise:
            wrong.append(f"d{name} gives {claimed.sum():.6g} where differences give {difference:.6g}")
    return DerivativeCheck(tuple(x.attr[0] for x in gradients), tuple(wrong))


def _finite(arrays: Sequence[np.ndarray]) -> bool:
    return all(np.isfinite(x).all() for x in arrays)
