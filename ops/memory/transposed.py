"""Shared tiles to and from registers, transposed on the way: a warp has 16 columns of the shared tile as its 16 rows. Ops of
`ops.warpgroup`."""

from dataclasses import replace

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.op import lowers, op
from tiles.types import rt, st

from ..threads.warps import FOUR_WARPS
from .shared_tiles import matrix_addresses

BASE = 16  # rows of a warp


@op
def load_transposed(tile, spec, fenced=True):
    """The warp's 16 rows of tile.T, as `spec`: rt(16, tile.rows) of the tile's dtype, from a 2-byte shared tile of 64 columns,
    16 for each warp. This is wgmma's left operand; ldmatrix transposes on the way. fenced: as in `load`."""
    first = BASE * current_warp().rank
    return current_warp().read(tile, fence=fenced, cols=range(first, first + BASE)).T


@lowers(load_transposed)
def _(tile, spec: type, fenced: int):
    ok = isinstance(tile, st) and tile.dtype.itemsize == 2 and tile.cols == WARPGROUP * BASE and tile.rows % BASE == 0
    if not ok or spec != rt(BASE, tile.rows, tile.dtype):
        raise TypeError(f"load_transposed: takes a 2-byte st(k, 64) and rt(16, k) of its dtype, got {tile} and {spec}")
    transpose = rt(tile.rows, BASE, tile.dtype, "col")  # a column layout's registers are those of its transpose in row layout

    def emit(b, address, *_):
        registers = []
        for at in matrix_addresses(
            b, tile, transpose, address, b.u32(0), first_col=b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE))
        ):
            registers += ptx.ldmatrix(b, at, transposed=True)
        if fenced:
            ptx.reads_done(b)
        return b.pack(registers)

    return spec, emit


@op
def store_transposed(tile, value):
    """tile.T = value, rounded to the tile's dtype: the warps' rt(16, k) as 16 columns each of a 2-byte shared tile of 64."""
    first = BASE * current_warp().rank
    current_warp().write(tile, value.array.T, cols=range(first, first + BASE))


@lowers(store_transposed)
def _(tile, value):
    ok = isinstance(tile, st) and tile.dtype.itemsize == 2 and tile.cols == tile.panel_cols == WARPGROUP * BASE
    if not (ok and isinstance(value, rt) and value.shape == (BASE, tile.rows) and value.layout == "row"):
        raise TypeError(f"store_transposed: takes a 2-byte st(k, 64) and rt(16, k) in row layout, got {tile} and {value}")
    stored, transpose = replace(value, dtype=tile.dtype), rt(tile.rows, BASE, tile.dtype, "col")

    def emit(b, address, registers):
        registers = b.unpack(registers if stored == value else b.from_elements(stored, b.elements(value, registers)))
        first = b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE))
        for k, at in enumerate(matrix_addresses(b, tile, transpose, address, b.u32(0), first_col=first)):
            ptx.stmatrix(b, at, registers[4 * k : 4 * k + 4], transposed=True)

    return void, emit
