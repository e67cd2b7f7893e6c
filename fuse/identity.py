"""Identity testing: are two terms equal, whatever their inputs are?

Both are computed with random numbers of the field of P = 2^61 - 1 elements, exactly. Two rational functions of degree d that
differ are equal at a random point with a chance of at most d / P (Schwartz, Zippel). exp is a homomorphism from exponents,
which are numbers modulo Q, into the field's subgroup of Q elements: exp(a + b) = exp(a) exp(b) holds, and little else. What
lies outside a field, a maximum, a root, a sigmoid, is opaque: a random function, equal where its arguments are; that of maxima
is the maximum of all that they are of.

Q = (P - 1) / 450 has no factor below 7, so halves, thirds and tenths are exponents, too. It is no prime: exponents that differ
are equal modulo its greatest prime factor, 1321, with a chance of at most d / 1321 a trial, which is the bound that is printed
where there is an exp."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from . import graph
from .axes import Axis, elementary
from .axes import extent as extent_of
from .evaluate import evaluate, picked, seen
from .functions import MAPS
from .graph import walk
from .terms import PARTS, Term

P = 2**61 - 1
Q = (P - 1) // 450
LEAST = 1321  # the greatest prime factor of Q
BASE = pow(37, (P - 1) // Q, P)  # of order Q
TRIALS, DRAWS = 8, 1000  # points that are compared, and that are drawn at most
OPAQUE = "max", "causal", "dropout"  # besides maps
SAME_DEGREE = "neg transpose half causal stacked heads split merged flat pick among spread pick_of_parts".split()
EXPONENTS = "exp", "sum_of_parts"
SIZES = (3, 5, 2, 4, 6, 8)  # of axes, prime to Q


class Retry(Exception):
    """A random number has no inverse, or none that an exponent needs. Other random numbers are tried."""


class Number(NamedTuple):
    """A number in both rings: p modulo P, and q modulo Q, which counts where it is an exponent. q is None if the number was
    divided by something without an inverse modulo Q."""

    p: int
    q: int | None

    def add(self, other):
        return Number((self.p + other.p) % P, None if None in (self.q, other.q) else (self.q + other.q) % Q)

    def sub(self, other):
        return self.add(other.neg())

    def mul(self, other):
        return Number(self.p * other.p % P, None if None in (self.q, other.q) else self.q * other.q % Q)

    def div(self, other):
        if other.p == 0:
            raise Retry
        lost = None in (self.q, other.q) or math.gcd(other.q, Q) != 1
        return Number(self.p * pow(other.p, -1, P) % P, None if lost else self.q * pow(other.q, -1, Q) % Q)

    def neg(self):
        return Number(-self.p % P, None if self.q is None else -self.q % Q)

    def same(self):
        return self

    def exp(self):
        if self.q is None:
            raise Retry
        value = pow(BASE, self.q, P)
        return Number(value, opaque("exp", value).q)


def opaque(*what: Any) -> Number:
    """The value of a random function, the same whenever its arguments are the same. Of a Number p decides."""
    what = tuple(x.p if isinstance(x, Number) else x for x in what)
    digest = hashlib.blake2b(repr(what).encode(), digest_size=32).digest()
    return Number(int.from_bytes(digest[:16], "little") % P, int.from_bytes(digest[16:], "little") % Q)


class InField:
    """Arithmetic on arrays of Numbers (evaluate.Arithmetic). sizes: the extents of axes, which are small."""

    def __init__(self, sizes: Mapping[Axis, int]):
        self.sizes = sizes
        self.maxima: dict[int, list[int]] = {}  # of what they are

    def number(self, value: float) -> Any:
        exact = Fraction(value)
        top, bottom = (Number(n % P, n % Q) for n in (exact.numerator, exact.denominator))
        return _array(top.div(bottom))

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.number(extent if axis is None else extent_of(axis, self.sizes))

    def map(self, name: str, *of: Any) -> Any:
        field = MAPS[name].field
        one: Callable = (lambda *x: getattr(x[0], field)(*x[1:])) if field else (lambda *x: opaque(name, *x))
        arrays = np.broadcast_arrays(*of)
        if name == "where" and arrays[0].dtype == bool:  # of columns, which are known; comparisons are opaque
            return np.where(*arrays)
        found = np.empty(arrays[0].shape, object)
        for at in np.ndindex(found.shape):
            found[at] = one(*[x[at] for x in arrays])
        return found

    def reduce(self, kind: str, x: Any) -> Any:
        found = np.empty((*x.shape[:-1], 1), object)
        for at in np.ndindex(found.shape[:-1]):
            row = list(x[at])
            found[at + (0,)] = _sum(row) if kind == "sum" else self._max(row)
        return found

    def _max(self, row: Sequence[Number]) -> Number:
        every = sorted(p for x in row for p in self.maxima.get(x.p, [x.p]))
        found = opaque("max", every)
        self.maxima[found.p] = every
        return found

    def matmul(self, a: Any, b: Any) -> Any:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows, columns = (np.broadcast_to(x, lead + x.shape[-2:]) for x in (a, b.swapaxes(-1, -2)))
        found = np.empty((*rows.shape[:-1], columns.shape[-2]), object)
        for at in np.ndindex(found.shape):
            found[at] = _sum([x.mul(y) for x, y in zip(rows[at[:-1]], columns[at[:-2] + at[-1:]])])
        return found

    def concat(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, -1)

    def causal(self, x: Any) -> Any:
        return seen(x, _array(opaque("unseen")))

    def pick(self, x: Any, index: Any) -> Any:
        return picked(x, index, _array(Number(0, 0)))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent_in(axis, self.sizes)

    def dropout(self, x: Any, p: Any, seed: Any) -> Any:
        found, given = np.empty(x.shape, object), (p.reshape(-1)[0], seed.reshape(-1)[0])
        for at in np.ndindex(x.shape):
            found[at] = opaque("dropout", *at, x[at], *given)
        return found


def extent_in(axis: Axis | None, sizes: Mapping[Axis, int]) -> int:
    """The extent of an axis, by those of the axes that are made of no others; 1 if it is None."""
    return 1 if axis is None else extent_of(axis, sizes)


def _array(x: Number) -> Any:
    found = np.empty((), object)
    found[()] = x
    return found


def _sum(row: Sequence[Number]) -> Number:
    exponents = [x.q for x in row if x.q is not None]
    return Number(sum(x.p for x in row) % P, sum(exponents) % Q if len(exponents) == len(row) else None)


def random(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """An array of random Numbers."""
    found = np.empty(shape, object)
    for at in np.ndindex(shape):
        found[at] = Number(int(rng.integers(1, P)), int(rng.integers(1, Q)))
    return found


@dataclass(frozen=True)
class Identity:
    """The result of identity testing. equal: whether the terms were equal at all points. trials: how many points. degree: a
    bound on the terms' degree. bound: on the chance that different terms are equal at all of these points. outside: the
    functions that are opaque to the test."""

    equal: bool
    trials: int
    degree: int
    bound: float
    outside: tuple[str, ...]

    def __str__(self):
        if not self.equal:
            return "identity: the rewritten term is NOT the definition"
        found = f"identity: equal at {self.trials} random points of the field of 2^61 - 1 elements"
        found += f"; terms of degree {self.degree} that differ would be so with a chance below {self.bound:.0e}"
        return found + (f"; not looked into: {', '.join(self.outside)}" if self.outside else "")


def identity(definition: Sequence[Term], rewritten: Sequence[Term], seed: int = 0, trials: int = TRIALS) -> Identity:
    """Test whether two lists of terms over the same inputs are equal, at random points. ValueError: no point was found at
    which all divisions are possible."""
    every = list(walk(*definition, *rewritten))
    axes = elementary(name for x in every for name in x.names)
    sizes = {axis: SIZES[n % len(SIZES)] for n, axis in enumerate(axes)}
    operations = {x.operation for x in every}
    outside = tuple(sorted(name for name in operations if name in OPAQUE or (name in MAPS and not MAPS[name].field)))
    degree = max(_degrees(roots, sizes) for roots in (definition, rewritten))
    bound = min(1.0, degree / (P if operations.isdisjoint(EXPONENTS) else LEAST)) ** trials
    among = graph.indices(every)
    rng, done, drawn, same = np.random.default_rng(seed), 0, 0, True
    while done < trials and same:
        drawn += 1
        if drawn > DRAWS:
            raise ValueError(f"identity: something is divided by what has no inverse, whatever the numbers are: {definition}")
        given = {}
        for x in (x for x in every if x.operation == "input"):
            shape = tuple(1 if name is None else extent_of(name, sizes) for name in x.names)
            chooses = x in among
            given[x.what[0]] = rng.integers(-1, extent_in(among[x][0], sizes), shape) if chooses else random(shape, rng)
        try:
            one, other = (evaluate(roots, given, InField(sizes)) for roots in (definition, rewritten))
        except Retry:
            continue
        same = all(x.shape == y.shape and all(a.p == b.p for a, b in zip(x.flat, y.flat)) for x, y in zip(one, other))
        done += 1
    return Identity(same, done, degree, bound, outside)


def _degrees(roots: Sequence[Term], sizes: Mapping[Axis, int]) -> int:
    """A bound on the sum of the degrees of all rational functions that must agree: of the terms themselves, and of the
    arguments of opaque functions and exponentials in them."""
    beyond = {*OPAQUE, *PARTS}
    inside = [y for x in walk(*roots) if x.operation in beyond or (x.operation in MAPS and _is_opaque(x)) for y in x.of]
    return sum(sum(_degree(x, sizes)) for x in dict.fromkeys([*roots, *inside]))


def _is_opaque(x: Term) -> bool:
    """Is the map none of a field's operations, or exp, whose argument is an exponent?"""
    return MAPS[x.operation].field in ("", "exp")


def _degree(root: Term, sizes: Mapping[Axis, int]) -> tuple[int, int]:
    """Bounds on the degrees of (numerator, denominator) of a term's elements."""
    found: dict[Term, tuple[int, int]] = {}
    for x in walk(root):
        of = [found[y] for y in x.of]
        if x.operation in ("add", "sub"):
            (a, b), (c, d) = of
            found[x] = max(a + d, b + c), b + d
        elif x.operation in ("mul", "div"):
            (a, b), (c, d) = of
            found[x] = (a + c, b + d) if x.operation == "mul" else (a + d, b + c)
        elif x.operation in ("sum", "matmul", "matmul_by", "weighted", "total"):
            axes = [x.of[0].names[place] for place in (x.what if x.operation == "total" else (-1,))]
            n = math.prod(extent_in(axis, sizes) for axis in axes)
            a, b = (sum(one) for one in zip(*of))
            found[x] = a + (n - 1) * b, n * b
        elif x.operation in SAME_DEGREE:
            found[x] = of[0]
        elif x.operation == "concat":
            found[x] = max(a for a, _ in of), max(b for _, b in of)
        else:
            found[x] = (0 if x.operation in ("number", "length") else 1), 0
    return found[root]
