"""Views of shared tiles: a block loads one tile, and each of its warpgroups works on a part of the rows.

    queries = subtile(q.wait(r), 64, warpgroup.id())
    s = warpgroup.mm_ABt(queries, k.wait(j))

A part may be loaded, stored, multiplied and copied by TMA like a tile of its own. Swizzles repeat every 8 rows, so it lies as
such a tile would, but for its panels, which are as far apart as the whole tile's (`st.whole`).
"""

from dataclasses import replace

from tiles.interpreter import here
from tiles.op import integer, lowers, op
from tiles.types import st
from tiles.values import SharedTile


@op
def subtile(tile, rows, index):
    """The `index`-th part of `rows` rows of a shared tile, rows index * rows and following, as a shared tile. No copy.
    `rows`, a multiple of 8 that divides the tile's rows, must be known when the kernel is compiled; `index` from 0."""
    if not 0 <= index < tile.rows // rows:
        raise here().hazard(f"subtile {index} of {rows} rows lies outside {tile.spec}")
    first = index * rows
    name = f"rows {first} to {first + rows - 1} of {tile.name}"
    address = tile.address + first * tile.width
    return SharedTile(replace(tile.spec, rows=rows), address, name, tile.slot, tile.number, tile.first + first)


@lowers(subtile)
def _(tile, rows: int, index):
    if not isinstance(tile, st) or not integer(index):
        raise TypeError(f"subtile: takes a shared tile, its rows and an integer, got {tile} and {index}")
    if rows < 8 or rows % 8 or tile.rows % rows:
        raise TypeError(f"subtile: rows must be a multiple of 8 that divides {tile.rows}, got {rows}")
    step = rows * tile.width
    return replace(tile, rows=rows), lambda b, address, _, i: b.add(address, b.mul(b.u32(i), b.u32(step)))
