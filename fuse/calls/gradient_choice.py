"""The choice of how the gradients of a fused function are computed: by kernels where the algebra finds them
(gradient_function.py); else, for torch, by torch's own ops on the definition. One argument's gradient may come from kernels and
another's from these parts.

Torch is never imported before a caller has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiles.calls.torch_op import ascii_name, imported_module, is_compiling, is_exporting, is_mapped_with_grad, is_transformed

from ..algebra.derivative import NoRule
from ..language import graph
from ..language.names import unused
from ..language.term_views import view_base
from ..language.terms import Term
from ..language.trace import Shape, kinds_of, loose_shapes, ordinal_of, shape_of
from ..planning.candidates import candidates
from ..planning.cost import LAUNCH, Card, card
from ..planning.plan_search import FusionPlan
from .program import PROGRAMS


def wants_gradient(arrays: Sequence[Any]) -> bool:
    """Does torch need a gradient of a call on these arrays?"""
    torch = imported_module("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    if any([isinstance(x, torch.Tensor) and x.requires_grad for x in arrays]):
        return not is_exporting()  # when exporting, the op itself refuses
    return is_mapped_with_grad(arrays)


def differentiable(function: Any, arrays: Sequence[Any]) -> Any:
    """function.run(*arrays), connected to torch's autograd graph. The definition's parts run instead under torch.func's
    transforms, and under torch.compile unless kernels compute all gradients that are needed: torch.compile then generates
    forward and backward."""
    from .autograd import FusedAutograd

    if is_transformed():
        return function._by_parts(*arrays)
    if is_compiling() and not function.gradients.all_by_kernels(arrays, [getattr(x, "requires_grad", False) for x in arrays]):
        return function._by_parts(*arrays)
    return FusedAutograd.apply(function, *arrays)


class GradientFunctions:
    """The gradients of a fused function: a Gradient for each choice of arguments and results, and the arguments whose gradients
    kernels compute."""

    def __init__(self, function: Any):
        self.function = function
        self.functions: dict[tuple, Any] = {}
        self.served_names: dict[tuple, Any] = {}
        self.op, self.all_of = _mark_constant(self._op), _mark_constant(self._all_of)

    def by_all(self) -> Any:
        """The gradient with respect to all arguments of floating point numbers, given the gradients with respect to all
        results."""
        from .gradient_function import Gradient

        return Gradient(self.function)

    def choose(self, requested: tuple[str, ...], result_places: tuple[int, ...], count: int) -> Any:
        """The gradient with respect to the `requested` arguments. result_places: the places, among `count` results, of those
        whose gradients are passed."""
        key = requested, result_places, count
        if key not in self.functions:
            from .gradient_function import Gradient

            self.functions[key] = Gradient(self.function, requested, result_places, count)
        return self.functions[key]

    def by_kernels(
        self, arrays: Sequence[Any], result_gradients: Sequence[Any], requested: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Callable[[], Sequence[Any]]]:
        """(the wanted arguments whose gradients kernels compute, a function that computes these gradients). arrays: the
        arguments, their leading axes joined. result_gradients: those with respect to the results, None where there is none."""
        places = tuple(n for n, g in enumerate(result_gradients) if g is not None)
        by_results = [g for g in result_gradients if g is not None]
        shapes = self.function.of_class(lambda shapes: shapes, self.function._shapes(arrays))
        roots, gradient_shapes = self.function._trace(shapes).roots, [shape_of(g, "gradient") for g in by_results]
        shapes += tuple([Shape(roots[n].extents, s.dtype, s.transposed) for n, s in zip(places, gradient_shapes)])
        key = shapes, requested, places, len(result_gradients), ordinal_of(arrays)
        if key not in self.served_names:
            self.served_names[key] = self._served_names(*key)
        names = self.served_names[key]
        return names, lambda: self.choose(names, places, len(result_gradients)).run(*arrays, *by_results) if names else ()

    def all_by_kernels(self, arrays: Sequence[Any], needed: Sequence[bool]) -> bool:
        """Do kernels compute all gradients that are needed? torch.compile calls this before lengths are known."""
        device = next(x.device for x in arrays if hasattr(x, "shape"))
        ordinal = device.index if device.type == "cuda" else None
        return self.all_of(kinds_of(self.function._shapes(arrays)), tuple(needed), ordinal)

    def _all_of(self, kinds: tuple, needed: tuple[bool, ...], ordinal: int | None) -> bool:
        shapes = loose_shapes(kinds)
        results, first = self.function._trace(shapes).roots, next(s.dtype for s in shapes if s.extents)
        shapes += tuple([Shape(x.extents, x.stored_dtype(first)) for x in results])
        requested = tuple([name for name, one in zip(self.function.names, needed) if one])
        gradient = self.choose(requested, tuple(range(len(results))), len(results))
        return bool(_gradient_plans(gradient, shapes, card(ordinal)))  # costs need lengths

    def _op(self, requested: tuple[str, ...], result_places: tuple[int, ...], count: int) -> str:
        """The name of the torch op that computes this gradient, which is registered if it is not yet. torch.compile does not
        trace into it."""
        key = "op", requested, result_places, count
        if key not in self.served_names:
            from . import autograd

            self.served_names[key] = unused(ascii_name(f"{self.function.name}_gradient"), PROGRAMS)
            PROGRAMS.add(self.served_names[key])
            autograd.op(self.choose(requested, result_places, count), self.served_names[key])
        return self.served_names[key]

    def make_vjp(
        self, outs: tuple[str, ...], names: tuple[str, ...], options: Mapping[str, Any], layout: str
    ) -> Callable[..., dict[str, Any]]:
        """The gradients with respect to the arguments `names`, as a function: JAX gets it from the program of a fused function
        (see `gradient` of tiles.calls.program). outs: the names of the results. options: the arguments that are numbers."""
        return functools.partial(self._vjp, outs, names, options)

    def _vjp(
        self,
        outs: tuple[str, ...],
        names: tuple[str, ...],
        options: Mapping[str, Any],
        inputs: Mapping[str, Any],
        results: Mapping[str, Any],
        result_gradients: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The gradients by name. inputs: the arrays. results: the results. result_gradients: those of the results
        that have one. NotImplementedError: kernels do not compute one of the gradients."""
        if not result_gradients:
            return {}
        arrays = [options[name] if name in options else inputs[name] for name in self.function.names]
        served, run = self.by_kernels(arrays, [result_gradients.get(out) for out in outs], names)
        for name in names:
            if name not in served:
                raise NotImplementedError(f"{name}: no kernel computes its gradient; put jax.lax.stop_gradient around it")
        return dict(zip(served, run()))

    def _served_names(
        self,
        shapes: tuple[Shape, ...],
        requested: tuple[str, ...],
        result_places: tuple[int, ...],
        count: int,
        ordinal: int | None,
    ) -> tuple[str, ...]:
        """The `requested` arguments whose gradients kernels compute, and faster than parts by the roofline: all of them
        together, or else those that pass one by one. shapes: those of the arguments, followed by those of the gradients with
        respect to the results at `result_places` among `count`."""
        at = card(ordinal)
        if _is_served(self.choose(requested, result_places, count), shapes, at):
            return requested
        singles = [(name,) for name in requested] if len(requested) > 1 else []
        return tuple([one for (one,) in singles if _is_served(self.choose((one,), result_places, count), shapes, at)])


def _mark_constant(function: Callable) -> Callable:
    """The function, marked so that Dynamo calls it while it traces, without tracing into it, and takes its result for a
    constant."""

    def constant(*args):
        return function(*args)

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant


def _is_served(gradient: Any, shapes: tuple[Shape, ...], at: Card) -> bool:
    """Do kernels compute the gradient, and by the roofline faster than parts?"""
    ways = _gradient_plans(gradient, shapes, at)
    if not ways or not ways[0].kernels:  # the framework computes all of it
        return bool(ways)
    return ways[0].seconds <= seconds_by_parts(gradient._trace(shapes).roots, at)


def _gradient_plans(gradient: Any, shapes: tuple[Shape, ...], at: Card) -> list[FusionPlan]:
    """The plans to compute the gradient, the best first; none if an operation has no rule or no template serves it."""
    try:
        if not gradient.kernel_outputs_for(shapes):
            return [FusionPlan((), 0.0)]
        return [one.plan for one in candidates(gradient._trace(shapes), at)]
    except NoRule:
        return []


def seconds_by_parts(roots: Sequence[Term], at: Card) -> float:
    """The roofline's time for these terms if each operation is a launch of its own."""
    seconds = 0.0
    for x in graph.walk(*roots):
        if x.args and view_base(x) is x and x.axes:
            work = 2.0 * math.prod(x.extents) * x.args[0].extents[-1] if x.operation == "matmul" else 0.0
            seconds += LAUNCH + max(sum(y.nbytes for y in (x, *x.args)) / at.bytes, work / at.products)
    return seconds
