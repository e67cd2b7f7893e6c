"""Running sums along a vector, in registers: no shared memory, four shuffles for every eight elements."""

import numpy as np

from tiles import ptx
from tiles.dtypes import fp32
from tiles.layout import QUAD
from tiles.op import lowers, op
from tiles.types import rt, rv

from . import quads


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
        place, quad = quads.place(b)
        end, elements, out = b.or_(quad, b.u32(QUAD - 1)), b.elements(x, value), {}

        def from_left(y, distance):
            """y of the lane that many places to the left in the quad, 0 where there is none."""
            got = ptx.shuffle(b, y, b.or_(quad, b.and_(b.sub(place, b.u32(distance)), b.u32(QUAD - 1))))
            return b.select(b.icmp_unsigned(">=", place, b.u32(distance)), got, b.real(0))

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
    """For each column of which a lane holds elements, which of them in order; a vector is one."""
    if isinstance(x, rv):
        return [list(range(x.elements))]
    columns = {}
    for k in range(x.elements):
        row, col = x.element(0, k)
        columns.setdefault(int(col), []).append((int(row), k))
    return [[k for _, k in sorted(column)] for column in columns.values()]
