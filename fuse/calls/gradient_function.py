"""The gradient of a fused function, which is a fused function itself.

    norm.gradient(x, g, dy)             # (dx, dg), of norm(x, g) with the gradient dy with respect to its result
    print(norm.gradient.source(x, g, dy))

Its definition is what the chain rule makes of the function's terms (algebra/derivative.py); rules, cost, templates and proof
are those of any fused function. Intermediates of the forward pass are recomputed from the arguments, which are all that is
saved. The framework (torch, JAX or NumPy) does two things at the end: products whose left factor is a transpose, x.T @ dy, and
sums over axes that are no columns, dg = total(dy * x * scale), where no row map accumulates them. Kernels compute the operands
of these, the *kernel outputs*."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..algebra import derivative
from ..algebra.derivative import NoRule
from ..algebra.derivative_check import DerivativeCheck, compare_with_differences
from ..language import functions, terms
from ..language.expression_text import writer_of_definition
from ..language.graph import between, walk
from ..language.maps import CASTS, MAPS
from ..language.names import unused
from ..language.term_views import view_base
from ..language.terms import Term
from ..language.trace import Shape, TracedDefinition, result_names, trace_definition
from ..planning.candidates import Candidate
from ..planning.definition import CACHE_SIZE, NoKernel
from ..planning.grouped_heads import LeadingAxes
from ..planning.plan_search import is_total_of_rows
from ..planning.proof import Proof
from .call_arguments import as_tuple, cast, dtype_of
from .fused import Fused
from .program import FLOATS, HOLDS

OPERATORS: dict[str, Callable] = {  # what the framework computes, besides language/functions.py
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
    "concat": lambda *parts: functions.concatenate(parts),
    "merge_heads": functions.merge_heads,
    **dict.fromkeys(CASTS, lambda x: x),
}
FRAMEWORK_MAPS = {*MAPS, "sum", "max"}  # operations that the framework applies to its own results


def is_by_framework(x: Term) -> bool:
    """Does the framework compute this term, from kernel outputs? Sums over rows may also be left to kernels: see
    can_sum_in_kernels."""
    if x.operation in ("total", "transpose"):
        return True
    if x.operation == "matmul":
        return x.args[0].operation == "transpose" or any(is_by_framework(y) for y in x.args if y.operation != "transpose")
    return x.operation in FRAMEWORK_MAPS and any(map(is_by_framework, x.args))


def can_sum_in_kernels(roots: Sequence[Term]) -> bool:
    """Can row maps accumulate all sums over rows? They can if each sum is a gradient by itself."""
    return all(x in roots and is_total_of_rows(x) for x in walk(*roots) if x.operation == "total")


def find_kernel_outputs(roots: Sequence[Term], sums: bool) -> list[Term]:
    """The terms that kernels compute, and from which the framework computes the gradients. sums: may kernels sum over rows?"""
    sums = sums and can_sum_in_kernels(roots)
    outputs, stack = dict[Term, None](), [*roots][::-1]
    while stack:
        x = stack.pop()
        if is_by_framework(x) and not (sums and x.operation == "total"):
            stack += x.args[::-1]
        elif x.args and x.ndim > 1:  # a term of vectors only needs no kernel
            outputs[x] = None
    return list(outputs)


class GradientPlan(NamedTuple):
    """The division of a gradient between kernels and the framework, for arrays of a class of lengths
    (planning/length_classes.py). traced: the gradients as terms. sums: can kernels sum over rows? kernel_outputs: the terms
    that kernels compute. rest: the terms that the framework computes from these, in topological order. names: the arguments
    whose gradients these are."""

    traced: TracedDefinition
    sums: bool
    kernel_outputs: list[Term]
    rest: list[Term]
    names: tuple[str, ...]


def compute_by_framework(roots: Sequence[Term], known: Mapping[Term, Any], rest: Sequence[Term] | None = None) -> list[Any]:
    """The values of `roots`, computed by the framework's own operations from the terms whose values are known. Sums over rows,
    and terms of vectors only, are computed in float32. rest: the terms between, if they are known."""
    values = dict(known)
    for x in between(roots, [*known]) if rest is None else rest:
        args = [values[y] for y in x.args]
        if x.ndim < 2:
            args = [cast(y, "float32") if dtype_of(y) in HOLDS else y for y in args]
        if x.operation == "number":
            values[x] = x.attr
        elif x.operation == "length":
            values[x] = float(x.attr[1])
        elif x.operation == "total":
            wide = sys.modules["torch"].float32 if hasattr(args[0], "requires_grad") else np.float32
            shape = [1 if n in x.attr else args[0].shape[n] for n in range(-x.ndim, 0)]
            values[x] = args[0].sum(tuple(x.attr), dtype=wide).reshape(shape)
        elif x.operation == "transpose":
            values[x] = args[0].swapaxes(-1, -2)
        elif x.operation == "half":
            values[x] = functions.halves(args[0])[x.attr]
        elif x.operation == "split":
            values[x] = functions.split_heads(args[0], x.attr)
        elif x.operation == "is_column":
            places = (
                sys.modules["torch"].arange(x.extents[-1], device=args[0].device) if hasattr(args[0], "requires_grad") else None
            )
            values[x] = args[0][..., None] == (np.arange(x.extents[-1]) if places is None else places)
        else:
            values[x] = (OPERATORS.get(x.operation) or getattr(functions, x.operation))(*args)
    return [values[x] for x in roots]


class Gradient(Fused):
    """The gradient of a fused function. Call it with the function's arguments, followed by the gradients with respect to its
    results. It returns the gradients with respect to the arguments that are arrays of floating point numbers, or to those named
    in `requested`.

    result_places: the places of the results whose gradients are passed, all if None. count: how many results the function has,
    0 if unknown. sums: may kernels sum over rows? `source`, `explain`, `candidates`, `proof` and `compile` are about the
    gradient's own kernels."""

    def __init__(
        self,
        function: Fused,
        requested: tuple[str, ...] = (),
        result_places: tuple[int, ...] | None = None,
        count: int = 0,
        sums: bool = True,
    ):
        self.function, self.requested, self.result_places = function, requested, result_places
        self.count, self.sums = count, sums

        def definition(*arguments: Term) -> dict[str, Term]:
            outputs = self.name_kernel_outputs(self.all_gradients(*arguments))
            if not outputs:
                raise NoKernel(f"{self.name}: has no kernel: the framework computes all of it")
            return outputs

        def all_gradients(*arguments: Term) -> dict[str, Term]:
            return self.all_gradients(*arguments)

        def with_results(*arguments: Term) -> dict[str, Term]:
            of_function = len(self.function.names)
            results = self._results(arguments[:of_function])
            places = range(len(results)) if self.result_places is None else self.result_places
            result_gradients = dict(zip(places, arguments[of_function:]))
            pairs = {
                f"{key}_{n}": x for n in result_gradients for key, x in (("result", results[n]), ("by", result_gradients[n]))
            }
            return self.all_gradients(*arguments) | pairs

        for one in (definition, all_gradients, with_results):
            one.__name__ = one.__qualname__ = f"{function.name}_gradient"
            one.named_by = function.definition  # type: ignore[attr-defined]  # whose names for terms are used
        self.gradients_definition, self.checked_definition = all_gradients, with_results
        definition.__doc__ = f"The gradient of {function.name}."
        super().__init__(definition)
        self.plan = functools.lru_cache(CACHE_SIZE)(self._make_plan)
        if count:
            self._set_result_count(count)

    @property
    def gradient(self) -> Gradient:
        """NotImplementedError: there are no second derivatives."""
        raise NotImplementedError(f"{self.name}: has no second derivatives")

    def __reduce__(self) -> Any:
        """Pickle it as the gradient of its function."""
        if self.function.__dict__.get("gradient") is self:
            return getattr, (self.function, "gradient")
        return Gradient, (self.function, self.requested, self.result_places, self.count, self.sums)

    def _set_result_count(self, count: int) -> None:
        """Note how many results the function has: the names of the parameters follow from it."""
        if count < 1:
            raise TypeError(
                f"{self.name}: takes the arguments of {self.function.name}, then the gradient by each of its results"
            )
        self.count = count
        result_places = range(count) if self.result_places is None else self.result_places
        outs = [f"d{one}" for one in result_names(self.function.names, count)]
        self.names = [*self.function.names, *(outs[n] for n in result_places)]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.names]
        self.signature = inspect.Signature(parameters)

    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """The function's arguments with its defaults, and the gradients with respect to its results. The number of results is
        found by trying if it is unknown. TypeError: there are too few or too many, or some are passed by name."""
        if named:
            words = f"the arguments of {self.function.name} and the gradients by its results"
            raise TypeError(f"{self.name}: takes {words}, by place")
        known = [len(self.names) - len(self.function.names)] if self.count else range(1, len(arrays))
        for count in known:
            try:
                bound = (*self.function._arguments(arrays[:-count]), *arrays[-count:])
                flat, _ = self.function._flatten_leading(bound[:-count])
                if not self.count and len(self.function.trace(flat).roots) != count:
                    continue
            except (TypeError, ValueError):
                continue
            if not self.count:
                self._set_result_count(count)
            return bound
        names = f": {', '.join(self.names)}" if self.count else ""
        expected = f"the arguments of {self.function.name}, then the gradient by each of its results{names}"
        raise TypeError(f"{self.name}: takes {expected}; got {len(arrays)}")

    def name_kernel_outputs(self, gradients: Mapping[str, Term]) -> dict[str, Term]:
        """{name: term that kernels compute}: dx if it is the whole gradient with respect to x, and for_dx if the framework
        computes dx from it."""
        labels, roots = {x: name for name, x in reversed([*gradients.items()])}, [*gradients.values()]
        sums = self.sums and can_sum_in_kernels(roots)
        for name, root in gradients.items():
            for x in find_kernel_outputs([root], sums):
                labels.setdefault(x, f"for_{name}")
        outputs, names = dict[str, Term](), list[str]()
        for x in find_kernel_outputs(roots, sums):
            names.append(unused(labels[x], names))
            outputs[names[-1]] = x
        return outputs

    def _results(self, inputs: Sequence[Term]) -> tuple[Term, ...]:
        """The terms that the function returns for these."""
        results = as_tuple(self.function.definition(*inputs))
        return results if isinstance(results, tuple) else (results,)

    def all_gradients(self, *arguments: Term) -> dict[str, Term]:
        """{"dx": the gradient with respect to x as a term, ...} for terms of the arguments and of the gradients with respect to
        results. ValueError: such a gradient has not the shape of its result. NoRule: no result depends on an argument that is
        wanted."""
        inputs, result_gradients = arguments[: len(self.function.names)], arguments[len(self.function.names) :]
        results = self._results(inputs)
        places = range(len(results)) if self.result_places is None else self.result_places
        gradients_by_result: dict[Term, list[Term]] = {}
        for place, g, name in zip(places, result_gradients, self.names[len(inputs) :]):
            if g.ndim != results[place].ndim or any(map(terms.extents_differ, g.extents, results[place].extents)):
                raise ValueError(f"{name}: must have the shape of the result, {results[place].extents}, has {g.extents}")
            gradients_by_result.setdefault(results[place], []).append(g)
        requested = [base_array(inputs[self.function.names.index(name)]) for name in self.requested_names(inputs)]
        terms_of_gradients = derivative.gradients(list(gradients_by_result), gradients_by_result, requested)
        gradients = dict[str, Term]()
        for name, x in zip(self.requested_names(inputs), terms_of_gradients):
            if x is None:
                raise NoRule(f"{name}: no result depends on it")
            gradients[f"d{name}"] = x
        return gradients

    def requested_names(self, arguments: Sequence[Term]) -> tuple[str, ...]:
        """The names of the arguments whose gradients are returned."""
        arrays = zip(self.function.names, map(base_array, arguments))
        return self.requested or tuple(name for name, x in arrays if x.ndim and x.attr[1] in FLOATS)

    def _trace(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        return self._trace_definition(self.definition, shapes)

    def _trace_all(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """The gradients as terms, for arrays of these shapes."""
        return self._trace_definition(self.gradients_definition, shapes)

    def kernel_outputs_for(self, shapes: tuple[Shape, ...]) -> list[Term]:
        """The terms that kernels compute for this gradient, for arrays of these shapes."""
        return find_kernel_outputs(self._trace_all(shapes).roots, self.sums)

    def proof(self, *arrays: Any, seed: int | None = None) -> Proof:
        """Whether the kernels for these arrays compute the definition, and whether that is the derivative of the function: see
        Definition."""
        return dataclasses.replace(super().proof(*arrays, seed=seed), derivative=self.differences(*arrays))

    def differences(self, *arrays: Any) -> DerivativeCheck:
        """The finite-difference check of the gradients, as terms for these arrays (algebra/derivative_check.py)."""
        shapes = self._shapes(self._flatten_leading(self._arguments(arrays))[0])
        traced = self._trace_definition(self.checked_definition, shapes)
        arguments = [x for _, x in traced.inputs][: len(self.function.names)]
        names = self.requested_names(arguments)
        gradients = {base_array(arguments[self.function.names.index(n)]): x for n, x in zip(names, traced.roots)}
        results, result_gradients = traced.roots[len(names) :: 2], traced.roots[len(names) + 1 :: 2]
        return compare_with_differences(results, result_gradients, gradients)

    @functools.cached_property
    def without_sums(self) -> Gradient:
        """This gradient with all sums over rows left to the framework, for rows whose length no row map can sum over. It is
        a function of its own because a program serves all lengths."""
        return Gradient(self.function, self.requested, self.result_places, self.count, sums=False)

    def _trace_definition(self, definition: Callable, shapes: tuple[Shape, ...]) -> TracedDefinition:
        if not self.count:
            self._set_result_count(len(shapes) - len(self.function.names))
        return trace_definition(definition, tuple(self.names), shapes)

    def _flatten_leading(self, arrays: Sequence[Any]) -> tuple[list[Any], LeadingAxes | None]:
        """The arrays with leading axes as the function's kernels see them, and how these differ."""
        of_function = len(self.function.names)
        flat, leading = self.function._flatten_leading(arrays[:of_function])
        result_gradients = [x.reshape(*leading.passed, x.shape[-1]) if leading else x for x in arrays[of_function:]]
        return [*flat, *result_gradients], leading

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **options: Any) -> tuple[Any, ...]:
        """The gradients, as a tuple. For NumPy arrays the definition is evaluated in float32; for arrays on a GPU the fused
        kernels run. TypeError, ValueError: as for the function; or a gradient has not the shape of its result."""
        arrays = self._arguments(args, options)
        if out is None and isinstance(next((x for x in arrays if hasattr(x, "shape")), None), np.ndarray):
            flat, _ = self._flatten_leading(arrays)
            shapes = self._shapes(flat)
            plan = self.of_class(self.plan, shapes)
            return self._finish(arrays, flat, shapes, plan, functools.partial(self._by_definition, out=None))
        return self.run(*arrays, out=out, stream=stream)

    def run(self, *args: Any, out: Any = None, stream: Any = None, **options: Any) -> tuple[Any, ...]:
        """Compute the gradients by the fused kernels, which run on NumPy arrays in the interpreter."""
        if out is not None:
            raise TypeError(f"{self.name}: out must be None: gradients are returned in new arrays")
        arrays = self._arguments(args, options)
        flat, _ = self._flatten_leading(arrays)
        shapes = self._shapes(flat)
        plan = self.of_class(self.plan, shapes)
        if self.sums and not plan.sums:
            return self.without_sums.run(*arrays, stream=stream)
        return self._finish(arrays, flat, shapes, plan, lambda flat: super(Gradient, self).run(*flat, stream=stream))

    def _make_plan(self, shapes: tuple[Shape, ...]) -> GradientPlan:
        """The GradientPlan for these shapes, the representatives of their class."""
        traced = self._trace_all(shapes)
        outputs, inputs = find_kernel_outputs(traced.roots, self.sums), [x for _, x in traced.inputs]
        names = self.requested_names(inputs[: len(self.function.names)])
        return GradientPlan(
            traced, can_sum_in_kernels(traced.roots), outputs, between(traced.roots, [*inputs, *outputs]), names
        )

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        arguments = self._arguments(arrays)
        sums = not self.sums or self.of_class(self.plan, self._shapes(self._flatten_leading(arguments)[0])).sums
        return super()._plan_call(arguments) if sums else self.without_sums._plan_call(arguments)

    def _finish(
        self, arrays: Sequence[Any], flat: Sequence[Any], shapes: Sequence[Shape], plan: GradientPlan, run: Callable
    ) -> tuple[Any, ...]:
        """The gradients for these arrays. flat: the arrays with leading axes joined, of these shapes. run: computes the kernel
        outputs, by kernels or by the definition; the framework's operations at the end are done here."""
        traced = plan.traced
        known = {x: a.T if s.transposed else a for (_, x), a, s in zip(traced.inputs, flat, shapes)}
        if plan.kernel_outputs:
            results = run(flat)
            known |= dict(zip(plan.kernel_outputs, results if isinstance(results, tuple) else (results,)))
        gradients = []
        for name, x in zip(plan.names, compute_by_framework(traced.roots, known, plan.rest)):
            place = self.function.names.index(name)
            like = arrays[place]
            x = x.swapaxes(-1, -2) if shapes[place].transposed else x
            gradients.append(
                cast(x.reshape(like.shape), dtype_of(like)) if dtype_of(x) != dtype_of(like) else x.reshape(like.shape)
            )
        return tuple(gradients)

    def _by_parts(self, *arrays: Any) -> Any:
        """The kernel outputs, computed from torch's tensors by torch's own operations in float32."""
        shapes = self._shapes(arrays)
        traced = self._trace(shapes)
        wide = [cast(x, "float32") if dtype_of(x) in FLOATS else x for x in arrays]
        known = {x: a.T if s.transposed else a for (_, x), a, s in zip(traced.inputs, wide, shapes)}
        first = next(s.dtype for s in shapes if s.extents)
        return tuple(
            [cast(x, root.stored_dtype(first)) for x, root in zip(compute_by_framework(traced.roots, known), traced.roots)]
        )

    def explain(self, *arrays: Any, rows: int = 0) -> str:
        """Say in sentences which rules were used, what the kernels do, what the roofline estimates, and what the framework
        computes at the end."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        shapes = self._shapes(flat)
        traced = self._trace_all(shapes)
        names = self.requested_names([x for _, x in traced.inputs][: len(self.function.names)])
        outputs = find_kernel_outputs(traced.roots, self.sums)
        writer, ends = writer_of_definition(traced.roots, {x: name for name, x in traced.local_names}), list[str]()
        for name, x in zip(names, traced.roots):
            if x not in outputs:
                text, *parts = writer.in_parts(x)
                ends += [f"d{name} = {text}", *(f"    where {line}" for line in parts)]
        kernels = super().explain(*arrays, rows=rows) if outputs else "There is no kernel."
        return "\n".join([kernels, *(["From these the framework computes", *ends] if ends else [])])


def base_array(x: Term) -> Term:
    """The argument's array as it lies in memory, whether the argument is it, its transpose or another view of it."""
    return x.args[0] if x.operation == "transpose" else view_base(x)
