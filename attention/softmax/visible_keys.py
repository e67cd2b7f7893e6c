"""Which keys a query sees: the variants of attention that mask, built in or by a function."""

from collections.abc import Callable
from typing import Any

from numpy import int32

from ops import causal, col_index, row_index, triu, where
from tiles import inlined, static
from tiles.arguments import INT

from .variants import Keys, Queries, Unforeseen, Variant


class Full(Variant):
    """A query sees all keys."""

    plain = True


class Causal(Variant):
    """A query sees the keys up to its own position."""

    everything = False
    rising = True
    within = True  # the last query stands at the last key
    plain = True

    @inlined
    def keys(self, first, last, at):
        return Keys(0, min(at.keys, last + at.shift + 1), 0, min(at.keys, first + at.shift + 1))

    @inlined
    def seers(self, first, last, at):
        return Queries(max(0, first - at.shift), at.queries, max(0, last - at.shift), at.queries)

    @inlined
    def mask(self, s, at, key, hidden):
        return causal(s, at.row + at.shift - key, hidden)


class Right(Variant):
    """A query sees the keys up to given.right positions after its own."""

    everything = False
    rising = True
    ends_early = True  # `right` may be negative, where a mask in Python says so

    @property
    def given(self) -> dict[str, Any]:
        return {"right": INT}

    @inlined
    def keys(self, first, last, at):
        edge = at.shift + at.given.right + 1
        return Keys(0, min(at.keys, last + edge), 0, min(at.keys, first + edge))

    @inlined
    def seers(self, first, last, at):
        edge = at.shift + at.given.right
        return Queries(max(0, first - edge), at.queries, max(0, last - edge), at.queries)

    @inlined
    def mask(self, s, at, key, hidden):
        return causal(s, at.row + at.shift + at.given.right - key, hidden)


class Left(Variant):
    """A query sees the keys from given.left positions before its own on."""

    everything = False
    from_first = False

    @property
    def given(self) -> dict[str, Any]:
        return {"left": INT}

    @inlined
    def keys(self, first, last, at):
        edge = at.shift - at.given.left
        return Keys(max(0, first + edge), at.keys, max(0, last + edge), at.keys)

    @inlined
    def seers(self, first, last, at):
        edge = at.shift - at.given.left
        return Queries(0, min(at.queries, last - edge + 1), 0, min(at.queries, first - edge + 1))

    @inlined
    def mask(self, s, at, key, hidden):
        return triu(s, at.row + at.shift - at.given.left - key, hidden)


@static
class Masked(Unforeseen):
    """A query sees the keys for which function(b, h, i, j, *aux) holds. i is a vector of queries, j one of keys, counted from
    0."""

    function: Callable

    @inlined
    def mask(self, s, at, key, hidden):
        i, j = row_index(s.col_vec) + at.row, col_index(s.row_vec) + int32(key)
        return where(self.function(at.batch, at.head, i, j, *at.aux), s, hidden)


FULL, CAUSAL = Full(), Causal()
