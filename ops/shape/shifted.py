"""16 rows of two tiles, one above the other, that begin at any row: what a window over rows, as of a convolution, needs."""

import numpy as np

from tiles.compiling import ptx
from tiles.layout import LANES
from tiles.op import lowers, op
from tiles.types import rt

from .slicing import register_coordinates

ROWS, HALF = 16, 8  # rows of such a tile; a lane has one row of each half


@op
def shift_rows(upper, lower, by):
    """The rows `by` to `by + 15` of two tiles of 16 rows, `lower` below `upper`. by: from 0 to 16, known at compile time.

    It takes a shuffle for each register, and none if `by` is a multiple of 8. Tiles in row layout, of one type, not fp8."""
    return np.concatenate([upper.array, lower.array])[by : by + ROWS]


@lowers(shift_rows)
def _(upper, lower, by: int):
    if not isinstance(upper, rt) or upper != lower or (upper.rows, upper.layout) != (ROWS, "row") or upper.dtype.itemsize < 2:
        raise TypeError(f"shift_rows: takes two tiles of {ROWS} rows in row layout, of one type, not fp8; got {upper}, {lower}")
    if not 0 <= by <= ROWS:
        raise TypeError(f"shift_rows: by must be from 0 to {ROWS}, got {by}")
    first, rows = divmod(by, HALF)

    def emit(b, *values):
        registers = [b.unpack(value) for value in values[:2]]
        places = register_coordinates(upper, len(registers[0]))
        halves = [dict(zip(places, of_tile, strict=True)) for of_tile in registers]
        row = b.lshr(b.lane(), b.u32(2))
        source = b.and_(b.add(b.lane(), b.u32(LANES // HALF * rows)), b.u32(LANES - 1))
        is_wrapped = b.icmp_unsigned("<", row, b.u32(rows))  # does this lane's row go to the half above?

        def register(half, col):
            tile, below = divmod(half, 2)
            return halves[tile][HALF * below, col]

        def shift_half(half, col):
            if not rows:
                return register(half, col)
            return ptx.shuffle(b, b.select(is_wrapped, register(half + 1, col), register(half, col)), source)

        return b.pack([shift_half(first + below // HALF, col) for below, col in places])

    return upper, emit
