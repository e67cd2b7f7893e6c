"""Copies by cp.async (sm_80 and later), as one warp starts them: its `warp_rows` rows of a shared tile, or numbers of a shared
vector, from a global array. Pipelines and ops.copy_async are made of these, and so are copies from pages (paged_copies.py)."""

import itertools

from . import layout
from .compiling import ptx
from .compiling.builder import i32, i64
from .compiling.numba_types import CAPTURED, SCALARS
from .numba_names import types
from .op import integer
from .types import gl, sv

VECTOR_SIZES = (16, 8, 4, 2)  # bytes that can be copied at once; cp.async copies 4 or more, and 2 bytes are loaded and stored
CHUNK_BYTES = VECTOR_SIZES[0]  # of a row: what one lane copies
ELEMENT = VECTOR_SIZES[-1]  # bytes: too few for cp.async
VECTOR = 16  # the length of a vector is a multiple of this
NUMBER = 4  # bytes of a vector's number: cp.async copies them one by one


def rows_of(tile):
    """The rows of a tile, or the elements of a vector."""
    return tile.length if isinstance(tile, sv) else tile.rows


def vector_sizes_of(itemsize: int) -> tuple[int, ...]:
    """The bytes that elements of this size can be copied by at once."""
    return VECTOR_SIZES if itemsize == ELEMENT else VECTOR_SIZES[:-1]


def check_copy(name, tile, source, at, rows, cols, vector_bytes):
    """TypeError if cp.async cannot fill a shared tile with this part of a global array."""
    if isinstance(source, types.Array) and not source.mutable:
        raise TypeError(f"{name}: {CAPTURED}")
    if not isinstance(source, types.Array) or SCALARS.get(source.dtype) is not tile.dtype:
        advice = "; pass the launch the array itself, not a tensor of it: cp.async is no TMA" if isinstance(source, gl) else ""
        raise TypeError(f"{name}: the source must be a global array of {tile.dtype} for {tile}, got {source}{advice}")
    if not (isinstance(at, types.BaseTuple) and len(at) == source.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {source.ndim} integers for an array of {source.ndim} axes, got {at}")
    if isinstance(tile, sv):
        return
    if not all(-source.ndim <= axis < source.ndim for axis in (rows, cols)) or (rows - cols) % source.ndim == 0:
        raise TypeError(f"{name}: {tile} lies along 2 axes of the array, got {rows} and {cols} of {source.ndim}")
    if vector_bytes not in (sizes := vector_sizes_of(tile.dtype.itemsize)):
        raise TypeError(f"{name}: vector_bytes must be one of {sizes} bytes for {tile.dtype}, got {vector_bytes}")


def check_vector(name, tile, warp_rows):
    """ValueError if no warp can copy `warp_rows` of a shared vector's numbers."""
    if tile.dtype.itemsize != NUMBER or warp_rows % VECTOR:
        raise ValueError(
            f"{name}: of a vector a warp copies a multiple of {VECTOR} numbers of {NUMBER} bytes, got {warp_rows} of {tile}"
        )


def chunk_parts(tile, unit):
    """What a lane copies of its row, panel after panel and `unit` bytes of a chunk at a time: (panel, byte in the row counted
    from the lane's first byte, byte in the chunk)."""
    for panel, part in itertools.product(range(tile.panels), range(0, CHUNK_BYTES, unit)):
        yield panel, panel * tile.width + part, part


def clamped(b, x, limit):
    """The 64-bit x, clamped to 0..most, in 32 bits."""
    low, high = i64(0), i64(limit)
    x = b.select(b.icmp_signed("<", x, high), x, high)
    return b.u32(b.select(b.icmp_signed("<", x, low), low, x))


def copy_bytes(b, tile, begin, end, vector_bytes):
    """How many bytes of each part to copy, if of a row the bytes from `begin` to before `end` lie inside the array. A part lies
    inside from its beginning or not at all: `begin` is where some part begins."""
    for _, low, _ in chunk_parts(tile, vector_bytes):
        left = b.sub(end, b.u32(low))
        left = b.select(b.icmp_signed("<", left, b.u32(vector_bytes)), left, b.u32(vector_bytes))
        outside = b.or_(b.icmp_signed("<", left, b.u32(0)), b.icmp_signed(">", begin, b.u32(low)))
        yield b.select(outside, b.u32(0), left)


def lane_place(b, tile, address, warp_rows, first):
    """What a lane copies of the first rows, counted from `first`: (the lane, rows that a warp copies at once, the lane's row,
    the byte of the row at which its chunk begins, the row's address, where in that row the chunk goes, whether the lane has a
    row)."""
    chunks = tile.width // CHUNK_BYTES  # of a panel's row
    step = layout.LANES // chunks
    lane = b.lane()
    lane_row = b.udiv(lane, b.u32(chunks))
    row, byte = b.add(lane_row, first), b.mul(b.and_(lane, b.u32(chunks - 1)), b.u32(CHUNK_BYTES))
    start, swizzle = b.row_address(tile, address, row)
    guard = b.zext(b.icmp_unsigned("<", lane_row, b.u32(min(step, warp_rows))), i32)
    return lane, step, row, byte, start, b.xor(byte, swizzle), guard


def row_below(b, tile, start, chunk, down):
    """The address to which a chunk goes, `down` rows below the one that goes to `chunk` in the row at `start`."""
    return b.add(b.add(start, b.xor(chunk, b.u32(down * tile.width >> 3 & tile.width - 16))), b.u32(down * tile.width))


def lower_copy(b, ty, tile, address, array, at, rows, cols, vector_bytes, warp_rows, first):
    """Start copying rows first.. first + warp_rows of the tile at `at`, by one warp. Neighbouring lanes copy neighbouring
    chunks of 16 bytes of a row, so that a panel's row is one access to global memory and its chunks go to different banks. A
    tile that lies inside the array, as most do, is copied without a check of each row, which would slow down the loop around
    it."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    rows, cols, itemsize = rows % ty.ndim, cols % ty.ndim, tile.dtype.itemsize
    inside = b.icmp_unsigned("==", b.u32(0), b.u32(0))
    for axis, size in ((rows, tile.rows), (cols, tile.cols)):
        fits = b.icmp_signed("<=", at[axis], b.sub(extents[axis], i64(size)))
        inside = b.and_(b.and_(inside, fits), b.icmp_signed(">=", at[axis], i64(0)))
    lane, step, row, byte, start, chunk, guard = lane_place(b, tile, address, warp_rows, first)
    source, first_row = b.add(data, b.zext(byte, i64)), b.add(b.trunc(at[rows], i32), row)  # there are fewer than 2**31 rows
    for axis in range(ty.ndim):
        if axis != rows:
            source = b.add(source, b.mul(at[axis], i64(itemsize) if axis == cols else strides[axis]))
    source = b.add(source, b.mul(b.sext(first_row, i64), strides[rows]))  # last, because it differs from tile to tile
    nbytes, by_elements = tile.cols * itemsize, vector_bytes == ELEMENT
    unit = CHUNK_BYTES if by_elements else vector_bytes

    def copies(counts):
        """The copies of all rows, one after the other. counts(row): how many bytes of each of its parts; if they are copied by
        elements, which bytes of the row."""
        line, row_step = source, b.mul(strides[rows], i64(step))
        for down in range(0, warp_rows, step):
            to = row_below(b, tile, start, chunk, down)
            for (panel, low, part), count in zip(chunk_parts(tile, unit), counts(down), strict=True):
                target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(line, i64(low))
                if by_elements:
                    ptx.copy_elements(b, target, origin, low, *count, guard)
                else:
                    ptx.copy_async(b, target, origin, count, guard, vector_bytes)
            line = b.add(line, row_step)  # step by step: multiples of a step would each be kept in a register over the loop

    with b.if_then(inside):
        all_of_it = (b.u32(0), b.u32(nbytes)) if by_elements else b.u32(vector_bytes)
        copies(lambda _: itertools.repeat(all_of_it, tile.panels * CHUNK_BYTES // unit))
    with b.if_then(b.not_(inside)):
        # from this lane to itself, so that the compiler cannot compute the widths ahead of a loop and hold them in registers
        byte = ptx.shuffle(b, byte, lane)
        first_byte = b.add(b.mul(at[cols], i64(itemsize)), b.zext(byte, i64))
        begin = clamped(b, b.sub(i64(0), first_byte), nbytes)  # bytes of the row, counted from the lane's first one
        end = clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
        in_bounds = [] if by_elements else list(copy_bytes(b, tile, begin, end, vector_bytes))

        def row_bounds(down):
            exists = b.icmp_unsigned("<", b.add(first_row, b.u32(down)), b.trunc(extents[rows], i32))
            if by_elements:
                return itertools.repeat((begin, b.select(exists, end, b.u32(0))), tile.panels)
            return [b.select(exists, count, b.u32(0)) for count in in_bounds]

        copies(row_bounds)


def numbers_of_lane(b, tile, address, warp_rows, first):
    """(number, its address, does it exist?) for each of a lane's numbers, among `warp_rows` numbers of a vector from `first`
    on."""
    lane = b.lane()
    for down in range(0, warp_rows, layout.LANES):
        lane_row = b.add(lane, b.u32(down))
        guard = b.zext(b.icmp_unsigned("<", lane_row, b.u32(warp_rows)), i32)
        lane_row = b.add(lane_row, first)
        yield lane_row, b.add(address, b.mul(lane_row, b.u32(NUMBER))), guard


def lower_copy_numbers(b, ty, tile, address, array, at, axis, warp_rows, first):
    """Start copying numbers first.. first + warp_rows of a vector that lies at `at` along an axis of a global array."""
    data, extents, strides = b.array(ty, array)
    at, axis = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], axis % ty.ndim
    for k in range(ty.ndim):
        if k != axis:
            data = b.add(data, b.mul(at[k], strides[k]))
    for lane_row, to, guard in numbers_of_lane(b, tile, address, warp_rows, first):
        place = b.add(at[axis], b.zext(lane_row, i64))
        exists = b.and_(b.icmp_signed(">=", place, i64(0)), b.icmp_signed("<", place, extents[axis]))
        origin = b.add(data, b.mul(place, strides[axis]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)
