"""How query tokens lie, as objects with the same methods: which rows a block's tile has. The rows of a sequence and a key head
are its tokens, and of each the query heads that share the key head."""

from typing import Any, NamedTuple

from numpy import int32

from tiles import inlined, static
from tiles.arguments import ENDS


class Rows(NamedTuple):
    """A tile: rows from `row` on, of so many tokens, of which the first is token `start` of a batch. sequence: whose tokens, if
    the tile says that."""

    sequence: Any
    start: Any
    tokens: Any
    row: Any


@static
class Alike:
    """Every sequence has a batch of as many tokens. band: rows of a tile."""

    band: int

    def __str__(self):
        return ""

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @inlined
    def find(self, band, tokens, group, given):
        """The Rows of the tile of that number; there are so many tokens, of `group` rows each."""
        return Rows(int32(0), int32(0), int32(tokens), int32(self.band * band))

    @inlined
    def number(self, number, splits, rows):
        """The number of a block among those of all sequences, each of which has so many parts."""
        return number

    @inlined
    def batch(self, sequence):
        """In which batch the tokens of a sequence lie."""
        return sequence

    @inlined
    def has(self, rows, group):
        """Has the tile any rows?"""
        return True


class OneBehindTheOther(Alike):
    """In one batch, sequence n having the tokens from given.ends[n] to given.ends[n + 1]. Its tiles begin at tile number
    ends[n] group // band + n, which leaves room for all of them; some tiles have no rows."""

    def __str__(self):
        return " packed"

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS}

    @inlined
    def find(self, band, tokens, group, given):
        """See Alike: the sequence is found by halves."""
        low, high = int32(0), int32(given.ends.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if given.ends[middle] * group // self.band + middle <= band:
                low = middle
            else:
                high = middle
        start = int32(given.ends[low])
        first = int32(start * group // self.band + low)
        return Rows(low, start, int32(given.ends[low + 1] - start), int32(self.band * (band - first)))

    @inlined
    def number(self, number, splits, rows):
        """See Alike: the tile says the sequence, the block which part."""
        return int32(rows.sequence * splits + number)

    @inlined
    def batch(self, sequence):
        return int32(0)

    @inlined
    def has(self, rows, group):
        return rows.row < rows.tokens * group
