"""What a warp of a warpgroup takes of something that lies across its rows: its part of a shared tile's columns, turned into
rows, and its part of a row vector, turned into a column. See `warpgroup.load_transposed` and `warpgroup.own_rows`. And one row
of a shared tile as a vector, for any warp."""

from dataclasses import replace

import numpy as np
from llvmlite import ir

from tiles import ptx
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import here
from tiles.interpreter.block import WARPGROUP
from tiles.op import integer, lowers, op
from tiles.plumbing import f32, i32, void
from tiles.types import rt, rv, st

from .panels import matrix_addresses, row_address
from .transpose import to_quads

BASE = 16  # rows of a warp


def rank(b):
    """This warp's place in its warpgroup."""
    return b.and_(b.lshr(b.special("tid.x"), b.u32(5)), b.u32(WARPGROUP - 1))


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
        for at in matrix_addresses(b, tile, turned, address, b.u32(0), first_col=b.mul(rank(b), b.u32(BASE))):
            registers += ptx.ldmatrix(b, at, transposed=True)
        ptx.reads_done(b)
        return b.pack(registers)

    return spec, emit


@op
def load_row(tile, spec, row):
    """One row of a shared fp32 or 2-byte tile as the fp32 row_vec `spec`, by one warp; all its lanes get it."""
    if not 0 <= row < tile.rows:
        raise here().hazard(f"row {row} lies outside {tile.spec}")
    return here().read(tile, range(row, row + 1)).astype(np.float32)


@lowers(load_row)
def _(tile, spec: type, row):
    ok = isinstance(tile, st) and tile.dtype in (fp32, bf16, fp16) and integer(row)
    if not ok or spec != rt(BASE, tile.cols, fp32).row_vec:
        raise TypeError(
            f"load_row: takes an fp32 or 2-byte tile, its fp32 row_vec and an integer, got {tile}, {spec} and {row}"
        )
    size = tile.dtype.itemsize

    def emit(b, address, _, row):
        start, swizzle = row_address(b, tile, address, b.u32(row))
        pair = b.mul(b.and_(b.lane(), b.u32(3)), b.u32(2 * size))
        out = []
        for i in range(0, spec.elements, 2):
            panel, byte = divmod(int(spec.element(0, i)) * size, tile.width)
            at = b.add(b.add(start, b.u32(panel * tile.panel_bytes)), b.xor(b.add(pair, b.u32(byte)), swizzle))
            if size == 4:
                words = b.asm(ir.LiteralStructType([f32] * 2), "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", at)
                out += b.unpack(words)
            else:
                word = b.asm(i32, "ld.shared.b32 $0, [$1];", "=r,r", at)
                out += b.elements(rt(16, 16, tile.dtype), b.pack([word]))[:2]
        ptx.reads_done(b)
        return b.from_elements(spec, out)

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
        first = b.mul(rank(b), b.u32(BASE))
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

    def emit(b, value):
        registers, mine = b.unpack(value), rank(b)
        count = len(registers) // WARPGROUP
        parts = [registers[w * count : (w + 1) * count] for w in range(WARPGROUP)]
        own = parts[0]
        for w in range(1, WARPGROUP):
            is_mine = b.icmp_unsigned("==", mine, b.u32(w))
            own = [b.select(is_mine, x, y) for x, y in zip(parts[w], own, strict=True)]
        return b.pack(to_quads(b, own))

    return out, emit
