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


def view_at(array, spec, at, rows, cols):
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


GUARD = (
    ".reg .pred p;\nsetp.ne.u32 p, $2, 0;\n"  # a predicated access, unlike a branch round it, leaves the code without branches
)
GUARD_BELOW = ".reg .pred p;\nsetp.lt.u32 p, $2, $3;\n"


def visible_range(b, at, extent, limit):
    """(begin, end) of the rows or columns, among the first `limit` of a tile at index `at`, that lie inside the array."""
    zero, limit = i64(0), i64(limit)

    def clamp(x):
        x = b.select(b.icmp_signed("<", x, limit), x, limit)
        return b.trunc(b.select(b.icmp_signed("<", x, zero), zero, x), i32)

    return clamp(b.sub(zero, at)), clamp(b.sub(extent, at))


def widen_indices(b, at):
    """An index, widened to 64 bits."""
    return [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]


def _vector_accesses(b, ty, array, spec, at, cols, first_row, adjacent, ordered, is_store):
    """For each of this lane's elements of a vector: (GUARD, what it asks, the element's address). adjacent: columns are, so
    addresses are a constant apart. is_store: of the lanes that hold an element one has access."""
    data, extents, strides = b.array(ty, array)
    at, cols = widen_indices(b, at), cols % ty.ndim
    quad, pair = shifts(b)
    shift = quad if spec.by_quad else pair
    shift = b.add(shift, first_row) if spec.axis == "col_vec" else shift
    numbers = [spec.element(0, i) for i in range(spec.elements)]
    if not ordered:
        shift, numbers = b.mul(shift, b.u32(4)), [_unordered_column(number) for number in numbers]
    base = data
    for axis, index in enumerate(at):
        if axis != cols:
            base = b.add(base, b.mul(index, strides[axis]))
    first = b.add(at[cols], b.zext(shift, i64))
    is_holder = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(spec.holders)), b.u32(0)) if is_store else None
    for number in numbers:
        index = b.add(first, i64(int(number)))
        inside, address = b.icmp_unsigned("<", index, extents[cols]), b.add(base, b.mul(index, strides[cols]))
        if adjacent:
            size = SCALARS[ty.dtype].itemsize
            address = b.add(b.add(base, b.mul(first, i64(size))), i64(size * int(number)))
        yield GUARD, [b.zext(b.and_(inside, is_holder) if is_store else inside, i32)], address


def _unordered_column(col):
    """Where unordered.py has, for lane 0, a column that ordered tiles have at `col`: a lane has 8 adjacent ones of each 32."""
    return col // 32 * 32 + col % 32 // 8 * 2 + col % 8


class _Steps:
    """Addresses at multiples of a stride from a first one. Each is the sum of one before it and of the stride times a power of
    2: a product for each of a tile's columns would be more code than the access."""

    def __init__(self, b, first, stride):
        self.b, self.stride, self.addresses = b, stride, {0: first}

    def __getitem__(self, number):
        if number not in self.addresses:
            lowest = number & -number
            step = self.b.mul(self.stride, i64(lowest))
            self.addresses[number] = self.b.add(self[number - lowest], step)
        return self.addresses[number]


def _tile_accesses(b, ty, array, spec, at, rows, cols, first_row, ordered):
    """For each of this lane's elements of a tile: (GUARD_BELOW, what it asks, the element's address).

    Of its rows and columns, the axis that has more of them in this lane is the long one: an element is asked for its number
    along that axis, below the end, which is 0 in those of the other axis that lie outside the array."""
    data, extents, strides = b.array(ty, array)
    at, axes = widen_indices(b, at), (rows % ty.ndim, cols % ty.ndim)
    coordinates = [tuple(map(int, spec.element(0, i))) for i in range(spec.elements)]
    quad, pair = shifts(b, spec.dtype.run)
    shift = {"row": (quad, pair), "col": (pair, quad), "line": (b.u32(0), b.mul(b.lane(), b.u32(spec.elements)))}[spec.layout]
    shift = b.add(shift[0], first_row), shift[1]
    if not ordered:
        shift = shift[0], b.mul(shift[1], b.u32(4))
        coordinates = [(row, _unordered_column(col)) for row, col in coordinates]
    for axis, distance in zip(axes, shift):
        at[axis] = b.add(at[axis], b.zext(distance, i64))
    for index, stride in zip(at, strides):
        data = b.add(data, b.mul(index, stride))
    long = max((0, 1), key=lambda k: len({place[k] for place in coordinates}))
    short_axis, long_axis = axes[1 - long], axes[long]
    begin, end = visible_range(b, at[long_axis], extents[long_axis], 1 << 30)
    visible, lines, numbers = b.sub(end, begin), {}, {}
    starts = _Steps(b, data, strides[short_axis])
    for place in coordinates:
        short, number = place[1 - long], place[long]
        if short not in lines:
            inside = b.icmp_unsigned("<", b.add(at[short_axis], i64(short)), extents[short_axis])
            lines[short] = b.select(inside, visible, b.u32(0)), _Steps(b, starts[short], strides[long_axis])
        if number not in numbers:
            numbers[number] = b.sub(b.u32(number), begin)
        count, addresses = lines[short]
        yield GUARD_BELOW, [numbers[number], count], addresses[number]


def _accesses(b, ty, array, spec, at, rows, cols, first_row, adjacent=False, ordered=True, is_store=False):
    """For each of this lane's elements: (how PTX sets the predicate p to whether the element lies inside the array; what it
    asks, from $2 on; the element's address). ordered: are the tile's columns in the array's order? If not, they are in
    unordered.py's order of elements of 2 bytes. is_store: of the lanes that hold an element of a vector, one has access."""
    if isinstance(spec, rv):
        return _vector_accesses(b, ty, array, spec, at, cols, first_row, adjacent, ordered, is_store)
    return _tile_accesses(b, ty, array, spec, at, rows, cols, first_row, ordered)


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
        accesses = _accesses(b, ty, array, spec, at, rows, cols, first_row(b), ordered=ordered, is_store=True)
        for x, (guard, inside, address) in zip(_split_elements(b, dtype, spec, value), accesses, strict=True):
            b.do(f"{{{guard}{STORE[dtype.itemsize]}}}", address, x, *inside)

    return lower


def lower_load(ty, spec, rows, cols, first_row, adjacent=False, ordered=True):
    """The lowering of a load from a global array, whose columns may be known to be adjacent."""
    dtype = SCALARS[ty.dtype]
    word, letter = (f32, "f") if dtype is fp32 else (i32, "r")

    def lower(b, array, _, at, *__):
        parts = []
        for guard, inside, address in _accesses(b, ty, array, spec, at, rows, cols, first_row(b), adjacent, ordered):
            constraints = ",".join([f"={letter}", "l", *["r"] * len(inside)])
            parts.append(b.asm(word, f"{{{guard}{LOAD[dtype.itemsize]}}}", constraints, address, *inside))
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
