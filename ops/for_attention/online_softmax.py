"""What an online softmax needs besides maps: a running maximum that seldom moves, and a rescale that is then seldom done.

exp2(scale (s - m)) may use any m near the row's maximum: the factor cancels in O / l. If m moves only when the maximum has
grown by more than `slack`, most blocks rescale nothing, and a warp vote skips the multiplications.
"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32
from tiles.dtypes import fp32
from tiles.op import lowers, number, op
from tiles.types import rt, rv


@op
def lazy_maximum(old, new, slack):
    """new where it exceeds old by more than `slack`, else old; vectors of one type, slack a number. A NaN never exceeds."""
    growth = new.array.astype(np.float32) - old.array.astype(np.float32)
    return np.where(growth > np.float32(slack), new.array, old.array)


@lowers(lazy_maximum)
def _(old, new, slack):
    if not (isinstance(old, rv) and old == new and not old.partial and number(slack)):
        raise TypeError(f"lazy_maximum: takes two vectors of one type and a number, got {old}, {new} and {slack}")

    def lower(b, vold, vnew, vslack):
        slack, out = b.real(vslack), []
        for x, y in zip(b.elements(old, vold), b.elements(new, vnew)):
            out.append(b.select(b.fcmp_ordered(">", b.fsub(y, x), slack), y, x))
        return b.from_elements(old, out)

    return old, lower


@op
def rescale(tile, alpha):
    """tile * alpha, one factor for each row, for an fp32 tile and its col_vec. A warp whose factors are all 1 skips the
    multiplications."""
    return tile.array * alpha.array


@lowers(rescale)
def _(tile, alpha):
    if not (isinstance(tile, rt) and tile.dtype is fp32 and alpha == tile.col_vec):
        raise TypeError(f"rescale: takes an fp32 tile and its col_vec, got {tile} and {alpha}")

    def lower(b, vtile, valpha):
        elements, factors, one = b.unpack(vtile), b.unpack(valpha), f32(1.0)
        rescales = b.fcmp_unordered("!=", factors[0], one)
        for factor in factors[1:]:
            rescales = b.or_(rescales, b.fcmp_unordered("!=", factor, one))
        any_lane = ptx.ballot(b, b.zext(rescales, i32))
        scaled = lambda: [b.fmul(e, factors[k]) for e, k in zip(elements, tile.lane_index(alpha))]
        return b.pack(b.choose(b.icmp_unsigned("!=", any_lane, b.u32(0)), scaled, elements))

    return tile, lower
