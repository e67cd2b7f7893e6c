"""Terms: what a function of arrays says, as a graph.

    x * rsqrt(mean(x * x) + 1e-5)      on Terms is a Term: x * rsqrt(sum(x * x) / 4096 + 1e-05)

A Term has an operation, the terms that it is of, and a shape. Equal terms are one object, so that what is shared is seen. There
are few operations, so that rules and templates are few: inputs and numbers; maps, element by element, which broadcast
(functions.MAPS); sum and max along the last axis, which stays with length 1; matmul; transpose; concat, along the last axis.
mean, softmax, variance are made of these (language.py).

Axes have names besides their lengths: those that an operation says are one have one name. So a term knows that the columns of
x are the rows of w, whatever their numbers are, and the axes of a call's arrays follow (`axes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .functions import MAPS

SIZES = {"bfloat16": 2, "float16": 2}  # bytes of an element, where it is not 4


class Axis:
    """A name for an axis. Two may turn out to be one: `same`."""

    def __init__(self):
        self.known_as: Axis = self

    @property
    def root(self) -> Axis:
        """What it is known as."""
        found = self
        while found.known_as is not found:
            found = found.known_as
        self.known_as = found
        return found


def same(one: Axis | None, other: Axis | None) -> Axis | None:
    """Two names for one axis; None is an axis of length 1 that broadcasts."""
    if one is None or other is None:
        return one or other
    one.root.known_as = other.root
    return other.root


class Term:
    """An operation on terms: see the module. Make one by `term` or by operators.

    operation: "input", "number", "length" (of an axis), "sum", "max", "matmul", "transpose", "concat", or a map's name. of:
    terms. what: an input's name and dtype, a number's value, a length's axis and value. extents: one for each axis; it has two,
    one or none. names: their Axis, None for 1."""

    __slots__ = ("extents", "names", "of", "operation", "what")
    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to us

    def __init__(
        self, operation: str, of: tuple[Term, ...], what: Any, extents: tuple[int, ...], names: tuple[Axis | None, ...]
    ):
        self.operation, self.of, self.what, self.extents, self.names = operation, of, what, extents, names

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents. A function that reads them means what it means for these lengths alone."""
        return self.extents

    @property
    def ndim(self) -> int:
        return len(self.extents)

    @property
    def nbytes(self) -> int:
        """Of an argument, or of a term that is kept in memory, in 16 bits an element."""
        return math.prod(self.extents) * (SIZES.get(self.what[1], 4) if self.operation == "input" else 2)

    @property
    def T(self) -> Term:
        """Its transpose."""
        return transpose(self)

    def __repr__(self):
        from .writing import expression

        return expression(self)

    def __iter__(self):
        raise TypeError("an array of a fused function cannot be iterated over: its rows are computed together")

    def __bool__(self):
        raise TypeError("an `if` on an array of a fused function is not known before it runs: use fuse.where")

    def __getitem__(self, index):
        raise TypeError("arrays of a fused function are not indexed: reduce them, or concatenate and split outside")

    def __add__(self, other):
        return apply("add", self, other)

    def __radd__(self, other):
        return apply("add", other, self)

    def __sub__(self, other):
        return apply("sub", self, other)

    def __rsub__(self, other):
        return apply("sub", other, self)

    def __mul__(self, other):
        return apply("mul", self, other)

    def __rmul__(self, other):
        return apply("mul", other, self)

    def __truediv__(self, other):
        return apply("div", self, other)

    def __rtruediv__(self, other):
        return apply("div", other, self)

    def __neg__(self):
        return apply("neg", self)

    def __abs__(self):
        return apply("abs", self)

    def __pow__(self, power):
        if power != 2:
            raise TypeError(f"**: a fused function has squares only, got {power!r}: use exp(log(x) * p), sqrt or rsqrt")
        return self * self

    def __matmul__(self, other):
        return matmul(self, other)

    def __rmatmul__(self, other):
        return matmul(other, self)

    def __lt__(self, other):
        return apply("less", self, other)

    def __le__(self, other):
        return apply("less_equal", self, other)

    def __gt__(self, other):
        return apply("greater", self, other)

    def __ge__(self, other):
        return apply("greater_equal", self, other)


# ---- making them -----------------------------------------------------------------------------------------------------
class Space:
    """Terms by what they are, so that equal ones are one object."""

    def __init__(self):
        self.terms: dict[tuple, Term] = {}

    def term(self, operation: str, of: Sequence[Term], what: Any, extents: tuple[int, ...], names: tuple) -> Term:
        """The one term of this operation on these terms."""
        key = operation, tuple(map(id, of)), what, type(what)
        if key not in self.terms:
            self.terms[key] = Term(operation, tuple(of), what, extents, names)
        return self.terms[key]


SPACES: list[Space] = [Space()]  # the last one is where terms are made


def _made(operation, of=(), what=None, extents=(), names=()) -> Term:
    return SPACES[-1].term(operation, of, what, extents, names)


def source(name: str, extents: Sequence[int], dtype: str) -> Term:
    """An argument of the function: an array, or a number where there are no extents."""
    return _made("input", (), (name, dtype), tuple(extents), tuple(None if n == 1 else Axis() for n in extents))


def number(value: float) -> Term:
    """A constant."""
    return _made("number", (), float(value))


def length(x: Any) -> Term:
    """How many columns a term has: a number that a kernel reads from its arrays."""
    return _made("length", (), (x.names[-1] and x.names[-1].root, x.extents[-1]))


def lifted(x: Any) -> Term:
    """A term as it is, a number as a term. TypeError: neither."""
    if isinstance(x, Term):
        return x
    if isinstance(x, (int, float)) or (hasattr(x, "__float__") and getattr(x, "ndim", 1) == 0):
        return number(float(x))
    raise TypeError(f"a fused function takes arrays as its arguments, and this comes from elsewhere: {x!r:.80}")


def apply(name: str, *given: Any) -> Term:
    """A map of terms and numbers, which broadcast as NumPy's do. Numbers alone are computed. ValueError: they do not."""
    of = [lifted(x) for x in given]
    if all(x.operation == "number" for x in of):
        return number(MAPS[name].numpy(*[x.what for x in of]))
    rank = max(x.ndim for x in of)
    extents, names = [], []
    for place in range(-rank, 0):
        extent, axis = 1, None
        for x in of:
            if x.ndim < -place or x.names[place] is None:
                continue
            if axis is not None and extent != x.extents[place]:
                raise ValueError(f"{name}: shapes {', '.join(str(y.extents) for y in of if y.ndim)} do not broadcast: {of}")
            extent, axis = x.extents[place], same(x.names[place], axis)
        extents.append(extent)
        names.append(axis)
    return _made(name, of, None, tuple(extents), tuple(names))


def reduce(kind: str, x: Any, axis: int = -1) -> Term:
    """The sum or max of each row, an axis of length 1."""
    x = lifted(x)
    if x.ndim == 0 or axis not in (-1, x.ndim - 1):
        raise TypeError(f"{kind}: reduces the last axis, got {axis=} of an array of shape {x.extents}")
    return x if x.names[-1] is None else _made(kind, (x,), None, (*x.extents[:-1], 1), (*x.names[:-1], None))


def matmul(a: Any, b: Any) -> Term:
    """a @ b of two matrices."""
    a, b = lifted(a), lifted(b)
    if a.ndim != 2 or b.ndim != 2 or a.extents[1] != b.extents[0]:
        raise ValueError(f"@: takes (m, k) and (k, n), got {a.extents} and {b.extents}: {a} @ {b}")
    same(a.names[1], b.names[0])
    return _made("matmul", (a, b), None, (a.extents[0], b.extents[1]), (a.names[0], b.names[1]))


def transpose(x: Any) -> Term:
    """The transpose of a matrix."""
    x = lifted(x)
    if x.ndim != 2:
        raise ValueError(f"transpose: takes a matrix, got {x.extents}")
    return x.of[0] if x.operation == "transpose" else _made("transpose", (x,), None, x.extents[::-1], x.names[::-1])


def concat(*parts: Any) -> Term:
    """Matrices side by side."""
    of = [lifted(x) for x in parts]
    if any(x.ndim != 2 or x.extents[0] != of[0].extents[0] for x in of):
        raise ValueError(f"concatenate: takes matrices of as many rows, got {[x.extents for x in of]}")
    rows = None
    for x in of:
        rows = same(x.names[0], rows)
    return _made("concat", of, None, (of[0].extents[0], sum(x.extents[1] for x in of)), (rows, Axis()))


def rebuilt(x: Term, of: Sequence[Term]) -> Term:
    """The same operation on other terms."""
    if x.operation in MAPS:
        return apply(x.operation, *of)
    if x.operation in ("sum", "max"):
        return reduce(x.operation, of[0])
    others: dict[str, Callable] = {"matmul": matmul, "transpose": transpose, "concat": concat}
    return others[x.operation](*of) if of else x


# ---- looking at them -------------------------------------------------------------------------------------------------
def walk(*roots: Term) -> Iterator[Term]:
    """Every term that these are made of, each once, and after those that it is of."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        if ready:
            yield x
        elif id(x) not in seen:
            seen.add(id(x))
            stack.append((x, True))
            stack.extend((y, False) for y in reversed(x.of))


def between(roots: Sequence[Term], leaves: Sequence[Term], with_leaves: bool = False) -> list[Term]:
    """The terms that lead from leaves to roots, each after its parts."""
    ends, found, stack = set(leaves), set(), list(roots)
    while stack:
        x = stack.pop()
        if x not in found and (with_leaves or x not in ends):
            found.add(x)
            if x not in ends:
                stack.extend(x.of)
    return [x for x in walk(*roots) if x in found]


def is_tile(x: Term) -> bool:
    """Has it rows and columns?"""
    return x.ndim == 2 and x.names[0] is not None and x.names[1] is not None


def along(x: Term) -> bool:
    """Has it columns?"""
    return x.ndim > 0 and x.names[-1] is not None


def inputs(*roots: Term) -> list[Term]:
    """The arguments that these read."""
    return [x for x in walk(*roots) if x.operation == "input"]


def axes(*terms: Term) -> list[str]:
    """The axes of each term, a letter an axis; those that are one have one. Those of length 1 alone have each their own."""
    letters = itertools.chain("mknabcdfghijlopqruvwxyz", map(chr, itertools.count(0x100)))
    known: dict[Axis, str] = {}
    found = []
    for x in terms:
        roots = [Axis() if name is None else name.root for name in x.names]
        for root in roots:
            if root not in known:
                known[root] = next(letters)
        found.append("".join(known[root] for root in roots))
    return found
