"""Where a block stores its rows of O and their log-sum-exp: to the caller's arrays if it has read all keys of these rows, or as
a partial output (split-KV), which decode_combine.py merges with those of the other splits. These classes have the same
methods."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import full, log2, store, truncate, zeros
from tiles import dtype, inlined, static
from tiles.launching.arguments import array

from ..part import KernelPart

LN2 = math.log(2)


class OutputTile(NamedTuple):
    """A tile of rows of the output. The rows begin at `row`; a row is a query head of key head `head`, and a token; each token
    has `group` rows; the tokens are `first_token` to `last_token` of batch `batch`. part, part_batch: the first two indices of
    these rows' place in the arrays of partial outputs. is_final: has the block read all keys of these rows?"""

    batch: Any
    head: Any
    part: Any
    part_batch: Any
    is_final: Any
    row: Any
    first_token: Any
    last_token: Any
    group: Any


@static
class FinalOutput(KernelPart):
    """O and lse go to the caller's arrays. vector_bytes: the number of bytes of which addresses are multiples."""

    dtype: dtype
    vector_bytes: int

    label = "final"

    def __str__(self):
        return self.label

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type} of the arrays that are written. out: (batch, token, key head, query head of the group, column).
        lse: (batch, key head, query head of the group, token)."""
        return {"out": array(5, self.dtype), "lse": array(4)}

    @inlined
    def is_final(self, out_tile):
        """Does the sum of weights of these rows cover all keys? Only then may a sink be added to it."""
        return True

    @inlined
    def store(self, o, out_tile, col, params):
        """Store the columns of O from `col` on. The rows of a token are contiguous; the store masks out the rows of others."""
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            at = out_tile.batch, token, out_tile.head, int32(out_tile.row - token * out_tile.group), col
            store(params.out, o, at, 3, 4, self.vector_bytes)

    @inlined
    def store_row_sums(self, m, l, scale, out_tile, params):
        """Store the log-sum-exp of the rows, by their sums l of weights exp2(scale (s - m)) of scores s."""
        self.store_lse(m + log2(l) / scale, scale, out_tile, params)

    @inlined
    def clear_row_sums(self, spec, scale, out_tile, params):
        """Store the log-sum-exp of rows without keys. spec: the type of a column vector."""
        self.store_lse(full(spec, -math.inf), scale, out_tile, params)

    @inlined
    def store_lse(self, lse, scale, out_tile, params):
        """Store the log-sum-exp of the rows. lse: in units of scores and to the base 2, so that a row's sum of weights is
        exp2(scale lse)."""
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            at = out_tile.batch, out_tile.head, int32(out_tile.row - token * out_tile.group), token
            store(params.lse, lse * (scale * LN2), at, cols=2)


@static
class PartialOutput(FinalOutput):
    """O and lse go to scratch memory, in float32, as the partial output of one split of the keys. keeps_sums: go row maxima and
    row sums there instead of lse? Of scores that are very low lse would be the maximum alone, and not say how many keys there
    were."""

    keeps_sums: bool = False

    label = "partial"

    def __str__(self):
        return f"{self.label} with sums" if self.keeps_sums else self.label

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}. out_partial: (part, part_batch, key head, row, column). The same without columns: lse_partial,
        or row maxima in its place, and sum_partial, row sums."""
        params: dict[str, Any] = {"out_partial": array(5), "lse_partial": array(4)}
        return params | ({"sum_partial": array(4)} if self.keeps_sums else {})

    @inlined
    def is_final(self, out_tile):
        return False

    @inlined
    def store(self, o, out_tile, col, params):
        at = out_tile.part, out_tile.part_batch, out_tile.head, out_tile.row, col
        store(params.out_partial, o, at, 3, 4, True)

    @inlined
    def store_lse(self, lse, scale, out_tile, params):
        self.store_rows(params.lse_partial, lse, out_tile)

    @inlined
    def store_row_sums(self, m, l, scale, out_tile, params):
        if self.keeps_sums:
            self.store_rows(params.lse_partial, m, out_tile)
            self.store_rows(params.sum_partial, l, out_tile)
        else:
            self.store_lse(m + log2(l) / scale, scale, out_tile, params)

    @inlined
    def clear_row_sums(self, spec, scale, out_tile, params):
        if self.keeps_sums:
            self.store_row_sums(full(spec, -math.inf), zeros(spec), scale, out_tile, params)
        else:
            self.store_lse(full(spec, -math.inf), scale, out_tile, params)

    @inlined
    def store_rows(self, target, x, out_tile):
        """Store a number of each row."""
        store(target, x, (out_tile.part, out_tile.part_batch, out_tile.head, out_tile.row))


class PackedPartialOutput(PartialOutput):
    """A partial output of packed sequences (cu_seqlens): the rows after the tile's last token are another sequence's, and are
    not stored."""

    label = "packed partial"

    @inlined
    def store(self, o, out_tile, col, params):
        end = int32((out_tile.last_token + 1) * out_tile.group)
        at = out_tile.part, out_tile.part_batch, out_tile.head, out_tile.row, col
        store(truncate(params.out_partial, 3, end), o, at, 3, 4, True)

    @inlined
    def store_rows(self, target, x, out_tile):
        end = int32((out_tile.last_token + 1) * out_tile.group)
        store(truncate(target, 3, end), x, (out_tile.part, out_tile.part_batch, out_tile.head, out_tile.row))


@static
class FinalOrPartialOutput:
    """O and lse of a tile go to the caller's arrays if the block has read all keys of its rows, otherwise to scratch memory."""

    final: FinalOutput
    partial: PartialOutput

    def __str__(self):
        return f"{self.final} or {self.partial}"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type} of the arrays of both."""
        return self.final.params | self.partial.params

    @inlined
    def is_final(self, out_tile):
        return out_tile.is_final

    @inlined
    def store(self, o, out_tile, col, params):
        if out_tile.is_final:
            self.final.store(o, out_tile, col, params)
        else:
            self.partial.store(o, out_tile, col, params)

    @inlined
    def store_row_sums(self, m, l, scale, out_tile, params):
        if self.partial.keeps_sums:
            if out_tile.is_final:
                self.final.store_row_sums(m, l, scale, out_tile, params)
            else:
                self.partial.store_row_sums(m, l, scale, out_tile, params)
        else:
            self.store_lse(m + log2(l) / scale, scale, out_tile, params)

    @inlined
    def store_lse(self, lse, scale, out_tile, params):
        if out_tile.is_final:
            self.final.store_lse(lse, scale, out_tile, params)
        else:
            self.partial.store_lse(lse, scale, out_tile, params)
