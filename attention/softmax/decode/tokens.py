"""How query tokens lie, as objects with the same methods: which rows a block's tile has. A sequence and a key head have a row
for each token and each query head that shares the key head."""

from typing import Any, NamedTuple

from numpy import int32

from tiles import inlined, static
from tiles.arguments import ENDS


class Rows(NamedTuple):
    """A tile of rows, from `row` on, of `tokens` tokens, the first of which is token `start` of its batch. sequence: the
    sequence of these tokens, if it follows from the tile."""

    sequence: Any
    start: Any
    tokens: Any
    row: Any


@static
class UniformRows:
    """Each sequence has a batch, and all have the same number of tokens. band: rows of a tile."""

    band: int

    def __str__(self):
        return ""

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @inlined
    def find(self, band, tokens, group, params):
        """The Rows of tile number `band`; there are `tokens` tokens, with `group` rows each."""
        return Rows(int32(0), int32(0), int32(tokens), int32(self.band * band))

    @inlined
    def number(self, number, splits, rows):
        """The number of a block among the blocks of all sequences, each of which has `splits` parts."""
        return number

    @inlined
    def batch(self, sequence):
        """The batch in which the tokens of a sequence lie."""
        return sequence

    packed = False  # do the tokens of other sequences follow, or nobody's?

    @inlined
    def has(self, rows, group):
        """Does the tile have any rows?"""
        return True

    @inlined
    def nobodys(self, rows, tokens, group, params):
        """(the first token of a tile that lies behind the last sequence, the last one), of a batch of `tokens` tokens. There
        are none if the last one comes first. Tiles that the last sequence does not need go on to the end of the batch."""
        return int32(0), int32(-1)


class PackedRows(UniformRows):
    """All sequences lie in one batch; sequence n has the tokens from params.ends[n] to params.ends[n + 1]. Its tiles begin at
    tile ends[n] group // band + n, which leaves room for all of them; some tiles have no rows."""

    def __str__(self):
        return " packed"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS}

    @inlined
    def find(self, band, tokens, group, params):
        """See UniformRows. The sequence is found by bisection."""
        low, high = int32(0), int32(params.ends.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if params.ends[middle] * group // self.band + middle <= band:
                low = middle
            else:
                high = middle
        start = int32(params.ends[low])
        first = int32(start * group // self.band + low)
        return Rows(low, start, int32(params.ends[low + 1] - start), int32(self.band * (band - first)))

    @inlined
    def number(self, number, splits, rows):
        """See UniformRows. Here the tile decides the sequence, and the block decides the part."""
        return int32(rows.sequence * splits + number)

    @inlined
    def batch(self, sequence):
        return int32(0)

    packed = True

    @inlined
    def has(self, rows, group):
        return rows.row < rows.tokens * group

    @inlined
    def nobodys(self, rows, tokens, group, params):
        row, end = int32(rows.start * group + rows.row), int32(rows.start + rows.tokens)
        last = min((row + self.band - 1) // group, tokens - 1) if rows.sequence + 2 == params.ends.shape[0] else -1
        return int32(max(end, row // group)), int32(last)
