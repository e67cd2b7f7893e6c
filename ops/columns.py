"""A part of a register tile's columns."""

from dataclasses import replace

from tiles.op import lowers, op
from tiles.types import rt

BASE = 16  # columns of a base tile


@op
def columns(tile, count, index):
    """tile[:, index * count : (index + 1) * count], as a register tile: the `index`-th part of `count` columns. No instruction:
    a lane's registers lie in the order of the columns. `count`, a multiple of 16 that divides the tile's columns, and `index`,
    from 0, must be known when the kernel is compiled. Tiles in row layout."""
    return tile.array[:, index * count : (index + 1) * count]


@lowers(columns)
def _(tile, count: int, index: int):
    if not isinstance(tile, rt) or tile.layout != "row":
        raise TypeError(f"columns: takes a register tile in row layout, got {tile}")
    if count < BASE or count % BASE or tile.cols % count or not 0 <= index < tile.cols // count:
        raise TypeError(
            f"columns: count must be a multiple of {BASE} that divides {tile.cols}, and index one of those parts, "
            f"got {count} and {index}"
        )

    def emit(b, value, *_):
        registers = b.unpack(value)
        band = len(registers) // (tile.rows // BASE)  # a lane's registers of 16 rows
        part = band * count // tile.cols
        return b.pack([r for k, r in enumerate(registers) if k % band // part == index])

    return replace(tile, cols=count), emit
