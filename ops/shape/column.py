"""A column of a register tile as a vector of its rows."""

import numpy as np

from tiles.compiling import ptx
from tiles.op import lowers, op
from tiles.types import rt

from ..threads import lanes


@op(takes_operands=True)
def column(tile, index):
    """tile[:, index], an fp32 tile's column, as its col_vec. index: known at compile time. A shuffle for each 8 rows, within
    quads. Tiles in row layout."""
    return np.ascontiguousarray(tile.array[:, index : index + 1])


@lowers(column)
def _(tile, index: int):
    if not (isinstance(tile, rt) and tile.layout == "row" and tile.dtype.itemsize == 4):
        raise TypeError(f"column: takes a tile of 4-byte elements in row layout, got {tile}")
    if not 0 <= index < tile.cols:
        raise TypeError(f"column: index must be from 0 to {tile.cols - 1}, got {index}")
    out = tile.col_vec

    def emit(b, value, *_):
        t, first = lanes.in_quad(b)
        owner, place = divmod(index % 8, 2)  # the lane of each quad that has the column, of its pair which
        registers_at = {
            tuple(int(x) for x in tile.element(0, k)): register for k, register in enumerate(b.elements(tile, value))
        }
        rows, col = [int(out.element(0, k)) for k in range(out.elements)], index - index % 8 + place
        source = b.or_(first, b.u32(owner))
        return b.from_elements(out, [ptx.shuffle(b, registers_at[row, col], source) for row in rows])

    return out, emit
