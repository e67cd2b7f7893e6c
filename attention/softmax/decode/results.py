"""Where a block's rows of the output go, as objects with the same methods: to the caller, or among the parts of a sequence
that combine.py makes one."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import store, truncate
from tiles import dtype, inlined, static
from tiles.arguments import array

LN2 = math.log(2)


class Spot(NamedTuple):
    """Which rows: those from `row` on, of a sequence's heads that share a key head; of its tokens `first` to `last`, `group`
    rows each. They are tokens start + first to start + last of a batch. split: which part of the keys they have seen. end: how
    many rows the sequence has."""

    batch: Any
    head: Any
    split: Any
    row: Any
    first: Any
    last: Any
    group: Any
    start: Any
    end: Any


@static
class Whole:
    """To the caller's arrays. piece: the bytes that addresses are multiples of."""

    dtype: dtype
    piece: int

    def __str__(self):
        return type(self).__name__.lower()

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it writes. out: (batch, token, key head, which of its query heads, column). lse:
        (batch, key head, which of its query heads, token)."""
        return {"out": array(5, self.dtype), "lse": array(4)}

    @inlined
    def store(self, o, spot, col, given):
        """Write some columns of O, from `col` on. A token's rows lie in one place: what other rows would write lies outside."""
        for token in range(spot.first, spot.last + 1):
            at = spot.batch, spot.start + token, spot.head, int32(spot.row - token * spot.group), col
            store(given.out, o, at, 3, 4, self.piece)

    @inlined
    def store_sums(self, sums, scale, spot, given):
        """Write the logarithms of the sums of weights; exp2(scale x) is the sum that x stands for."""
        for token in range(spot.first, spot.last + 1):
            at = spot.batch, spot.head, int32(spot.row - token * spot.group), spot.start + token
            store(given.lse, sums * (scale * LN2), at, cols=2)


class Part(Whole):
    """To scratch memory, a part of the keys each."""

    @property
    def given(self) -> dict[str, Any]:
        """See Whole. parts: (split, batch, key head, row, column). sums: the same without columns."""
        return {"parts": array(5), "sums": array(4)}

    @inlined
    def store(self, o, spot, col, given):
        """See Whole."""
        store(given.parts, o, (spot.split, spot.batch, spot.head, spot.row, col), 3, 4, True)

    @inlined
    def store_sums(self, sums, scale, spot, given):
        """See Whole."""
        store(given.sums, sums, (spot.split, spot.batch, spot.head, spot.row))


class PartOfPacked(Part):
    """The same where the rows of another sequence follow."""

    @inlined
    def store(self, o, spot, col, given):
        """See Whole."""
        begin = spot.start * spot.group
        at = spot.split, spot.batch, spot.head, int32(begin + spot.row), col
        store(truncate(given.parts, 3, begin + spot.end), o, at, 3, 4, True)

    @inlined
    def store_sums(self, sums, scale, spot, given):
        """See Whole."""
        begin = spot.start * spot.group
        store(truncate(given.sums, 3, begin + spot.end), sums, (spot.split, spot.batch, spot.head, int32(begin + spot.row)))
