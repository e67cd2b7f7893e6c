"""The gradient of a fused function, which is a fused function itself.

    norm.gradient(x, g, dy)             # (dx, dg), of norm(x, g) with the gradient dy by its result
    print(norm.gradient.source(x, g, dy))

Its definition is what the chain rule makes of the function's terms (derivative.py); rules, cost, templates and proof are those
of any other. What it needs of the forward pass it computes once more from the arguments: no other array is kept. Two things the
framework does at the end: products whose left factor is a transpose, x.T @ dy, and sums over axes that are no columns,
dg = total(dy * x * scale), where no row map gathers them as rows go by. Kernels make what these are of, its *pieces*."""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import derivative, language, terms
from .axes import same
from .derivative import NoRule
from .functions import CASTS
from .fused import FLOATS, Fused, NoKernel, cast, dtype_of
from .graph import between, walk
from .module import unused
from .place import is_total_of_rows
from .terms import Term, viewed
from .trace import Shape, Traced, ordinal_of, result_names, traced

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
WIDE = 512  # rows, columns, and what is summed over: of products from which on the framework's are as fast
AT_THE_END = "add", "sub", "mul", "div", "neg"  # what it does with what it makes of pieces


def at_the_end(x: Term) -> bool:
    """Does the framework compute it, from pieces? Sums over rows may be kernels', too (sums_by_kernels)."""
    if x.operation in ("total", "transpose"):
        return True
    if x.operation == "matmul":
        return x.of[0].operation == "transpose" or any(at_the_end(y) for y in x.of if y.operation != "transpose")
    return x.operation in AT_THE_END and any(map(at_the_end, x.of))


def sums_by_kernels(roots: Sequence[Term]) -> bool:
    """Are all sums over rows gradients by themselves, that row maps gather as rows go by?"""
    return all(x in roots and is_total_of_rows(x) for x in walk(*roots) if x.operation == "total")


class Division(NamedTuple):
    """What of a gradient is whose. sums: are sums over rows the kernels'? ahead: which of plain_products the framework makes
    ahead of them. behind: does it add up products of what they made, too?"""

    sums: bool = True
    ahead: tuple[int, ...] = ()
    behind: bool = False


def plain_products(roots: Sequence[Term]) -> list[Term]:
    """Products of two arguments, the right one as it is or as its transpose."""
    products = [x for x in walk(*roots) if x.operation == "matmul" and x.ndim == x.of[1].ndim == 2]
    right = [x.of[1].of[0] if x.of[1].operation == "transpose" else x.of[1] for x in products]
    return [x for x, y in zip(products, right) if x.of[0].operation == y.operation == "input"]


def _is_sum_of_products(x: Term) -> bool:
    """A product, or several that are added up, times numbers?"""
    parts = [y for y in x.of if any(y.names)]
    return x.operation == "matmul" or (x.operation in AT_THE_END and bool(parts) and all(map(_is_sum_of_products, parts)))


def _is_wide(x: Term) -> bool:
    """Is it a product in which a framework's is as fast as any can be?"""
    return min(*x.extents, x.of[0].extents[-1]) >= WIDE


def divided(roots: Sequence[Term]) -> Division:
    """Who is to compute what of these gradients. What a kernel would do with a product, besides multiplying, decides: where a
    product only feeds a row map, or only adds up others, a kernel of ours has nothing to add."""
    sums = [x for x in roots if _is_sum_of_products(x) and not at_the_end(x)]
    behind = bool(sums) and all(map(_is_wide, _outer(sums)))
    known = plain_products([x for x in roots if x not in sums])
    ahead = [n for n, x in enumerate(plain_products(roots)) if x in known and _is_wide(x)]
    return Division(sums_by_kernels(roots), tuple(ahead), behind)


def _outer(sums: Sequence[Term]) -> list[Term]:
    """The products that are added up."""
    return [y for x in sums if any(x.names) for y in ([x] if x.operation == "matmul" else _outer(x.of))]


def pieces(roots: Sequence[Term], division: Division) -> list[Term]:
    """What kernels make, of which the framework makes the rest."""
    sums = division.sums and sums_by_kernels(roots)
    found, stack = dict[Term, None](), [*roots][::-1]
    while stack:
        x = stack.pop()
        if x.operation == "total" and sums:
            found[x] = None
        elif at_the_end(x) or (division.behind and _is_sum_of_products(x)):
            stack += x.of[::-1]
        elif x.of:
            found[x] = None
    return list(found)


def by_framework(roots: Sequence[Term], known: Mapping[Term, Any]) -> list[Any]:
    """The values of what is made of known ones, by the framework's own operations; sums over rows are taken in float32."""
    found = dict(known)
    every = between(roots, [*known])
    users = collections.Counter(y for x in every for y in x.of) + collections.Counter(roots)
    added = {x.of[1] for x in every if x.operation == "add" and x.of[1].operation == "matmul" and x.ndim == 2}
    for x in every:
        if x in added and users[x] == 1 and hasattr(found[x.of[0]], "addmm"):
            continue  # it is added as it is made
        if x.operation == "add" and x.of[1] not in found:
            found[x] = found[x.of[0]].addmm(*[found[y] for y in x.of[1].of])
            continue
        of = [found[y] for y in x.of]
        if x.operation == "number":
            found[x] = x.what
        elif x.operation == "length":
            found[x] = float(x.what[1])
        elif x.operation == "total":
            wide = sys.modules["torch"].float32 if hasattr(of[0], "requires_grad") else np.float32
            kept = [1 if n in x.what else of[0].shape[n] for n in range(-x.ndim, 0)]
            found[x] = of[0].sum(tuple(x.what), dtype=wide).reshape(kept)
        elif x.operation == "transpose":
            found[x] = of[0].swapaxes(-1, -2)
        elif x.operation == "half":
            found[x] = language.halves(of[0])[x.what]
        elif x.operation == "split":
            found[x] = language.split_heads(of[0], x.what)
        elif x.operation == "is_column":
            places = (
                sys.modules["torch"].arange(x.extents[-1], device=of[0].device) if hasattr(of[0], "requires_grad") else None
            )
            found[x] = of[0][..., None] == (np.arange(x.extents[-1]) if places is None else places)
        else:
            found[x] = (OPERATORS.get(x.operation) or getattr(language, x.operation))(*of)
    return [found[x] for x in roots]


class Gradient(Fused):
    """The gradient of a fused function: call it with the function's arguments and the gradients by its results; it gives those
    by the arguments that are arrays of floating point numbers, or by the `wanted` ones. by: the places of the results whose
    gradients are given, all if None; count: how many there are. `source`, `explain`, `candidates`, `proof` and `compile` are
    those of its kernels."""

    def __init__(
        self,
        function: Fused,
        wanted: tuple[str, ...] = (),
        by: tuple[int, ...] | None = None,
        count: int = 0,
        division: Division | None = None,
    ):
        self.function, self.wanted, self.by, self.count, self.division = function, wanted, by, count, division
        self.others: dict[Division, Gradient] = {}

        def definition(*given: Term) -> dict[str, Term]:
            made = self.pieces(self.whole(*given))
            if not made:
                raise NoKernel(f"{self.name}: has no kernel, for the framework makes all of it")
            return made

        def whole(*given: Term) -> dict[str, Term]:
            return self.whole(*given)

        for one in (definition, whole):
            one.__name__ = one.__qualname__ = f"{function.name}_gradient"
            one.watched = function.definition  # type: ignore[attr-defined]  # whose names for terms are used
        self.definition_of_all = whole
        definition.__doc__ = f"The gradient of {function.name}."
        super().__init__(definition)
        if count:
            self._know(count)

    @property
    def gradient(self) -> Gradient:
        """There is none."""
        raise NotImplementedError(f"{self.name}: has no second derivatives")

    def _know(self, count: int) -> None:
        """How many results the function has, which says what the parameters are called."""
        if count < 1:
            raise TypeError(
                f"{self.name}: takes the arguments of {self.function.name}, then the gradient by each of its results"
            )
        self.count = count
        by = range(count) if self.by is None else self.by
        outs = [f"d{one}" for one in result_names(self.function.names, count)]
        ahead = range(len(self.division.ahead) if self.division else 0)
        self.names = [*self.function.names, *(outs[n] for n in by), *(f"product_{n}" for n in ahead)]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.names]
        self.signature = inspect.Signature(parameters)

    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """The function's, with its defaults, and the gradients by its results."""
        if named:
            raise TypeError(
                f"{self.name}: takes the arguments of {self.function.name} and the gradients by its results, by place"
            )
        known = [len(self.names) - len(self.function.names)] if self.count else range(1, len(arrays))
        for more in known:
            try:
                given = (*self.function._arguments(arrays[:-more]), *arrays[-more:])
                if not self.count and len(self.function.trace(given[:-more]).roots) != more:
                    continue
            except (TypeError, ValueError):
                if self.count:
                    raise
                continue
            if not self.count:
                self._know(more)
            return given
        raise TypeError(f"{self.name}: takes the arguments of {self.function.name}, then the gradient by each of its results")

    def pieces(self, gradients: Mapping[str, Term]) -> dict[str, Term]:
        """What kernels make, by names: those of gradients that are whole, and for_dx of others."""
        found, roots = {x: name for name, x in reversed([*gradients.items()])}, [*gradients.values()]
        division = self.division or Division()
        division = division._replace(sums=division.sums and sums_by_kernels(roots))
        for name, root in gradients.items():
            for x in pieces([root], division):
                found.setdefault(x, f"for_{name}")
        made, names = dict[str, Term](), list[str]()
        for x in pieces(roots, division):
            names.append(unused(found[x], names))
            made[names[-1]] = x
        return made

    def whole(self, *given: Term) -> dict[str, Term]:
        """The gradients, as terms, by names."""
        arguments, by = given[: len(self.function.names)], given[len(self.function.names) :]
        result = self.function.definition(*arguments)
        results = result if isinstance(result, tuple) else (result,)
        places = range(len(results)) if self.by is None else self.by
        of_results: dict[Term, list[Term]] = {}
        for place, g, name in zip(places, by, self.names[len(arguments) :]):
            if g.ndim != results[place].ndim or any(map(terms.differ, g.extents, results[place].extents)):
                raise ValueError(f"{name}: must have the shape of the result, {results[place].extents}, has {g.extents}")
            of_results.setdefault(results[place], []).append(g)
        wanted = [viewed_whole(arguments[self.function.names.index(name)]) for name in self.asked(arguments)]
        found = derivative.gradients(list(of_results), of_results, wanted)
        gradients = dict[str, Term]()
        for name, x in zip(self.asked(arguments), found):
            if x is None:
                raise NoRule(f"{name}: no result depends on it")
            gradients[f"d{name}"] = x
        if self.division is None or not self.division.ahead:
            return gradients
        every = plain_products([*gradients.values()])
        products = {every[n]: given for n, given in zip(self.division.ahead, given[-len(self.division.ahead) :])}
        return dict(zip(gradients, replaced([*gradients.values()], products)))

    def asked(self, arguments: Sequence[Term]) -> tuple[str, ...]:
        """The names of the arguments whose gradients are given."""
        arrays = zip(self.function.names, map(viewed_whole, arguments))
        return self.wanted or tuple(name for name, x in arrays if x.ndim and x.what[1] in FLOATS)

    def _trace(self, shapes: tuple[Shape, ...]) -> Traced:
        return self._traced(self.definition, shapes)

    def _whole(self, shapes: tuple[Shape, ...]) -> Traced:
        """The gradients as terms, for arrays of these shapes."""
        return self._traced(self.definition_of_all, shapes)

    def made_of(self, shapes: tuple[Shape, ...]) -> list[Term]:
        """What kernels make of it, for arrays of these shapes."""
        return pieces(self._whole(shapes).roots, self.division or Division())

    def divided(self, shapes: tuple[Shape, ...]) -> tuple[Gradient, list[Term]]:
        """The same for arrays of these shapes, where it is known who computes what, for which there is a program each, that
        serves all lengths; and the products that it is given behind the arrays."""
        roots = self._whole(shapes).roots
        division = divided(roots)
        if division not in self.others:
            self.others[division] = Gradient(self.function, self.wanted, self.by, self.count, division)
        every = plain_products(roots)
        return self.others[division], [every[n] for n in division.ahead]

    def _of_shapes(self, shapes: tuple[Shape, ...]) -> tuple[Gradient, tuple[Shape, ...]]:
        """The same, with the shapes of these products."""
        other, products = self.divided(shapes)
        first = next(s.dtype for s in shapes if s.extents)
        return other, (*shapes, *(Shape(x.extents, first) for x in products))

    def _found(self, arrays: Sequence[Any]) -> tuple[Traced, list[Any]]:
        """See Fused."""
        flat, _ = self._rows(self._arguments(arrays))
        other, shapes = self._of_shapes(self._shapes(flat))
        found = other._trace(shapes)
        return found, other._candidates(found, ordinal_of(flat))

    def launches(self, shapes: Sequence[Shape], card: Any) -> list[tuple[Any, ...]]:
        """See Fused."""
        if self.division is not None:
            return super().launches(shapes, card)
        other, every = self._of_shapes(tuple(shapes))
        return other.launches(every, card)

    def _traced(self, definition: Callable, shapes: tuple[Shape, ...]) -> Traced:
        if not self.count:
            self._know(len(shapes) - len(self.function.names))
        return traced(definition, tuple(self.names), shapes)

    def _rows(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """Where leading axes are rows to the function, they are here."""
        of_function = len(self.function.names)
        flat, lead = self.function._rows(arrays[:of_function])
        by = [x.reshape(-1, x.shape[-1]) if lead else x for x in arrays[of_function:]]
        return [*flat, *by], lead

    def __call__(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> tuple[Any, ...]:
        """The gradients, a tuple: of NumPy's arrays by the definition, in float32; of a GPU's by the fused kernels."""
        arrays = self._arguments(given, named)
        if isinstance(next((x for x in arrays if hasattr(x, "shape")), None), np.ndarray):
            return self._ended(arrays, functools.partial(self._by_definition, out=None))
        return self.run(*arrays, stream=stream)

    def run(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> tuple[Any, ...]:
        """The same by the fused kernels, of NumPy's arrays in the interpreter."""
        if out is not None:
            raise TypeError(f"{self.name}: gives new arrays, and takes no out")
        arrays = self._arguments(given, named)
        if self.division is not None:
            return self._ended(arrays, lambda flat: super(Gradient, self).run(*flat, stream=stream))
        flat, _ = self._rows(arrays)
        shapes = self._shapes(flat)
        other, products = self.divided(shapes)
        inputs = self._whole(shapes).inputs
        ahead = by_framework(products, {x: a.T if s.turned else a for (_, x), a, s in zip(inputs, flat, shapes)})
        return tuple([x.reshape(y.shape) for x, y in zip(other.run(*flat, *ahead, stream=stream), self._likes(arrays))])

    def _likes(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments whose gradients are given."""
        found = self._whole(self._shapes(self._rows(arrays)[0])).inputs
        names = self.asked([x for _, x in found[: len(self.function.names)]])
        return [arrays[self.function.names.index(name)] for name in names]

    def _ended(self, arrays: Sequence[Any], run: Callable) -> tuple[Any, ...]:
        """The gradients, of pieces that `run` makes."""
        flat, _ = self._rows(arrays)
        shapes = self._shapes(flat)
        found = self._whole(shapes)
        made = pieces(found.roots, self.division or Division())
        known = {x: a.T if s.turned else a for (_, x), a, s in zip(found.inputs, flat, shapes)}
        if made:
            results = run(flat)
            known |= dict(zip(made, results if isinstance(results, tuple) else (results,)))
        names = self.asked([x for _, x in found.inputs][: len(self.function.names)])
        gradients = []
        for name, x in zip(names, by_framework(found.roots, known)):
            place = self.function.names.index(name)
            like = arrays[place]
            x = x.swapaxes(-1, -2) if shapes[place].turned else x
            gradients.append(
                cast(x.reshape(like.shape), dtype_of(like)) if dtype_of(x) != dtype_of(like) else x.reshape(like.shape)
            )
        return tuple(gradients)

    def _by_parts(self, *arrays: Any) -> Any:
        """The pieces, of torch's tensors, by its own operations in float32."""
        shapes = self._shapes(arrays)
        found = self._trace(shapes)
        wide = [cast(x, "float32") if dtype_of(x) in FLOATS else x for x in arrays]
        known = {x: a.T if s.turned else a for (_, x), a, s in zip(found.inputs, wide, shapes)}
        first = next(s.dtype for s in shapes if s.extents)
        return tuple([cast(x, root.held_as(first)) for x, root in zip(by_framework(found.roots, known), found.roots)])

    def explain(self, *arrays: Any) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline says, what the framework does."""
        flat, _ = self._rows(self._arguments(arrays))
        shapes = self._shapes(flat)
        found = self._whole(shapes)
        names = self.asked([x for _, x in found.inputs][: len(self.function.names)])
        division, products = divided(found.roots), plain_products(found.roots)
        made = pieces(found.roots, division)
        ahead = [f"product_{n} = {products[place]!r:.200}" for n, place in enumerate(division.ahead)]
        ends = [f"d{name} = {x!r:.200}" for name, x in zip(names, found.roots) if x not in made]
        kernels = super().explain(*arrays) if made else "There is no kernel."
        first = ["The framework makes ahead", *ahead] if ahead else []
        return "\n".join([*first, kernels, *(["The framework makes of this", *ends] if ends else [])])


def replaced(roots: Sequence[Term], known: Mapping[Term, Term]) -> list[Term]:
    """Terms with known ones in place of some, whose axes they have."""
    for x, y in known.items():
        for one, other in zip(x.names, y.names):
            same(one, other)
    found = dict(known)
    for x in walk(*roots):
        if x not in found:
            found[x] = terms.rebuilt(x, [found[y] for y in x.of]) if x.of else x
    return [found[x] for x in roots]


def viewed_whole(x: Term) -> Term:
    """The array that lies in memory, where an argument comes as its transpose."""
    return x.of[0] if x.operation == "transpose" else viewed(x)
