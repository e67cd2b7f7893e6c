"""Variants that mask: full, causal and windowed attention, and masks that are functions."""

from collections.abc import Callable
from typing import Any

from ops import causal, triu, where
from tiles import inlined, static
from tiles.launching.arguments import INT

from .variant import DataDependentMask, KeyRange, QueryRange, Variant


class FullAttention(Variant):
    """Every query sees every key."""

    cheap_mask = True

    def __str__(self):
        return "full"


class Causal(Variant):
    """A query sees the keys up to its own position, aligned bottom right."""

    monotonic = True
    ends_at_last_key = True  # the last query is aligned with the last key
    cheap_mask = True
    fits_slope_gradient = True

    @inlined
    def key_range(self, first, last, ctx):
        return KeyRange(0, min(ctx.seqlen_k, last + ctx.shift + 1), 0, min(ctx.seqlen_k, first + ctx.shift + 1))

    @inlined
    def query_range(self, first, last, ctx):
        return QueryRange(max(0, first - ctx.shift), ctx.seqlen_q, max(0, last - ctx.shift), ctx.seqlen_q)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return causal(s, ctx.row + ctx.shift - key, hidden)


class WindowRight(Variant):
    """A query sees the keys up to params.right positions after its own: the right edge of a window."""

    monotonic = True
    may_end_early = True  # a window recognised in a mask function may have a negative `right`

    @property
    def params(self) -> dict[str, Any]:
        return {"right": INT}

    @inlined
    def key_range(self, first, last, ctx):
        edge = ctx.shift + ctx.params.right + 1
        return KeyRange(0, min(ctx.seqlen_k, last + edge), 0, min(ctx.seqlen_k, first + edge))

    @inlined
    def query_range(self, first, last, ctx):
        edge = ctx.shift + ctx.params.right
        return QueryRange(max(0, first - edge), ctx.seqlen_q, max(0, last - edge), ctx.seqlen_q)

    @inlined
    def mask(self, s, ctx, key, hidden):
        return causal(s, ctx.row + ctx.shift + ctx.params.right - key, hidden)


class WindowLeft(Variant):
    """A query sees the keys from params.left positions before its own on: the left edge of a window."""

    starts_at_zero = False
    fits_slope_gradient = True

    @property
    def params(self) -> dict[str, Any]:
        return {"left": INT}

    @inlined
    def key_range(self, first, last, ctx):
        edge = ctx.shift - ctx.params.left
        return KeyRange(max(0, first + edge), ctx.seqlen_k, max(0, last + edge), ctx.seqlen_k)

    @inlined
    def query_range(self, first, last, ctx):
        edge = ctx.shift - ctx.params.left
        return QueryRange(0, min(ctx.seqlen_q, last - edge + 1), 0, min(ctx.seqlen_q, first - edge + 1))

    @inlined
    def mask(self, s, ctx, key, hidden):
        return triu(s, ctx.row + ctx.shift - ctx.params.left - key, hidden)


@static
class MaskMod(DataDependentMask):
    """A query sees the keys for which function(b, h, i, j, *aux) is true. i is a column vector of queries and j a row vector of
    keys, both counted from 0."""

    function: Callable

    @inlined
    def mask(self, s, ctx, key, hidden):
        return where(self.function(ctx.batch, ctx.head, ctx.rows(s), ctx.columns(s, key), *ctx.aux), s, hidden)


FULL, CAUSAL = FullAttention(), Causal()
