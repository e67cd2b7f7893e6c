"""Running sums. Along a vector, in registers: four shuffles for every eight elements. Down a shared tile: no shuffles, for a
lane has a column to itself."""

import functools

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import f32, void
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES, QUAD
from tiles.op import lowers, number, op
from tiles.types import rt, rv, st, sv

from ..elementwise.functions import check_function
from ..memory.shared_vectors import load_elements, store_elements
from ..threads import lanes

AT_ONCE = 16  # rows of a shared tile that are on their way to registers
COMPUTED_AT_ONCE = 4  # the same of a function: a burst of special functions, loads and stores would hold up other warps
GROUP = 16  # rows down which sums fall by so much at most, if there is a limit
FIRST_SHARE = 1 / 7  # of that limit, by which they may fall from the first row to the second


@op
def cumsum(x):
    """Running sums, in fp32: out[j] = x[0] + ... + x[j]. Of a row_vec of tiles in row layout (or a col_vec of tiles in column
    layout); of an fp32 tile in column layout, down each column; along an fp32 line."""
    axis = x.array.shape.index(x.length) if hasattr(x, "length") else int(x.spec.layout == "line")
    return np.cumsum(x.array, axis=axis, dtype=np.float32)


@lowers(cumsum)
def _(x):
    if isinstance(x, rt) and x.layout == "line" and x.dtype is fp32:
        return x, functools.partial(_along_line, x)
    fits = (isinstance(x, rt) and x.layout == "col") or (isinstance(x, rv) and not (x.partial or x.by_quad))
    if not fits or x.dtype is not fp32:
        raise TypeError(
            "cumsum: takes an fp32 tile in column layout, or a row_vec of row layout or col_vec of column layout, or an fp32 "
            f"line, got {x}"
        )

    def emit(b, value):
        t, quad = lanes.in_quad(b)
        end, elements, out = b.or_(quad, b.u32(QUAD - 1)), b.elements(x, value), {}

        def from_left(y, distance):
            """y of the lane that is `distance` before this one in the quad, 0 where there is none."""
            got = ptx.shuffle(b, y, b.or_(quad, b.and_(b.sub(t, b.u32(distance)), b.u32(QUAD - 1))))
            return b.select(b.icmp_unsigned(">=", t, b.u32(distance)), got, b.real(0))

        for column in _columns(x):
            before = b.real(0)
            for low, high in zip(column[::2], column[1::2], strict=True):
                so_far = b.fadd(elements[low], elements[high])
                for distance in (1, 2):
                    so_far = b.fadd(so_far, from_left(so_far, distance))
                out[low] = b.fadd(before, b.fadd(from_left(so_far, 1), elements[low]))
                out[high] = b.fadd(before, so_far)
                before = b.fadd(before, ptx.shuffle(b, so_far, end))
        return b.from_elements(x, [out[k] for k in range(x.elements)])

    return x, emit


def _along_line(x, b, value):
    """Running sums along a line: of each lane's run, and of the lanes before it."""
    elements, sums = b.elements(x, value), []
    for element in elements:
        sums.append(b.fadd(sums[-1], element) if sums else element)
    total = sums[-1]
    for k in range(LANES.bit_length() - 1):
        total = ptx.add_before(b, total, 1 << k)
    before = ptx.before(b, total)
    return b.from_elements(x, [b.fadd(before, x) for x in sums])


def _columns(x):
    """For each column of which a lane has elements, their indices in order; a vector is one column."""
    if isinstance(x, rv):
        return [list(range(x.elements))]
    columns = {}
    for k in range(x.elements):
        row, col = x.element(0, k)
        columns.setdefault(int(col), []).append((int(row), k))
    return [[k for _, k in sorted(column)] for column in columns.values()]


# ---- down a shared tile ----------------------------------------------------------------------------------------------
@op
def cumsum_columns(
    target, source, least, function=None, y=None, z=None, below=None, fall=None, factor=None, divides=False, in_loop=False
):
    """target[i] = source[0] + ... + source[i], by one warp: running sums in fp32 down each column of a shared tile, of elements
    that are `least` where they are less, or this number `below` (NaN stays NaN; least None: there is none). target: an fp32
    shared tile of source's shape, or source itself.

    function: the sums are of function(e, y, z[column]) of each element e (see `map`). y: a number. z: an fp32 shared vector.

    factor: they are of factor function(..), or with `divides` of factor / function(..); factor is negative. A function that
    divides is at least 1.

    fall: elements are never positive, and sums fall by no more than so much (a Python number) from the first to the last of
    each GROUP rows; to the rows between by no more than shares of it, `fall_shares`. So an element that is too low counts what
    is left, which is the more, the longer no other one was low. `least` is for the first of these rows alone.

    in_loop: the code is that of GROUP rows, in a loop that waits for the elements of each: for what is run once."""
    x = current_warp().read(source, fence=False).astype(np.float32)
    if function is not None:
        x = function(x, np.float32(y), current_warp().read(z, fence=False).astype(np.float32))
    if factor is not None:
        x = np.float32(factor) / x if divides else np.float32(factor) * x
    if least is not None:
        x = np.where(x < least, np.float32(least if below is None else below), x)
    current_warp().write(target, np.cumsum(x, axis=0, dtype=np.float32) if fall is None else _sum_limited(x, fall))


def _sum_limited(x, fall):
    """Running sums of rows that fall by no more than `fall` in each GROUP."""
    sums, so_far = [], np.float32(0)
    for first, *others in x.reshape(-1, GROUP, x.shape[1]):
        so_far, fallen = so_far + first, np.float32(0)
        rows = [so_far]
        for element, share in zip(others, fall_shares()[1:], strict=True):
            fallen = np.maximum(fallen + element, np.float32(-fall * share))
            rows.append(so_far + fallen)
        sums += rows
        so_far = rows[-1]
    return np.array(sums, np.float32)


def fall_shares():
    """For each of GROUP rows, the share of the greatest fall of sums from the first row on that is allowed there: a little at
    once, then as much for each row, so that no element counts less than that. An element that is low in the second row counts
    FIRST_SHARE."""
    each = (1 - FIRST_SHARE) / (GROUP - 2)
    return [0.0, *(FIRST_SHARE + each * i for i in range(GROUP - 1))]


@lowers(cumsum_columns)
def _(target, source, least, function, y, z, below, fall, factor, divides: int, in_loop: int):
    fits = isinstance(target, st) and isinstance(source, st) and target.shape == source.shape
    if not fits or target.dtype is not fp32 or source.dtype.itemsize == 1:
        raise TypeError(
            f"cumsum_columns: takes an fp32 shared tile and one of its shape, not of fp8, got {target} and {source}"
        )

    if function is not None:
        check_function("cumsum_columns", function, 3)
        if not (number(y) and z == sv(source.cols, fp32)):
            raise TypeError(f"cumsum_columns: takes a number and {sv(source.cols, fp32)} for a function, got {y} and {z}")

    if (in_loop or number(fall)) and source.rows % GROUP:
        raise TypeError(f"cumsum_columns: a loop and a limit of falls take a multiple of {GROUP} rows, got {source}")

    at_once = AT_ONCE if function is None else COMPUTED_AT_ONCE
    has_least, has_below, has_fall, has_factor = number(least), number(below), number(fall), number(factor)
    if has_factor and (has_below or function is None):
        raise TypeError(
            f"cumsum_columns: takes a factor of a function, and then no other number below, got {function}, {below}"
        )

    def emit(b, target_address, source_address, least, python_function, y, z_address, below, fall, factor, *_):
        least = b.real(least) if has_least else None
        below = b.real(below) if has_below else least
        fall = b.real(fall) if has_fall else None
        factor = b.real(factor) if has_factor else None
        limits_values = has_factor and has_least and not divides  # is what the function has limited, and not the element?
        most_value = b.fmul(least, _reciprocal(b, factor)) if limits_values else None

        def scale(i, x):
            """The element of row i, of what the function has there."""
            if divides:
                return b.fmul(factor, _reciprocal(b, x))
            if limits_values and is_limited(i):
                x = b.asm(f32, "min.NaN.f32 $0, $1, $2;", "=f,f,f", x, most_value, effect=False)
            return b.fmul(factor, x)

        def is_limited(i):
            """Is it the element of row i that is limited, and not the sum?"""
            return not has_fall or i % GROUP == 0

        def place(tile, address, i, column_index, group=None):
            """The address of row i of a column; in a loop of row i of a group of GROUP rows, which are all swizzled alike."""
            address = _at(b, tile, address, i, column_index)
            return address if group is None else b.add(address, b.mul(group, b.u32(GROUP * tile.width)))

        def column(first):
            """Running sums down column first + lane."""
            column_index = b.add(b.lane(), b.u32(first))
            if function is not None:
                of_column = load_elements(b, fp32, 1, b.add(z_address, b.mul(column_index, b.u32(fp32.itemsize))))[0]

            def load_batch(rows, group=None):
                places = [place(source, source_address, i, column_index, group) for i in rows]
                elements = [load_elements(b, source.dtype, 1, place)[0] for place in places]
                if function is not None:
                    elements = [b.apply(function, python_function, x, b.real(y), of_column) for x in elements]
                if has_factor:
                    elements = [scale(i, x) for i, x in zip(rows, elements, strict=True)]
                if has_least and not limits_values:
                    elements = [
                        b.select(b.fcmp_ordered("<", x, least), below, x) if is_limited(i) else x
                        for i, x in zip(rows, elements, strict=True)
                    ]
                return elements

            def add_batch(rows, elements, so_far, group=None):
                """The running sums of a batch are stored. so_far, and what is returned: the sum at the first row of the last
                GROUP, and how far it has fallen since; without a limit of that, the whole sum and 0."""
                first, fallen = so_far
                for i, x in zip(rows, elements, strict=True):
                    if is_limited(i):
                        first, fallen = b.fadd(b.fadd(first, fallen), x) if has_fall else b.fadd(first, x), b.real(0)
                    else:
                        most = b.fmul(fall, b.real(-shares[i % GROUP]))
                        fallen = b.asm(f32, "max.NaN.f32 $0, $1, $2;", "=f,f,f", b.fadd(fallen, x), most, effect=False)
                    total = b.fadd(first, fallen) if has_fall else first
                    store_elements(b, fp32, [total], place(target, target_address, i, column_index, group))
                return first, fallen

            def batch(start):
                return range(start, min(start + at_once, source.rows))

            so_far, shares = (b.real(0), b.real(0)), fall_shares()
            if in_loop:
                b.repeat(
                    source.rows // GROUP,
                    list(so_far),
                    lambda group, sums: add_batch(range(GROUP), load_batch(range(GROUP), group), sums, group),
                )
            else:
                ahead = load_batch(batch(0))
                for start in range(0, source.rows, at_once):
                    # the next ones are loaded before these are stored, for a load waits for no store
                    arrived, ahead = ahead, load_batch(batch(start + at_once))
                    so_far = add_batch(batch(start), arrived, so_far)

        _each_column(b, source.cols, column)

    return void, emit


def _reciprocal(b, x):
    return b.asm(f32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", x, effect=False)


@op
def reverse_cumsum_columns(tile, last):
    """tile[i] = last + tile[n - 1] + ... + tile[i], by one warp: running sums from the last row on, up each column of an fp32
    shared tile of n rows. last: an fp32 shared vector, a number for each column."""
    x = current_warp().read(tile, fence=False)
    sums = np.cumsum(np.concatenate([current_warp().read(last, fence=False).reshape(1, -1), x[::-1]]), axis=0, dtype=np.float32)
    current_warp().write(tile, sums[:0:-1])


@lowers(reverse_cumsum_columns)
def _(tile, last):
    if not isinstance(tile, st) or tile.dtype is not fp32 or last != sv(tile.cols, fp32):
        raise TypeError(
            f"reverse_cumsum_columns: takes an fp32 shared tile and vector of as many columns, got {tile} and {last}"
        )

    def emit(b, address, last_address):
        def column(first):
            """Running sums up column first + lane."""
            column_index = b.add(b.lane(), b.u32(first))
            so_far = load_elements(b, fp32, 1, b.add(last_address, b.mul(column_index, b.u32(fp32.itemsize))))[0]

            def load_batch(end):
                return [load_elements(b, fp32, 1, _at(b, tile, address, i, column_index))[0] for i in batch(end)]

            def batch(end):
                return range(end - 1, max(end - AT_ONCE, 0) - 1, -1)

            ahead = load_batch(tile.rows)
            for end in range(tile.rows, 0, -AT_ONCE):
                # the next ones are loaded before these are stored, for a load waits for no store
                arrived, ahead = ahead, load_batch(max(end - AT_ONCE, 0))
                for i, x in zip(batch(end), arrived, strict=True):
                    so_far = b.fadd(so_far, x)
                    store_elements(b, fp32, [so_far], _at(b, tile, address, i, column_index))

        _each_column(b, tile.cols, column)

    return void, emit


def _at(b, tile, address, i, column):
    """Address of row i of a shared tile's column."""
    start, swizzle = b.row_address(tile, address, b.u32(i))
    panel = b.udiv(column, b.u32(tile.panel_cols))
    byte = b.mul(b.urem(column, b.u32(tile.panel_cols)), b.u32(tile.dtype.itemsize))
    return b.add(b.add(start, b.mul(panel, b.u32(tile.panel_bytes))), b.xor(byte, swizzle))


def _each_column(b, cols, emit_column):
    """emit_column(first), where lanes have columns from `first` on, until they have had all columns; the warp meets."""
    for first in range(0, cols, LANES):
        if cols - first >= LANES:
            emit_column(first)
        else:
            with b.if_then(b.icmp_unsigned("<", b.lane(), b.u32(cols - first))):
                emit_column(first)
    ptx.warp_sync(b)
