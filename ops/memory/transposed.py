"""Shared tiles to and from registers, transposed on the way: a warp has 16 columns of the shared tile as its 16 rows. Ops of
`ops.warpgroup`."""

from dataclasses import replace

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.op import lowers, op
from tiles.types import rt, st

from ..threads.warps import FOUR_WARPS
from .shared_tiles import matrix_addresses, shifts
from .shared_vectors import load_elements, store_elements

BASE = 16  # rows of a warp
COLUMNS = WARPGROUP * BASE  # of the shared tile
WIDTH = 128  # bytes of a row of its panels, if it is fp32
SWIZZLED_ROWS = 8  # after which the swizzle repeats


def _takes(tile, dtype):
    """Is this a shared tile of 64 columns, of 2 bytes or fp32, whose transpose warps load or store as this dtype?"""
    if not isinstance(tile, st) or tile.cols != COLUMNS or tile.rows % BASE:
        return False
    return tile.dtype.itemsize == 2 or (tile.dtype is fp32 and dtype is fp32 and tile.width == WIDTH)


def _column_addresses(b, tile, address):
    """The address of each fp32 element of this lane, of the warp's 16 columns: two warps have a panel of 32 columns. The
    swizzle repeats every 8 rows, so four addresses serve all elements, with offsets that instructions hold."""
    rank, transpose = FOUR_WARPS.emit_rank(b), rt(tile.rows, BASE, fp32, "col")
    warps = tile.panel_cols // BASE
    panel = b.add(address, b.mul(b.udiv(rank, b.u32(warps)), b.u32(tile.panel_bytes)))
    across, down = shifts(b)  # a lane has two rows of every eight, two columns of the warp's
    first_col = b.add(b.mul(b.urem(rank, b.u32(warps)), b.u32(BASE)), across)
    starts = {}
    for row, col in (transpose.element(0, k) for k in range(transpose.elements)):
        group, place = divmod(int(row), SWIZZLED_ROWS)
        if (place, int(col)) not in starts:
            start, swizzle = b.row_address(tile, panel, b.add(down, b.u32(place)))
            inside = b.mul(b.add(first_col, b.u32(int(col))), b.u32(fp32.itemsize))
            starts[place, int(col)] = ptx.opaque(b, b.add(start, b.xor(inside, swizzle)))
        yield b.add(starts[place, int(col)], b.u32(group * SWIZZLED_ROWS * tile.width))


@op
def load_transposed(tile, spec, fenced=True, recompute=False):
    """The warp's 16 rows of tile.T, as `spec`: rt(16, tile.rows) of the tile's dtype, from a 2-byte or fp32 shared tile of 64
    columns, 16 for each warp. Of 2 bytes this is wgmma's left operand; ldmatrix transposes on the way. fenced: as in `load`.
    recompute: of 2 bytes, addresses are computed here, so that no loop keeps them in registers."""
    first = BASE * current_warp().rank
    return current_warp().read(tile, fence=fenced, cols=range(first, first + BASE)).T


@lowers(load_transposed)
def _(tile, spec: type, fenced: int, recompute: int = 0):
    if not _takes(tile, fp32) or spec != rt(BASE, tile.rows, tile.dtype):
        raise TypeError(f"load_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k) of its dtype, got {tile} and {spec}")
    transpose = rt(tile.rows, BASE, tile.dtype, "col")  # a column layout's registers are those of its transpose in row layout

    def emit(b, address, *_):
        registers = []
        if tile.dtype is fp32:
            registers = [load_elements(b, fp32, 1, at)[0] for at in _column_addresses(b, tile, address)]
            if fenced:
                ptx.reads_done(b)
            return b.from_elements(spec, registers)
        for at in matrix_addresses(
            b,
            tile,
            transpose,
            address,
            b.u32(0),
            first_col=b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE)),
            recompute=bool(recompute),
        ):
            registers += ptx.ldmatrix(b, at, transposed=True)
        if fenced:
            ptx.reads_done(b)
        return b.pack(registers)

    return spec, emit


@op
def store_transposed(tile, value, recompute=False):
    """tile.T = value, rounded to the tile's dtype: the warps' rt(16, k) as 16 columns each of a shared tile of 64, of 2 bytes
    or, as the value is, fp32. recompute: as in load_transposed."""
    first = BASE * current_warp().rank
    current_warp().write(tile, value.array.T, cols=range(first, first + BASE))


@lowers(store_transposed)
def _(tile, value, recompute: int = 0):
    ok = isinstance(value, rt) and _takes(tile, value.dtype) and (tile.dtype is fp32 or tile.cols == tile.panel_cols)
    if not (ok and value.shape == (BASE, tile.rows) and value.layout == "row"):
        raise TypeError(
            f"store_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k) in row layout, got {tile} and {value}"
        )
    stored, transpose = replace(value, dtype=tile.dtype), rt(tile.rows, BASE, tile.dtype, "col")

    def emit(b, address, registers, *_):
        if tile.dtype is fp32:
            for at, element in zip(_column_addresses(b, tile, address), b.elements(value, registers), strict=True):
                store_elements(b, fp32, [element], at)
            return
        registers = b.unpack(registers if stored == value else b.from_elements(stored, b.elements(value, registers)))
        first = b.mul(FOUR_WARPS.emit_rank(b), b.u32(BASE))
        for k, at in enumerate(
            matrix_addresses(b, tile, transpose, address, b.u32(0), first_col=first, recompute=bool(recompute))
        ):
            ptx.stmatrix(b, at, registers[4 * k : 4 * k + 4], transposed=True)

    return void, emit
