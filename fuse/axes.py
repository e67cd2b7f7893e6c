"""The names of axes: which of them are one, what they are made of, and how long they are."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

PART = 128  # columns of a part (terms.of_parts)


class Axis:
    """A name for an axis. Two names may turn out to mean one axis: see `same`. factors: if the axis is made of others, as a
    split into heads makes it, those axes, or numbers; its extent is their product. half: the axis of half the extent, if
    somebody asked for it. tiled_axis: if the axis counts the PARTs of another one, that one."""

    def __init__(self, *factors: Axis | int, tiled_axis: Axis | None = None):
        self.alias_of: Axis = self
        self.factors, self.tiled_axis = factors, tiled_axis
        self.half: Axis | None = None
        self.doubled: Axis | None = None  # that this is the half of

    @property
    def root(self) -> Axis:
        """The one name among all that mean this axis that is compared."""
        found = self
        while found.alias_of is not found:
            found = found.alias_of
        self.alias_of = found
        return found


def unify(one: Axis | None, other: Axis | None) -> Axis | None:
    """Let two names mean one axis, and return it. None is an axis of length 1, which broadcasts to the other."""
    if one is None or other is None:
        return one or other
    one, other = one.root, other.root
    if one is not other:
        one.alias_of = other
        other.factors, other.doubled, other.tiled_axis = (
            other.factors or one.factors,
            other.doubled or one.doubled,
            other.tiled_axis or one.tiled_axis,
        )
        halves = one.half, other.half
        other.half = unify(*halves)
    return other


def half_of(axis: Axis) -> Axis:
    """The axis that is half of this one."""
    whole = axis.root
    if whole.half is None:
        whole.half = Axis()
        whole.half.doubled, whole.factors = whole, whole.factors or (2, whole.half)
    return whole.half


def extent(axis: Axis, known: Mapping[Axis, int]) -> int:
    """The extent of an axis. known: the extents of the axes that are made of no others."""
    factors, tiled_axis = axis.root.factors, axis.root.tiled_axis
    if tiled_axis is not None and axis.root not in known:
        return -(-extent(tiled_axis, known) // PART)
    return math.prod(n if isinstance(n, int) else extent(n, known) for n in factors) if factors else known[axis.root]


def base_axes(axes: Iterable[Axis | None]) -> list[Axis]:
    """The axes that these are made of, and that are not made of others, each once."""
    found: dict[Axis, None] = {}
    stack = [axis for axis in axes if axis is not None][::-1]
    while stack:
        axis = stack.pop().root
        if axis.factors:
            stack += [n for n in axis.factors if not isinstance(n, int)]
        else:
            found[axis] = None
    return list(found)


Extent = Callable[[Mapping[str, Any]], Any]  # of the extents that axes have by their letters


def derive_extent(
    axis: Axis, known: Mapping[Axis, str], splits: Iterable[Sequence[Axis]], seen: frozenset[Axis] = frozenset()
) -> Extent | None:
    """The extent of an axis as a function of known ones: half of another's, a product of others', the number of heads or the
    columns of each, which a split into heads makes of columns. None: it does not follow. known: letters, by which the function
    is given extents. splits: (columns, heads, columns of each) as Space has them. seen: axes that are asked for already."""
    axis = axis.root
    if axis in known:
        return itemgetter(known[axis])
    if axis in seen:
        return None

    def other(one: Axis | int) -> Extent | None:
        return (lambda _: one) if isinstance(one, int) else derive_extent(one, known, splits, seen | {axis})

    if axis.doubled and (whole := other(axis.doubled)):
        return _divide(whole, 2)
    factors = [part for part in map(other, axis.factors) if part]
    if factors and len(factors) == len(axis.factors):
        return lambda extents: functools.reduce(operator.mul, [part(extents) for part in factors])
    for columns, heads, own in splits:
        if own.root is axis and (whole := other(columns)) and isinstance(count := heads.root.factors[0], int):
            return _divide(whole, count)
    return None


def _divide(whole: Extent, count: int) -> Extent:
    return lambda extents: whole(extents) // count
