"""Running sums along a vector, in registers: no shared memory, four shuffles for every eight elements; and where they end."""

import numpy as np
from numba.cuda import types

from tiles import ptx
from tiles.dtypes import fp32
from tiles.interpreter import here
from tiles.op import lowers, op
from tiles.plumbing import f32
from tiles.types import rv, sv

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
        end, before, out = b.or_(quad, b.u32(PLACES - 1)), b.real(0), []

        def from_left(x, distance):
            """x of the lane that many places to the left in the quad, 0 where there is none."""
            got = ptx.shuffle(b, x, b.or_(quad, b.and_(b.sub(lane, b.u32(distance)), b.u32(PLACES - 1))))
            return b.select(b.icmp_unsigned(">=", place, b.u32(distance)), got, b.real(0))

        elements = b.elements(vector, value)
        for low, high in zip(elements[::2], elements[1::2], strict=True):
            so_far = b.fadd(low, high)
            for distance in (1, 2):
                so_far = b.fadd(so_far, from_left(so_far, distance))
            out += [b.fadd(before, b.fadd(from_left(so_far, 1), low)), b.fadd(before, so_far)]
            before = b.fadd(before, ptx.shuffle(b, so_far, end))
        return b.from_elements(vector, out)

    return vector, emit


@op
def last(vector):
    """The last element of a shared vector, as a number."""
    return here().read(vector)[-1]


@lowers(last)
def _(vector):
    if not isinstance(vector, sv) or vector.dtype is not fp32:
        raise TypeError(f"last: takes an fp32 shared vector, got {vector}")
    end = vector.nbytes - vector.dtype.itemsize
    return types.float32, lambda b, address: b.asm(f32, "ld.shared.f32 $0, [$1];", "=f,r", b.add(address, b.u32(end)))
