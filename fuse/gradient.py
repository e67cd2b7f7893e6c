"""Gradients of fused functions: who computes them. By kernels where the algebra finds them (backward.py), else, for torch, by
the definition's parts, torch's own ops. One argument's may come from kernels, another's from parts.

Torch is never imported before a caller has."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiles.torch_op import compiling, exporting, mapped_with_grad, token, transformed

from . import graph
from .candidates import candidates
from .cost import LAUNCH, Card, card
from .derivative import NoRule
from .module import PROGRAMS
from .names import unused
from .place import FusionPlan
from .terms import Term, viewed
from .trace import Shape, kinds_of, loose, ordinal_of, shape_of

if TYPE_CHECKING:
    from .backward import Gradient
    from .fused import Fused


def wants_gradient(arrays: Sequence[Any]) -> bool:
    """Does torch want a gradient of a call on these arrays?"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    if any([isinstance(x, torch.Tensor) and x.requires_grad for x in arrays]):
        return not exporting()  # then it is the op's to refuse it
    return mapped_with_grad(arrays)


def differentiable(function: Fused, arrays: Sequence[Any]) -> Any:
    """function.run(*arrays), which torch's autograd can differentiate. The definition's parts run instead under torch.func's
    transforms, and under torch.compile if kernels do not compute all gradients that are needed: torch.compile then makes
    kernels of its own, forward and backward."""
    from .autograd import FusedAutograd

    if transformed():
        return function._by_parts(*arrays)
    if compiling() and not function.gradients.all_by_kernels(arrays, [getattr(x, "requires_grad", False) for x in arrays]):
        return function._by_parts(*arrays)
    return FusedAutograd.apply(function, *arrays)


class GradientFunctions:
    """The gradients of a fused function: what was made and found out for those that were asked for."""

    def __init__(self, function: Fused):
        self.function = function
        self.made: dict[tuple, Gradient] = {}
        self.known: dict[tuple, Any] = {}
        self.op, self.all_of = _mark_constant(self._op), _mark_constant(self._all_of)

    def by_all(self) -> Gradient:
        """The gradient with respect to all arguments that can have one, given the gradients with respect to all results."""
        from .backward import Gradient

        return Gradient(self.function)

    def of(self, wanted: tuple[str, ...], by: tuple[int, ...], count: int) -> Gradient:
        """The gradient with respect to the `wanted` arguments. by: the places, among `count` results, of those whose gradients
        are given."""
        key = wanted, by, count
        if key not in self.made:
            from .backward import Gradient

            self.made[key] = Gradient(self.function, wanted, by, count)
        return self.made[key]

    def by_kernels(
        self, arrays: Sequence[Any], by: Sequence[Any], wanted: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Callable[[], Sequence[Any]]]:
        """(the wanted arguments whose gradients kernels compute, a function that computes these). arrays: the arguments, their
        leading axes joined. by: the gradients with respect to the results, None where there is none."""
        places, given = tuple(n for n, g in enumerate(by) if g is not None), [g for g in by if g is not None]
        shapes = self.function.of_class(lambda shapes: shapes, self.function._shapes(arrays))
        roots, like = self.function._trace(shapes).roots, [shape_of(g, "gradient") for g in given]
        shapes += tuple([Shape(roots[n].extents, s.dtype, s.transposed) for n, s in zip(places, like)])
        key = shapes, wanted, places, len(by), ordinal_of(arrays)
        if key not in self.known:
            self.known[key] = self._served_names(*key)
        names = self.known[key]
        return names, lambda: self.of(names, places, len(by)).run(*arrays, *given) if names else ()

    def all_by_kernels(self, arrays: Sequence[Any], needed: Sequence[bool]) -> bool:
        """Do kernels compute all gradients that are needed? torch.compile asks this, before it knows lengths."""
        device = next(x.device for x in arrays if hasattr(x, "shape"))
        ordinal = device.index if device.type == "cuda" else None
        return self.all_of(kinds_of(self.function._shapes(arrays)), tuple(needed), ordinal)

    def _all_of(self, kinds: tuple, needed: tuple[bool, ...], ordinal: int | None) -> bool:
        shapes = loose(kinds)
        results, first = self.function._trace(shapes).roots, next(s.dtype for s in shapes if s.extents)
        shapes += tuple([Shape(x.extents, x.stored_dtype(first)) for x in results])
        wanted = tuple([name for name, one in zip(self.function.names, needed) if one])
        made = self.of(wanted, tuple(range(len(results))), len(results))
        return bool(_gradient_plans(made, shapes, card(ordinal)))  # what they cost follows from lengths

    def _op(self, wanted: tuple[str, ...], by: tuple[int, ...], count: int) -> str:
        """The name of the torch op that computes this gradient, which is registered if it is not yet. torch.compile does not
        look into it."""
        key = "op", wanted, by, count
        if key not in self.known:
            from . import autograd

            self.known[key] = unused(token(f"{self.function.name}_gradient"), PROGRAMS)
            PROGRAMS.add(self.known[key])
            autograd.op(self.of(wanted, by, count), self.known[key])
        return self.known[key]

    def of_program(
        self, outs: tuple[str, ...], names: tuple[str, ...], options: Mapping[str, Any], layout: str
    ) -> Callable[..., dict[str, Any]]:
        """The gradients with respect to these arguments, as a function: JAX asks the program of a fused function for it (see
        `gradient` of tiles.program). outs: what results are called. options: the arguments that are numbers."""
        return functools.partial(self._of_program, outs, names, options)

    def _of_program(
        self,
        outs: tuple[str, ...],
        names: tuple[str, ...],
        options: Mapping[str, Any],
        given: Mapping[str, Any],
        made: Mapping[str, Any],
        by: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The gradients by name. given: the arrays. made: the results. by: the gradients with respect to results, of those that
        have one. NotImplementedError: kernels do not compute one that is wanted."""
        if not by:
            return {}
        arrays = [options[name] if name in options else given[name] for name in self.function.names]
        found, run = self.by_kernels(arrays, [by.get(out) for out in outs], names)
        for name in names:
            if name not in found:
                raise NotImplementedError(f"{name}: no kernel computes its gradient; put jax.lax.stop_gradient around it")
        return dict(zip(found, run()))

    def _served_names(
        self, shapes: tuple[Shape, ...], wanted: tuple[str, ...], by: tuple[int, ...], count: int, ordinal: int | None
    ) -> tuple[str, ...]:
        """Those of the `wanted` arguments whose gradients kernels compute, and faster than parts would by the roofline: all of
        them together, or else those that pass one by one. shapes: those of the arguments, followed by those of the gradients
        with respect to the results at the places `by` among `count`."""
        at = card(ordinal)
        if _is_served(self.of(wanted, by, count), shapes, at):
            return wanted
        alone = [(name,) for name in wanted] if len(wanted) > 1 else []
        return tuple([one for (one,) in alone if _is_served(self.of((one,), by, count), shapes, at)])


def _mark_constant(function: Callable) -> Callable:
    """The same function, marked so that Dynamo calls it while it traces, without a look inside, and takes what it returns for
    a constant."""

    def called(*given):
        return function(*given)

    called._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return called


def _is_served(gradient: Gradient, shapes: tuple[Shape, ...], at: Card) -> bool:
    """Do kernels compute the gradient, and by the roofline faster than parts would?"""
    ways = _gradient_plans(gradient, shapes, at)
    if not ways or not ways[0].kernels:  # the framework does it all
        return bool(ways)
    return ways[0].seconds <= seconds_by_parts(gradient._trace(shapes).roots, at)


def _gradient_plans(gradient: Gradient, shapes: tuple[Shape, ...], at: Card) -> list[FusionPlan]:
    """The ways to compute the gradient, the best first; none if an operation has no rule or no template serves it."""
    try:
        if not gradient.kernel_outputs_for(shapes):
            return [FusionPlan((), 0.0)]
        return [one.plan for one in candidates(gradient._trace(shapes), at)]
    except NoRule:
        return []


def seconds_by_parts(roots: Sequence[Term], at: Card) -> float:
    """By the roofline, the least time for these terms where each operation is a launch of its own."""
    found = 0.0
    for x in graph.walk(*roots):
        if x.args and viewed(x) is x and x.axes:
            work = 2.0 * math.prod(x.extents) * x.args[0].extents[-1] if x.operation == "matmul" else 0.0
            found += LAUNCH + max(sum(y.nbytes for y in (x, *x.args)) / at.bytes, work / at.products)
    return found
