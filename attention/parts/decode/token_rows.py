"""How query tokens are laid out, and which rows a block's tile has, as classes with the same methods. For a sequence and a key
head there is a row for each token and each query head of the group that shares the key head (as pack_gqa does)."""

from typing import Any, NamedTuple

from numpy import int32

from tiles import inlined, static
from tiles.launching.arguments import ENDS

from ..part import KernelPart


class RowTile(NamedTuple):
    """A tile of rows of a sequence of `tokens` query tokens, from `row` on. seq_start: the index in its batch of the sequence's
    first token. sequence: its number, if the tile decides it."""

    sequence: Any
    seq_start: Any
    tokens: Any
    row: Any


@static
class UniformRows(KernelPart):
    """Each sequence is a batch, and all have the same number of tokens. tile_rows: rows of a tile."""

    tile_rows: int

    is_packed = False

    @inlined
    def find_tile(self, index, tokens, group, params):
        """The RowTile with this index. tokens: of a batch. group: rows of a token."""
        return RowTile(int32(0), int32(0), int32(tokens), int32(self.tile_rows * index))

    @inlined
    def block_number(self, number, splits, tile):
        """A block's number among the blocks of all sequences, with `splits` splits each."""
        return number

    @inlined
    def batch_of(self, sequence):
        """The batch that has the tokens of a sequence."""
        return sequence

    @inlined
    def has_rows(self, tile, group):
        """Does the tile have any rows?"""
        return True

    @inlined
    def unused_tokens(self, tile, tokens, group, params):
        """(first, last) of the tokens after the last sequence, in a batch of `tokens`, whose rows this tile has to clear; none
        if first > last."""
        return int32(0), int32(-1)


class PackedRows(UniformRows):
    """All sequences are in one batch (varlen): sequence n has the tokens from params.ends[n] to params.ends[n + 1], which are
    cu_seqlens. Its tiles begin at index ends[n] group // tile_rows + n, which leaves room for all of them; some tiles have no
    rows."""

    is_packed = True

    def __str__(self):
        return " packed"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS}

    @inlined
    def find_tile(self, index, tokens, group, params):
        """The RowTile with this index; its sequence is found by bisection."""
        low, high = int32(0), int32(params.ends.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if params.ends[middle] * group // self.tile_rows + middle <= index:
                low = middle
            else:
                high = middle
        start = int32(params.ends[low])
        first = int32(start * group // self.tile_rows + low)
        return RowTile(low, start, int32(params.ends[low + 1] - start), int32(self.tile_rows * (index - first)))

    @inlined
    def block_number(self, number, splits, tile):
        """A block's number among the blocks of all sequences: the tile decides the sequence, `number` the split."""
        return int32(tile.sequence * splits + number)

    @inlined
    def batch_of(self, sequence):
        return int32(0)

    @inlined
    def has_rows(self, tile, group):
        return tile.row < tile.tokens * group

    @inlined
    def unused_tokens(self, tile, tokens, group, params):
        """(first, last) of the tokens after the last sequence that this tile clears: tiles of the last sequence go on to the
        end of the batch."""
        row, end = int32(tile.seq_start * group + tile.row), int32(tile.seq_start + tile.tokens)
        last = min((row + self.tile_rows - 1) // group, tokens - 1) if tile.sequence + 2 == params.ends.shape[0] else -1
        return int32(max(end, row // group)), int32(last)
