"""Between registers and shared vectors: how `load` and `store` (load_store.py) move a vector.

    gate = load(gates.wait(j), S.col_vec)          a tile's vector from a shared one, along either axis
    store(sums.claim(j), cumsum(line))             a line, of which each lane has a part of its own

A warpgroup's col_vec is 64 elements or more, as long as its tile is high: each warp moves its part.

Here, too: `load_row`, a row of a shared tile as a vector or line, `load_row_of_group`, rows that groups share, and
`last_element`, an element of a shared vector as a number.
"""

import contextlib

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, struct
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import QUAD
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.types import rt, rv, st, sv

from .lines import BYTES as LINE_PARTS
from .lines import part_bytes


def part(spec, rank):
    """The elements of a shared vector that warp `rank` of its group loads: along rows its own, along columns all."""
    first = spec.length * rank if spec.axis == "col_vec" else 0
    return range(first, first + spec.length)


def check(name, vector, verb, spec, at, warps):
    """TypeError if `warps` warps cannot move this vector, or this line, in registers from or to a shared one."""
    if isinstance(spec, rt) and spec.layout == "line" and (spec.cols, warps, at) == (vector.length, 1, None):
        return
    spread = warps if isinstance(spec, rv) and spec.axis == "col_vec" else 1
    if not isinstance(spec, rv) or spread * spec.length != vector.length:
        raise TypeError(f"{name}: {vector} does not {verb} {f'{spread} x ' * (spread > 1)}{spec}")
    if verb == "take" and spread < warps:
        raise TypeError(f"{name}: all {warps} warps hold the whole {spec}; let one of them store it (ops.store)")
    if at is not None:
        raise TypeError(f"{name}: `at` is for global arrays; a shared vector is taken whole, got {at}")


def addresses(b, vector, spec, address, first):
    """The elements that go together (two if the lane's lie in pairs, else one) and the address of each such access."""
    if isinstance(spec, rt):
        start = ptx.opaque(b, b.add(address, b.mul(b.lane(), b.u32(spec.elements * vector.dtype.itemsize))))
        for i in range(0, spec.elements, 2):
            yield slice(i, i + 2), b.add(start, b.u32(i * vector.dtype.itemsize))
        return
    lane, step = b.lane(), 1 if spec.by_quad else 2
    index = b.lshr(lane, b.u32(2)) if spec.by_quad else b.mul(b.and_(lane, b.u32(3)), b.u32(2))
    if spec.axis == "col_vec":
        index = b.add(index, first)
    start = ptx.opaque(b, b.add(address, b.mul(index, b.u32(vector.dtype.itemsize))))
    for i in range(0, spec.elements, step):
        yield slice(i, i + step), b.add(start, b.u32(spec.element(0, i) * vector.dtype.itemsize))


def lower_load(vector, spec, first_row):
    """The lowering of a load, by a warp whose part begins at first_row(b)."""

    def lower(b, address, *_):
        return b.from_elements(spec, read(b, vector, spec, address, first_row(b)))

    return lower


def read(b, vector, spec, address, first):
    """This lane's elements of a vector in registers, from a shared one."""
    out = []
    for together, at in addresses(b, vector, spec, address, first):
        out += load_elements(b, vector.dtype, together.stop - together.start, at)
    return out


def load_elements(b, dtype, count, at, space="shared"):
    """`count` elements (neighbours: 1, 2, or 4 of fp8) at an address in shared memory, as fp32. space: the state space."""
    if dtype.itemsize == 4:
        if count == 1:
            return [b.asm(f32, f"ld.{space}.f32 $0, [$1];", "=f,r", at)]
        return b.unpack(b.asm(struct([f32] * 2), f"ld.{space}.v2.f32 {{$0, $1}}, [$2];", "=f,=f,r", at))
    if count * dtype.itemsize == 2:
        text = f"ld.{space}.u16 $0, [$1];"
    else:
        text = f"ld.{space}.b{8 * count * dtype.itemsize} $0, [$1];"
    return b.elements(rt(32, 32, dtype), b.pack([b.asm(i32, text, "=r,r", at)]))[:count]


def store_elements(b, dtype, elements, at, instruction="st.shared", *bars):
    """Store adjacent elements (as many as load_elements loads), given as fp32, at an address in shared memory. bars: the
    barrier address that is the last operand of an asynchronous instruction, which stores 4 bytes or more."""
    if dtype.itemsize == 4:
        values, kind = b.unpack(b.from_elements(rt(16, 16, dtype), elements)), ["f32", "v2.f32"][len(elements) - 1]
    else:
        word = b.pair if dtype.itemsize == 2 else b.quad
        values, kind = [word(dtype, *(elements * dtype.run)[: dtype.run])], f"b{8 * len(elements) * dtype.itemsize}"
    if kind == "b16":
        b.do(f"{{.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\n{instruction}.b16 [$0], lo;}}", at, *values)
        return
    names, tail = "$1" if len(values) == 1 else "{$1, $2}", "".join(f", [${1 + len(values)}]" for _ in bars)
    b.do(f"{instruction}.{kind} [$0], {names}{tail};", at, *values, *bars)


def lower_store(vector, spec, first_row):
    """The lowering of a store, by a warp whose part begins at first_row(b); of the lanes that hold an element one stores it."""

    def lower(b, address, value, *_):
        elements = b.elements(spec, value)
        is_holder = b.icmp_unsigned("==", b.and_(b.lane(), b.u32(spec.holders)), b.u32(0)) if isinstance(spec, rv) else None
        with b.if_then(is_holder) if is_holder is not None else contextlib.nullcontext():
            for together, at in addresses(b, vector, spec, address, first_row(b)):
                store_elements(b, vector.dtype, elements[together], at)

    return lower


# ---- rows of shared tiles, elements of shared vectors ----------------------------------------------------------------
@op
def load_row(tile, spec, row, fenced=True):
    """One row of a shared tile, by one warp: as the fp32 row_vec `spec`, which all lanes get, or as a line of the tile's dtype,
    of which each lane gets its part. fenced: as in `load`."""
    if not 0 <= row < tile.rows:
        raise current_warp().hazard(f"row {row} lies outside {tile.spec}")
    values = current_warp().read(tile, range(row, row + 1), fence=fenced).astype(np.float32)
    return values.reshape(spec.shape) if isinstance(spec, rt) else values


@lowers(load_row)
def _(tile, spec: type, row, fenced: int):
    is_line = isinstance(tile, st) and isinstance(spec, rt) and _fits_line(tile, spec)
    if not (isinstance(tile, st) and integer(row)) or not (is_line or spec == rt(16, tile.cols, fp32).row_vec):
        raise TypeError(
            f"load_row: takes a shared tile, its fp32 row_vec or a line, and an integer; a line has the tile's dtype, and of "
            f"it a lane 4, 8 or 16 bytes: got {tile}, {spec} and {row}"
        )

    def emit(b, address, _, row, __):
        loaded = (_load_line if is_line else _load_vector)(b, tile, spec, address, b.u32(row))
        if fenced:
            ptx.reads_done(b)
        return loaded

    return spec, emit


def _fits_line(tile, spec):
    """Is `spec` a line of this tile, and does a lane load its part by one instruction?"""
    return spec.layout == "line" and (spec.cols, spec.dtype) == (tile.cols, tile.dtype) and part_bytes(spec) in LINE_PARTS


def _load_line(b, tile, spec, address, row):
    """A lane's part of a row of a shared tile."""
    words = part_bytes(spec) // 4
    byte = b.mul(b.lane(), b.u32(4 * words))
    panel, byte = b.udiv(byte, b.u32(tile.width)), b.and_(byte, b.u32(tile.width - 1))
    start, swizzle = b.row_address(tile, address, row)
    at = b.add(b.add(start, b.mul(panel, b.u32(tile.panel_bytes))), b.xor(byte, swizzle))
    names, kind = ", ".join(f"${k}" for k in range(words)), f"v{words}.b32" if words > 1 else "b32"
    names = f"{{{names}}}" if words > 1 else names
    loaded = b.asm(
        struct([i32] * words) if words > 1 else i32, f"ld.shared.{kind} {names}, [${words}];", "=r," * words + "r", at
    )
    registers = b.unpack(loaded) if words > 1 else [loaded]
    return b.pack([b.bitcast(x, f32) if tile.dtype is fp32 else x for x in registers])


def _load_vector(b, tile, spec, address, row):
    """All elements of a row of a shared tile, which every lane gets."""
    size = tile.dtype.itemsize
    start, swizzle = b.row_address(tile, address, row)
    pair = b.mul(b.and_(b.lane(), b.u32(QUAD - 1)), b.u32(2 * size))
    out = []
    for i in range(0, spec.elements, 2):
        panel, byte = divmod(int(spec.element(0, i)) * size, tile.width)
        at = b.add(b.add(start, b.u32(panel * tile.panel_bytes)), b.xor(b.add(pair, b.u32(byte)), swizzle))
        out += load_elements(b, tile.dtype, 2, at)
    return b.from_elements(spec, out)


@op
def load_row_of_group(tile, spec, size, row, fenced=True):
    """A shared tile whose rows form groups of `size`, a power of 2: the fp32 tile `spec` in which each row is the group's row
    of index `row`. By one warp. fenced: as in `load`."""
    if not (0 <= row < size <= tile.rows and size & (size - 1) == 0):
        raise current_warp().hazard(f"row {row} of groups of {size}: must be one of a power of 2, at most {tile.rows}")
    rows = current_warp().read(tile, range(tile.rows), fence=fenced).astype(np.float32)
    return rows[np.arange(tile.rows) // size * size + row]


@lowers(load_row_of_group)
def _(tile, spec: type, size, row, fenced: int):
    fits = isinstance(tile, st) and isinstance(spec, rt) and spec == rt(tile.rows, tile.cols, fp32)
    if not (fits and integer(size) and integer(row)):
        raise TypeError(
            f"load_row_of_group: takes a shared tile, an fp32 tile of its shape and two integers, got {tile}, {spec}, {size} "
            f"and {row}"
        )

    def emit(b, address, _, size, row, __):
        width, quad = tile.dtype.itemsize, b.lshr(b.lane(), b.u32(2))
        pair, first = b.mul(b.and_(b.lane(), b.u32(QUAD - 1)), b.u32(2 * width)), b.neg(b.u32(size))
        out = []
        for i in range(0, spec.elements, 2):
            down, across = (int(n) for n in spec.element(0, i))
            group = b.and_(b.add(quad, b.u32(down)), first)
            start, swizzle = b.row_address(tile, address, b.add(group, b.u32(row)))
            panel, byte = divmod(across * width, tile.width)
            at = b.add(b.add(start, b.u32(panel * tile.panel_bytes)), b.xor(b.add(pair, b.u32(byte)), swizzle))
            out += load_elements(b, tile.dtype, 2, at)
        if fenced:
            ptx.reads_done(b)
        return b.from_elements(spec, out)

    return spec, emit


@op
def last_element(vector):
    """The last element of a shared vector, as a number."""
    return current_warp().read(vector, fence=False)[-1]


@lowers(last_element)
def _(vector):
    if not isinstance(vector, sv) or vector.dtype is not fp32:
        raise TypeError(f"last_element: takes an fp32 shared vector, got {vector}")
    end = vector.nbytes - vector.dtype.itemsize
    return types.float32, lambda b, address: load_elements(b, fp32, 1, b.add(address, b.u32(end)))[0]
