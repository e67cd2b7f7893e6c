"""A warp's tile in global memory in the order in which its lanes hold it: sums that many blocks add to, and that a later kernel
loads.

    add_fragment(sums, part, (pair, row, 0))
    part = load_fragment(sums, rt(16, 64, fp32), (pair, row, 0))

The lanes' first elements are adjacent, then their second ones, and so on: each instruction of a warp adds or loads 128 adjacent
bytes, from one address. Only a load of the same type knows the order of rows and columns.

A warpgroup's tile can go through a shared tile, from which TMA adds it. There a lane's elements are adjacent by fours, 16
bytes:

    warpgroup.store_fragment(tile, part)
    part = load_fragment(sums, rt(16, 64, fp32), (pair, row, 0), 4)

Another warpgroup, or with `cluster.store_fragment_async` one of a peer, gets it from there, 16 bytes at a time; or one warp
gets the parts of all four warps, one by one:

    part = warpgroup.load_shared_fragment(tile, rt(16, 64, fp32))
    part = load_part_of_fragment(subtile(tile, 32, warp), rt(16, 64, fp32))"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, i64, struct
from tiles.compiling.numba_types import SCALARS, void
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import AccessStep, current_warp, note
from tiles.interpreter.accesses import READ
from tiles.layout import LANES, WARPGROUP
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.types import rt, st

from ..threads.warps import FOUR_WARPS
from .shared_tiles import describe_index

QUAD = 4  # registers of a lane that are adjacent in shared memory
FRAGMENT_DTYPES = fp32, bf16, fp16  # of what goes from one warpgroup or block to another
ROW_BYTES = 128  # of a row of the shared tile of store_fragment: eight lanes' elements, a row of all banks


def _line(array, spec, at, vector_elements):
    """The elements of a global array, from index `at` on, that a tile takes."""
    flat, start = np.asarray(array), int(np.dot([int(i) for i in at], array.strides)) // fp32.itemsize
    if not flat.flags.c_contiguous:
        raise current_warp().hazard(
            f"add_fragment, load_fragment: the array must be C-ordered, its strides are {array.strides}"
        )
    if not 0 <= start <= flat.size - LANES * spec.elements:
        raise current_warp().hazard(f"index {at} and a tile behind it are out of range for an array of shape {array.shape}")
    line = flat.reshape(-1)[start : start + LANES * spec.elements]
    if line.ctypes.data % (vector_elements * fp32.itemsize):
        raise current_warp().hazard(
            f"{vector_elements} adjacent elements are accessed at once, and those at index {at} begin at "
            f"{line.ctypes.data:#x}, no multiple of their {vector_elements * fp32.itemsize} bytes"
        )
    return line


def _places(spec, vector_elements=1):
    """The position among them of each of a tile's elements, with so many adjacent ones of a lane."""
    lane, index = np.arange(LANES)[:, None], np.arange(spec.elements)
    places = np.empty(spec.shape, np.int64)
    places[spec.element(lane, index)] = (LANES * (index // vector_elements) + lane) * vector_elements + index % vector_elements
    return places


@op
def add_fragment(target, value, at, vector_elements=1):
    """Add an fp32 tile in registers to a global array, from index `at` on, in the order in which the lanes hold it. Each
    element is added atomically, and nothing waits for the sums. target: C-ordered, fp32; a tile takes as many elements as it
    has. vector_elements: 4 adds four elements of a lane at once, which are then adjacent (sm_90 and later)."""
    line = _line(target, value.spec, at, vector_elements)
    current_warp().note_access(target, READ)  # too: two blocks that add to one place must not do so at once
    line[_places(value.spec, vector_elements)] += value.array
    note(AccessStep, line, True)


@op
def load_fragment(source, spec, at, vector_elements=1):
    """The tile of type `spec` that was added by add_fragment. vector_elements: 4 if it came through a shared tile."""
    line = _line(source, spec, at, vector_elements)
    note(AccessStep, line, False)
    return line[_places(spec, vector_elements)]


@op(takes_operands=True)
def store_fragment(tile, value):
    """A shared tile = the warps' fp32 tiles in the order in which their lanes hold them, one below the other. TMA then copies
    it to an array with the same columns, from which `load_fragment` loads. tile: fp32, 32 columns."""
    current_warp().write(tile, in_lane_order(value), _rows_of_warp(tile))


@op
def load_shared_fragment(tile, spec):
    """The tile of type `spec` of each of the four warps, from a shared tile of its dtype that store_fragment, or a peer's
    cluster.store_fragment_async, has stored. No fence follows: TMA does not write there."""
    values = current_warp().read(tile, _rows_of_warp(tile), fence=False)
    return values.reshape(-1)[_places(spec, 16 // spec.dtype.itemsize)]


@op
def load_part_of_fragment(tile, spec):
    """The tile of type `spec` that one warp of a warpgroup has stored, by store_fragment or cluster.store_fragment_async, from
    its part of the shared tile. No fence follows."""
    values = current_warp().read(tile, range(tile.shape[0]), fence=False)
    return values.reshape(-1)[_places(spec, 16 // spec.dtype.itemsize)]


def in_lane_order(value):
    """The rows of a shared tile that a warp's tile in registers takes in store_fragment."""
    values, itemsize = np.empty(value.array.size, np.float32), value.spec.dtype.itemsize
    values[_places(value.spec, 16 // itemsize)] = value.array
    return values.reshape(-1, ROW_BYTES // itemsize)


def _rows_of_warp(tile):
    rows = tile.shape[0] // WARPGROUP
    return range(rows * current_warp().rank, rows * (current_warp().rank + 1))


def _check(name, array, spec, at):
    if not isinstance(spec, rt) or spec.dtype is not fp32:
        raise TypeError(f"{name}: takes a register tile of fp32, got {spec}")
    if not isinstance(array, types.Array) or SCALARS.get(array.dtype) is not fp32:
        raise TypeError(f"{name}: takes a global array of fp32, got {array}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(
            f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {describe_index(at)}"
        )


def _first(b, array, value, at, vector_elements=1):
    """The address of this lane's first element."""
    address, _, strides = b.array(array, value)
    for index, stride in zip(b.unpack(at), strides, strict=True):
        address = b.add(address, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
    return ptx.opaque(b, b.add(address, b.zext(b.mul(b.lane(), b.u32(vector_elements * fp32.itemsize)), i64)))


def _addresses(b, array, value, spec, at):
    """The addresses of this lane's elements."""
    address = _first(b, array, value, at)
    return [b.add(address, i64(LANES * fp32.itemsize * k)) for k in range(spec.elements)]


@lowers(add_fragment)
def _(target, value, at, vector_elements: int):
    _check("add_fragment", target, value, at)
    if vector_elements not in (1, QUAD):
        raise TypeError(f"add_fragment: 1 or {QUAD} of a lane's elements are adjacent, got {vector_elements}")

    def emit(b, vtarget, registers, vat, _):
        elements = b.unpack(registers)
        if vector_elements == QUAD:
            address = _first(b, target, vtarget, vat, QUAD)
            for k in range(0, value.elements, QUAD):
                ptx.add_four_global(b, b.add(address, i64(fp32.itemsize * LANES * k)), elements[k : k + QUAD])
            return
        for address, x in zip(_addresses(b, target, vtarget, value, vat), elements, strict=True):
            ptx.add_global(b, address, x)

    return void, emit


@lowers(load_fragment)
def _(source, spec: type, at, vector_elements: int):
    _check("load_fragment", source, spec, at)
    if vector_elements not in (1, QUAD):
        raise TypeError(f"load_fragment: 1 or {QUAD} of a lane's elements are adjacent, got {vector_elements}")

    def emit(b, vsource, _, vat, __):
        if vector_elements == 1:
            return b.pack([b.asm(f32, "ld.global.f32 $0, [$1];", "=f,l", a) for a in _addresses(b, source, vsource, spec, vat)])
        address, elements = _first(b, source, vsource, vat, QUAD), []
        for k in range(0, spec.elements, QUAD):
            four = struct([f32] * QUAD)
            load = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
            elements += b.unpack(b.asm(four, load, "=f,=f,=f,=f,l", b.add(address, i64(fp32.itemsize * LANES * k))))
        return b.pack(elements)

    return spec, emit


def check_shared(name, tile, spec, warps, dtypes=(fp32,)):
    """TypeError if a shared tile does not take the tiles of so many warps, of one of these dtypes, in the order of their
    lanes."""
    if not isinstance(spec, rt) or spec.dtype not in dtypes:
        raise TypeError(f"{name}: takes a register tile of {' or '.join(map(str, dtypes))}, got {spec}")
    cols = ROW_BYTES // spec.dtype.itemsize
    rows = spec.rows * spec.cols * warps // cols
    if not isinstance(tile, st) or tile.dtype is not spec.dtype or tile.shape != (rows, cols):
        wanted = f"a shared tile of {rows} rows and {cols} columns of {spec.dtype}"
        raise TypeError(f"{name}: takes {wanted} for {spec}, got {tile}")


def shared_places(b, tile, spec, address, first_row):
    """The registers of a lane that are adjacent in a shared tile, and their address. first_row(b): of the warp's rows."""
    lane = b.lane()
    row, chunk = b.lshr(lane, b.u32(3)), b.and_(lane, b.u32(7))  # eight lanes to a row, which has all banks
    start = b.add(address, b.mul(b.add(first_row(b), row), b.u32(tile.width)))
    even = b.mul(b.xor(chunk, row), b.u32(16))  # the swizzle: XORed by the row's number; four rows on, by 4 more
    places = [b.add(start, even), b.add(start, b.xor(even, b.u32(64)))]
    for n, k in enumerate(range(0, spec.elements * spec.dtype.itemsize // 4, QUAD)):
        yield slice(k, k + QUAD), b.add(places[n % 2], b.u32(4 * tile.width * n))


def _first_row(tile):
    return lambda b: b.mul(FOUR_WARPS.emit_rank(b), b.u32(tile.rows // WARPGROUP))


@lowers(store_fragment)
def _(tile, value):
    check_shared("store_fragment", tile, value, WARPGROUP)

    def emit(b, address, registers):
        registers = b.unpack(registers)
        for four, at in shared_places(b, tile, value, address, _first_row(tile)):
            b.do("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", at, *registers[four])

    return void, emit


def _lower_shared_load(name, tile, spec, warps, first_row):
    """The lowering of a load from a shared tile of the parts of so many warps. first_row: as in shared_places."""
    check_shared(name, tile, spec, warps, FRAGMENT_DTYPES)

    def emit(b, address, _):
        kind, name, constraint = (f32, "f32", "=f,") if spec.dtype is fp32 else (i32, "b32", "=r,")
        four, registers = struct([kind] * QUAD), []
        for _, at in shared_places(b, tile, spec, address, first_row):
            text = f"ld.shared.v4.{name} {{$0, $1, $2, $3}}, [$4];"
            registers += b.unpack(b.asm(four, text, QUAD * constraint + "r", at))
        return b.pack(registers)

    return spec, emit


@lowers(load_shared_fragment)
def _(tile, spec: type):
    return _lower_shared_load("load_shared_fragment", tile, spec, WARPGROUP, _first_row(tile))


@lowers(load_part_of_fragment)
def _(tile, spec: type):
    return _lower_shared_load("load_part_of_fragment", tile, spec, 1, lambda b: b.u32(0))
