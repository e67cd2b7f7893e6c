"""Between registers and global arrays, element by element: any layout, any strides, any dtype, any index. (By 16 bytes a lane:
global_vectorized.py.)

Accesses outside the array along the tile's axes are left out: loads give 0. `truncate` moves that edge, for kernels that share
one array between sequences.
"""

import numpy as np

from tiles.compiling.builder import f32, i32, i64
from tiles.compiling.numba_types import CAPTURED, SCALARS
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.types import rt, rv

from .shared_tiles import bytes_of, describe_index, joined, shifts


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
            raise current_warp().hazard(f"index {at} is out of range for an array of shape {array.shape}")
    view = np.asarray(array)[tuple(index)]
    return view.T if len(axes) == 2 and axes[0] > axes[1] else view, tuple(part)


def check(name, array, spec, at, rows, cols):
    """TypeError if a tile or vector of this type does not go to or from `at` of a global array."""
    if not array.mutable:
        raise TypeError(f"{name}: {CAPTURED}")
    if array.dtype not in SCALARS:
        remedy = "; convert it on the host: x.astype(np.float32)" if isinstance(array.dtype, types.Number) else ""
        raise TypeError(f"{name}: the array must hold {', '.join(map(str, SCALARS.values()))}, got {array}{remedy}")
    axes = (rows, cols) if isinstance(spec, rt) else (cols,)
    if array.ndim < len(axes):
        raise TypeError(f"{name}: {spec} lies along {len(axes)} axes of the array, and {array} has {array.ndim}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(
            f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {describe_index(at)}"
        )
    if not all(-array.ndim <= axis < array.ndim for axis in axes) or len({axis % array.ndim for axis in axes}) < len(axes):
        raise TypeError(f"{name}: {spec} lies along {len(axes)} axes of the array, got {axes} of {array.ndim}")


def element_addresses(b, ty, array, spec, at, rows, cols, first_row, adjacent=False, ordered=True):
    """For each of this lane's elements: (does it lie inside the array, its address). adjacent: columns are, so addresses are a
    constant apart. ordered: are the tile's columns in the array's order? If not, they are in unordered.py's order of elements
    of 2 bytes."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    quad, pair = shifts(b, spec.dtype.run if isinstance(spec, rt) else 2)
    rows, cols = rows % ty.ndim, cols % ty.ndim
    if isinstance(spec, rv):
        coordinates = [(0, spec.element(0, i)) for i in range(spec.elements)]
        shift = b.u32(0), quad if spec.by_quad else pair
        shift = shift[0], b.add(shift[1], first_row) if spec.axis == "col_vec" else shift[1]
    else:
        coordinates = [spec.element(0, i) for i in range(spec.elements)]
        shift = {"row": (quad, pair), "col": (pair, quad), "line": (b.u32(0), b.mul(b.lane(), b.u32(spec.elements)))}[
            spec.layout
        ]
        shift = b.add(shift[0], first_row), shift[1]
    if not ordered:  # a lane has 8 adjacent columns of each 32
        shift = shift[0], b.mul(shift[1], b.u32(4))
        coordinates = [(row, col // 32 * 32 + col % 32 // 8 * 2 + col % 8) for row, col in coordinates]
    base = data
    for axis, index in enumerate(at):
        if axis != cols and not (axis == rows and isinstance(spec, rt)):
            base = b.add(base, b.mul(index, strides[axis]))
    row0 = b.add(at[rows], b.zext(shift[0], i64)) if isinstance(spec, rt) else None
    col0 = b.add(at[cols], b.zext(shift[1], i64))
    for row, col in coordinates:
        c = b.add(col0, i64(int(col)))
        inside, address = b.icmp_unsigned("<", c, extents[cols]), b.add(base, b.mul(c, strides[cols]))
        if adjacent:
            size = SCALARS[ty.dtype].itemsize
            address = b.add(b.add(base, b.mul(col0, i64(size))), i64(size * int(col)))
        if row0 is not None:
            r = b.add(row0, i64(int(row)))
            inside = b.and_(inside, b.icmp_unsigned("<", r, extents[rows]))
            address = b.add(address, b.mul(r, strides[rows]))
        yield inside, address


GUARD = (
    ".reg .pred p;\nsetp.ne.u32 p, $2, 0;\n"  # a predicated access, unlike a branch round it, leaves the code without branches
)


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


def _split_elements(b, dtype, spec, value):
    """A register for each element of a value, which begins with the element as `dtype`."""
    if dtype.itemsize == 1 and spec.dtype is dtype and isinstance(spec, rt):
        return bytes_of(b, b.unpack(value))
    elements, word = b.elements(spec, value), {4: lambda _, e: e, 2: b.pair, 1: b.quad}[dtype.itemsize]
    return [word(dtype, *[e] * (4 // dtype.itemsize)) for e in elements]


def _join_elements(b, dtype, spec, parts):
    """The value of these elements."""
    if dtype.itemsize == 1 and spec.dtype is dtype and isinstance(spec, rt):
        return b.pack(joined(b, parts))
    stored = rt(32, 32, dtype)
    return b.from_elements(spec, parts if dtype is fp32 else [b.elements(stored, b.pack([word]))[0] for word in parts])


def lower_store(ty, spec, rows, cols, first_row, ordered=True):
    """The lowering of a store to a global array by a warp whose first row is `first_row(b)` of the tile."""
    dtype = SCALARS[ty.dtype]

    def lower(b, array, value, at, *_):
        accesses = element_addresses(b, ty, array, spec, at, rows, cols, first_row(b), ordered=ordered)
        is_holder = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(getattr(spec, "holders", 0))), b.u32(0))
        for x, (inside, address) in zip(_split_elements(b, dtype, spec, value), accesses, strict=True):
            b.do(f"{{{GUARD}{STORE[dtype.itemsize]}}}", address, x, b.zext(b.and_(inside, is_holder), i32))

    return lower


def lower_load(ty, spec, rows, cols, first_row, adjacent=False, ordered=True):
    """The lowering of a load from a global array, whose columns may be known to be adjacent."""
    dtype = SCALARS[ty.dtype]
    word, letter = (f32, "f") if dtype is fp32 else (i32, "r")

    def lower(b, array, _, at, *__):
        accesses = element_addresses(b, ty, array, spec, at, rows, cols, first_row(b), adjacent, ordered)
        text = f"{{{GUARD}{LOAD[dtype.itemsize]}}}"
        parts = [b.asm(word, text, f"={letter},l,r", address, b.zext(inside, i32)) for inside, address in accesses]
        return _join_elements(b, dtype, spec, parts)

    return lower


@op
def truncate(array, axis, end):
    """The array without its elements from index `end` on along `axis`: loads give zeros there, stores leave it alone. `axis`
    must be known when the kernel is compiled."""
    return array[(slice(None),) * axis + (slice(0, max(end, 0)),)]


@lowers(truncate)
def _(array, axis: int, end):
    if not isinstance(array, types.Array) or not integer(end) or not 0 <= axis < array.ndim:
        raise TypeError(f"truncate: takes a global array, one of its axes and an integer, got {array}, {axis} and {end}")

    def emit(b, value, _, end):
        return b.clipped(array, value, axis, b.sext(end, i64) if end.type.width < 64 else end)

    return array, emit
