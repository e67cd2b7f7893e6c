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
    def keys(self, first, last, ctx):
        return Keys(0, min(ctx.keys, last + ctx.shift + 1), 0, min(ctx.keys, first + ctx.shift + 1))

    @inlined
    def seers(self, first, last, ctx):
        return Queries(max(0, first - ctx.shift), ctx.queries, max(0, last - ctx.shift), ctx.queries)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return causal(s, ctx.row + ctx.shift - key, hidden)


class Right(Variant):
    """A query sees the keys up to params.right positions after its own."""

    everything = False
    rising = True
    ends_early = True  # `right` may be negative, where a mask in Python says so

    @property
    def params(self) -> dict[str, Any]:
        return {"right": INT}

    @inlined
    def keys(self, first, last, ctx):
        edge = ctx.shift + ctx.params.right + 1
        return Keys(0, min(ctx.keys, last + edge), 0, min(ctx.keys, first + edge))

    @inlined
    def seers(self, first, last, ctx):
        edge = ctx.shift + ctx.params.right
        return Queries(max(0, first - edge), ctx.queries, max(0, last - edge), ctx.queries)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return causal(s, ctx.row + ctx.shift + ctx.params.right - key, hidden)


class Left(Variant):
    """A query sees the keys from params.left positions before its own on."""

    everything = False
    from_first = False

    @property
    def params(self) -> dict[str, Any]:
        return {"left": INT}

    @inlined
    def keys(self, first, last, ctx):
        edge = ctx.shift - ctx.params.left
        return Keys(max(0, first + edge), ctx.keys, max(0, last + edge), ctx.keys)

    @inlined
    def seers(self, first, last, ctx):
        edge = ctx.shift - ctx.params.left
        return Queries(0, min(ctx.queries, last - edge + 1), 0, min(ctx.queries, first - edge + 1))

    @inlined
    def mask(self, s, ctx, key, hidden):
        return triu(s, ctx.row + ctx.shift - ctx.params.left - key, hidden)


@static
class Masked(Unforeseen):
    """A query sees the keys for which function(b, h, i, j, *aux) holds. i is a vector of queries, j one of keys, counted from
    0."""

    function: Callable

    @inlined
    def mask(self, s, ctx, key, hidden):
        i, j = row_index(s.col_vec) + ctx.row, col_index(s.row_vec) + int32(key)
        return where(self.function(ctx.batch, ctx.head, i, j, *ctx.aux), s, hidden)


FULL, CAUSAL = Full(), Causal()
