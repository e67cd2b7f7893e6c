"""What the kernels of gated norms share: where rows lie, and what a gate multiplies.

A row is lines of 32 columns, one behind the other, as in memory, and so are all rows of a token. Sixteen lines
are a warp's tile: several rows (GroupedRows), or a part of one, whose others the block's other warps have (SpreadRow). Columns
of tiles are in load_unordered's order, as nothing depends on a column's number."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import (
    block,
    divmod,
    group_sum,
    load_unordered,
    row_sum,
    sigmoid,
    store_unordered,
    tile_sum,
    truncate,
    warp_index,
    zeros,
)
from tiles import dtype, fp32, inlined, rt, static
from tiles.layout import LANES

LINES, COLUMNS = 16, 32  # of a warp's tile
WARPS, MAX_WARPS = 4, 16  # of a block of GroupedRows; of a block of SpreadRow, at most
GROUPS = (1, 2, 4, 8)  # lines of rows of which a tile has several


class Strip(NamedTuple):
    """The tokens [start, end) of a batch and the rows from that of `head` on. number: of the strip among those of its heads."""

    batch: Any
    head: Any
    start: Any
    end: Any
    number: Any


@static
class GroupedRows:
    """Rows of 1, 2, 4 or 8 lines, so that a warp's tile has several rows of a token. lines: of a row. aligned:
    do addresses and strides allow accesses of 16 bytes?"""

    lines: int
    dtype: dtype
    aligned: bool

    threads = LANES * WARPS  # of a block

    @property
    def registers(self):
        """Registers of a thread of the kernel of results, and of that of gradients."""
        return (64, 128) if self.aligned else (80, 168)

    @property
    def rows(self):
        """How many rows a tile has."""
        return LINES // self.lines

    @property
    def tile(self):
        """The type of a warp's tile."""
        return rt(LINES, COLUMNS, self.dtype)

    @property
    def fp32_tile(self):
        """The type of a warp's tile in fp32."""
        return rt(LINES, COLUMNS, fp32)

    def __str__(self):
        return f"rows of {COLUMNS * self.lines}, {self.dtype}{'' if self.aligned else ', unaligned'}"

    @inlined
    def find(self, panels, splits, tokens, length, batches):
        """The Strip of this warp, or block; a Strip without tokens for warps beyond the last one. panels: groups of heads, each
        of as many as a tile has rows. splits: parts of a sequence, each of `tokens` tokens."""
        number, panel = divmod(self.index(), panels)
        batch, split = divmod(number, splits)
        start = int32(split * tokens)
        end = int32(min(start + tokens, length)) if batch < batches else start
        return Strip(int32(batch), int32(panel * self.rows), start, end, int32(number))

    @inlined
    def index(self):
        """Which strip this warp, or block, has."""
        return cuda.blockIdx.x * WARPS + warp_index()

    @inlined
    def load(self, gX, strip, token):
        """Load this warp's lines of a token, in fp32, from an array (batch, token, line, column)."""
        at = strip.batch, int32(token), int32(self.lines * strip.head), 0
        return fp32(load_unordered(gX, self.tile, at, 2, 3, self.aligned))

    @inlined
    def reload(self, x, gX, strip, token):
        """x, which `load` returned: from registers, or loaded again where registers are too few."""
        return x

    @inlined
    def store(self, gX, value, strip, token):
        """Store this warp's lines of a token."""
        at = strip.batch, int32(token), int32(self.lines * strip.head), 0
        store_unordered(gX, self.dtype(value), at, 2, 3, self.aligned)

    @inlined
    def load_weights(self, gWeight, head):
        """The weights (head, line, column) for this warp's lines. What is loaded for a row is 0 in all others."""
        weight = zeros(self.fp32_tile)
        for n in range(self.rows):
            at = int32(min(head + n, gWeight.shape[0] - 1)), int32(-self.lines * n), 0
            weight = weight + load_unordered(gWeight, self.fp32_tile, at, 1, 2, False)
        return weight

    @inlined
    def sum_rows(self, x, scratch):
        """The sum of the elements of each row, for all of its lines."""
        return group_sum(row_sum(x), self.lines)

    @inlined
    def store_sums(self, gSums, sums, strip):
        """Store sums over the tokens of a strip, (head, strip, line, column)."""
        for n in range(self.rows):
            if strip.head + n < gSums.shape[0]:
                at = int32(strip.head + n), strip.number, int32(-self.lines * n), 0
                store_unordered(gSums, sums, at, 2, 3, False)


@static
class SpreadRow(GroupedRows):
    """Rows of any other number of lines: a block has one row of a token at a time, and each of its warps sixteen lines of
    it."""

    registers = 80, 128

    @property
    def rows(self):
        return 1

    @property
    def threads(self):
        """How many threads a block has."""
        return LANES * -(-self.lines // LINES)

    @inlined
    def index(self):
        return cuda.blockIdx.x

    @inlined
    def load(self, gX, strip, token):
        first = int32(self.lines * strip.head)
        row_lines = truncate(gX, 2, int32(first + self.lines))
        at = strip.batch, int32(token), int32(first + LINES * warp_index()), 0
        return fp32(load_unordered(row_lines, self.tile, at, 2, 3, self.aligned))

    @inlined
    def reload(self, x, gX, strip, token):
        return self.load(gX, strip, token)

    @inlined
    def store(self, gX, value, strip, token):
        first = int32(self.lines * strip.head)
        row_lines = truncate(gX, 2, int32(first + self.lines))
        at = strip.batch, int32(token), int32(first + LINES * warp_index()), 0
        store_unordered(row_lines, self.dtype(value), at, 2, 3, self.aligned)

    @inlined
    def load_weights(self, gWeight, head):
        return load_unordered(gWeight, self.fp32_tile, (head, int32(LINES * warp_index()), 0), 1, 2, False)

    @inlined
    def sum_rows(self, x, scratch):
        return block.reduce_sum(tile_sum(x), scratch)

    @inlined
    def store_sums(self, gSums, sums, strip):
        at = strip.head, strip.number, int32(LINES * warp_index()), 0
        store_unordered(gSums, sums, at, 2, 3, False)


@static
class RowWeights:
    """Weights of a row's columns, of each head or of all."""

    def __str__(self):
        return ""

    @inlined
    def load(self, rows, gWeight, head):
        """The weights of this warp's lines."""
        return rows.load_weights(gWeight, head)

    @inlined
    def store_sums(self, rows, gSums, sums, strip):
        """Store the sums over a strip's tokens of which the weights' gradients consist."""
        rows.store_sums(gSums, sums, strip)


@static
class UnitWeights(RowWeights):
    """Weights of 1, which are in no array and have no gradient."""

    def __str__(self):
        return ", no weights"

    @inlined
    def load(self, rows, gWeight, head):
        return float32(1)

    @inlined
    def store_sums(self, rows, gSums, sums, strip):
        pass


ROW_WEIGHTS, UNIT_WEIGHTS = RowWeights(), UnitWeights()


@static
class SiluGate:
    """act(z) = silu(z) = z sigmoid(z)."""

    @inlined
    def activate(self, z):
        """act(z), by which the gate multiplies a row."""
        return z * sigmoid(z)

    @inlined
    def activate_with_derivative(self, z):
        """(silu(z), silu'(z)), and silu'(z) = s + z s (1 - s), where s = sigmoid(z)."""
        s = sigmoid(z)
        return z * s, s + z * s * (1.0 - s)


@static
class SigmoidGate(SiluGate):
    """act(z) = sigmoid(z)."""

    @inlined
    def activate(self, z):
        return sigmoid(z)

    @inlined
    def activate_with_derivative(self, z):
        """(sigmoid(z), sigmoid'(z)), and sigmoid'(z) = s (1 - s)."""
        s = sigmoid(z)
        return s, s * (1.0 - s)
