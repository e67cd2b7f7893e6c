"""Views of shared tiles: a block loads one tile, and each of its warpgroups works on a part of the rows.

    queries = subtile(q.wait(r), 64, warpgroup.id())
    s = warpgroup.mm_ABt(queries, k.wait(j))

A part may be loaded, stored, multiplied and copied by TMA like a tile of its own. Swizzles repeat every 8 rows, so
a part of 8, 16, ... rows has the memory layout of such a tile. Only its panels have the stride of the whole tile's
(`st.parent_rows`). Columns come by whole panels:

    state = warpgroup.mma_AtB(state, subtile(k.wait(j), ROWS, 0, 64, warpgroup.id()), v.wait(j))     # 64 rows of K^T V

Of a shared vector, `rows` elements are a part.
"""

import functools
from dataclasses import replace

from tiles.interpreter import current_warp
from tiles.op import integer, lowers, op
from tiles.types import remote, st, sv
from tiles.values import SharedTile


@op
def subtile(tile, rows, index, cols=0, across=0):
    """The part of a shared tile with `rows` rows and `cols` columns that begins at (index * rows, across * cols), as a shared
    tile. No copy. Known at compile time: `rows`, a multiple of 8 that divides the tile's rows, and `cols`, a multiple of a
    panel's columns, up to the tile's (all by default). `index` and `across` count from 0. For a shared vector: its elements
    from index * rows on; `rows` is a multiple of 16."""
    if isinstance(tile.spec, sv):
        return _elements(tile, rows, index)
    spec = _part(tile.spec, rows, cols)
    if not (0 <= index < tile.rows // rows and 0 <= across < tile.cols // spec.cols):
        description = f"subtile {index} of {rows} rows" + f", {across} of {cols} columns" * bool(cols)
        raise current_warp().hazard(f"{description} lies outside {tile.spec}")
    first, left = index * rows, across * spec.cols
    columns = f", columns {left} to {left + spec.cols - 1}" * (spec.cols < tile.cols)
    name = f"rows {first} to {first + rows - 1}{columns} of {tile.name}"
    address = tile.address + first * tile.width + left // tile.panel_cols * tile.panel_bytes
    return SharedTile(spec, address, name, tile.slot, tile.number, tile.first + first)


def _elements(vector, count, index):
    first = index * count
    if not 0 <= index < vector.length // count:
        raise current_warp().hazard(f"subtile {index} of {count} elements lies outside {vector.spec}")
    name = f"elements {first} to {first + count - 1} of {vector.name}"
    address = vector.address + first * vector.dtype.itemsize
    return SharedTile(_some_elements(vector.spec, count), address, name, vector.slot, vector.number)


@functools.cache
def _some_elements(vector, count):
    return replace(vector, length=count)


@functools.cache
def _part(tile, rows, cols):
    return replace(tile, rows=rows, cols=cols or tile.cols)


@lowers(subtile)
def _(tile, rows: int, index, cols: int, across):
    if isinstance(tile, sv) and integer(index) and not cols:
        if rows < 16 or rows % 16 or tile.length % rows:
            raise TypeError(f"subtile: the elements must be a multiple of 16 that divides {tile.length}, got {rows}")
        step = rows * tile.dtype.itemsize
        return _some_elements(tile, rows), lambda b, address, _, i, *__: b.add(address, b.mul(b.u32(i), b.u32(step)))
    if not (isinstance(tile, st) and integer(index) and integer(across)):
        numbers = f"{index} and {across}" if cols else index
        first = f": of the block's own, {tile.item}, and then cluster.map(part, block)" if isinstance(tile, remote) else ""
        raise TypeError(f"subtile: takes a shared tile, its rows and an integer, got {tile} and {numbers}{first}")
    if rows < 8 or rows % 8 or tile.rows % rows:
        raise TypeError(f"subtile: rows must be a multiple of 8 that divides {tile.rows}, got {rows}")
    if not 0 <= cols <= tile.cols or cols % tile.panel_cols:
        raise TypeError(
            f"subtile: cols must be a multiple of the {tile.panel_cols} columns of a panel, up to {tile.cols}, got {cols}"
        )
    spec = _part(tile, rows, cols)
    down, right = rows * tile.width, spec.panels * tile.panel_bytes

    def emit(b, address, _, index, __, across):
        address = b.add(address, b.mul(b.u32(index), b.u32(down)))
        return b.add(address, b.mul(b.u32(across), b.u32(right))) if cols else address

    return spec, emit
