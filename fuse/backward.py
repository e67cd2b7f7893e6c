"""The gradient of a fused function, which is a fused function itself.

    norm.gradient(x, g, dy)             # (dx, dg), of norm(x, g) with the gradient dy by its result
    print(norm.gradient.source(x, g, dy))

Its definition is what the chain rule makes of the function's terms (derivative.py); rules, cost, templates and proof are those
of any other. What it needs of the forward pass it computes once more from the arguments: no other array is kept. Two things the
framework does at the end: products whose left factor is a transpose, x.T @ dy, and sums over axes that are no columns,
dg = total(dy * x * scale), where no row map gathers them as rows go by. Kernels make what these are of, its *pieces*."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import derivative, language, terms
from .candidates import Candidate
from .definition import BEST, NoKernel
from .derivative import NoRule
from .derivative_check import DerivativeCheck, compare_with_differences
from .functions import CASTS, MAPS
from .fused import Fused
from .given import cast, dtype_of
from .graph import between, walk
from .names import unused
from .place import is_total_of_rows
from .program import FLOATS, HOLDS
from .proof import Proof
from .terms import Term, viewed
from .trace import Shape, TracedDefinition, result_names, trace_definition

OPERATORS: dict[str, Callable] = {  # what the framework does with arrays, besides functions of language.py by their names
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "matmul": operator.matmul,
    "concat": lambda *parts: language.concatenate(parts),
    "merged": language.merge_heads,
    **dict.fromkeys(CASTS, lambda x: x),
}
FRAMEWORK_MAPS = {*MAPS, "sum", "max"}  # what it does with what it makes of pieces


def is_by_framework(x: Term) -> bool:
    """Does the framework compute this term, from pieces that kernels make? Sums over rows may also be left to kernels: see
    sums_by_kernels."""
    if x.operation in ("total", "transpose"):
        return True
    if x.operation == "matmul":
        return x.args[0].operation == "transpose" or any(is_by_framework(y) for y in x.args if y.operation != "transpose")
    return x.operation in FRAMEWORK_MAPS and any(map(is_by_framework, x.args))


def can_sum_in_kernels(roots: Sequence[Term]) -> bool:
    """Can row maps gather all sums over rows as the rows go by? They can if each sum is a gradient by itself."""
    return all(x in roots and is_total_of_rows(x) for x in walk(*roots) if x.operation == "total")


def find_kernel_outputs(roots: Sequence[Term], sums: bool) -> list[Term]:
    """The terms that kernels make; the framework makes the gradients from them. sums: may kernels sum over rows?"""
    sums = sums and can_sum_in_kernels(roots)
    found, stack = dict[Term, None](), [*roots][::-1]
    while stack:
        x = stack.pop()
        if is_by_framework(x) and not (sums and x.operation == "total"):
            stack += x.args[::-1]
        elif x.args and x.ndim > 1:  # what is made of vectors alone needs no kernel
            found[x] = None
    return list(found)


class GradientPlan(NamedTuple):
    """Who computes a gradient, for arrays of a class of lengths (classes.py). traced: the gradients as terms. sums: can kernels
    sum over rows? kernel_outputs: what kernels make. rest: what the framework makes of these, in topological order. names: the
    arguments whose gradients these are."""

    traced: TracedDefinition
    sums: bool
    kernel_outputs: list[Term]
    rest: list[Term]
    names: tuple[str, ...]


def compute_by_framework(roots: Sequence[Term], known: Mapping[Term, Any], rest: Sequence[Term] | None = None) -> list[Any]:
    """The values of `roots`, computed with the framework's own operations from the terms whose values are known. Sums over
    rows are taken in float32, and so is what is made of vectors. rest: the terms between, if they are known."""
    found = dict(known)
    for x in between(roots, [*known]) if rest is None else rest:
        of = [found[y] for y in x.args]
        if x.ndim < 2:
            of = [cast(y, "float32") if dtype_of(y) in HOLDS else y for y in of]
        if x.operation == "number":
            found[x] = x.attr
        elif x.operation == "length":
            found[x] = float(x.attr[1])
        elif x.operation == "total":
            wide = sys.modules["torch"].float32 if hasattr(of[0], "requires_grad") else np.float32
            kept = [1 if n in x.attr else of[0].shape[n] for n in range(-x.ndim, 0)]
            found[x] = of[0].sum(tuple(x.attr), dtype=wide).reshape(kept)
        elif x.operation == "transpose":
            found[x] = of[0].swapaxes(-1, -2)
        elif x.operation == "half":
            found[x] = language.halves(of[0])[x.attr]
        elif x.operation == "split":
            found[x] = language.split_heads(of[0], x.attr)
        elif x.operation == "is_column":
            places = (
                sys.modules["torch"].arange(x.extents[-1], device=of[0].device) if hasattr(of[0], "requires_grad") else None
            )
            found[x] = of[0][..., None] == (np.arange(x.extents[-1]) if places is None else places)
        else:
            found[x] = (OPERATORS.get(x.operation) or getattr(language, x.operation))(*of)
    return [found[x] for x in roots]


class Gradient(Fused):
    """The gradient of a fused function. Call it with the function's arguments, followed by the gradients with respect to its
    results. It returns the gradients with respect to the arguments that are arrays of floating point numbers, or to those
    named in `wanted`.

    by: the places of the results whose gradients are given, all if None. count: how many results the function has, 0 if it is
    not known yet. sums: may kernels sum over rows? `source`, `explain`, `candidates`, `proof` and `compile` are about the
    gradient's own kernels."""

    def __init__(
        self,
        function: Fused,
        wanted: tuple[str, ...] = (),
        by: tuple[int, ...] | None = None,
        count: int = 0,
        sums: bool = True,
    ):
        self.function, self.wanted, self.by, self.count, self.sums = function, wanted, by, count, sums

        def definition(*given: Term) -> dict[str, Term]:
            made = self.name_kernel_outputs(self.all_gradients(*given))
            if not made:
                raise NoKernel(f"{self.name}: has no kernel, for the framework makes all of it")
            return made

        def all_gradients(*given: Term) -> dict[str, Term]:
            return self.all_gradients(*given)

        def with_results(*given: Term) -> dict[str, Term]:
            of_function = len(self.function.names)
            results = self.function.definition(*given[:of_function])
            results = results if isinstance(results, tuple) else (results,)
            by = dict(zip(range(len(results)) if self.by is None else self.by, given[of_function:]))
            pairs = {f"{key}_{n}": x for n in by for key, x in (("result", results[n]), ("by", by[n]))}
            return self.all_gradients(*given) | pairs

        for one in (definition, all_gradients, with_results):
            one.__name__ = one.__qualname__ = f"{function.name}_gradient"
            one.watched = function.definition  # type: ignore[attr-defined]  # whose names for terms are used
        self.gradients_definition, self.checked_definition = all_gradients, with_results
        definition.__doc__ = f"The gradient of {function.name}."
        super().__init__(definition)
        self.shared = functools.lru_cache(BEST)(self._shared)
        if count:
            self._set_result_count(count)

    @property
    def gradient(self) -> Gradient:
        """NotImplementedError: there are no second derivatives."""
        raise NotImplementedError(f"{self.name}: has no second derivatives")

    def __reduce__(self) -> Any:
        """See Fused: as what is made of the function."""
        if self.function.__dict__.get("gradient") is self:
            return getattr, (self.function, "gradient")
        return Gradient, (self.function, self.wanted, self.by, self.count, self.sums)

    def _set_result_count(self, count: int) -> None:
        """Take note of how many results the function has: the names of the parameters follow from it."""
        if count < 1:
            raise TypeError(
                f"{self.name}: takes the arguments of {self.function.name}, then the gradient by each of its results"
            )
        self.count = count
        by = range(count) if self.by is None else self.by
        outs = [f"d{one}" for one in result_names(self.function.names, count)]
        self.names = [*self.function.names, *(outs[n] for n in by)]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.names]
        self.signature = inspect.Signature(parameters)

    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """The function's arguments with its defaults, and the gradients with respect to its results. How many results there
        are is found by trying, if it is not known. TypeError: there are too few or too many, or some are given by name."""
        if named:
            arguments = f"the arguments of {self.function.name} and the gradients by its results"
            raise TypeError(f"{self.name}: takes {arguments}, by place")
        known = [len(self.names) - len(self.function.names)] if self.count else range(1, len(arrays))
        for more in known:
            try:
                given = (*self.function._arguments(arrays[:-more]), *arrays[-more:])
                if not self.count and len(self.function.trace(given[:-more]).roots) != more:
                    continue
            except (TypeError, ValueError):
                continue
            if not self.count:
                self._set_result_count(more)
            return given
        these = f": {', '.join(self.names)}" if self.count else ""
        what = f"the arguments of {self.function.name}, then the gradient by each of its results{these}"
        raise TypeError(f"{self.name}: takes {what}; got {len(arrays)}")

    def name_kernel_outputs(self, gradients: Mapping[str, Term]) -> dict[str, Term]:
        """The terms that kernels make, by name: dx, if it is the whole gradient with respect to x, and for_dx, if the
        framework makes dx from it."""
        found, roots = {x: name for name, x in reversed([*gradients.items()])}, [*gradients.values()]
        sums = self.sums and can_sum_in_kernels(roots)
        for name, root in gradients.items():
            for x in find_kernel_outputs([root], sums):
                found.setdefault(x, f"for_{name}")
        made, names = dict[str, Term](), list[str]()
        for x in find_kernel_outputs(roots, sums):
            names.append(unused(found[x], names))
            made[names[-1]] = x
        return made

    def all_gradients(self, *given: Term) -> dict[str, Term]:
        """{"dx": the gradient with respect to x as a term, ...} for terms of the arguments and of the given gradients.
        ValueError: a given gradient has not the shape of its result. NoRule: no result depends on an argument that is
        wanted."""
        arguments, by = given[: len(self.function.names)], given[len(self.function.names) :]
        result = self.function.definition(*arguments)
        results = result if isinstance(result, tuple) else (result,)
        places = range(len(results)) if self.by is None else self.by
        of_results: dict[Term, list[Term]] = {}
        for place, g, name in zip(places, by, self.names[len(arguments) :]):
            if g.ndim != results[place].ndim or any(map(terms.differ, g.extents, results[place].extents)):
                raise ValueError(f"{name}: must have the shape of the result, {results[place].extents}, has {g.extents}")
            of_results.setdefault(results[place], []).append(g)
        wanted = [base_array(arguments[self.function.names.index(name)]) for name in self.wanted_names(arguments)]
        found = derivative.gradients(list(of_results), of_results, wanted)
        gradients = dict[str, Term]()
        for name, x in zip(self.wanted_names(arguments), found):
            if x is None:
                raise NoRule(f"{name}: no result depends on it")
            gradients[f"d{name}"] = x
        return gradients

    def wanted_names(self, arguments: Sequence[Term]) -> tuple[str, ...]:
        """The names of the arguments whose gradients are returned."""
        arrays = zip(self.function.names, map(base_array, arguments))
        return self.wanted or tuple(name for name, x in arrays if x.ndim and x.attr[1] in FLOATS)

    def _trace(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        return self._traced(self.definition, shapes)

    def _trace_all(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """The gradients as terms, for arrays of these shapes."""
        return self._traced(self.gradients_definition, shapes)

    def kernel_outputs_for(self, shapes: tuple[Shape, ...]) -> list[Term]:
        """The terms that kernels make for this gradient, for arrays of these shapes."""
        return find_kernel_outputs(self._trace_all(shapes).roots, self.sums)

    def proof(self, *arrays: Any, seed: int | None = None) -> Proof:
        """Whether the kernels for these arrays compute the definition, and whether that is the derivative of the function: see
        Definition."""
        return dataclasses.replace(super().proof(*arrays, seed=seed), derivative=self.differences(*arrays))

    def differences(self, *arrays: Any) -> DerivativeCheck:
        """The gradients, as terms for these arrays, compared with differences of the function (derivative_check.py)."""
        shapes = self._shapes(self._flatten_leading(self._arguments(arrays))[0])
        found = self._traced(self.checked_definition, shapes)
        arguments = [x for _, x in found.inputs][: len(self.function.names)]
        names = self.wanted_names(arguments)
        gradients = {base_array(arguments[self.function.names.index(n)]): x for n, x in zip(names, found.roots)}
        results, by = found.roots[len(names) :: 2], found.roots[len(names) + 1 :: 2]
        return compare_with_differences(results, by, gradients)

    @functools.cached_property
    def without_sums(self) -> Gradient:
        """The same gradient, with all sums over rows left to the framework, for rows of lengths that no row map can sum over.
        It is a function of its own because a program serves all lengths."""
        return Gradient(self.function, self.wanted, self.by, self.count, sums=False)

    def _traced(self, definition: Callable, shapes: tuple[Shape, ...]) -> TracedDefinition:
        if not self.count:
            self._set_result_count(len(shapes) - len(self.function.names))
        return trace_definition(definition, tuple(self.names), shapes)

    def _flatten_leading(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """See Definition. Leading axes are rows here if they are rows to the function."""
        of_function = len(self.function.names)
        flat, lead = self.function._flatten_leading(arrays[:of_function])
        by = [x.reshape(-1, x.shape[-1]) if lead else x for x in arrays[of_function:]]
        return [*flat, *by], lead

    def __call__(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> tuple[Any, ...]:
        """The gradients, as a tuple. For NumPy arrays they are computed by the definition, in float32; for arrays on a GPU by
        the fused kernels. TypeError, ValueError: as for the function; or a gradient has not the shape of its result."""
        arrays = self._arguments(given, named)
        if out is None and isinstance(next((x for x in arrays if hasattr(x, "shape")), None), np.ndarray):
            flat, _ = self._flatten_leading(arrays)
            shapes = self._shapes(flat)
            shared = self.of_class(self.shared, shapes)
            return self._finish(arrays, flat, shapes, shared, functools.partial(self._by_definition, out=None))
        return self.run(*arrays, out=out, stream=stream)

    def run(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> tuple[Any, ...]:
        """The same gradients, computed by the fused kernels, which run on NumPy arrays in the interpreter."""
        if out is not None:
            raise TypeError(f"{self.name}: gives new arrays, and takes no out")
        arrays = self._arguments(given, named)
        flat, _ = self._flatten_leading(arrays)
        shapes = self._shapes(flat)
        shared = self.of_class(self.shared, shapes)
        if self.sums and not shared.sums:
            return self.without_sums.run(*arrays, stream=stream)
        return self._finish(arrays, flat, shapes, shared, lambda flat: super(Gradient, self).run(*flat, stream=stream))

    def _shared(self, shapes: tuple[Shape, ...]) -> GradientPlan:
        """Who computes what, for these shapes, which stand for their class."""
        found = self._trace_all(shapes)
        made, inputs = find_kernel_outputs(found.roots, self.sums), [x for _, x in found.inputs]
        names = self.wanted_names(inputs[: len(self.function.names)])
        return GradientPlan(found, can_sum_in_kernels(found.roots), made, between(found.roots, [*inputs, *made]), names)

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        given = self._arguments(arrays)
        sums = not self.sums or self.of_class(self.shared, self._shapes(self._flatten_leading(given)[0])).sums
        return super()._plan_call(given) if sums else self.without_sums._plan_call(given)

    def _finish(
        self, arrays: Sequence[Any], flat: Sequence[Any], shapes: Sequence[Shape], shared: GradientPlan, run: Callable
    ) -> tuple[Any, ...]:
        """The gradients for these arrays. flat: the same with leading axes joined, of these shapes. run: makes the pieces, by
        kernels or by the definition; the framework's operations at the end are done here."""
        found = shared.traced
        known = {x: a.T if s.transposed else a for (_, x), a, s in zip(found.inputs, flat, shapes)}
        if shared.kernel_outputs:
            results = run(flat)
            known |= dict(zip(shared.kernel_outputs, results if isinstance(results, tuple) else (results,)))
        gradients = []
        for name, x in zip(shared.names, compute_by_framework(found.roots, known, shared.rest)):
            place = self.function.names.index(name)
            like = arrays[place]
            x = x.swapaxes(-1, -2) if shapes[place].transposed else x
            gradients.append(
                cast(x.reshape(like.shape), dtype_of(like)) if dtype_of(x) != dtype_of(like) else x.reshape(like.shape)
            )
        return tuple(gradients)

    def _by_parts(self, *arrays: Any) -> Any:
        """The pieces, made from torch's tensors by torch's own operations in float32."""
        shapes = self._shapes(arrays)
        found = self._trace(shapes)
        wide = [cast(x, "float32") if dtype_of(x) in FLOATS else x for x in arrays]
        known = {x: a.T if s.transposed else a for (_, x), a, s in zip(found.inputs, wide, shapes)}
        first = next(s.dtype for s in shapes if s.extents)
        return tuple(
            [cast(x, root.stored_dtype(first)) for x, root in zip(compute_by_framework(found.roots, known), found.roots)]
        )

    def explain(self, *arrays: Any, rows: int = 0) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline estimates, and what the framework does
        at the end."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        shapes = self._shapes(flat)
        found = self._trace_all(shapes)
        names = self.wanted_names([x for _, x in found.inputs][: len(self.function.names)])
        made = find_kernel_outputs(found.roots, self.sums)
        ends = [f"d{name} = {x!r:.200}" for name, x in zip(names, found.roots) if x not in made]
        kernels = super().explain(*arrays, rows=rows) if made else "There is no kernel."
        return "\n".join([kernels, *(["The framework makes of this", *ends] if ends else [])])


def base_array(x: Term) -> Term:
    """The argument's array as it lies in memory, whether the argument is it, its transpose or another view of it."""
    return x.args[0] if x.operation == "transpose" else viewed(x)
