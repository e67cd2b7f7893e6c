"""Masks: a value in place of the elements on one side of a line."""

import numpy as np

from tiles import layout
from tiles.op import integer, lowers, number, op
from tiles.types import rt


def _keep_below(b, tile, v, fill, bound, slope):
    """Keep element (row, col) where col < bound + slope * row, else `fill`; rows count from this lane's first.

    Rows and columns of a lane's elements are constants plus 2 (lane % 4) columns, so the bound takes what varies, and the
    element's constant col - slope * row stands against it: rows 8 apart share the comparisons of columns 8 apart."""
    fill, bound = b.real(fill), b.sub(bound, b.mul(b.and_(b.special("tid.x"), b.u32(3)), b.u32(2)))
    out = []
    for i, e in enumerate(b.elements(tile, v)):
        row, col = layout.element(0, i, tile.cols)
        out.append(b.select(b.icmp_signed(">", bound, b.u32(col - slope * row)), e, fill))
    return b.from_elements(tile, out)


def check(name, tile, index, value):
    """TypeError if a mask does not take these."""
    if not (isinstance(tile, rt) and tile.layout == "row" and integer(index) and number(value)):
        raise TypeError(f"{name}: takes a register tile in row layout, an integer and a number, got {tile}, {index}, {value}")


@op
def right_fill(tile, col, value):
    """tile, with `value` in every column from `col` on."""
    return np.where(np.arange(tile.cols)[None, :] < col, tile.array, np.float32(value))


@lowers(right_fill)
def _(tile, col, value):
    check("right_fill", tile, col, value)
    return tile, lambda b, v, n, fill: _keep_below(b, tile, v, fill, b.u32(n), slope=0)


def causal_array(array, diagonal, value):
    """array, with `value` where col > row + diagonal."""
    rows, cols = np.indices(array.shape)
    return np.where(cols <= rows + diagonal, array, np.float32(value))


def lower_causal(tile, first_row):
    """The lowering of a causal mask of a tile whose first row is `first_row(b)`."""

    def lower(b, v, diagonal, fill):
        row = b.add(b.lshr(b.lane(), b.u32(2)), first_row(b))
        return _keep_below(b, tile, v, fill, b.add(b.add(row, b.u32(diagonal)), b.u32(1)), slope=1)

    return lower


@op
def causal(tile, diagonal, value):
    """tile, with `value` in every element (row, col) with col > row + diagonal."""
    return causal_array(tile.array, diagonal, value)


@lowers(causal)
def _(tile, diagonal, value):
    check("causal", tile, diagonal, value)
    return tile, lower_causal(tile, lambda b: b.u32(0))
