"""Between registers and memory: a warp's tile or vector to and from global arrays and shared tiles.

`load` and `store` take either: a shared tile of as many rows as the register tile, for a vector a shared vector (vectors.py),
or a global array with the index of the tile's first element. Global accesses outside the array along the tile's axes are left
out (loads give 0).
"""

from dataclasses import replace

import numpy as np
from llvmlite import ir
from numba.cuda import types

from tiles import ptx
from tiles.dtypes import fp32
from tiles.interpreter import here
from tiles.op import integer, lowers, op
from tiles.plumbing import SCALARS, f32, i32, i64, void
from tiles.types import REGISTER_DTYPES, rt, rv, st, sv
from tiles.values import SharedTile

from . import pieces, vectors


# ---- global arrays -------------------------------------------------------------------------------------------------
def window(array, spec, at, rows, cols):
    """The view of a global array that a tile or vector at index `at` covers, tile axes last, and which part of the tile or
    vector that is."""
    axes = [rows % array.ndim, cols % array.ndim] if isinstance(spec, rt) else [cols % array.ndim]
    extents = spec.shape if isinstance(spec, rt) else (spec.length,)
    index, part = [], [slice(0)] * len(axes)
    for axis, (start, size) in enumerate(zip(at, array.shape, strict=True)):
        if axis in axes:
            k = axes.index(axis)
            low, high = (min(max(int(x), 0), size) for x in (start, start + extents[k]))
            index.append(slice(low, high))
            part[k] = slice(low - start, high - start)
        elif 0 <= start < size:
            index.append(start)
        else:
            raise here().hazard(f"index {at} is out of range for an array of shape {array.shape}")
    view = np.asarray(array)[tuple(index)]
    return view.T if len(axes) == 2 and axes[0] > axes[1] else view, tuple(part)


def said(at):
    """The type of an index in a user's words: (int, float32)."""
    return f"({', '.join('int' if integer(i) else str(i) for i in at)})" if isinstance(at, types.BaseTuple) else at


def _check_global(name, array, spec, at, rows, cols):
    if array.dtype not in SCALARS:
        raise TypeError(f"{name}: the array must hold {', '.join(map(str, SCALARS.values()))}, got {array}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {said(at)}")
    axes = (rows, cols) if isinstance(spec, rt) else (cols,)
    if not all(-array.ndim <= axis < array.ndim for axis in axes) or len({axis % array.ndim for axis in axes}) < len(axes):
        raise TypeError(f"{name}: {spec} lies along {len(axes)} axes of the array, got {axes} of {array.ndim}")


def _shifts(b):
    """What this lane's elements are apart from lane 0's: along the axis where quads differ, and along that of the pairs."""
    lane = b.lane()
    return b.lshr(lane, b.u32(2)), b.mul(b.and_(lane, b.u32(3)), b.u32(2))


def element_addresses(b, ty, array, spec, at, rows, cols, first_row):
    """For each of this lane's elements: (does it lie inside the array, its address)."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    quad, pair = _shifts(b)
    rows, cols = rows % ty.ndim, cols % ty.ndim
    if isinstance(spec, rv):
        places = [(0, spec.element(0, i)) for i in range(spec.elements)]
        shift = b.u32(0), quad if spec.by_quad else pair
        shift = shift[0], b.add(shift[1], first_row) if spec.axis == "col_vec" else shift[1]
    else:
        places = [spec.element(0, i) for i in range(spec.elements)]
        shift = (quad, pair) if spec.layout == "row" else (pair, quad)
        shift = b.add(shift[0], first_row), shift[1]
    base = data
    for axis, index in enumerate(at):
        if axis != cols and not (axis == rows and isinstance(spec, rt)):
            base = b.add(base, b.mul(index, strides[axis]))
    row0 = b.add(at[rows], b.zext(shift[0], i64)) if isinstance(spec, rt) else None
    col0 = b.add(at[cols], b.zext(shift[1], i64))
    for row, col in places:
        c = b.add(col0, ir.Constant(i64, int(col)))
        inside, address = b.icmp_unsigned("<", c, extents[cols]), b.add(base, b.mul(c, strides[cols]))
        if row0 is not None:
            r = b.add(row0, ir.Constant(i64, int(row)))
            inside = b.and_(inside, b.icmp_unsigned("<", r, extents[rows]))
            address = b.add(address, b.mul(r, strides[rows]))
        yield inside, address


GUARD = ".reg .pred p;\nsetp.ne.u32 p, $2, 0;\n"  # a predicated access, unlike a branch round it, leaves the code in one piece


def lower_global_store(ty, spec, rows, cols, first_row):
    """The lowering of a store to a global array by a warp whose first row is `first_row(b)` of the tile."""
    dtype = SCALARS[ty.dtype]

    def lower(b, array, value, at, *_):
        places = element_addresses(b, ty, array, spec, at, rows, cols, first_row(b))
        mine = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(getattr(spec, "holders", 0))), b.u32(0))
        for e, (inside, address) in zip(b.elements(spec, value), places, strict=True):
            guard = b.zext(b.and_(inside, mine), i32)
            if dtype is fp32:
                b.do(f"{{{GUARD}@p st.global.f32 [$0], $1;}}", address, e, guard)
            else:
                text = f"{{{GUARD}.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\n@p st.global.b16 [$0], lo;}}"
                b.do(text, address, b.pair(dtype, e, e), guard)

    return lower


def lower_global_load(ty, spec, rows, cols, first_row):
    """The lowering of a load from a global array."""
    dtype = SCALARS[ty.dtype]

    def lower(b, array, _, at, *__):
        out = []
        for inside, address in element_addresses(b, ty, array, spec, at, rows, cols, first_row(b)):
            guard = b.zext(inside, i32)
            if dtype is fp32:
                text = f"{{{GUARD}mov.f32 $0, 0f00000000;\n@p ld.global.f32 $0, [$1];}}"
                out.append(b.asm(f32, text, "=f,l,r", address, guard))
            else:
                text = f"{{{GUARD}.reg .b16 lo;\nmov.b16 lo, 0;\n@p ld.global.b16 lo, [$1];\nmov.b32 $0, {{lo, lo}};}}"
                word = b.asm(i32, text, "=r,l,r", address, guard)
                out.append(b.elements(rt(16, 16, dtype), b.pack([word]))[0])
        return b.from_elements(spec, out)

    return lower


# ---- shared tiles --------------------------------------------------------------------------------------------------
def _row_address(b, tile, address, row):
    """(address of a row of a shared tile, what the swizzle XORs into offsets inside its panels)."""
    offset = b.mul(row, b.u32(tile.width))
    return b.add(address, offset), b.and_(b.lshr(offset, b.u32(3)), b.u32(tile.width - 16))


def matrix_addresses(b, tile, spec, address, first_row, turned=False, first_col=None):
    """For each 16x16 base tile of `spec`, in the order of its registers, the address that this lane gives ldmatrix or
    stmatrix. Matrices 0 and 1 are the base tile's left half, 2 and 3 its right one; for column layout, with .trans, its upper
    and its lower half. `turned`: matrices 1 and 2 change places. first_col: of a base tile, in the tile's first panel."""
    lane, by_row = b.lane(), spec.layout == "row"
    down_first = by_row != turned  # matrix 1 lies below matrix 0, not to its right
    lower, right = (15, 16) if down_first else (7, 8)
    row = b.and_(lane, b.u32(lower))
    if not down_first:
        row = b.or_(row, b.lshr(b.and_(lane, b.u32(16)), b.u32(1)))
    start, swizzle = _row_address(b, tile, address, b.add(row, first_row))
    half = b.and_(lane, b.u32(right))
    half = b.xor(half if down_first else b.shl(half, b.u32(1)), swizzle)
    if first_col is not None:
        half = b.xor(half, b.mul(first_col, b.u32(tile.dtype.itemsize)))
    bands, across = range(0, spec.rows, 16), range(0, spec.cols, 16)
    for row, col in ((r, c) for r in bands for c in across) if by_row else ((r, c) for c in across for r in bands):
        panel, byte = divmod(col * tile.dtype.itemsize, tile.width)  # the swizzle repeats after 8 rows
        yield b.add(b.add(start, b.xor(half, b.u32(byte))), b.u32(panel * tile.panel_bytes + row * tile.width))


def _lane_addresses(b, tile, spec, address, first_row, step):
    """The address of every `step`-th element of this lane."""
    quad, pair = _shifts(b)
    down, across = (quad, pair) if spec.layout == "row" else (pair, quad)
    inside = b.mul(across, b.u32(tile.dtype.itemsize))
    for i in range(0, spec.elements, step):
        row, col = spec.element(0, i)
        start, swizzle = _row_address(b, tile, address, b.add(b.add(down, first_row), b.u32(int(row))))
        panel, byte = divmod(int(col) * tile.dtype.itemsize, tile.width)
        yield b.add(b.add(start, b.u32(panel * tile.panel_bytes)), b.xor(b.add(inside, b.u32(byte)), swizzle))


def _store_words(b, tile, spec, address, registers, first_row):
    """2-byte elements by plain stores: pairs of a row at once, pairs of a column one by one."""
    if spec.layout == "row":
        for at, register in zip(_lane_addresses(b, tile, spec, address, first_row, 2), registers, strict=True):
            b.do("st.shared.b32 [$0], $1;", at, register)
        return
    for i, at in enumerate(_lane_addresses(b, tile, spec, address, first_row, 1)):
        half = "lo" if i % 2 == 0 else "hi"
        b.do(f"{{.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\nst.shared.b16 [$0], {half};}}", at, registers[i // 2])


def lower_shared_store(tile, spec, first_row):
    """The lowering of a store to rows first_row(b).. of a shared tile."""
    by_row = spec.layout == "row"

    def lower(b, address, value, *_):
        e, row = b.elements(spec, value), first_row(b)
        if tile.dtype is fp32 and by_row:
            for k, at in enumerate(_lane_addresses(b, tile, spec, address, row, 2)):
                b.do("st.shared.v2.f32 [$0], {$1, $2};", at, e[2 * k], e[2 * k + 1])
            return
        if tile.dtype is fp32:
            for at, x in zip(_lane_addresses(b, tile, spec, address, row, 1), e, strict=True):
                b.do("st.shared.f32 [$0], $1;", at, x)
            return
        registers = b.unpack(value if spec.dtype is tile.dtype else b.from_elements(replace(spec, dtype=tile.dtype), e))
        matrices = b.since(90)
        with b.if_then(matrices):
            for k, at in enumerate(matrix_addresses(b, tile, spec, address, row)):
                ptx.stmatrix(b, at, registers[4 * k : 4 * k + 4], transposed=not by_row)
        with b.if_then(b.not_(matrices)):
            _store_words(b, tile, spec, address, registers, row)

    return lower


def lower_shared_load(tile, spec, first_row):
    """The lowering of a load from rows first_row(b).. of a shared tile."""
    by_row = spec.layout == "row"

    def lower(b, address, *_):
        row = first_row(b)
        if tile.dtype is fp32:
            out = []
            for at in _lane_addresses(b, tile, spec, address, row, 2 if by_row else 1):
                if by_row:
                    pair = b.asm(ir.LiteralStructType([f32] * 2), "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", at)
                    out += b.unpack(pair)
                else:
                    out.append(b.asm(f32, "ld.shared.f32 $0, [$1];", "=f,r", at))
            ptx.reads_done(b)
            return b.from_elements(spec, out)
        registers = []
        for at in matrix_addresses(b, tile, spec, address, row):
            registers += ptx.ldmatrix(b, at, transposed=not by_row)
        ptx.reads_done(b)
        held = replace(spec, dtype=tile.dtype)
        return b.pack(registers) if held == spec else b.from_elements(spec, b.elements(held, b.pack(registers)))

    return lower


# ---- both scopes ---------------------------------------------------------------------------------------------------
def rows_of(spec, rank):
    """The rows of a warpgroup's tile, or the elements of its vector, that its warp `rank` holds."""
    if isinstance(spec, rv):
        return vectors.part(spec, rank)
    return range(spec.rows * rank, spec.rows * (rank + 1))


def _check_shared(name, tile, verb, spec, at, warps):
    """A shared tile is loaded and stored whole, by one warp or by four."""
    if tile.dtype not in REGISTER_DTYPES:
        raise TypeError(f"{name}: there are no register tiles of {tile.dtype}: {tile}")
    if not isinstance(spec, rt) or tile.shape != (warps * spec.rows, spec.cols):
        raise TypeError(f"{name}: {tile} does not {verb} {f'{warps} x ' * (warps > 1)}{spec}")
    if at is not None:
        raise TypeError(f"{name}: `at` is for global arrays; a shared tile is taken whole, got {said(at)}")


def check_store(name, target, value, at, rows, cols, is_aligned, warps):
    """The rule that stores at warp and warpgroup scope share."""
    if not isinstance(value, (rt, rv)) or getattr(value, "partial", False):
        raise TypeError(f"{name}: stores a register tile or whole vector, got {value}")
    if isinstance(target, (st, sv)):
        (_check_shared if isinstance(target, st) else vectors.check)(name, target, "take", value, at, warps)
        if is_aligned:
            raise TypeError(f"{name}: `aligned` is for global arrays, got {target}")
    elif isinstance(target, types.Array):
        _check_global(name, target, value, at, rows, cols)
        if is_aligned:
            pieces.check(name, target, value)
    else:
        raise TypeError(f"{name}: the target must be a shared tile or vector, or a global array, got {target}")


def check_load(name, source, spec, at, rows, cols, warps):
    """The rule that loads at warp and warpgroup scope share."""
    if not isinstance(spec, (rt, rv)) or getattr(spec, "partial", False):
        raise TypeError(f"{name}: the type to load must be an rt or a vector type, got {spec}")
    if isinstance(source, (st, sv)):
        (_check_shared if isinstance(source, st) else vectors.check)(name, source, "hold", spec, at, warps)
    elif isinstance(source, types.Array):
        _check_global(name, source, spec, at, rows, cols)
    else:
        raise TypeError(f"{name}: the source must be a shared tile or vector, or a global array, got {source}")


def lower_store(target, value, rows, cols, is_aligned, first_row):
    """The lowering of a store by a warp whose first row is `first_row(b)` of the tile."""
    if isinstance(target, (st, sv)):
        return (lower_shared_store if isinstance(target, st) else vectors.lower_store)(target, value, first_row)
    return (pieces.lower_store if is_aligned else lower_global_store)(target, value, rows, cols, first_row)


def lower_load(source, spec, rows, cols, first_row):
    """The lowering of a load, likewise."""
    if isinstance(source, (st, sv)):
        return (lower_shared_load if isinstance(source, st) else vectors.lower_load)(source, spec, first_row)
    return lower_global_load(source, spec, rows, cols, first_row)


def store_rows(target, value, at, rows, cols, is_aligned, rank):
    """The meaning of a store by warp `rank` of those that share the tile."""
    if isinstance(target, SharedTile):
        return here().write(target, value.array.reshape(-1, *target.shape[1:]), rows_of(value.spec, rank))
    if is_aligned and (why := pieces.misaligned(target, at, cols)):
        raise here().hazard(f"aligned store: {why}")
    at = shifted(value.spec, at, rows, cols, rank)
    view, part = window(target, value.spec, at, rows, cols)
    array = value.array if isinstance(value.spec, rt) else value.array.ravel()
    view[...] = array[part].astype(view.dtype)


def load_rows(source, spec, at, rows, cols, rank):
    """The meaning of a load by warp `rank` of those that share the tile."""
    if isinstance(source, SharedTile):
        return here().read(source, rows_of(spec, rank)).astype(np.float32).reshape(spec.shape)
    view, part = window(source, spec, shifted(spec, at, rows, cols, rank), rows, cols)
    out = np.zeros(spec.shape if isinstance(spec, rt) else spec.length, np.float32)
    out[part] = view
    return out.reshape(spec.shape)


def shifted(spec, at, rows, cols, rank):
    """`at`, moved down to the rows of warp `rank`."""
    if isinstance(spec, rv) and spec.axis == "row_vec":
        return at
    axis = (rows if isinstance(spec, rt) else cols) % len(at)
    step = spec.rows if isinstance(spec, rt) else spec.length
    return tuple(x + step * rank if k == axis else x for k, x in enumerate(at))


# ---- warp scope ----------------------------------------------------------------------------------------------------
@op
def store(target, value, at=None, rows=-2, cols=-1, aligned=False):
    """target[...] = value, rounded to target's dtype, by one warp. target: a shared tile or vector of value's shape; or a
    global array, where `at` is the index of the first element and the tile runs along axes `rows` and `cols` (a vector along
    `cols`).

    aligned: a promise that lets a lane store 16 bytes at a time, for tiles of 32, 64, 96, ... columns and 2-byte arrays: the
    array's columns are adjacent and come by eight, as does `at` along them, and its address and other strides are multiples
    of 16 bytes. The interpreter checks it; on the GPU a broken promise is a misaligned access, or a write past the columns."""
    store_rows(target, value, at, rows, cols, aligned, 0)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    check_store("store", target, value, at, rows, cols, aligned, 1)
    return void, lower_store(target, value, rows, cols, aligned, lambda b: b.u32(0))


@op
def load(source, spec, at=None, rows=-2, cols=-1):
    """The register tile or vector of type `spec` from a shared tile or vector, or a global array (see `store`), by one warp."""
    return load_rows(source, spec, at, rows, cols, 0)


@lowers(load)
def _(source, spec: type, at, rows: int, cols: int):
    check_load("load", source, spec, at, rows, cols, 1)
    return spec, lower_load(source, spec, rows, cols, lambda b: b.u32(0))
