"""Named axes: a union-find structure that says which axes are one, which are products or halves of others, and how long they
are."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

PART = 128  # columns of a block of columns (term_operations.reduce_parts)


class Axis:
    """The identity of an axis. `unify` lets two of them mean one axis; `root` is the one that represents both. factors: the
    axes and numbers whose product this axis is, if it was split into heads or merged from them. half, doubled: the axis of half
    and of twice the extent, if there is one. tiled_axis: the axis whose blocks of PART columns this one counts, if it does."""

    def __init__(self, *factors: Axis | int, tiled_axis: Axis | None = None):
        self.alias_of: Axis = self
        self.factors, self.tiled_axis = factors, tiled_axis
        self.half: Axis | None = None
        self.doubled: Axis | None = None

    @property
    def root(self) -> Axis:
        """The representative of all axes that were unified with this one. Only representatives are compared."""
        axis = self
        while axis.alias_of is not axis:
            axis = axis.alias_of
        self.alias_of = axis
        return axis


def unify(one: Axis | None, other: Axis | None) -> Axis | None:
    """Let two axes mean one, and return it. None is an axis of length 1, which broadcasts to the other."""
    if one is None or other is None:
        return one or other
    one, other = one.root, other.root
    if one is not other:
        one.alias_of = other
        unify_groups(one.factors, other.factors)
        other.factors, other.doubled, other.tiled_axis = (
            other.factors or one.factors,
            other.doubled or one.doubled,
            other.tiled_axis or one.tiled_axis,
        )
        halves = one.half, other.half
        other.half = unify(*halves)
    return other


def unify_groups(one: tuple[Axis | int, ...], other: tuple[Axis | int, ...]) -> None:
    """Unify the axes that count the groups of one axis, which is groups times the extent of a group in both ways, as
    (groups, 128) says. Where one has greater groups, its groups times their ratio are the other's."""
    pairs = [(a.root, n) for a, n in map(_as_groups, (one, other)) if a is not None]
    if len(pairs) < 2:
        return
    (groups, n), (smaller, m) = sorted(pairs, key=lambda pair: -pair[1])
    if n == m:
        unify(groups, smaller)
    elif n % m == 0 and not smaller.factors:
        smaller.factors = groups, n // m


def _as_groups(factors: tuple[Axis | int, ...]) -> tuple[Axis | None, int]:
    """(the axis that counts groups, the extent of a group) if factors say this, else (None, 0)."""
    if len(factors) == 2 and isinstance(factors[0], Axis) and isinstance(factors[1], int):
        return factors[0], factors[1]
    return None, 0


def half_of(axis: Axis) -> Axis:
    """The axis of half this one's extent, as `halves` of columns makes it."""
    full = axis.root
    if full.half is None:
        full.half = Axis()
        full.half.doubled, full.factors = full, full.factors or (2, full.half)
    return full.half


def extent(axis: Axis, known: Mapping[Axis, int]) -> int:
    """The extent of an axis. known: the extents of the base axes."""
    factors, tiled_axis = axis.root.factors, axis.root.tiled_axis
    if tiled_axis is not None and axis.root not in known:
        return -(-extent(tiled_axis, known) // PART)
    return math.prod(n if isinstance(n, int) else extent(n, known) for n in factors) if factors else known[axis.root]


def base_axes(axes: Iterable[Axis | None]) -> list[Axis]:
    """The axes that these are made of and that are not made of others themselves, each once."""
    bases: dict[Axis, None] = {}
    stack = [axis for axis in axes if axis is not None][::-1]
    while stack:
        axis = stack.pop().root
        if axis.factors:
            stack += [n for n in axis.factors if not isinstance(n, int)]
        else:
            bases[axis] = None
    return list(bases)


Extent = Callable[[Mapping[str, Any]], Any]  # computes an extent from {name of an axis: its extent}


def derive_extent(
    axis: Axis, known: Mapping[Axis, str], splits: Iterable[Sequence[Axis]], visiting: frozenset[Axis] = frozenset()
) -> Extent | None:
    """The extent of an axis as a function of known extents: half of another's, a product of others', or one of the two factors
    into which a split into heads cuts columns. None: it does not follow from them. known: {axis: name}, the names by which
    the function is given extents. splits: (columns, heads, columns per head), as in TermTable. visiting: axes whose derivation
    is under way."""
    axis = axis.root
    if axis in known:
        return itemgetter(known[axis])
    if axis in visiting:
        return None

    def extent_of(one: Axis | int) -> Extent | None:
        return (lambda _: one) if isinstance(one, int) else derive_extent(one, known, splits, visiting | {axis})

    if axis.doubled and (full := extent_of(axis.doubled)):
        return _divide(full, 2)
    factors = [part for part in map(extent_of, axis.factors) if part]
    if factors and len(factors) == len(axis.factors):
        return lambda extents: functools.reduce(operator.mul, [part(extents) for part in factors])
    for columns, heads, per_head in splits:
        if per_head.root is axis and (full := extent_of(columns)) and isinstance(count := heads.root.factors[0], int):
            return _divide(full, count)
    return None


def _divide(full: Extent, count: int) -> Extent:
    return lambda extents: full(extents) // count
