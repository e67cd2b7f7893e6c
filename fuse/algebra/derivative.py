"""The chain rule on terms: the gradients with respect to a definition's arguments, as terms.

    y = x * rsqrt(mean(x * x) + eps) * g, and dy, the gradient with respect to y

    scale = rsqrt(sum(x * x) / n + eps)
    dx = dy * g * scale - x * (sum(dy * g * x) * scale * scale * scale / n)
    dg = total(dy * (x * scale))                        # over the rows, which g lacks

GRADIENT_RULES has the vector-Jacobian product of each operation. Intermediates of the forward pass are terms of the arguments,
so kernels recompute them, and only the arguments are saved between the passes. A gradient is a sum of ScaledTerms, whose
numeric factors are combined here: a term that is added twice is scaled by 2, and terms that cancel are dropped.

A maximum gets no gradient where it only shifts the argument of an exp, as in softmax: the gradient is then zero for all inputs,
which identity testing finds (identity.py). So softmax needs no rule, nor does the logarithm of a sum of exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..language import term_operations, term_views, terms
from ..language.axes import unify
from ..language.functions import where
from ..language.graph import has_columns, walk
from ..language.maps import CASTS
from ..language.terms import Term
from .identity import identity
from .rules import factors, product

LN_2 = math.log(2)
KNOWN_ZEROS: dict[tuple, bool] = {}  # {key of a term: is it 0 for all inputs?} (see _is_zero)
NORMAL = 1 / math.sqrt(2 * math.pi)  # the density of the normal distribution at 0


class NoRule(TypeError):
    """An operation has no gradient rule, or broadcasts in a way that has none; the message says which."""


class ScaledTerm(NamedTuple):
    """One summand of a gradient: the number `factor` times the term."""

    factor: float
    term: Term

    def times(self, other: Term) -> ScaledTerm:
        """The product with another term. A number is multiplied into `factor`."""
        if other.operation == "number":
            return ScaledTerm(self.factor * other.attr, self.term)
        return self._replace(term=self.term * other)

    def over(self, other: Term) -> ScaledTerm:
        """The quotient by another term. A number is divided into `factor`."""
        if other.operation == "number":
            return ScaledTerm(self.factor / other.attr, self.term)
        return self._replace(term=self.term / other)

    def scale(self, number: float) -> ScaledTerm:
        """The summand times a number."""
        return self._replace(factor=self.factor * number)

    def where(self, mask: Term, otherwise: bool = False) -> ScaledTerm:
        """The summand where a mask holds, or with `otherwise` where it does not hold, and 0 elsewhere."""
        return self._replace(term=where(mask, 0.0, self.term) if otherwise else where(mask, self.term, 0.0))


GradientRule = Callable[..., Sequence["ScaledTerm | None"]]


def _mul(g: ScaledTerm, y: Term, a: Term, b: Term) -> Sequence[ScaledTerm | None]:
    return (g.times(a).scale(2), None) if a is b else (g.times(b), g.times(a))


def _gelu(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    below = where(terms.apply("abs", x) > 0.0, y / x, 0.5)  # of a normal distribution, what is below x
    return (g.times(below + x * terms.apply("exp", x * x * -0.5) * NORMAL),)


def _silu(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    gate = terms.apply("sigmoid", x)
    return (g.times(gate * (1.0 + x * (1.0 - gate))),)


def _matmul(g: ScaledTerm, y: Term, a: Term, b: Term) -> Sequence[ScaledTerm]:
    gradient = _match_axes(g.term, y)
    numbers, wide = ([one for one in factors(gradient) if any(one[1].axes) == has] for has in (False, True))
    rest = product(wide)
    if rest is None:  # the product of one row and one column is a number itself
        numbers, rest = [], gradient
    pair = ScaledTerm(g.factor, rest @ terms.transpose(b)), ScaledTerm(g.factor, terms.transpose(a) @ rest)
    for operation, number in numbers:  # after the products
        first, second = ((one.times(number) if operation == "mul" else one.over(number)) for one in pair)
        pair = first, second
    return pair


def _transpose(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    return (ScaledTerm(g.factor, _transpose_gradient(_match_axes(g.term, y))),)


def _max(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    greatest = x >= y  # ties share the gradient
    return (g.over(terms.reduce("sum", where(greatest, 1.0, 0.0))).where(greatest),)


def _half(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    term = _match_axes(g.term, y)
    zero = term * 0.0
    return (ScaledTerm(g.factor, term_operations.concat(*((term, zero) if y.attr == 0 else (zero, term)))),)


def _concat(g: ScaledTerm, y: Term, *parts: Term) -> Sequence[ScaledTerm]:
    if len(parts) != 2 or parts[0].extents != parts[1].extents or parts[0].axes[-1] is None:
        raise NoRule("concatenate: has a gradient only for two equal halves")
    return tuple([ScaledTerm(g.factor, term_operations.half(_match_axes(g.term, y), n)) for n in (0, 1)])


def _linear(operation: Callable[[Term, Term], Term]) -> GradientRule:
    """The gradient rule of an operation that only moves elements of its first argument: `operation` moves them back."""
    return lambda g, y, x, *rest: (ScaledTerm(g.factor, operation(_match_axes(g.term, y), y)), *[None] * len(rest))


GRADIENT_RULES: dict[str, GradientRule] = {  # {operation: (g, y, *args) -> gradients of its args}, where y = operation(*args)
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, g.scale(-1)),
    "mul": _mul,
    "div": lambda g, y, a, b: (g.over(b), g.times(y).over(b).scale(-1)),
    "neg": lambda g, y, x: (g.scale(-1),),
    "where": lambda g, y, mask, a, b: (None, g.where(mask), g.where(mask, otherwise=True)),
    "maximum": lambda g, y, a, b: (g.where(a >= b), g.where(a >= b, otherwise=True)),
    "minimum": lambda g, y, a, b: (g.where(a <= b), g.where(a <= b, otherwise=True)),
    "exp": lambda g, y, x: (g.times(y),),
    "exp2": lambda g, y, x: (g.times(y).scale(LN_2),),
    "log": lambda g, y, x: (g.over(x),),
    "sqrt": lambda g, y, x: (g.over(y).scale(0.5),),
    "rsqrt": lambda g, y, x: (g.times(y * y * y).scale(-0.5),),
    "tanh": lambda g, y, x: (g.times(1.0 - y * y),),
    "sigmoid": lambda g, y, x: (g.times(y * (1.0 - y)),),
    "silu": _silu,
    "gelu": _gelu,
    "relu": lambda g, y, x: (g.where(x > 0.0),),
    "abs": lambda g, y, x: (ScaledTerm(g.factor, where(x > 0.0, g.term, where(x < 0.0, -g.term, 0.0))),),
    **{name: (lambda g, y, x: (g,)) for name in CASTS if CASTS[name].itemsize > 1},
    "sum": lambda g, y, x: (g,),
    "max": _max,
    "matmul": _matmul,
    "transpose": _transpose,
    "concat": _concat,
    "half": _half,
    "dropout": lambda g, y, x, p, seed: (
        ScaledTerm(g.factor, term_operations.dropout(_match_axes(g.term, y), p, seed)),
        None,
        None,
    ),
    "pick": lambda g, y, x, index: (g.where(term_operations.is_column(x, index)), None),
    "split": _linear(lambda g, y: term_views.merge_heads(g)),
    "merge_heads": _linear(lambda g, y: term_views.split_like(g, y.args[0])),
}
for _comparison in ("less", "less_equal", "greater", "greater_equal"):
    GRADIENT_RULES[_comparison] = lambda g, y, a, b: (None, None)


def gradients(
    roots: Sequence[Term], root_gradients: Mapping[Term, Sequence[Term]], requested: Sequence[Term]
) -> list[Term | None]:
    """The gradients with respect to the `requested` terms; None where no root depends on one. root_gradients: those of each
    root; there are several if a function returns one term twice. NoRule: an operation on the way has no gradient."""
    nodes = list(walk(*roots))
    on_path = set(requested)
    for x in nodes:
        if any(y in on_path for y in x.args):
            on_path.add(x)
    parts: dict[Term, list[ScaledTerm]] = {
        x: [ScaledTerm(1.0, _match_axes(g, x)) for g in by_root] for x, by_root in root_gradients.items()
    }
    for x in reversed(nodes):
        if x not in on_path or x not in parts or not x.args:
            continue
        if x.operation not in GRADIENT_RULES:
            raise NoRule(
                f"{x.operation}: has no gradient yet: of torch's tensors that require grad, loss.backward() goes by torch's "
                f"operations; {x!r:.200}"
            )
        total = _sum_parts(parts[x])
        if total is None or (x.operation == "max" and _is_zero(total.term)):
            continue
        for y, part in zip(x.args, GRADIENT_RULES[x.operation](total, x, *x.args)):
            contribution = _reduce_to_operand(part, x, y) if part is not None and y in on_path else None
            if contribution is not None:
                parts.setdefault(y, []).append(contribution)
    sums = [_sum_parts(parts.get(x, [])) for x in requested]
    return [None if one is None else _match_axes(_as_term(one), x) for one, x in zip(sums, requested)]


def _sum_parts(parts: Sequence[ScaledTerm]) -> ScaledTerm | None:
    """The sum of the summands, with equal terms combined; None if they cancel."""
    numbers: dict[Term, float] = {}
    for part in _merge_totals(parts):
        numbers[part.term] = numbers.get(part.term, 0.0) + part.factor
    summands = sorted(
        [ScaledTerm(factor, x) for x, factor in numbers.items() if factor], key=lambda part: part.factor < 0
    )  # negative ones last
    if len(summands) < 2:
        return summands[0] if summands else None
    halves = _concat_halves(summands)
    if halves is not None:
        return ScaledTerm(1.0, halves)
    total = _as_term(summands[0])
    for factor, x in summands[1:]:
        total = total - _as_term(ScaledTerm(-factor, x)) if factor < 0 else total + _as_term(ScaledTerm(factor, x))
    return ScaledTerm(1.0, total)


def _merge_totals(parts: Sequence[ScaledTerm]) -> list[ScaledTerm]:
    """The summands with totals over the same axes merged: a sum of totals becomes the total of a sum."""
    totals: dict[tuple, list[ScaledTerm]] = {}
    for factor, x in parts:
        if x.operation == "total":
            totals.setdefault((x.attr, x.args[0].ndim), []).append(ScaledTerm(factor, x.args[0]))
    if all(len(group) < 2 for group in totals.values()):
        return [*parts]
    sums = [(axes, _sum_parts(group)) for (axes, _), group in totals.items()]
    rest = [part for part in parts if part.term.operation != "total"]
    return rest + [ScaledTerm(one.factor, term_operations.total_along(one.term, axes)) for axes, one in sums if one]


def _concat_halves(parts: Sequence[ScaledTerm]) -> Term | None:
    """If the two summands are gradients of the two halves of one row, these halves concatenated, as one term; otherwise
    None."""
    if len(parts) != 2 or not all(part.term.operation == "concat" for part in parts):
        return None
    (a, zero), (other_zero, b) = sorted((part.term.args for part in parts), key=lambda terms: _is_times_zero(terms[0]))
    if not _is_times_zero(zero) or not _is_times_zero(other_zero) or _is_times_zero(a) or _is_times_zero(b):
        return None
    first = next(part.factor for part in parts if part.term.args == (a, zero))
    second = next(part.factor for part in parts if part.term.args == (other_zero, b))
    return term_operations.concat(_as_term(ScaledTerm(first, a)), _as_term(ScaledTerm(second, b)))


def _is_times_zero(x: Term) -> bool:
    """Is the term a product with 0, as _half makes it for the other half of the row?"""
    return x.operation == "mul" and x.args[1].operation == "number" and x.args[1].attr == 0


def _as_term(part: ScaledTerm) -> Term:
    """The summand as one term."""
    return part.term if part.factor == 1 else -part.term if part.factor == -1 else part.term * part.factor


def _reduce_to_operand(part: ScaledTerm, x: Term, y: Term) -> ScaledTerm | None:
    """The gradient that an operation x returns to its operand y, summed over the axes along which y was broadcast; None if it
    is 0."""
    term = part.term
    has = ((None,) * (x.ndim - term.ndim) + term.axes)[max(0, term.ndim - x.ndim) :]  # a total over rows keeps its axes
    needs = (None,) * (x.ndim - y.ndim) + y.axes
    if x.operation not in (
        "sum",
        "max",
        "matmul",
        "transpose",
        "concat",
        "half",
        "split",
        "merge_heads",
        "pick",
    ):  # elementwise
        for place, axis in enumerate(x.axes):
            if axis is not None and needs[place] is None and has[place] is None:
                if place != x.ndim - 1:
                    raise NoRule(f"{x.operation}: an operand that broadcasts along rows has no gradient rule: {x!r:.200}")
                part = part.times(terms.length(x))
        if needs and has[-1] is not None and needs[-1] is None:
            summed = _sum_rows(part.term)
            if summed is None:
                return None
            part = summed.scale(part.factor)
    extra = [n for n in range(1, part.term.ndim + 1) if part.term.axes[-n] is not None and (n > y.ndim or y.axes[-n] is None)]
    return ScaledTerm(part.factor, term_operations.total(part.term, y)) if extra else part


def _sum_rows(x: Term) -> ScaledTerm | None:
    """The sum of each row, as a summand. Factors with one number per row are moved out of the sum, so that fewer reductions
    depend on others. None if the sum is 0 for all inputs, such as that of x - mean(x)."""
    scales, inner = _split_row_scales(x)
    if scales and inner is not None:
        total = _sum_rows(inner)
        for operation, scale in scales if total else ():
            total = total and (total.times(scale) if operation == "mul" else total.over(scale))
        return total
    row_sum = terms.reduce("sum", x)
    if x.operation in ("add", "sub"):
        if _is_zero(row_sum):
            return None
        if all(map(has_columns, x.args)) and any(_split_row_scales(y)[0] for y in x.args):
            a, b = map(_sum_rows, x.args)
            return _sum_parts([part for part in (a, b and b.scale(-1 if x.operation == "sub" else 1)) if part])
    return ScaledTerm(1.0, row_sum)


def _split_row_scales(x: Term) -> tuple[list[tuple[str, Term]], Term | None]:
    """(the factors of x that have one number per row, the product of all other factors)"""
    parts = factors(x)
    return [one for one in parts if not has_columns(one[1])], product([one for one in parts if has_columns(one[1])])


def _match_axes(g: Term, term: Term) -> Term:
    """The gradient g, after its axes were unified with those of the term that it belongs to. NoRule: g lacks one of these axes,
    because it is constant along it."""
    gradient_axes, term_axes = ((None,) * (max(g.ndim, term.ndim) - x.ndim) + x.axes for x in (g, term))
    for axis, term_axis in zip(gradient_axes, term_axes):
        if (axis is None) != (term_axis is None):
            raise NoRule(f"the gradient {g!r:.100} of {term!r:.100} is constant along an axis")
        unify(axis, term_axis)
    return g


def _transpose_gradient(g: Term) -> Term:
    """The transpose of a gradient. That of a.T @ b is b.T @ a, so that the product itself need not be transposed."""
    if g.operation == "matmul" and g.args[0].operation == "transpose":
        return terms.transpose(g.args[1]) @ g.args[0].args[0]
    return terms.transpose(g)


def _is_zero(x: Term) -> bool:
    """Is the term 0 for all inputs, by identity testing? The answer does not depend on lengths, so it is remembered for equal
    terms of any lengths."""
    order = {y: n for n, y in enumerate(walk(x))}
    contents = [y.attr if y.operation in ("number", "half", "total") else y.operation == "input" and y.attr[0] for y in order]
    key = tuple([(y.operation, *map(order.get, y.args), content, *map(bool, y.axes)) for y, content in zip(order, contents)])
    if key not in KNOWN_ZEROS:
        try:
            KNOWN_ZEROS[key] = identity([x], [x * 2.0]).equal
        except ValueError:  # something has no inverse
            KNOWN_ZEROS[key] = False
    return KNOWN_ZEROS[key]
