"""Which keys query tokens see: those in use, limited by a window and by left padding.

Query heads that share a key head, and the query tokens, are the rows of a tile: row r of the tile that begins at `row` belongs
to token (row + r) // group. So what is a number where rows are queries of one head is a vector here (TokenHeadContext): `row`
has the rows' tokens, `head` their heads. Token t is at key t + shift, so that the last token is at the last key."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import col_index, line_up, right_fill, where
from tiles import inlined, static
from tiles.launching.arguments import ENDS, INT

from ..part import KernelPart
from ..scores import ScoreMod
from ..sequences import APPENDING, in_use


class KeySpan(NamedTuple):
    """Some tokens see no keys but those from `first` to before `end`. shift: token t is at key t + shift."""

    first: Any
    end: Any
    shift: Any


@static
class KeyWindow(KernelPart):
    """Which keys in use a token at key p sees: those from p - params.left on if `left`, and up to p + params.right if `right`;
    none before params.leftpad[n] of sequence n if `padded`."""

    left: bool
    right: bool
    padded: bool

    def __str__(self):
        flags = {"left": self.left, "right": self.right, "padded": self.padded}
        return " ".join(name for name, is_set in flags.items() if is_set) or "all"

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {**self.length_params}
        params |= {"left": INT} if self.left else {}
        params |= {"right": INT} if self.right else {}
        return params | ({"leftpad": ENDS} if self.padded else {})

    @property
    def length_params(self) -> dict[str, Any]:
        """{parameter: its type} of those that say how many keys are in use."""
        return APPENDING

    @inlined
    def in_use(self, sequence, params):
        """How many keys of a sequence are in use."""
        return in_use(sequence, params)

    @inlined
    def key_span(self, sequence, first, last, tokens, params):
        """The KeySpan of tokens `first` to `last` of the `tokens` that a sequence has."""
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
        """ops.line_up of the tiles of `size` keys that any token of a sequence sees."""
        begins = params.leftpad if self.padded else None
        max_keys = int32(tokens + params.left if self.left else 2**31 - 1)
        return line_up(params.lengths, begins, max_keys, size, first, count, before, tile)

    @inlined
    def mask(self, s, ctx, key, end):
        """s, of keys from `key` on, with -inf where a row does not see the key. end: the end of the keys in use."""
        s, place, j = right_fill(s, int32(end - key), -math.inf), ctx.row + int32(ctx.shift - key), col_index(s.row_vec)
        if self.right:
            s = where(j <= place + ctx.params.right, s, -math.inf)
        if self.left:
            s = where(j >= place - ctx.params.left, s, -math.inf)
        return s


class GrowingKeyWindow(KeyWindow):
    """A KeyWindow while the same call appends params.added keys, which stream-K shares out, too."""

    @inlined
    def line_up(self, size, first, count, before, tile, tokens, params):
        begins = params.leftpad if self.padded else None
        max_keys = int32(tokens + params.left if self.left else 2**31 - 1)
        return line_up(params.lengths, begins, max_keys, size, first, count, before, tile, params.added)


class WholeCacheWindow(KeyWindow):
    """A KeyWindow over caches that are full: params.keys keys of each sequence are in use. As all sequences are equally long,
    their keys go to fixed splits, not to stream-K."""

    def __str__(self):
        return f"{super().__str__()} of whole caches"

    @property
    def length_params(self) -> dict[str, Any]:
        return {"keys": INT}

    @inlined
    def in_use(self, sequence, params):
        return int32(params.keys)


class TokenHeadScoreMod(ScoreMod):
    """ScoreMod, with instructions in the order in which decode_hopper.py's machine code was timed: the product comes first."""

    @inlined
    def score(self, s, ctx, key):
        s = s * ctx.params.score_unit
        return self.function(s, ctx.batch, ctx.head, ctx.rows(s), ctx.columns(s, key), *ctx.aux)
