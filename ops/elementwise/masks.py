"""Masks: a value instead of the elements on one side of a line.

A line is `down * row + across * col < bound + past`; the mask keeps the elements on that side of it, or on the other. Each
mask is a row of the table `LINES`. Rows are those of the warp's tile; ops.warpgroup has the masks whose rows count through the
warpgroup's 64.
"""

from typing import NamedTuple

import numpy as np

from tiles.op import integer, lowers, number, op
from tiles.types import rt

from .create import lane_first


class Line(NamedTuple):
    """Kept is down * row + across * col < bound + past, or if not `below` the rest."""

    down: int
    across: int
    past: int = 0
    below: bool = True

    def keeps(self, shape, bound, first_row=0):
        """An array of booleans: which elements the mask keeps."""
        rows, cols = np.indices(shape)
        return (self.down * (rows + first_row) + self.across * cols < bound + self.past) == self.below


def masked(op_function, tile, bound, value, first_row=0):
    """The NumPy meaning of the mask `op_function`, for a tile whose first row is `first_row`."""
    return np.where(LINES[op_function].keeps(tile.shape, bound, first_row), tile.array, np.float32(value))


def mask_rule(name, op_function, first_row=None):
    """The rule and lowering of the mask `op_function`, for tiles whose first row is `first_row(tile)(b)`.

    An element's row and column are those of its lane's first element plus constants. What differs from lane to lane is taken
    off the bound once, and an element then compares only its constant: in row layout, rows 8 apart share the comparisons of
    columns 8 apart."""
    line = LINES[op_function]

    def rule(tile, bound, value):
        if not (isinstance(tile, rt) and integer(bound) and number(value)):
            raise TypeError(f"{name}: takes a register tile, an integer and a number, got {tile}, {bound} and {value}")

        def lower(b, v, bound_value, fill):
            bound, fill = b.u32(bound_value), b.real(fill)
            if line.down:
                row = lane_first(b, tile, 0)
                row = row if first_row is None else b.add(row, first_row(tile)(b))
                bound = b.sub(bound, row) if line.down > 0 else b.add(row, bound)
            if line.past:
                bound = b.add(bound, b.u32(line.past))
            if line.across:
                bound = b.sub(bound, lane_first(b, tile, 1))
            out = []
            for i, e in enumerate(b.elements(tile, v)):
                row, col = tile.element(0, i)
                visible = b.icmp_signed(">" if line.below else "<=", bound, b.u32(int(line.down * row + line.across * col)))
                out.append(b.select(visible, e, fill))
            return b.from_elements(tile, out)

        return tile, lower

    return rule


@op
def right_fill(tile, col, value):
    """tile, with `value` in every column from `col` on."""
    return masked(right_fill, tile, col, value)


@op
def left_fill(tile, col, value):
    """tile, with `value` in every column before `col`."""
    return masked(left_fill, tile, col, value)


@op
def lower_fill(tile, row, value):
    """tile, with `value` in every row from `row` on."""
    return masked(lower_fill, tile, row, value)


@op
def upper_fill(tile, row, value):
    """tile, with `value` in every row before `row`."""
    return masked(upper_fill, tile, row, value)


@op
def causal(tile, diagonal, value):
    """The lower triangle of tile: `value` in every element (row, col) with col > row + diagonal. Also called `tril`."""
    return masked(causal, tile, diagonal, value)


tril = causal


@op
def triu(tile, diagonal, value):
    """The upper triangle of tile: `value` in every element (row, col) with col < row + diagonal."""
    return masked(triu, tile, diagonal, value)


LINES = {
    right_fill: Line(0, 1),
    left_fill: Line(0, 1, below=False),
    lower_fill: Line(1, 0),
    upper_fill: Line(1, 0, below=False),
    causal: Line(-1, 1, past=1),
    triu: Line(-1, 1, below=False),
}
for _op_function in LINES:
    lowers(_op_function)(mask_rule(_op_function.__name__, _op_function))


def outside_filled(tile, rows, cols, value, first_row=0):
    """What outside_fill means, for a tile whose first row is `first_row`."""
    inside = LINES[lower_fill].keeps(tile.shape, rows, first_row) & LINES[right_fill].keeps(tile.shape, cols)
    return np.where(inside, tile.array, np.float32(value))


def outside_rule(name, first_row=None):
    """The rule and lowering of outside_fill, for tiles whose first row is `first_row(tile)(b)`."""
    below, left = mask_rule(name, lower_fill, first_row), mask_rule(name, right_fill)

    def rule(tile, rows, cols, value):
        if not (isinstance(tile, rt) and integer(rows) and integer(cols) and number(value)):
            raise TypeError(f"{name}: takes a register tile, two integers and a number, got {tile}, {rows}, {cols} and {value}")
        (_, fill_rows), (_, fill_cols) = below(tile, rows, value), left(tile, cols, value)
        return tile, lambda b, v, r, c, fill: fill_cols(b, fill_rows(b, v, r, fill), c, fill)

    return rule


@op
def outside_fill(tile, rows, cols, value):
    """tile, with `value` in every row from `rows` on and every column from `cols` on: the outside of a ragged tile."""
    return outside_filled(tile, rows, cols, value)


lowers(outside_fill)(outside_rule("outside_fill"))
