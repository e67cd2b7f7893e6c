"""Which keys query tokens see: those in use, from a place on and up to a place. And what depends on how far a key is away.

Query heads that share a key head, and the query tokens, are the rows of a tile: row r of the tile that begins at `row` belongs
to token (row + r) // group. So what is a number where rows are queries is a vector here: At.row are the rows' tokens, At.head
their heads. Token t stands at key t + shift, the last one at the last key."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import abs, col_index, line_up, right_fill, where
from tiles import inlined, static
from tiles.arguments import ENDS, FLOAT, INT, array

from ..scores import Scored
from ..sequences import GROWING, in_use
from ..variants import Variant
from ..visible_keys import Masked


class KeySpan(NamedTuple):
    """Keys `first` to before `end`: no row sees others. shift: see the module."""

    first: Any
    end: Any
    shift: Any


@static
class KeyWindow:
    """Of the keys in use (`in_use`) those from params.left places before a token's own on, and up to params.right places after
    it, as far as these are said; and none before params.leftpad[n], if the cache is padded."""

    left: bool
    right: bool
    padded: bool

    def __str__(self):
        said = {"left": self.left, "right": self.right, "padded": self.padded}
        return " ".join(name for name, is_so in said.items() if is_so) or "all"

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        params: dict[str, Any] = {**self.length_params}
        params |= {"left": INT} if self.left else {}
        params |= {"right": INT} if self.right else {}
        return params | ({"leftpad": ENDS} if self.padded else {})

    @property
    def length_params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of those that say how many keys are in use."""
        return GROWING

    @inlined
    def in_use(self, sequence, params):
        """How many keys of a sequence are in use."""
        return in_use(sequence, params)

    @inlined
    def key_span(self, sequence, first, last, tokens, params):
        """The Stretch of tokens `first` to `last` of `tokens`."""
        length = self.in_use(sequence, params)
        begin, end, shift = int32(0), length, int32(length - tokens)
        if self.padded:
            begin = int32(params.leftpad[sequence])
        if self.left:
            begin = int32(max(begin, first + shift - params.left))
        if self.right:
            end = int32(min(end, last + shift + params.right + 1))
        return KeySpan(begin, end, shift)

    @inlined
    def line_up(self, size, first, count, before, tile, tokens, params):
        """The keys that all tokens of a sequence together see, in tiles: see ops.line_up."""
        begins = params.leftpad if self.padded else None
        most = int32(tokens + params.left if self.left else 2**31 - 1)
        return line_up(params.lengths, begins, most, size, first, count, before, tile)

    @inlined
    def mask(self, s, ctx, key, end):
        """-inf for the scores that must not be seen, of keys from `key` on."""
        s, place, j = right_fill(s, int32(end - key), -math.inf), ctx.row + int32(ctx.shift - key), col_index(s.row_vec)
        if self.right:
            s = where(j <= place + ctx.params.right, s, -math.inf)
        if self.left:
            s = where(j >= place - ctx.params.left, s, -math.inf)
        return s


class GrowingKeyWindow(KeyWindow):
    """The same where params.added keys are being appended; the tiles that are shared out include them."""

    @inlined
    def line_up(self, size, first, count, before, tile, tokens, params):
        begins = params.leftpad if self.padded else None
        most = int32(tokens + params.left if self.left else 2**31 - 1)
        return line_up(params.lengths, begins, most, size, first, count, before, tile, params.added)


class WholeCacheWindow(KeyWindow):
    """All keys that there is room for, params.keys in each sequence. All sequences are equally long, so their keys are split
    into parts and not shared out."""

    def __str__(self):
        return f"{super().__str__()} of whole caches"

    @property
    def length_params(self) -> dict[str, Any]:
        return {"keys": INT}

    @inlined
    def in_use(self, sequence, params):
        return int32(params.keys)


class AlibiRows(Variant):
    """score - slope |t + shift - j|, with a slope a head: ALiBi."""

    changes_scores = True

    @property
    def params(self) -> dict[str, Any]:
        """See Variant. slopes: (sequence, head). per_slope: 1 / the unit of scores."""
        return {"slopes": array(2), "per_slope": FLOAT}

    @inlined
    def precompute(self, ctx):
        """See Variant: the rows' slopes, in units of scores."""
        return ctx.params.slopes[ctx.batch, ctx.head] * ctx.params.per_slope

    @inlined
    def score(self, s, ctx, key):
        return s - abs(ctx.row + int32(ctx.shift - key) - col_index(s.row_vec)) * ctx.precomputed


class ScoredRows(Scored):
    """A score in Python, for rows that belong to several tokens and heads."""

    @inlined
    def score(self, s, ctx, key):
        return self.function(
            s * ctx.params.score_unit, ctx.batch, ctx.head, ctx.row, col_index(s.row_vec) + int32(key), *ctx.aux
        )


class MaskedRows(Masked):
    """A mask in Python, for such rows."""

    @inlined
    def mask(self, s, ctx, key, hidden):
        return where(self.function(ctx.batch, ctx.head, ctx.row, col_index(s.row_vec) + int32(key), *ctx.aux), s, hidden)
