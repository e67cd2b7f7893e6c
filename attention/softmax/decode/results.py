"""Where a block's rows of the output go, as objects with the same methods: to the caller, or to the parts of a sequence that
combine.py merges."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import store, truncate
from tiles import dtype, inlined, static
from tiles.arguments import array

LN2 = math.log(2)


class Spot(NamedTuple):
    """Where the rows of a tile belong: the rows from `row` on, of heads that share a key head and of tokens `first` to `last`
    of a batch, with `group` rows for each token. sequence: the batch, that of one sequence or of several. part, of: the first
    two indices into an array of parts, for the keys that they have seen. whole: are these all keys?"""

    sequence: Any
    head: Any
    part: Any
    of: Any
    whole: Any
    row: Any
    first: Any
    last: Any
    group: Any


@static
class Whole:
    """Results go to the caller's arrays. piece: the number of bytes of which addresses are multiples."""

    dtype: dtype
    piece: int

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it writes. out: (sequence, token, key head, which of its query heads, column). lse:
        (sequence, key head, which of its query heads, token)."""
        return {"out": array(5, self.dtype), "lse": array(4)}

    @inlined
    def joins(self, spot):
        """Do these rows have all their weights, so that a sink may join the sum?"""
        return True

    @inlined
    def store(self, o, spot, col, params):
        """Write some columns of O, from `col` on. The rows of a token lie side by side; other rows are left out as out of
        range."""
        for token in range(spot.first, spot.last + 1):
            at = spot.sequence, token, spot.head, int32(spot.row - token * spot.group), col
            store(params.out, o, at, 3, 4, self.piece)

    @inlined
    def store_sums(self, sums, scale, spot, params):
        """Write the logarithms of the sums of weights; exp2(scale x) is the sum that x stands for."""
        for token in range(spot.first, spot.last + 1):
            at = spot.sequence, spot.head, int32(spot.row - token * spot.group), token
            store(params.lse, sums * (scale * LN2), at, cols=2)


class Part(Whole):
    """Results go to scratch memory, for each part of the keys."""

    @property
    def params(self) -> dict[str, Any]:
        """See Whole. parts: (part, of, key head, row, column). sums: the same without columns."""
        return {"parts": array(5), "sums": array(4)}

    @inlined
    def joins(self, spot):
        return False

    @inlined
    def store(self, o, spot, col, params):
        store(params.parts, o, (spot.part, spot.of, spot.head, spot.row, col), 3, 4, True)

    @inlined
    def store_sums(self, sums, scale, spot, params):
        store(params.sums, sums, (spot.part, spot.of, spot.head, spot.row))


class PartOfPacked(Part):
    """The same if the rows of another sequence follow: a tile ends with the rows of its last token."""

    @inlined
    def store(self, o, spot, col, params):
        end = int32((spot.last + 1) * spot.group)
        store(truncate(params.parts, 3, end), o, (spot.part, spot.of, spot.head, spot.row, col), 3, 4, True)

    @inlined
    def store_sums(self, sums, scale, spot, params):
        end = int32((spot.last + 1) * spot.group)
        store(truncate(params.sums, 3, end), sums, (spot.part, spot.of, spot.head, spot.row))


@static
class Either:
    """Results go to the caller's arrays if they are for all keys of their rows, otherwise to scratch memory."""

    whole: Whole
    part: Part

    def __str__(self):
        return "either"

    @property
    def params(self) -> dict[str, Any]:
        """See Whole."""
        return self.whole.params | self.part.params

    @inlined
    def joins(self, spot):
        """See Whole."""
        return spot.whole

    @inlined
    def store(self, o, spot, col, params):
        """See Whole."""
        if spot.whole:
            self.whole.store(o, spot, col, params)
        else:
            self.part.store(o, spot, col, params)

    @inlined
    def store_sums(self, sums, scale, spot, params):
        """See Whole."""
        if spot.whole:
            self.whole.store_sums(sums, scale, spot, params)
        else:
            self.part.store_sums(sums, scale, spot, params)
