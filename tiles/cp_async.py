"""Copies by cp.async (sm_80 and later), as one warp starts them: its share of the rows of a shared tile, or of the numbers of a
shared vector, from a global array or from pages that were looked up before. Pipelines and ops.copy_async are made of these.
"""

import itertools

from . import layout
from .compiling import ptx
from .compiling.builder import i32, i64
from .compiling.numba_types import CAPTURED, SCALARS
from .numba_names import types
from .op import integer
from .types import gl, sv

PIECES = (16, 8, 4, 2)  # bytes that can be copied at once; cp.async copies 4 or more, and 2 bytes are loaded and stored
CHUNK_BYTES = PIECES[0]  # of a row: what one lane copies
ELEMENT = PIECES[-1]  # bytes: too few for cp.async
VECTOR = 16  # the length of a vector is a multiple of this
NUMBER = 4  # bytes of a vector's number: cp.async copies them one by one


def rows_of(tile):
    """The rows of a tile, or the elements of a vector."""
    return tile.length if isinstance(tile, sv) else tile.rows


def pieces_of(itemsize: int) -> tuple[int, ...]:
    """The bytes that elements of this size can be copied by at once."""
    return PIECES if itemsize == ELEMENT else PIECES[:-1]


def check_copy(name, tile, source, at, rows, cols, piece):
    """TypeError if cp.async cannot fill a shared tile with this part of a global array."""
    if isinstance(source, types.Array) and not source.mutable:
        raise TypeError(f"{name}: {CAPTURED}")
    if not isinstance(source, types.Array) or SCALARS.get(source.dtype) is not tile.dtype:
        cut = "; pass the launch the array itself, not a tensor of it: cp.async is no TMA" if isinstance(source, gl) else ""
        raise TypeError(f"{name}: the source must be a global array of {tile.dtype} for {tile}, got {source}{cut}")
    if not (isinstance(at, types.BaseTuple) and len(at) == source.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {source.ndim} integers for an array of {source.ndim} axes, got {at}")
    if isinstance(tile, sv):
        return
    if not all(-source.ndim <= axis < source.ndim for axis in (rows, cols)) or (rows - cols) % source.ndim == 0:
        raise TypeError(f"{name}: {tile} lies along 2 axes of the array, got {rows} and {cols} of {source.ndim}")
    if piece not in (pieces := pieces_of(tile.dtype.itemsize)):
        raise TypeError(f"{name}: piece must be one of {pieces} bytes for {tile.dtype}, got {piece}")


def check_vector(name, tile, share):
    """ValueError if no warp can copy `share` of a shared vector's numbers."""
    if tile.dtype.itemsize != NUMBER or share % VECTOR:
        raise ValueError(
            f"{name}: of a vector a warp copies a multiple of {VECTOR} numbers of {NUMBER} bytes, got {share} of {tile}"
        )


def _parts(tile, unit):
    """What a lane copies of its row, panel after panel and `unit` bytes of a chunk at a time: (panel, byte in the row counted
    from the lane's first byte, byte in the chunk)."""
    for panel, part in itertools.product(range(tile.panels), range(0, CHUNK_BYTES, unit)):
        yield panel, panel * tile.width + part, part


def _clamped(b, x, most):
    """The 64-bit x, clamped to 0..most, in 32 bits."""
    low, high = i64(0), i64(most)
    x = b.select(b.icmp_signed("<", x, high), x, high)
    return b.u32(b.select(b.icmp_signed("<", x, low), low, x))


def _counts(b, tile, begin, end, piece):
    """How many bytes of each part to copy, if of a row the bytes from `begin` to before `end` lie inside the array. A part lies
    inside from its beginning or not at all: `begin` is where some part begins."""
    for _, low, _ in _parts(tile, piece):
        left = b.sub(end, b.u32(low))
        left = b.select(b.icmp_signed("<", left, b.u32(piece)), left, b.u32(piece))
        outside = b.or_(b.icmp_signed("<", left, b.u32(0)), b.icmp_signed(">", begin, b.u32(low)))
        yield b.select(outside, b.u32(0), left)


def _place(b, tile, address, share, first):
    """What a lane copies of the first rows, counted from `first`: (the lane, rows that a warp copies at once, the lane's row,
    the byte of the row at which its chunk begins, the row's address, where in that row the chunk goes, whether the lane has a
    row)."""
    chunks = tile.width // CHUNK_BYTES  # of a panel's row
    step = layout.LANES // chunks
    lane = b.lane()
    lane_row = b.udiv(lane, b.u32(chunks))
    row, byte = b.add(lane_row, first), b.mul(b.and_(lane, b.u32(chunks - 1)), b.u32(CHUNK_BYTES))
    start, swizzle = b.row_address(tile, address, row)
    guard = b.zext(b.icmp_unsigned("<", lane_row, b.u32(min(step, share))), i32)
    return lane, step, row, byte, start, b.xor(byte, swizzle), guard


def _further(b, tile, start, chunk, down):
    """The address to which a chunk goes, `down` rows below the one that goes to `chunk` in the row at `start`."""
    return b.add(b.add(start, b.xor(chunk, b.u32(down * tile.width >> 3 & tile.width - 16))), b.u32(down * tile.width))


def lower_copy(b, ty, tile, address, array, at, rows, cols, piece, share, first):
    """Start copying rows first.. first + share of the tile at `at`, by one warp. Neighbouring lanes copy neighbouring chunks of
    16 bytes of a row, so that a panel's row is one access to global memory and its chunks go to different banks. A tile that
    lies inside the array, as most do, is copied without a check of each row, which would slow down the loop around it."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    rows, cols, itemsize = rows % ty.ndim, cols % ty.ndim, tile.dtype.itemsize
    inside = b.icmp_unsigned("==", b.u32(0), b.u32(0))
    for axis, size in ((rows, tile.rows), (cols, tile.cols)):
        fits = b.icmp_signed("<=", at[axis], b.sub(extents[axis], i64(size)))
        inside = b.and_(b.and_(inside, fits), b.icmp_signed(">=", at[axis], i64(0)))
    lane, step, row, byte, start, chunk, guard = _place(b, tile, address, share, first)
    source, first_row = b.add(data, b.zext(byte, i64)), b.add(b.trunc(at[rows], i32), row)  # there are fewer than 2**31 rows
    for axis in range(ty.ndim):
        if axis != rows:
            source = b.add(source, b.mul(at[axis], i64(itemsize) if axis == cols else strides[axis]))
    source = b.add(source, b.mul(b.sext(first_row, i64), strides[rows]))  # last, because it differs from tile to tile
    nbytes, by_elements = tile.cols * itemsize, piece == ELEMENT
    unit = CHUNK_BYTES if by_elements else piece

    def copies(counts):
        """The copies of all rows, one after the other. counts(row): how many bytes of each of its parts; if they are copied by
        elements, which bytes of the row."""
        line, further = source, b.mul(strides[rows], i64(step))
        for down in range(0, share, step):
            to = _further(b, tile, start, chunk, down)
            for (panel, low, part), count in zip(_parts(tile, unit), counts(down), strict=True):
                target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(line, i64(low))
                if by_elements:
                    ptx.copy_elements(b, target, origin, low, *count, guard)
                else:
                    ptx.copy_async(b, target, origin, count, guard, piece)
            line = b.add(line, further)  # step by step: multiples of a step would each be kept in a register over the loop

    with b.if_then(inside):
        all_of_it = (b.u32(0), b.u32(nbytes)) if by_elements else b.u32(piece)
        copies(lambda _: itertools.repeat(all_of_it, tile.panels * CHUNK_BYTES // unit))
    with b.if_then(b.not_(inside)):
        # from this lane to itself, so that the compiler cannot compute the widths ahead of a loop and hold them in registers
        byte = ptx.shuffle(b, byte, lane)
        first_byte = b.add(b.mul(at[cols], i64(itemsize)), b.zext(byte, i64))
        begin = _clamped(b, b.sub(i64(0), first_byte), nbytes)  # bytes of the row, counted from the lane's first one
        end = _clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
        in_bounds = [] if by_elements else list(_counts(b, tile, begin, end, piece))

        def cut(down):
            exists = b.icmp_unsigned("<", b.add(first_row, b.u32(down)), b.trunc(extents[rows], i32))
            if by_elements:
                return itertools.repeat((begin, b.select(exists, end, b.u32(0))), tile.panels)
            return [b.select(exists, count, b.u32(0)) for count in in_bounds]

        copies(cut)


def _numbers(b, tile, address, share, first):
    """(number, its address, does it exist?) for each of a lane's numbers, among `share` numbers of a vector from `first` on."""
    lane = b.lane()
    for down in range(0, share, layout.LANES):
        lane_row = b.add(lane, b.u32(down))
        guard = b.zext(b.icmp_unsigned("<", lane_row, b.u32(share)), i32)
        lane_row = b.add(lane_row, first)
        yield lane_row, b.add(address, b.mul(lane_row, b.u32(NUMBER))), guard


def lower_copy_numbers(b, ty, tile, address, array, at, axis, share, first):
    """Start copying numbers first.. first + share of a vector that lies at `at` along an axis of a global array."""
    data, extents, strides = b.array(ty, array)
    at, axis = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], axis % ty.ndim
    for k in range(ty.ndim):
        if k != axis:
            data = b.add(data, b.mul(at[k], strides[k]))
    for lane_row, to, guard in _numbers(b, tile, address, share, first):
        place = b.add(at[axis], b.zext(lane_row, i64))
        exists = b.and_(b.icmp_signed(">=", place, i64(0)), b.icmp_signed("<", place, extents[axis]))
        origin = b.add(data, b.mul(place, strides[axis]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)


def lower_number_pages(b, ty, tile, address, pool, page_rows, at, last, share, first):
    """The same for numbers whose places in pages are known."""
    data, _, strides = b.array(ty, pool)
    at, page_rows = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], b.unpack(page_rows)
    for axis in range(2, ty.ndim):
        data = b.add(data, b.mul(at[axis - 1], strides[axis]))
    numbers = _numbers(b, tile, address, share, first)
    for (lane_row, to, guard), number, inside in zip(numbers, page_rows[::2], page_rows[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(b.trunc(at[0], i32), lane_row), b.u32(last))
        origin = b.add(b.add(data, b.mul(b.sext(number, i64), strides[0])), b.mul(b.zext(inside, i64), strides[1]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)


def _ownrows_of(b, tile, share, first):
    """(row, does it exist?) for each row of which a lane copies a part."""
    if isinstance(tile, sv):
        return [(lane_row, guard) for lane_row, _, guard in _numbers(b, tile, b.u32(0), share, first)]
    _, step, row, *_, guard = _place(b, tile, b.u32(0), share, first)
    return [(b.add(row, b.u32(down)), guard) for down in range(0, share, step)]


def _looked_up(tile, share):
    """For how many rows a lane looks up where they lie."""
    return -(-share // (layout.LANES if isinstance(tile, sv) else layout.LANES * CHUNK_BYTES // tile.width))


def lower_look_up(b, tile, table_ty, table, size, at, last, before, share, first):
    """(page number, row in the page) for each of a lane's rows, all looked up at once. Rows that are neighbours in a sequence
    have neighbouring entries in the table, so that several lanes look up theirs by one access. before: rows before this one
    have none; None: there are no such rows."""
    sequence, begin = b.unpack(at)
    begin, size, page_rows = b.u32(begin), b.u32(size), []
    if table_ty is not None:
        numbers, _, steps = b.array(table_ty, table)
        numbers = b.add(numbers, b.mul(b.sext(sequence, i64) if sequence.type.width < 64 else sequence, steps[0]))
        wide = table_ty.dtype.bitwidth == 64
        register, letter, kind = (i64, "l", "b64") if wide else (i32, "r", "b32")
        text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{kind} $0, 0;\n@p ld.global.{kind} $0, [$1];}}"
    for row, guard in _ownrows_of(b, tile, share, first):
        place = b.add(begin, row)
        page = number = b.udiv(place, size)
        if table_ty is not None:
            exists = b.and_(b.icmp_signed("<", place, b.u32(last)), b.icmp_signed("!=", guard, b.u32(0)))
            if before is not None:
                exists = b.and_(exists, b.icmp_signed(">=", place, b.u32(before)))
            entry = b.add(numbers, b.mul(b.zext(page, i64), steps[1]))
            number = b.asm(register, text, f"={letter},l,r", entry, b.zext(exists, i32))
            number = b.trunc(number, i32) if wide else number
        page_rows += number, b.sub(place, b.mul(page, size))
    return page_rows


def lower_pages(b, ty, tile, address, pool, page_rows, at, last, piece, share, first):
    """The same for rows whose places in pages are known."""
    data, extents, strides = b.array(ty, pool)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    itemsize, cols, page_rows = tile.dtype.itemsize, ty.ndim - 1, b.unpack(page_rows)
    _, step, row, byte, start, chunk, guard = _place(b, tile, address, share, first)
    line = b.add(data, b.zext(byte, i64))
    for axis in range(2, ty.ndim):
        line = b.add(line, b.mul(at[axis - 1], i64(itemsize) if axis == cols else strides[axis]))
    first_row = b.add(b.trunc(at[0], i32), row)
    nbytes, by_elements = tile.cols * itemsize, piece == ELEMENT
    first_byte = b.add(b.mul(at[-1], i64(itemsize)), b.zext(byte, i64))
    begin = _clamped(b, b.sub(i64(0), first_byte), nbytes)
    end = _clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
    in_bounds = [] if by_elements else list(_counts(b, tile, begin, end, piece))
    for down, number, inside in zip(range(0, share, step), page_rows[::2], page_rows[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(first_row, b.u32(down)), b.u32(last))
        to = _further(b, tile, start, chunk, down)
        source = b.add(b.add(line, b.mul(b.sext(number, i64), strides[0])), b.mul(b.zext(inside, i64), strides[1]))
        for k, (panel, low, part) in enumerate(_parts(tile, CHUNK_BYTES if by_elements else piece)):
            target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(source, i64(low))
            if by_elements:
                ptx.copy_elements(b, target, origin, low, begin, b.select(exists, end, b.u32(0)), guard)
            else:
                ptx.copy_async(b, target, origin, b.select(exists, in_bounds[k], b.u32(0)), guard, piece)


def page_rows_type(tile, share, pages, size, at, last, before=None):
    """(the type of the places of `share` rows of a tile, emit(b, first, ...) that looks up those from row `first` on)"""
    numbers, table = (types.int32, types.int64), None if pages in (None, types.none) else pages
    if table is not None and not (isinstance(table, types.Array) and table.ndim == 2 and table.dtype in numbers):
        raise TypeError(f"look_up: takes int32 or int64 numbers (sequence, which of its pages), or None, got {pages}")
    if not (isinstance(at, types.BaseTuple) and len(at) == 2 and all(map(integer, at)) and integer(size) and integer(last)):
        raise TypeError(f"look_up: size, last and the two of `at` must be integers, got {size}, {last} and {at}")
    bounded = before not in (None, types.none)
    if bounded and not integer(before):
        raise TypeError(f"look_up: begin must be an integer or None, got {before}")
    page_rows = types.UniTuple(types.int32, 2 * _looked_up(tile, share))

    def emit(b, first, value, vsize, vat, vlast, vbefore):
        operands = table, value, vsize, vat, vlast, vbefore if bounded else None
        return b.context.make_tuple(b, page_rows, lower_look_up(b, tile, *operands, share, first))

    return page_rows, emit


def lower_copy_pages(name, tile, share, pool, page_rows, at, last, piece):
    """emit(b, ...) for the copies of `share` of a tile's rows. TypeError: they cannot be copied like this."""
    vector = isinstance(tile, sv)
    if not isinstance(pool, types.Array) or pool.ndim < 3 - vector or not isinstance(at, types.BaseTuple):
        raise TypeError(f"{name}: takes a pool (page, row, ..., column), and a tuple `at`, got {pool} and {at}")
    check_copy(name, tile, pool, types.BaseTuple.from_types((types.int32, *at)), 1, -1, piece)
    counts = 2 * _looked_up(tile, share), 2 * share  # places that a lane has; that the interpreter has
    if not (isinstance(page_rows, types.UniTuple) and integer(page_rows.dtype) and page_rows.count in counts):
        raise TypeError(f"{name}: takes what look_up of a pipeline of such tiles has found, got {page_rows}")
    if not integer(last):
        raise TypeError(f"{name}: last must be an integer, got {last}")

    def emit(b, address, first, array, page_rows, at, last):
        if vector:
            return lower_number_pages(b, pool, tile, address, array, page_rows, at, last, share, first)
        lower_pages(b, pool, tile, address, array, page_rows, at, last, piece, share, first)

    return emit
