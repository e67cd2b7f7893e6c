"""Running sums along a vector, in registers: no shared memory, four shuffles for every eight elements."""

import numpy as np

from tiles import ptx
from tiles.dtypes import fp32
from tiles.op import lowers, op
from tiles.types import rv

PLACES = 4  # lanes of a quad, which hold neighbouring pairs


@op
def cumsum(vector):
    """The sums of the vector's elements up to and with each: out[j] = vector[0] + ... + vector[j], in fp32. A row_vec of tiles
    in row layout (or a col_vec of tiles in column layout)."""
    return np.cumsum(vector.array, axis=None, dtype=np.float32).reshape(vector.shape)


@lowers(cumsum)
def _(vector):
    if not isinstance(vector, rv) or vector.partial or vector.by_quad or vector.dtype is not fp32:
        raise TypeError(f"cumsum: takes an fp32 row_vec of tiles in row layout, or a col_vec in column layout, got {vector}")

    def emit(b, value):
        lane = b.lane()
        place, quad = b.and_(lane, b.u32(PLACES - 1)), b.and_(lane, b.u32(-PLACES))
        last, before, out = b.or_(quad, b.u32(PLACES - 1)), b.real(0), []

        def from_left(x, distance):
            """x of the lane that many places to the left in the quad, 0 where there is none."""
            got = ptx.shuffle(b, x, b.or_(quad, b.and_(b.sub(lane, b.u32(distance)), b.u32(PLACES - 1))))
            return b.select(b.icmp_unsigned(">=", place, b.u32(distance)), got, b.real(0))

        elements = b.elements(vector, value)
        for low, high in zip(elements[::2], elements[1::2], strict=True):
            here = b.fadd(low, high)
            for distance in (1, 2):
                here = b.fadd(here, from_left(here, distance))
            out += [b.fadd(before, b.fadd(from_left(here, 1), low)), b.fadd(before, here)]
            before = b.fadd(before, ptx.shuffle(b, here, last))
        return b.from_elements(vector, out)

    return vector, emit
