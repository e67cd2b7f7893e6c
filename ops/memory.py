"""Between registers and memory: a warp's tile or vector to and from global arrays and shared tiles.

`load` and `store` take either: a shared tile of as many rows as the register tile, for a vector a shared vector (vectors.py),
or a global array with the index of the tile's first element. Global accesses outside the array along the tile's axes are left
out (loads give 0); `clip` moves that edge, for kernels that share one array between sequences.
"""

import numpy as np
from llvmlite import ir
from numba.cuda import types

from tiles.builder import f32, i32, i64
from tiles.dtypes import fp32
from tiles.interpreter import here
from tiles.op import integer, lowers, op
from tiles.plumbing import SCALARS, void
from tiles.types import rt, rv, st, sv
from tiles.values import SharedTile

from . import panels, pieces, vectors
from .panels import bytes_of, joined, said, shifts


# ---- global arrays -------------------------------------------------------------------------------------------------
def window(array, spec, at, rows, cols):
    """The view of a global array that a tile or vector at index `at` covers, tile axes last, and which part of the tile or
    vector that is."""
    axes = [rows % array.ndim, cols % array.ndim] if isinstance(spec, rt) else [cols % array.ndim]
    extents = spec.shape if isinstance(spec, rt) else (spec.length,)
    if not any(array.shape):  # an array that was not given to the launch: all lies outside it
        return np.zeros((0,) * len(axes), array.dtype), (slice(0, 0),) * len(axes)
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


def _check_global(name, array, spec, at, rows, cols):
    if array.dtype not in SCALARS:
        raise TypeError(f"{name}: the array must hold {', '.join(map(str, SCALARS.values()))}, got {array}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {said(at)}")
    axes = (rows, cols) if isinstance(spec, rt) else (cols,)
    if not all(-array.ndim <= axis < array.ndim for axis in axes) or len({axis % array.ndim for axis in axes}) < len(axes):
        raise TypeError(f"{name}: {spec} lies along {len(axes)} axes of the array, got {axes} of {array.ndim}")


def element_addresses(b, ty, array, spec, at, rows, cols, first_row, adjacent=False):
    """For each of this lane's elements: (does it lie inside the array, its address). adjacent: columns are, so addresses are a
    constant apart."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    quad, pair = shifts(b, spec.dtype.run if isinstance(spec, rt) else 2)
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
        if adjacent:
            size = SCALARS[ty.dtype].itemsize
            address = b.add(b.add(base, b.mul(col0, ir.Constant(i64, size))), ir.Constant(i64, size * int(col)))
        if row0 is not None:
            r = b.add(row0, ir.Constant(i64, int(row)))
            inside = b.and_(inside, b.icmp_unsigned("<", r, extents[rows]))
            address = b.add(address, b.mul(r, strides[rows]))
        yield inside, address


GUARD = ".reg .pred p;\nsetp.ne.u32 p, $2, 0;\n"  # a predicated access, unlike a branch round it, leaves the code in one piece


STORE = {
    4: "@p st.global.f32 [$0], $1;",
    2: ".reg .b16 lo, hi;\nmov.b32 {lo, hi}, $1;\n@p st.global.b16 [$0], lo;",
    1: "@p st.global.b8 [$0], $1;",
}
LOAD = {
    4: "mov.f32 $0, 0f00000000;\n@p ld.global.f32 $0, [$1];",
    2: ".reg .b16 lo;\nmov.b16 lo, 0;\n@p ld.global.b16 lo, [$1];\nmov.b32 $0, {lo, lo};",
    1: "mov.b32 $0, 0;\n@p ld.global.b8 $0, [$1];",
}


def _apart(b, dtype, spec, value):
    """A register for each element of a value, which begins with the element as `dtype`."""
    if dtype.itemsize == 1 and spec.dtype is dtype and isinstance(spec, rt):
        return bytes_of(b, b.unpack(value))
    elements, word = b.elements(spec, value), {4: lambda _, e: e, 2: b.pair, 1: b.quad}[dtype.itemsize]
    return [word(dtype, *[e] * (4 // dtype.itemsize)) for e in elements]


def _together(b, dtype, spec, parts):
    """The value of these elements."""
    if dtype.itemsize == 1 and spec.dtype is dtype and isinstance(spec, rt):
        return b.pack(joined(b, parts))
    held = rt(32, 32, dtype)
    return b.from_elements(spec, parts if dtype is fp32 else [b.elements(held, b.pack([word]))[0] for word in parts])


def lower_global_store(ty, spec, rows, cols, first_row):
    """The lowering of a store to a global array by a warp whose first row is `first_row(b)` of the tile."""
    dtype = SCALARS[ty.dtype]

    def lower(b, array, value, at, *_):
        places = element_addresses(b, ty, array, spec, at, rows, cols, first_row(b))
        mine = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(getattr(spec, "holders", 0))), b.u32(0))
        for x, (inside, address) in zip(_apart(b, dtype, spec, value), places, strict=True):
            b.do(f"{{{GUARD}{STORE[dtype.itemsize]}}}", address, x, b.zext(b.and_(inside, mine), i32))

    return lower


def lower_global_load(ty, spec, rows, cols, first_row, adjacent=False):
    """The lowering of a load from a global array, whose columns may be known to be adjacent."""
    dtype = SCALARS[ty.dtype]
    word, letter = (f32, "f") if dtype is fp32 else (i32, "r")

    def lower(b, array, _, at, *__):
        places = element_addresses(b, ty, array, spec, at, rows, cols, first_row(b), adjacent)
        text = f"{{{GUARD}{LOAD[dtype.itemsize]}}}"
        parts = [b.asm(word, text, f"={letter},l,r", address, b.zext(inside, i32)) for inside, address in places]
        return _together(b, dtype, spec, parts)

    return lower


@op
def clip(array, axis, end):
    """The array without what lies from index `end` on along `axis`: loads give zeros there, stores leave it alone. `axis` must
    be known when the kernel is compiled."""
    return array[(slice(None),) * axis + (slice(0, max(end, 0)),)]


@lowers(clip)
def _(array, axis: int, end):
    if not isinstance(array, types.Array) or not integer(end) or not 0 <= axis < array.ndim:
        raise TypeError(f"clip: takes a global array, one of its axes and an integer, got {array}, {axis} and {end}")

    def emit(b, value, _, end):
        return b.clipped(array, value, axis, b.sext(end, i64) if end.type.width < 64 else end)

    return array, emit


# ---- both scopes ---------------------------------------------------------------------------------------------------
def rows_of(spec, rank):
    """The rows of a warpgroup's tile, or the elements of its vector, that its warp `rank` holds."""
    if isinstance(spec, rv):
        return vectors.part(spec, rank)
    return range(spec.rows * rank, spec.rows * (rank + 1))


def _shared(spec):
    """The module that knows how such shared memory is read and written."""
    return panels if isinstance(spec, st) else vectors


def check_store(name, target, value, at, rows, cols, is_aligned, warps):
    """The rule that stores at warp and warpgroup scope share."""
    if isinstance(value, (st, sv, types.Array)):
        way = "copy_async it" if isinstance(value, types.Array) else "tma_store it"
        raise TypeError(f"{name}: stores from registers, got {value}: load(...) it first, or {way}")
    if not isinstance(value, (rt, rv)) or getattr(value, "partial", False):
        raise TypeError(f"{name}: stores a register tile or whole vector, got {value}")
    if isinstance(target, (st, sv)):
        _shared(target).check(name, target, "take", value, at, warps)
        _check_unaligned(name, target, is_aligned)
    elif isinstance(target, types.Array):
        _check_global(name, target, value, at, rows, cols)
        if is_aligned:
            pieces.check(name, target, value, is_aligned)
    else:
        raise TypeError(f"{name}: the target must be a shared tile or vector, or a global array, got {target}")


def _check_unaligned(name, shared, is_aligned):
    if is_aligned:
        raise TypeError(f"{name}: `aligned` is for global arrays, got {shared}")


def check_load(name, source, spec, at, rows, cols, is_aligned, warps):
    """The rule that loads at warp and warpgroup scope share."""
    if not isinstance(spec, (rt, rv)) or getattr(spec, "partial", False):
        raise TypeError(f"{name}: the type to load must be an rt or a vector type, got {spec}")
    if isinstance(source, (st, sv)):
        _shared(source).check(name, source, "hold", spec, at, warps)
        _check_unaligned(name, source, is_aligned)
    elif isinstance(source, types.Array):
        _check_global(name, source, spec, at, rows, cols)
        if is_aligned:
            pieces.check(name, source, spec, is_aligned, loads=True)
    else:
        raise TypeError(f"{name}: the source must be a shared tile or vector, or a global array, got {source}")


def lower_store(target, value, rows, cols, is_aligned, first_row):
    """The lowering of a store by a warp whose first row is `first_row(b)` of the tile."""
    if isinstance(target, (st, sv)):
        return _shared(target).lower_store(target, value, first_row)
    if is_aligned:
        return pieces.lower_store(target, value, rows, cols, first_row, pieces.piece_of(is_aligned))
    return lower_global_store(target, value, rows, cols, first_row)


def lower_load(source, spec, rows, cols, is_aligned, first_row):
    """The lowering of a load, likewise."""
    if isinstance(source, (st, sv)):
        return _shared(source).lower_load(source, spec, first_row)
    if is_aligned and isinstance(spec, rt):
        return pieces.lower_load(source, spec, rows, cols, first_row)
    return lower_global_load(source, spec, rows, cols, first_row, is_aligned)


def store_rows(target, value, at, rows, cols, is_aligned, rank):
    """The meaning of a store by warp `rank` of those that share the tile."""
    if isinstance(target, SharedTile):
        return here().write(target, value.array.reshape(-1, *target.shape[1:]), rows_of(value.spec, rank))
    if is_aligned and (why := pieces.misaligned(target, value.spec, at, cols, pieces.piece_of(is_aligned))):
        raise here().hazard(f"aligned store: {why}")
    at = shifted(value.spec, at, rows, cols, rank)
    view, part = window(target, value.spec, at, rows, cols)
    array = value.array if isinstance(value.spec, rt) else value.array.ravel()
    view[...] = array[part].astype(view.dtype)


def load_rows(source, spec, at, rows, cols, is_aligned, rank):
    """The meaning of a load by warp `rank` of those that share the tile."""
    if isinstance(source, SharedTile):
        found = here().read(source, rows_of(spec, rank), fence=isinstance(source.spec, st))
        return found.astype(np.float32).reshape(spec.shape)
    if is_aligned and (why := pieces.misaligned(source, spec, at, cols)):
        raise here().hazard(f"aligned load: {why}")
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
@op(takes_operands=True)
def store(target, value, at=None, rows=-2, cols=-1, aligned=False):
    """target[...] = value, rounded to target's dtype, by one warp. target: a shared tile or vector of value's shape; or a
    global array, where `at` is the index of the first element and the tile runs along axes `rows` and `cols` (a vector along
    `cols`).

    aligned: a promise that lets a lane move 16 bytes at a time, for tiles in row layout, fp8 only to and from fp8: the array's
    columns are adjacent and come by 16 bytes, as does `at` along them, and its address and other strides are multiples of 16
    bytes. Of a vector, which may be loaded so, that its elements are adjacent. aligned=4: the same with multiples of 4 bytes
    and columns by two, for stores to 2-byte arrays. The interpreter checks it; on the GPU a broken promise is an access
    elsewhere."""
    store_rows(target, value, at, rows, cols, aligned, 0)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    check_store("store", target, value, at, rows, cols, aligned, 1)
    return void, lower_store(target, value, rows, cols, aligned, lambda b: b.u32(0))


@op(takes_operands=True)
def load(source, spec, at=None, rows=-2, cols=-1, aligned=False):
    """The register tile or vector of type `spec` from a shared tile or vector, or a global array (see `store`), by one warp."""
    return load_rows(source, spec, at, rows, cols, aligned, 0)


@lowers(load)
def _(source, spec: type, at, rows: int, cols: int, aligned: int):
    check_load("load", source, spec, at, rows, cols, aligned, 1)
    return spec, lower_load(source, spec, rows, cols, aligned, lambda b: b.u32(0))
