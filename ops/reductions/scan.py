"""Running sums. Along a vector, in registers: four shuffles for every eight elements. Down a shared tile: no shuffles, for a
lane has a column to itself."""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES, QUAD
from tiles.op import lowers, number, op
from tiles.types import rt, rv, st, sv

from ..elementwise.functions import check_function
from ..memory.shared_vectors import load_elements, store_elements
from ..threads import lanes

AT_ONCE = 16  # rows of a shared tile that are on their way to registers


@op
def cumsum(x):
    """Running sums, in fp32: out[j] = x[0] + ... + x[j]. Of a row_vec of tiles in row layout (or a col_vec of tiles in column
    layout); of an fp32 tile in column layout, down each column."""
    return np.cumsum(x.array, axis=x.array.shape.index(x.length) if hasattr(x, "length") else 0, dtype=np.float32)


@lowers(cumsum)
def _(x):
    fits = (isinstance(x, rt) and x.layout == "col") or (isinstance(x, rv) and not (x.partial or x.by_quad))
    if not fits or x.dtype is not fp32:
        raise TypeError(
            f"cumsum: takes an fp32 tile in column layout, or a row_vec of row layout or col_vec of column layout, got {x}"
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
def cumsum_columns(target, source, least, function=None, y=None, z=None):
    """target[i] = source[0] + ... + source[i], by one warp: running sums in fp32 down each column of a shared tile, of elements
    that are `least` where they are less (NaN stays NaN). target: an fp32 shared tile of source's shape, or source itself.

    function: the sums are of function(e, y, z[column]) of each element e (see `map`). y: a number. z: an fp32 shared vector."""
    x = current_warp().read(source, fence=False).astype(np.float32)
    if function is not None:
        x = function(x, np.float32(y), current_warp().read(z, fence=False).astype(np.float32))
    current_warp().write(target, np.cumsum(np.where(x < least, np.float32(least), x), axis=0, dtype=np.float32))


@lowers(cumsum_columns)
def _(target, source, least, function, y, z):
    fits = isinstance(target, st) and isinstance(source, st) and target.shape == source.shape
    if not fits or target.dtype is not fp32 or source.dtype.itemsize == 1:
        raise TypeError(
            f"cumsum_columns: takes an fp32 shared tile and one of its shape, not of fp8, got {target} and {source}"
        )

    if function is not None:
        check_function("cumsum_columns", function, 3)
        if not (number(y) and z == sv(source.cols, fp32)):
            raise TypeError(f"cumsum_columns: takes a number and {sv(source.cols, fp32)} for a function, got {y} and {z}")

    at_once = AT_ONCE if function is None else AT_ONCE // 2  # a function needs registers of its own

    def emit(b, target_address, source_address, least, python_function, y, z_address):
        least = b.real(least)

        def column(first):
            """Running sums down column first + lane."""
            mine = b.add(b.lane(), b.u32(first))
            if function is not None:
                of_column = load_elements(b, fp32, 1, b.add(z_address, b.mul(mine, b.u32(fp32.itemsize))))[0]

            def at(tile, address, i):
                start, swizzle = b.row_address(tile, address, b.u32(i))
                panel = b.udiv(mine, b.u32(tile.panel_cols))
                byte = b.mul(b.urem(mine, b.u32(tile.panel_cols)), b.u32(tile.dtype.itemsize))
                return b.add(b.add(start, b.mul(panel, b.u32(tile.panel_bytes))), b.xor(byte, swizzle))

            def some(start):
                elements = [load_elements(b, source.dtype, 1, at(source, source_address, i))[0] for i in batch(start)]
                if function is not None:
                    elements = [b.apply(function, python_function, x, b.real(y), of_column) for x in elements]
                return [b.select(b.fcmp_ordered("<", x, least), least, x) for x in elements]

            def batch(start):
                return range(start, min(start + at_once, source.rows))

            so_far, ahead = b.real(0), some(0)
            for start in range(0, source.rows, at_once):
                arrived, ahead = ahead, some(start + at_once)  # before these are stored, for a load waits for no store
                for i, x in zip(batch(start), arrived, strict=True):
                    so_far = b.fadd(so_far, x)
                    store_elements(b, fp32, [so_far], at(target, target_address, i))

        for first in range(0, source.cols, LANES):
            if source.cols - first >= LANES:
                column(first)
            else:
                with b.if_then(b.icmp_unsigned("<", b.lane(), b.u32(source.cols - first))):
                    column(first)
        ptx.warp_sync(b)

    return void, emit
