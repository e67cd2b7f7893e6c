"""Views of shared tiles."""

from dataclasses import replace

from tiles.interpreter import here
from tiles.op import integer, lowers, op
from tiles.types import st
from tiles.values import SharedTile


@op
def subtile(tile, rows, index):
    """Rows index * rows .. (index + 1) * rows of a shared tile, as a shared tile: one warpgroup's part of what all load.
    `rows`, a multiple of 8 that divides the tile's rows, must be known when the kernel is compiled."""
    if not 0 <= index < tile.rows // rows:
        raise here().hazard(f"subtile {index} of {rows} rows lies outside {tile.spec}")
    first = index * rows
    part = _part(tile.spec, rows)
    name = f"rows {first} to {first + rows - 1} of {tile.name}"
    return SharedTile(part, tile.address + first * tile.width, name, tile.slot, tile.number, tile.first + first)


def _part(tile, rows):
    return replace(tile, rows=rows, whole=tile.whole)


@lowers(subtile)
def _(tile, rows: int, index):
    if not isinstance(tile, st) or not integer(index):
        raise TypeError(f"subtile: takes a shared tile, its rows and an integer, got {tile} and {index}")
    if rows < 8 or rows % 8 or tile.rows % rows:
        raise TypeError(f"subtile: rows must be a multiple of 8 that divides {tile.rows}, got {rows}")
    return _part(tile, rows), lambda b, address, _, i: b.add(address, b.mul(b.u32(i), b.u32(rows * tile.width)))
