"""A warp's slice of what lies across its warpgroup's rows: the 16 columns, of a shared tile of 64, or the 16 elements, of a
row vector of 64, that have the numbers of its own 16 rows. Turned into rows, or the block on the diagonal; ops of
`ops.warpgroup`."""

from dataclasses import replace

import numpy as np

from tiles import ptx
from tiles.interpreter import here
from tiles.layout import WARPGROUP
from tiles.op import lowers, op
from tiles.plumbing import void
from tiles.types import rt, rv, st

from .group import FOUR_WARPS
from .panels import matrix_addresses
from .transpose import to_quads

BASE = 16  # rows of a warp


def _own(b, registers):
    """This warp's quarter of registers that every warp has all of."""
    rank, count = FOUR_WARPS.emit_rank(b), len(registers) // WARPGROUP
    own = registers[:count]
    for w in range(1, WARPGROUP):
        is_mine = b.icmp_unsigned("==", rank, b.u32(w))
        own = [b.select(is_mine, x, y) for x, y in zip(registers[w * count :][:count], own, strict=True)]
    return own


@op
def load_transposed(tile, spec):
    """The warp's 16 rows of tile.T, as `spec`: rt(16, tile.rows) of the tile's dtype, from a 2-byte shared tile of 64 columns,
    16 a warp. It is what wgmma takes as its left operand, and ldmatrix transposes on the way."""
    first = BASE * here().rank
    return here().read(tile)[:, first : first + BASE].T


@lowers(load_transposed)
def _(tile, spec: type):
    ok = isinstance(tile, st) and tile.dtype.itemsize == 2 and tile.cols == WARPGROUP * BASE and tile.rows % BASE == 0
    if not ok or spec != rt(BASE, tile.rows, tile.dtype):
        raise TypeError(f"load_transposed: takes a 2-byte st(k, 64) and rt(16, k) of its dtype, got {tile} and {spec}")
    turned = rt(tile.rows, BASE, tile.dtype, "col")  # a column layout's registers are those of its transpose in row layout

    def emit(b, address, *_):
        registers = []
        for at in matrix_addresses(b, tile, turned, address, b.u32(0), first_col=b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE))):
            registers += ptx.ldmatrix(b, at, transposed=True)
        ptx.reads_done(b)
        return b.pack(registers)

    return spec, emit


@op
def store_transposed(tile, value):
    """tile.T = value, rounded to the tile's dtype: the warps' rt(16, k) as 16 columns each of a 2-byte shared tile of 64."""
    first = BASE * here().rank
    here().write(tile, value.array.T, cols=range(first, first + BASE))


@lowers(store_transposed)
def _(tile, value):
    ok = isinstance(tile, st) and tile.dtype.itemsize == 2 and tile.cols == tile.panel_cols == WARPGROUP * BASE
    if not (ok and isinstance(value, rt) and value.shape == (BASE, tile.rows) and value.layout == "row"):
        raise TypeError(f"store_transposed: takes a 2-byte st(k, 64) and rt(16, k) in row layout, got {tile} and {value}")
    held, turned = replace(value, dtype=tile.dtype), rt(tile.rows, BASE, tile.dtype, "col")

    def emit(b, address, registers):
        registers = b.unpack(registers if held == value else b.from_elements(held, b.elements(value, registers)))
        first = b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE))
        for k, at in enumerate(matrix_addresses(b, tile, turned, address, b.u32(0), first_col=first)):
            ptx.stmatrix(b, at, registers[4 * k : 4 * k + 4], transposed=True)

    return void, emit


@op
def own_rows(vector):
    """The warp's 16 elements of a row_vec of 64, as the col_vec of its rows: what the warpgroup's 64 x 64 tile, one of whose
    sides is the vector's, has on its other side."""
    first = BASE * here().rank
    return np.ascontiguousarray(vector.array[:, first : first + BASE].T)


@lowers(own_rows)
def _(vector):
    if not isinstance(vector, rv) or vector.partial or vector.by_quad or vector.length != WARPGROUP * BASE:
        raise TypeError(f"own_rows: takes a row_vec of {WARPGROUP * BASE} elements, got {vector}")
    out = replace(vector, length=BASE, axis="col_vec" if vector.axis == "row_vec" else "row_vec")
    return out, lambda b, value: b.pack(to_quads(b, _own(b, b.unpack(value))))


@op
def own_block(tile):
    """The 16 x 16 block that this warp's rt(16, 64) has on the diagonal of its warpgroup's 64 x 64 tile."""
    first = BASE * here().rank
    return tile.array[:, first : first + BASE]


@lowers(own_block)
def _(tile):
    if not isinstance(tile, rt) or tile.shape != (BASE, WARPGROUP * BASE) or tile.layout != "row":
        raise TypeError(f"own_block: takes rt({BASE}, {WARPGROUP * BASE}) in row layout, got {tile}")
    return rt(BASE, BASE, tile.dtype), lambda b, value: b.pack(_own(b, b.unpack(value)))
