"""Arithmetic of indices, in the 32 bits that the GPU has units for (Numba's // and % work on 64, with a sign)."""

from numba.cuda import types

from tiles.op import integer, lowers, op


@op
def split(index, extent):
    """A flat index as (inner, outer) = (index % extent, index // extent); 0 <= index < 2**31, 1 <= extent < 2**31."""
    return index % extent, index // extent


@lowers(split)
def _(index, extent):
    if not (integer(index) and integer(extent)):
        raise TypeError(f"split: takes two integers, got {index} and {extent}")

    def lower(b, index, extent):
        index, extent = b.u32(index), b.u32(extent)
        outer = b.udiv(index, extent)
        return b.context.make_tuple(b, result, [b.sub(index, b.mul(outer, extent)), outer])

    result = types.UniTuple(types.int32, 2)
    return result, lower
