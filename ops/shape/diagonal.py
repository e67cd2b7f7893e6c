"""A warp's 16 of 64 columns: those with the numbers of its own 16 rows, as rows, or as the block on the diagonal, and back. Ops
of `ops.warpgroup`."""

from dataclasses import replace

import numpy as np

from tiles.compiling import ptx
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.op import lowers, op
from tiles.types import rt, rv

from ..threads.lanes import in_quad
from ..threads.warps import FOUR_WARPS
from .transpose import to_quads

BASE = 16  # rows of a warp


def _select_quarter(b, registers):
    """This warp's quarter of registers, of which every warp has all four."""
    rank, count = FOUR_WARPS.emit_rank(b), len(registers) // WARPGROUP
    selected = registers[:count]
    for w in range(1, WARPGROUP):
        is_mine = b.icmp_unsigned("==", rank, b.u32(w))
        selected = [b.select(is_mine, x, y) for x, y in zip(registers[w * count :][:count], selected, strict=True)]
    return selected


@op
def warp_rows(vector):
    """The warp's 16 elements of a row_vec of 64, as the col_vec of its rows. It takes a vector from one side of the warpgroup's
    64 x 64 tile to the other."""
    first = BASE * current_warp().rank
    return np.ascontiguousarray(vector.array[:, first : first + BASE].T)


@lowers(warp_rows)
def _(vector):
    if not isinstance(vector, rv) or vector.partial or vector.by_quad or vector.length != WARPGROUP * BASE:
        raise TypeError(f"warp_rows: takes a row_vec of {WARPGROUP * BASE} elements, got {vector}")
    out = replace(vector, length=BASE, axis="col_vec" if vector.axis == "row_vec" else "row_vec")
    return out, lambda b, value: b.pack(to_quads(b, _select_quarter(b, b.unpack(value))))


@op
def diagonal_block(tile):
    """The 16 x 16 block that this warp's rt(16, 64) has on the diagonal of its warpgroup's 64 x 64 tile."""
    first = BASE * current_warp().rank
    return tile.array[:, first : first + BASE]


@lowers(diagonal_block)
def _(tile):
    if not isinstance(tile, rt) or tile.shape != (BASE, WARPGROUP * BASE) or tile.layout != "row":
        raise TypeError(f"diagonal_block: takes rt({BASE}, {WARPGROUP * BASE}) in row layout, got {tile}")
    return rt(BASE, BASE, tile.dtype), lambda b, value: b.pack(_select_quarter(b, b.unpack(value)))


@op
def diagonal(tile):
    """The diagonal of the 64 x 64 tile of which each warp of a warpgroup has rt(16, 64, fp32): the warp's 16 elements, as the
    col_vec of its rows. Of an rt(16, 16, fp32) its own."""
    first = BASE * current_warp().rank if tile.array.shape[1] > BASE else 0
    return np.diagonal(tile.array[:, first : first + BASE]).reshape(-1, 1).copy()


@lowers(diagonal)
def _(tile):
    block = rt(BASE, BASE, fp32)
    if tile not in (block, rt(BASE, WARPGROUP * BASE, fp32)):
        raise TypeError(f"diagonal: takes {rt(BASE, WARPGROUP * BASE, fp32)} in row layout, or {block}, got {tile}")

    def emit(b, value):
        _, quad = in_quad(b)
        row = b.lshr(b.lane(), b.u32(2))  # also row + 8; its element is in lane row / 2 of the quad
        is_odd, source = b.icmp_unsigned("!=", b.and_(row, b.u32(1)), b.u32(0)), b.or_(quad, b.lshr(row, b.u32(1)))
        elements = b.unpack(value) if tile == block else _select_quarter(b, b.unpack(value))
        places = {block.element(0, k): k for k in range(block.elements)}
        pairs = [(elements[places[half, half + 1]], elements[places[half, half]]) for half in (0, BASE // 2)]
        return b.pack([ptx.shuffle(b, b.select(is_odd, odd, even), source) for odd, even in pairs])

    return block.col_vec, emit


@op
def on_diagonal(block):
    """The warp's rt(16, 64) of the warpgroup's 64 x 64 tile that has the warps' `block` on its diagonal and 0 elsewhere: the
    inverse of diagonal_block."""
    out, first = np.zeros((BASE, WARPGROUP * BASE), block.array.dtype), BASE * current_warp().rank
    out[:, first : first + BASE] = block.array
    return out


@lowers(on_diagonal)
def _(block):
    if not isinstance(block, rt) or block.shape != (BASE, BASE) or block.layout != "row":
        raise TypeError(f"on_diagonal: takes rt({BASE}, {BASE}) in row layout, got {block}")

    def emit(b, value):
        rank, registers, out = FOUR_WARPS.emit_rank(b), b.unpack(value), []
        for w in range(WARPGROUP):
            is_mine = b.icmp_unsigned("==", rank, b.u32(w))
            out += [b.select(is_mine, x, b.bitcast(b.u32(0), x.type)) for x in registers]
        return b.pack(out)

    return rt(BASE, WARPGROUP * BASE, block.dtype), emit
