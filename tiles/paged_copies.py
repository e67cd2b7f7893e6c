"""Copies by cp.async of rows that lie in pages of a pool, as in a paged KV cache: from a row of a sequence, by its entry in the
page table (other libraries' block table), to its address, at which a copy starts. One warp does so for its rows of a tile:

    page, page_row = page_table[sequence, row // size], row % size            lower_look_up, a tile or two ahead
    address = pool + page * strides[0] + page_row * strides[1] + ...          lower_paged_copy, which starts cp.async there

pipeline.look_up and fill_pages, ops.look_up and copy_pages are made of these; the latter two are also what ops.load_pages reads
by. What TMA loads from pages stands in ring.fill_pages. Where rows lie in an array without pages: cp_async.py."""

from . import layout
from .compiling import ptx
from .compiling.builder import i32, i64
from .cp_async import (
    CHUNK_BYTES,
    ELEMENT,
    NUMBER,
    check_copy,
    chunk_parts,
    clamped,
    copy_bytes,
    lane_place,
    numbers_of_lane,
    row_below,
)
from .numba_names import types
from .op import integer
from .types import sv


def _rows_of_lane(b, tile, warp_rows, first):
    """(row, does it exist?) for each row of which a lane copies a part."""
    if isinstance(tile, sv):
        return [(lane_row, guard) for lane_row, _, guard in numbers_of_lane(b, tile, b.u32(0), warp_rows, first)]
    _, step, row, *_, guard = lane_place(b, tile, b.u32(0), warp_rows, first)
    return [(b.add(row, b.u32(down)), guard) for down in range(0, warp_rows, step)]


def _lookups(tile, warp_rows):
    """For how many rows a lane looks up where they lie."""
    return -(-warp_rows // (layout.LANES if isinstance(tile, sv) else layout.LANES * CHUNK_BYTES // tile.width))


def lower_look_up(b, tile, table_ty, table, size, at, last, before, warp_rows, first):
    """(page, row in the page) for each of a lane's rows, all looked up in the page table at once. Rows that are neighbours in a
    sequence have neighbouring entries in the table, so that several lanes look up theirs by one access. before: no entries are
    read of rows before this one; None: there are no such rows."""
    sequence, begin = b.unpack(at)
    begin, size, page_rows = b.u32(begin), b.u32(size), []
    if table_ty is not None:
        entries, _, steps = b.array(table_ty, table)
        entries = b.add(entries, b.mul(b.sext(sequence, i64) if sequence.type.width < 64 else sequence, steps[0]))
        wide = table_ty.dtype.bitwidth == 64
        register, letter, kind = (i64, "l", "b64") if wide else (i32, "r", "b32")
        text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{kind} $0, 0;\n@p ld.global.{kind} $0, [$1];}}"
    for row, guard in _rows_of_lane(b, tile, warp_rows, first):
        place = b.add(begin, row)
        nth = page = b.udiv(place, size)
        if table_ty is not None:
            exists = b.and_(b.icmp_signed("<", place, b.u32(last)), b.icmp_signed("!=", guard, b.u32(0)))
            if before is not None:
                exists = b.and_(exists, b.icmp_signed(">=", place, b.u32(before)))
            entry = b.add(entries, b.mul(b.zext(nth, i64), steps[1]))
            page = b.asm(register, text, f"={letter},l,r", entry, b.zext(exists, i32))
            page = b.trunc(page, i32) if wide else page
        page_rows += page, b.sub(place, b.mul(nth, size))
    return page_rows


def lower_paged_numbers(b, ty, tile, address, pool, page_rows, at, last, warp_rows, first):
    """Start copying numbers first.. first + warp_rows of a vector from pages. page_rows: where they lie, by lower_look_up."""
    data, _, strides = b.array(ty, pool)
    at, page_rows = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], b.unpack(page_rows)
    for axis in range(2, ty.ndim):
        data = b.add(data, b.mul(at[axis - 1], strides[axis]))
    numbers = numbers_of_lane(b, tile, address, warp_rows, first)
    for (lane_row, to, guard), page, page_row in zip(numbers, page_rows[::2], page_rows[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(b.trunc(at[0], i32), lane_row), b.u32(last))
        origin = b.add(b.add(data, b.mul(b.sext(page, i64), strides[0])), b.mul(b.zext(page_row, i64), strides[1]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)


def lower_paged_copy(b, ty, tile, address, pool, page_rows, at, last, vector_bytes, warp_rows, first):
    """Start copying rows first.. first + warp_rows of a tile from pages. page_rows: where they lie, by lower_look_up."""
    data, extents, strides = b.array(ty, pool)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    itemsize, cols, page_rows = tile.dtype.itemsize, ty.ndim - 1, b.unpack(page_rows)
    _, step, row, byte, start, chunk, guard = lane_place(b, tile, address, warp_rows, first)
    line = b.add(data, b.zext(byte, i64))
    for axis in range(2, ty.ndim):
        line = b.add(line, b.mul(at[axis - 1], i64(itemsize) if axis == cols else strides[axis]))
    first_row = b.add(b.trunc(at[0], i32), row)
    nbytes, by_elements = tile.cols * itemsize, vector_bytes == ELEMENT
    first_byte = b.add(b.mul(at[-1], i64(itemsize)), b.zext(byte, i64))
    begin = clamped(b, b.sub(i64(0), first_byte), nbytes)
    end = clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
    in_bounds = [] if by_elements else list(copy_bytes(b, tile, begin, end, vector_bytes))
    for down, page, page_row in zip(range(0, warp_rows, step), page_rows[::2], page_rows[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(first_row, b.u32(down)), b.u32(last))
        to = row_below(b, tile, start, chunk, down)
        source = b.add(b.add(line, b.mul(b.sext(page, i64), strides[0])), b.mul(b.zext(page_row, i64), strides[1]))
        for k, (panel, low, part) in enumerate(chunk_parts(tile, CHUNK_BYTES if by_elements else vector_bytes)):
            target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(source, i64(low))
            if by_elements:
                ptx.copy_elements(b, target, origin, low, begin, b.select(exists, end, b.u32(0)), guard)
            else:
                ptx.copy_async(b, target, origin, b.select(exists, in_bounds[k], b.u32(0)), guard, vector_bytes)


def look_up_rule(tile, warp_rows, pages, size, at, last, before=None):
    """(the type of the places of `warp_rows` rows of a tile, emit(b, first, ...) that looks up those from row `first` on)"""
    numbers, table = (types.int32, types.int64), None if pages in (None, types.none) else pages
    if table is not None and not (isinstance(table, types.Array) and table.ndim == 2 and table.dtype in numbers):
        raise TypeError(f"look_up: takes int32 or int64 numbers (sequence, which of its pages), or None, got {pages}")
    if not (isinstance(at, types.BaseTuple) and len(at) == 2 and all(map(integer, at)) and integer(size) and integer(last)):
        raise TypeError(f"look_up: size, last and the two of `at` must be integers, got {size}, {last} and {at}")
    bounded = before not in (None, types.none)
    if bounded and not integer(before):
        raise TypeError(f"look_up: begin must be an integer or None, got {before}")
    page_rows = types.UniTuple(types.int32, 2 * _lookups(tile, warp_rows))

    def emit(b, first, value, vsize, vat, vlast, vbefore):
        operands = table, value, vsize, vat, vlast, vbefore if bounded else None
        return b.context.make_tuple(b, page_rows, lower_look_up(b, tile, *operands, warp_rows, first))

    return page_rows, emit


def copy_pages_rule(name, tile, warp_rows, pool, page_rows, at, last, vector_bytes):
    """emit(b, ...) for the copies of `warp_rows` of a tile's rows. TypeError: they cannot be copied like this."""
    vector = isinstance(tile, sv)
    if not isinstance(pool, types.Array) or pool.ndim < 3 - vector or not isinstance(at, types.BaseTuple):
        raise TypeError(f"{name}: takes a pool (page, row, ..., column), and a tuple `at`, got {pool} and {at}")
    check_copy(name, tile, pool, types.BaseTuple.from_types((types.int32, *at)), 1, -1, vector_bytes)
    counts = 2 * _lookups(tile, warp_rows), 2 * warp_rows  # places that a lane has; that the interpreter has
    if not (isinstance(page_rows, types.UniTuple) and integer(page_rows.dtype) and page_rows.count in counts):
        raise TypeError(f"{name}: takes what look_up of a pipeline of such tiles has found, got {page_rows}")
    if not integer(last):
        raise TypeError(f"{name}: last must be an integer, got {last}")

    def emit(b, address, first, array, page_rows, at, last):
        if vector:
            return lower_paged_numbers(b, pool, tile, address, array, page_rows, at, last, warp_rows, first)
        lower_paged_copy(b, pool, tile, address, array, page_rows, at, last, vector_bytes, warp_rows, first)

    return emit
