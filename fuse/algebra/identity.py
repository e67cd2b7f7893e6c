"""Identity testing (a probabilistic equivalence test): are two terms equal for all inputs?

Both are computed exactly, at POINTS random points. Each point has a prime field of its own, the integers modulo a random p
(prime_fields.py), random elements of it as inputs, and random extents of the axes, all different, none as at the point before:
a constant in place of an axis's extent is found out. A constant is a float, which is m * 2^e exactly, and that is its value
modulo p; primes at which two different constants become equal are drawn anew.

    exp                 base ** x, x being a number modulo q, the order of base: exp(a + b) = exp(a) exp(b) holds, and
                        exp(q) = 1, but no rule can know q
    max, of a row       a random function of the set of its elements; a maximum of maxima is that of the union
    opaque functions    rsqrt, sigmoid, comparisons, casts, ...: a random function of its arguments, equal where they are

**The bound.** Terms without a random function are rational functions with rational coefficients. Two that differ are equal at a
point in one of two ways: the difference, whose numerator has degree d, is 0 at the random numbers (at most d / 2^60: Schwartz,
Zippel), or all its coefficients, of which one has at most B bits, are 0 modulo p (less than 2 B / 2^60). So a *comparison*
costs (d + 2 B) / 2^60. The results are one comparison. Each random function, and exp, is one for each pair of its arguments:
while arguments that differ get different values, its values are further random numbers, for which the same holds. `bound` is
the sum of these, times TRIES for points that were drawn anew because of a division by 0, to the power of POINTS. It is the
chance for terms that differ at the extents of every point.

Three assumptions: the numbers that Python's generator makes from the seed are random; BLAKE2b, with a random key for each
point, is a random function; and powers of `base` with different exponents satisfy no more equations than random numbers do."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ..language import graph
from ..language.axes import Axis, base_axes
from ..language.axes import extent as extent_of
from ..language.evaluate import evaluate, mask_causal, pick_elements
from ..language.graph import walk
from ..language.maps import MAPS
from ..language.terms import Term
from .prime_fields import BITS, PrimeField, random_field

POINTS, TRIES = 4, 64  # points that are compared, and the most draws of one
SIZES = 2, 3, 4, 5, 6, 8, 7, 9, 10, 11, 12, 13  # extents of axes; the first ones are used
OPAQUE = "max", "causal", "dropout"  # operations that are random functions, besides maps


class NoInverse(ArithmeticError):
    """A division by 0 at this point."""


class FieldNumber(NamedTuple):
    """A number twice: modulo p, and modulo q, which counts where it is an exponent. q is None if nothing is an exponent, or
    after a division by 0 modulo q."""

    p: int
    q: int | None


_P, _Q = (np.frompyfunc(part, 1, 1) for part in (lambda x: x.p, lambda x: x.q or 0))
_HAS_Q, _NUMBERS = np.frompyfunc(lambda x: x.q is not None, 1, 1), np.frompyfunc(FieldNumber, 2, 1)


class FieldArithmetic:
    """Arithmetic on arrays of FieldNumbers (evaluate.Arithmetic). sizes: the extents of axes. key: selects the random
    functions."""

    def __init__(self, field: PrimeField, sizes: Mapping[Axis, int], key: bytes):
        self.field, self.sizes, self.key = field, sizes, key
        self.maxima: dict[int, set[int]] = {}  # {value of a maximum: the elements that it is the maximum of}

    # ---- numbers -----------------------------------------------------------------------------------------------------
    def embed(self, value: float) -> FieldNumber:
        """A constant: m * 2^e modulo p and q. Infinities and NaN are random numbers."""
        if not math.isfinite(value):
            return self.opaque("number", repr(value))
        exact = Fraction(value)
        p, q = ((exact.numerator * pow(exact.denominator, -1, n)) % n for n in self.field[:2])
        return FieldNumber(p, q)

    def opaque(self, *key: Any) -> FieldNumber:
        """The value of a random function, the same whenever its arguments are the same. A FieldNumber counts by p only."""
        text = repr(tuple(x.p if isinstance(x, FieldNumber) else x for x in key)).encode()
        digest = hashlib.blake2b(text, digest_size=48, key=self.key).digest()
        return FieldNumber(
            int.from_bytes(digest[:24], "little") % self.field.p, int.from_bytes(digest[24:], "little") % self.field.q
        )

    def add(self, a: FieldNumber, b: FieldNumber) -> FieldNumber:
        return FieldNumber((a.p + b.p) % self.field.p, None if a.q is None or b.q is None else (a.q + b.q) % self.field.q)

    def sub(self, a: FieldNumber, b: FieldNumber) -> FieldNumber:
        return FieldNumber((a.p - b.p) % self.field.p, None if a.q is None or b.q is None else (a.q - b.q) % self.field.q)

    def mul(self, a: FieldNumber, b: FieldNumber) -> FieldNumber:
        return FieldNumber(a.p * b.p % self.field.p, None if a.q is None or b.q is None else a.q * b.q % self.field.q)

    def div(self, a: FieldNumber, b: FieldNumber) -> FieldNumber:
        if not b.p:
            raise NoInverse
        p, q, _ = self.field
        return FieldNumber(a.p * pow(b.p, -1, p) % p, a.q * pow(b.q, -1, q) % q if a.q is not None and b.q else None)

    def neg(self, a: FieldNumber) -> FieldNumber:
        return FieldNumber(-a.p % self.field.p, None if a.q is None else -a.q % self.field.q)

    def same(self, a: FieldNumber) -> FieldNumber:
        return a

    def exp(self, a: FieldNumber) -> FieldNumber:
        if a.q is None:
            raise NoInverse
        value = pow(self.field.base, a.q, self.field.p)
        return FieldNumber(value, self.opaque("exp", value).q)

    # ---- arrays of them ----------------------------------------------------------------------------------------------
    def number(self, value: float) -> Any:
        return _array(self.embed(value))

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.number(extent if axis is None else extent_of(axis, self.sizes))

    def map(self, name: str, *operands: Any) -> Any:
        field = MAPS[name].field
        function = getattr(self, field) if field else lambda *x: self.opaque(name, *x)
        arrays = np.broadcast_arrays(*operands)
        if name == "where" and arrays[0].dtype == bool:  # a mask of columns is known; comparisons are opaque
            return np.where(*arrays)
        values = np.empty(arrays[0].shape, object)
        flat = values.reshape(-1)
        for n, x in enumerate(zip(*[array.flat for array in arrays])):
            flat[n] = function(*x)
        return values

    def reduce(self, kind: str, x: Any) -> Any:
        values = np.empty((*x.shape[:-1], 1), object)
        for at in np.ndindex(values.shape[:-1]):
            row = list(x[at])
            values[at + (0,)] = self._sum(row) if kind == "sum" else self._max(row)
        return values

    def _sum(self, row: Sequence[FieldNumber]) -> FieldNumber:
        has_q = all(x.q is not None for x in row)
        return FieldNumber(sum(x.p for x in row) % self.field.p, sum(x.q or 0 for x in row) % self.field.q if has_q else None)

    def _max(self, row: Sequence[FieldNumber]) -> FieldNumber:
        elements = set[int]().union(*[self.maxima.get(x.p, {x.p}) for x in row])
        value = row[0] if len(elements) == 1 else self.opaque("max", *sorted(elements))
        self.maxima[value.p] = elements
        return value

    def matmul(self, a: Any, b: Any) -> Any:
        p = _P(a) @ _P(b) % self.field.p  # NumPy's loops over Python's integers
        known = _HAS_Q(a).astype(bool).all(-1, keepdims=True) & _HAS_Q(b).astype(bool).all(-2, keepdims=True)
        q = _Q(a) @ _Q(b) % self.field.q if known.any() else 0
        return _NUMBERS(p, np.where(known, q, np.full((), None)))

    def concat(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, -1)

    def causal(self, x: Any) -> Any:
        return mask_causal(x, _array(self.opaque("unseen")))

    def pick(self, x: Any, index: Any) -> Any:
        return pick_elements(x, index, _array(FieldNumber(0, 0)))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent_in(axis, self.sizes)

    def dropout(self, x: Any, p: Any, seed: Any) -> Any:
        values, options = np.empty(x.shape, object), (p.reshape(-1)[0], seed.reshape(-1)[0])
        for at in np.ndindex(x.shape):
            values[at] = self.opaque("dropout", *at, x[at], *options)
        return values


def extent_in(axis: Axis | None, sizes: Mapping[Axis, int]) -> int:
    """The extent of an axis by those of the base axes; 1 if the axis is None."""
    return 1 if axis is None else extent_of(axis, sizes)


def _array(x: FieldNumber) -> Any:
    array = np.empty((), object)
    array[()] = x
    return array


@dataclass(frozen=True)
class IdentityCheck:
    """The result of identity testing. equal: whether the terms were equal at all points. points: how many. seed: the seed they
    follow from. fields: their primes (p, q). comparisons: the Comparisons of the point with the greatest chance of a miss.
    bound: on the chance that different terms are equal at all points. outside: the functions that are random in the test."""

    equal: bool
    points: int
    seed: int
    fields: tuple[tuple[int, int], ...]
    comparisons: tuple[Comparisons, ...]
    bound: float
    outside: tuple[str, ...]

    def __str__(self):
        if not self.equal:
            return f"identity: the rewritten term is NOT the definition (seed {self.seed})"
        text = f"identity: equal at {self.points} random points, each modulo a random prime of its own (seed {self.seed})"
        chances = " + ".join(str(one) for one in self.comparisons)
        text += f"; terms that differ are equal at one with a chance of at most {TRIES} ({chances}) / 2^{BITS}"
        text += f", at all with {self.bound:.0e}"
        return text + (f"; replaced by random functions: {', '.join(self.outside)}" if self.outside else "")


def identity(
    definition: Sequence[Term], rewritten: Sequence[Term], seed: int | None = None, points: int = POINTS
) -> IdentityCheck:
    """Test whether two lists of terms over the same inputs are equal, at random points that follow from the seed. The seed is
    random by default, because the bound assumes primes that were unknown when a rule was written. ValueError: no point was
    found at which all divisions are possible."""
    seed = secrets.randbits(64) if seed is None else seed
    nodes = list(walk(*definition, *rewritten))
    axes = base_axes(name for x in nodes for name in x.axes)
    operations = {x.operation for x in nodes}
    outside = tuple(sorted(name for name in operations if name in OPAQUE or (name in MAPS and not MAPS[name].field)))
    constants = {Fraction(x.attr) for x in nodes if x.operation == "number" and math.isfinite(x.attr)}
    random, fields, known, same = Random(seed), list[PrimeField](), list[tuple[Comparisons, ...]](), True
    sizes = dict[Axis, int]()
    while len(fields) < points and same:
        field = _field_for(constants, random)
        sizes = _other_sizes(axes, sizes, random)
        one, other = _values_at(definition, rewritten, field, sizes, random)
        same = all(x.shape == y.shape and all(a.p == b.p for a, b in zip(x.flat, y.flat)) for x, y in zip(one, other))
        known.append(_comparisons(definition, rewritten, sizes))
        fields.append(field)
    misses = [TRIES * sum(one.chance for one in nodes) for nodes in known]
    bound = math.prod(min(1.0, miss / 2**BITS) for miss in misses)
    return IdentityCheck(same, len(fields), seed, tuple((x.p, x.q) for x in fields), known[np.argmax(misses)], bound, outside)


def _field_for(constants: set[Fraction], random: Random) -> PrimeField:
    """A random field in which these constants are all different, modulo p and modulo q."""
    while True:
        field = random_field(random)
        if all(len({x.numerator * pow(x.denominator, -1, n) % n for x in constants}) == len(constants) for n in field[:2]):
            return field


def _other_sizes(axes: Sequence[Axis], before: Mapping[Axis, int], random: Random) -> dict[Axis, int]:
    """Random extents of these axes, all different and none of them as before."""
    extents = [*SIZES[: len(axes) + 1], *range(14, 15 + len(axes) - len(SIZES))]
    while True:
        sizes = dict(zip(axes, random.sample(extents, len(axes))))
        if not any(before.get(axis) == extent for axis, extent in sizes.items()):
            return sizes


def _values_at(
    definition: Sequence[Term], rewritten: Sequence[Term], field: PrimeField, sizes: Mapping[Axis, int], random: Random
) -> list[list[Any]]:
    """The values of both lists of terms for random inputs, at the first point where all divisions are possible."""
    nodes = list(walk(*definition, *rewritten))
    counts, exponents = graph.indices(nodes), any(x.operation in ("exp", "sum_of_parts") for x in nodes)
    for _ in range(TRIES):
        inputs = {}
        for x in (x for x in nodes if x.operation == "input"):
            shape = tuple(extent_in(name, sizes) for name in x.axes)
            values, draw = (
                np.empty(math.prod(shape), object),
                range(-1, extent_in(counts[x][0], sizes)) if x in counts else None,
            )
            for n in range(len(values)):
                values[n] = random.choice(draw) if draw else _random_number(field, exponents, random)
            inputs[x.attr[0]] = values.reshape(shape)
        arithmetic = FieldArithmetic(field, sizes, random.randbytes(32))
        try:
            both = evaluate([*definition, *rewritten], inputs, arithmetic)  # together, as they have terms in common
            return [both[: len(definition)], both[len(definition) :]]
        except NoInverse:
            continue
    raise ValueError(f"identity: every point has a division by 0, after {TRIES} draws: {definition}")


def _random_number(field: PrimeField, exponent: bool, random: Random) -> FieldNumber:
    return FieldNumber(random.randrange(field.p), random.randrange(field.q) if exponent else None)


# ---- the bound -------------------------------------------------------------------------------------------------------
class DegreeBound(NamedTuple):
    """Bounds on a rational function with integer coefficients: degree and bits of the numerator, degree and bits of the
    denominator. bits: of the sum of the coefficients' absolute values, which is never less than 1."""

    up: int
    up_bits: int
    down: int
    down_bits: int

    def times(self, other: DegreeBound) -> DegreeBound:
        return DegreeBound(*map(sum, zip(self, other)))

    def over(self, other: DegreeBound) -> DegreeBound:
        return self.times(DegreeBound(*other[2:], *other[:2]))

    def plus(self, other: DegreeBound) -> DegreeBound:
        (a, i, b, j), (c, k, d, n) = self, other
        return DegreeBound(max(a + d, c + b), max(i + n, k + j) + 1, b + d, j + n)

    def bound_of_sum(self, n: int) -> DegreeBound:
        """The bound of a sum of n such functions, whose denominators may all differ."""
        a, i, b, j = self
        return DegreeBound(a + (n - 1) * b, i + (n - 1) * j + n.bit_length(), n * b, n * j)


class Comparisons(NamedTuple):
    """A number of pairs of rational functions. degree, bits: bounds on the numerators of their differences, see DegreeBound."""

    pairs: int
    degree: int
    bits: int

    @property
    def chance(self) -> int:
        """A bound on the chance that one of the pairs is equal at a point although it differs, in units of 2^-BITS."""
        return self.pairs * (self.degree + 2 * self.bits)

    def __str__(self):
        return f"{self.pairs} ({self.degree} + 2 x {self.bits})"


VARIABLE = DegreeBound(1, 0, 0, 0)  # a random function's value is a further variable


def _max_bound(bounds: Sequence[DegreeBound]) -> DegreeBound:
    return DegreeBound(*map(max, zip(*bounds)))


def _bound_of_number(value: float) -> DegreeBound:
    exact = Fraction(value)
    return DegreeBound(0, exact.numerator.bit_length(), 0, exact.denominator.bit_length() - 1)


SELECTIONS = "transpose half repeat causal stacked heads split merge_heads flat pick select_columns repeat_columns".split()
SELECTIONS += "pick_of_parts concat where".split()  # each element is an element of an operand, or 0


def _degree_bounds(roots: Sequence[Term], sizes: Mapping[Axis, int]) -> dict[Term, DegreeBound]:
    """The DegreeBound of the elements of each term that these depend on."""
    bounds: dict[Term, DegreeBound] = {}
    for x in walk(*roots):
        args = [bounds[y] for y in x.args]
        name = MAPS[x.operation].field if x.operation in MAPS else x.operation
        if x.operation in ("input", "exp") or not name:
            bounds[x] = _max_bound([*args[1:], VARIABLE]) if x.operation == "where" else VARIABLE
        elif name == "number":
            bounds[x] = _bound_of_number(x.attr) if math.isfinite(x.attr) else VARIABLE
        elif name == "length":
            bounds[x] = DegreeBound(0, extent_in(x.attr[0], sizes).bit_length() if x.attr[0] else x.attr[1].bit_length(), 0, 0)
        elif name in ("add", "sub"):
            bounds[x] = args[0].plus(args[1])
        elif name in ("mul", "div"):
            bounds[x] = args[0].times(args[1]) if name == "mul" else args[0].over(args[1])
        elif name in ("neg", "same"):
            bounds[x] = args[0]
        elif name in ("sum", "matmul", "matmul_by", "weighted", "total", "partial_sums"):
            places = x.attr if name == "total" else (-2,) if name == "partial_sums" else (-1,)
            n = math.prod(extent_in(x.args[0].axes[place], sizes) for place in places)
            bounds[x] = (args[0] if len(args) == 1 else args[0].times(args[1])).bound_of_sum(n)
        elif name == "sum_of_parts":
            bounds[x] = VARIABLE.bound_of_sum(extent_in(x.args[0].axes[-1], sizes))
        elif name in SELECTIONS:
            bounds[x] = _max_bound(
                [y for y, term in zip(args, x.args) if not graph.is_index(term)] + [VARIABLE] * (name == "causal")
            )
        else:  # max, max_of_parts, dropout, is_column
            bounds[x] = VARIABLE
    return bounds


def _comparisons(definition: Sequence[Term], rewritten: Sequence[Term], sizes: Mapping[Axis, int]) -> tuple[Comparisons, ...]:
    """The comparisons at a point: the results, then the arguments of each random function and of exp (see the module)."""
    size = _degree_bounds([*definition, *rewritten], sizes)
    arguments: dict[str, list[tuple[int, DegreeBound]]] = defaultdict(list)  # {random function: [(how many, their bound)]}
    for x in walk(*definition, *rewritten):
        sizes_of_args, count = (
            [size[y] for y in x.args if not graph.is_index(y)],
            max(_elements(y.axes, sizes) for y in (x, *x.args)),
        )
        if x.operation in ("max_of_parts", "sum_of_parts"):
            arguments["max"].append((count, sizes_of_args[0]))
        if x.operation == "sum_of_parts":  # the sum of exp(x - the maximum of its block)
            arguments["exp"].append((count, sizes_of_args[0].plus(VARIABLE)))
        elif x.operation in OPAQUE or (x.operation in MAPS and MAPS[x.operation].field in ("", "exp")):
            arguments[x.operation].append((count, _max_bound(sizes_of_args)))
    results = [_compare_bounds(1, size[x], size[y]) for x, y in zip(definition, rewritten)]
    comparisons = [max(results, key=lambda one: one.chance)]
    for group in arguments.values():
        n, greatest = sum(count for count, _ in group), _max_bound([one for _, one in group])
        comparisons.append(_compare_bounds(n * (n - 1) // 2, greatest, greatest))
    return tuple(one for one in comparisons if one.pairs)


def _compare_bounds(pairs: int, one: DegreeBound, other: DegreeBound) -> Comparisons:
    difference = one.plus(other)
    return Comparisons(pairs, difference.up, difference.up_bits)


def _elements(names: Sequence[Axis | None], sizes: Mapping[Axis, int]) -> int:
    return math.prod(extent_in(axis, sizes) for axis in names)
