"""The chain rule on terms: gradients of a definition's arguments as terms, which are definitions like others.

    y = x * rsqrt(mean(x * x) + eps) * g, and dy, the gradient by y

    scale = rsqrt(sum(x * x) / n + eps)
    dx = dy * g * scale - x * (sum(dy * g * x) * scale * scale * scale / n)
    dg = total(dy * (x * scale))                        # over the rows, which g has not

BACK says of each operation what it gives back to what it is of. What it computed is a term that is there already; a kernel
computes it once more from the arguments, so nothing but them is kept between the passes. A gradient is a sum of Parts, whose
numbers are multiplied here: what is added twice is twice that, and what cancels is gone.

Of a maximum nothing may come back where it only shifts what an exp is of, as in softmax: its gradient is then zero whatever
the numbers are, which identity testing finds (identity.py). So softmax needs no rule, nor does the logarithm of a sum of
exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import terms
from .axes import unify
from .functions import CASTS
from .graph import along, walk
from .identity import identity
from .language import where
from .rules import factors, product
from .terms import Term

LN_2 = math.log(2)
ZEROS: dict[tuple, bool] = {}  # what is known of terms (see _is_zero)
NORMAL = 1 / math.sqrt(2 * math.pi)  # of a normal distribution, where it is greatest


class NoRule(TypeError):
    """There is no rule for the gradient of an operation, or for the way in which it broadcasts; the message says which."""


class ScaledTerm(NamedTuple):
    """A part of a gradient: the number `by` times the term."""

    by: float
    term: Term

    def times(self, other: Term) -> ScaledTerm:
        """The product with another term. A number is multiplied into `by`."""
        if other.operation == "number":
            return ScaledTerm(self.by * other.attr, self.term)
        return self._replace(term=self.term * other)

    def over(self, other: Term) -> ScaledTerm:
        """The quotient by another term. A number is divided into `by`."""
        if other.operation == "number":
            return ScaledTerm(self.by / other.attr, self.term)
        return self._replace(term=self.term / other)

    def scaled(self, number: float) -> ScaledTerm:
        """The product with a number."""
        return self._replace(by=self.by * number)

    def where(self, mask: Term, otherwise: bool = False) -> ScaledTerm:
        """The part where a mask holds, or with `otherwise` where it does not hold, and 0 elsewhere."""
        return self._replace(term=where(mask, 0.0, self.term) if otherwise else where(mask, self.term, 0.0))


Back = Callable[..., Sequence["ScaledTerm | None"]]


def _mul(g: ScaledTerm, y: Term, a: Term, b: Term) -> Sequence[ScaledTerm | None]:
    return (g.times(a).scaled(2), None) if a is b else (g.times(b), g.times(a))


def _gelu(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    share = where(terms.apply("abs", x) > 0.0, y / x, 0.5)  # of a normal distribution, what is below x
    return (g.times(share + x * terms.apply("exp", x * x * -0.5) * NORMAL),)


def _silu(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    gate = terms.apply("sigmoid", x)
    return (g.times(gate * (1.0 + x * (1.0 - gate))),)


def _matmul(g: ScaledTerm, y: Term, a: Term, b: Term) -> Sequence[ScaledTerm]:
    whole = _whole(g.term, y)
    numbers, wide = ([one for one in factors(whole) if any(one[1].axes) == has] for has in (False, True))
    rest = product(wide)
    if rest is None:  # the product of one row and one column is a number itself
        numbers, rest = [], whole
    found = ScaledTerm(g.by, rest @ terms.transpose(b)), ScaledTerm(g.by, terms.transpose(a) @ rest)
    for how, number in numbers:  # behind the products
        first, second = ((one.times(number) if how == "mul" else one.over(number)) for one in found)
        found = first, second
    return found


def _transpose(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    return (ScaledTerm(g.by, _turned(_whole(g.term, y))),)


def _max(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    greatest = x >= y  # of which there may be several
    return (g.over(terms.reduce("sum", where(greatest, 1.0, 0.0))).where(greatest),)


def _half(g: ScaledTerm, y: Term, x: Term) -> Sequence[ScaledTerm]:
    term = _whole(g.term, y)
    zero = term * 0.0
    return (ScaledTerm(g.by, terms.concat(*((term, zero) if y.attr == 0 else (zero, term)))),)


def _concat(g: ScaledTerm, y: Term, *of: Term) -> Sequence[ScaledTerm]:
    if len(of) != 2 or of[0].extents != of[1].extents or of[0].axes[-1] is None:
        raise NoRule("concatenate: has a gradient of two halves")
    return tuple([ScaledTerm(g.by, terms.half(_whole(g.term, y), n)) for n in (0, 1)])


def _linear(operation: Callable[[Term, Term], Term]) -> Back:
    """The rule of an operation that only moves elements of its first argument: the gradient is moved back by `operation`."""
    return lambda g, y, x, *rest: (ScaledTerm(g.by, operation(_whole(g.term, y), y)), *[None] * len(rest))


BACK: dict[str, Back] = {  # of y, made of others, with the gradient g by y: those by the others
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, g.scaled(-1)),
    "mul": _mul,
    "div": lambda g, y, a, b: (g.over(b), g.times(y).over(b).scaled(-1)),
    "neg": lambda g, y, x: (g.scaled(-1),),
    "where": lambda g, y, mask, a, b: (None, g.where(mask), g.where(mask, otherwise=True)),
    "maximum": lambda g, y, a, b: (g.where(a >= b), g.where(a >= b, otherwise=True)),
    "minimum": lambda g, y, a, b: (g.where(a <= b), g.where(a <= b, otherwise=True)),
    "exp": lambda g, y, x: (g.times(y),),
    "exp2": lambda g, y, x: (g.times(y).scaled(LN_2),),
    "log": lambda g, y, x: (g.over(x),),
    "sqrt": lambda g, y, x: (g.over(y).scaled(0.5),),
    "rsqrt": lambda g, y, x: (g.times(y * y * y).scaled(-0.5),),
    "tanh": lambda g, y, x: (g.times(1.0 - y * y),),
    "sigmoid": lambda g, y, x: (g.times(y * (1.0 - y)),),
    "silu": _silu,
    "gelu": _gelu,
    "relu": lambda g, y, x: (g.where(x > 0.0),),
    "abs": lambda g, y, x: (ScaledTerm(g.by, where(x > 0.0, g.term, where(x < 0.0, -g.term, 0.0))),),
    **{name: (lambda g, y, x: (g,)) for name in CASTS if name != "fp8e4m3"},
    "sum": lambda g, y, x: (g,),
    "max": _max,
    "matmul": _matmul,
    "transpose": _transpose,
    "concat": _concat,
    "half": _half,
    "dropout": lambda g, y, x, p, seed: (ScaledTerm(g.by, terms.dropout(_whole(g.term, y), p, seed)), None, None),
    "pick": lambda g, y, x, index: (g.where(terms.is_column(x, index)), None),
    "split": _linear(lambda g, y: terms.merged(g)),
    "merged": _linear(lambda g, y: terms.split_like(g, y.args[0])),
}
for _comparison in ("less", "less_equal", "greater", "greater_equal"):
    BACK[_comparison] = lambda g, y, a, b: (None, None)


def gradients(roots: Sequence[Term], by: Mapping[Term, Sequence[Term]], wanted: Sequence[Term]) -> list[Term | None]:
    """The gradients with respect to the `wanted` terms; None where no root depends on one. by: for each root its own
    gradients; there are several if a function returns the same term twice. NoRule: an operation on the way has no gradient."""
    every = list(walk(*roots))
    leads = set(wanted)
    for x in every:
        if any(y in leads for y in x.args):
            leads.add(x)
    parts: dict[Term, list[ScaledTerm]] = {x: [ScaledTerm(1.0, _whole(g, x)) for g in given] for x, given in by.items()}
    for x in reversed(every):
        if x not in leads or x not in parts or not x.args:
            continue
        if x.operation not in BACK:
            raise NoRule(f"{x.operation}: has no gradient yet: {x!r:.200}")
        found = _added(parts[x])
        if found is None or (x.operation == "max" and _is_zero(found.term)):
            continue
        for y, part in zip(x.args, BACK[x.operation](found, x, *x.args)):
            fitted = _fitted(part, x, y) if part is not None and y in leads else None
            if fitted is not None:
                parts.setdefault(y, []).append(fitted)
    sums = [_added(parts.get(x, [])) for x in wanted]
    return [None if one is None else _whole(_written(one), x) for one, x in zip(sums, wanted)]


def _added(parts: Sequence[ScaledTerm]) -> ScaledTerm | None:
    """The sum of the parts, in which equal terms are joined; None if they cancel."""
    numbers: dict[Term, float] = {}
    for part in _totals_as_one(parts):
        numbers[part.term] = numbers.get(part.term, 0.0) + part.by
    left = sorted(
        [ScaledTerm(by, x) for x, by in numbers.items() if by], key=lambda part: part.by < 0
    )  # what is taken away is last
    if len(left) < 2:
        return left[0] if left else None
    halves = _side_by_side(left)
    if halves is not None:
        return ScaledTerm(1.0, halves)
    found = _written(left[0])
    for by, x in left[1:]:
        found = found - _written(ScaledTerm(-by, x)) if by < 0 else found + _written(ScaledTerm(by, x))
    return ScaledTerm(1.0, found)


def _totals_as_one(parts: Sequence[ScaledTerm]) -> list[ScaledTerm]:
    """The parts with totals over the same axes joined: the sum of totals becomes the total of a sum."""
    totals: dict[tuple, list[ScaledTerm]] = {}
    for by, x in parts:
        if x.operation == "total":
            totals.setdefault((x.attr, x.args[0].ndim), []).append(ScaledTerm(by, x.args[0]))
    if all(len(some) < 2 for some in totals.values()):
        return [*parts]
    sums = [(what, _added(some)) for (what, _), some in totals.items()]
    rest = [part for part in parts if part.term.operation != "total"]
    return rest + [ScaledTerm(one.by, terms.total_along(one.term, what)) for what, one in sums if one]


def _side_by_side(parts: Sequence[ScaledTerm]) -> Term | None:
    """If the two parts are gradients by the two halves of one row, these halves side by side, as one term; otherwise None."""
    if len(parts) != 2 or not all(part.term.operation == "concat" for part in parts):
        return None
    (a, zero), (none, b) = sorted((part.term.args for part in parts), key=lambda of: _is_nothing(of[0]))
    if not _is_nothing(zero) or not _is_nothing(none) or _is_nothing(a) or _is_nothing(b):
        return None
    first = next(part.by for part in parts if part.term.args == (a, zero))
    second = next(part.by for part in parts if part.term.args == (none, b))
    return terms.concat(_written(ScaledTerm(first, a)), _written(ScaledTerm(second, b)))


def _is_nothing(x: Term) -> bool:
    """Is it a product with 0, as _half makes it for the other half of the row?"""
    return x.operation == "mul" and x.args[1].operation == "number" and x.args[1].attr == 0


def _written(part: ScaledTerm) -> Term:
    """The part as a term."""
    return part.term if part.by == 1 else -part.term if part.by == -1 else part.term * part.by


def _fitted(part: ScaledTerm, x: Term, y: Term) -> ScaledTerm | None:
    """The gradient that an operation x returns to its operand y, summed over the axes along which y was broadcast; None if it
    is 0."""
    term = part.term
    has = ((None,) * (x.ndim - term.ndim) + term.axes)[max(0, term.ndim - x.ndim) :]  # a total over rows keeps their axis
    needs = (None,) * (x.ndim - y.ndim) + y.axes
    if x.operation not in ("sum", "max", "matmul", "transpose", "concat", "half", "split", "merged", "pick"):  # of its shape
        for place, axis in enumerate(x.axes):
            if axis is not None and needs[place] is None and has[place] is None:
                if place != x.ndim - 1:
                    raise NoRule(f"{x.operation}: what broadcasts along rows has a gradient that does: {x!r:.200}")
                part = part.times(terms.length(x))
        if needs and has[-1] is not None and needs[-1] is None:
            summed = _summed(part.term)
            if summed is None:
                return None
            part = summed.scaled(part.by)
    extra = [n for n in range(1, part.term.ndim + 1) if part.term.axes[-n] is not None and (n > y.ndim or y.axes[-n] is None)]
    return ScaledTerm(part.by, terms.total(part.term, y)) if extra else part


def _summed(x: Term) -> ScaledTerm | None:
    """The sum of each row. Factors that are one number for each row are taken out of the sum, so that fewer reductions have to
    wait for others. None if the sum is 0 for all inputs, such as that of x - mean(x)."""
    scales, inner = _scales_apart(x)
    if scales and inner is not None:
        found = _summed(inner)
        for how, scale in scales if found else ():
            found = found and (found.times(scale) if how == "mul" else found.over(scale))
        return found
    whole = terms.reduce("sum", x)
    if x.operation in ("add", "sub"):
        if _is_zero(whole):
            return None
        if all(map(along, x.args)) and any(_scales_apart(y)[0] for y in x.args):
            a, b = map(_summed, x.args)
            return _added([part for part in (a, b and b.scaled(-1 if x.operation == "sub" else 1)) if part])
    return ScaledTerm(1.0, whole)


def _scales_apart(x: Term) -> tuple[list[tuple[str, Term]], Term | None]:
    """(the factors of x that are one number for each row, the product of all other factors)"""
    parts = factors(x)
    return [one for one in parts if not along(one[1])], product([one for one in parts if along(one[1])])


def _whole(g: Term, like: Term) -> Term:
    """A gradient that has all axes of the term that it belongs to. NoRule: it lacks one, because it is the same along that
    axis."""
    ours, its = ((None,) * (max(g.ndim, like.ndim) - x.ndim) + x.axes for x in (g, like))
    for axis, wanted in zip(ours, its):
        if (axis is None) != (wanted is None):
            raise NoRule(f"a gradient that is the same along an axis: {g!r:.100} of {like!r:.100}")
        unify(axis, wanted)
    return g


def _turned(g: Term) -> Term:
    """The transpose of a gradient. That of a.T @ b is b.T @ a, so that the product itself need not be transposed."""
    if g.operation == "matmul" and g.args[0].operation == "transpose":
        return terms.transpose(g.args[1]) @ g.args[0].args[0]
    return terms.transpose(g)


def _is_zero(x: Term) -> bool:
    """Is the term 0 for all inputs? Identity testing finds it out (identity.py). The answer does not depend on lengths, so it
    is kept for equal terms of other lengths."""
    order = {y: n for n, y in enumerate(walk(x))}
    what = [y.attr if y.operation in ("number", "half", "total") else y.operation == "input" and y.attr[0] for y in order]
    key = tuple([(y.operation, *map(order.get, y.args), its, *map(bool, y.axes)) for y, its in zip(order, what)])
    if key not in ZEROS:
        try:
            ZEROS[key] = identity([x], [x * 2.0]).equal
        except ValueError:  # something has no inverse
            ZEROS[key] = False
    return ZEROS[key]
