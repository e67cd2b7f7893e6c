"""How a gradient reaches its array: stored, or added to what the array holds. One class for each, with the same methods."""

from ops import load, store, warpgroup, where
from tiles import dtype, fp32, inlined, rt, static


@inlined
def times(gradient, x):
    """gradient x, but 0 where the gradient is 0, even if x is NaN there: rows that no query sees, or that belong to no
    sequence, may hold NaN."""
    return where(gradient == 0.0, 0.0, gradient * x)


@static
class StoreGradient:
    """array = gradient, rounded to the array's dtype. The columns of the array are adjacent in memory."""

    dtype: dtype

    @inlined
    def store(self, array, x, at, vector_bytes):
        """Store a warp's tile along axes 1 and 3 of an array, whose address and strides are multiples of vector_bytes."""
        store(array, self.dtype(x), at, 1, 3, vector_bytes)

    @inlined
    def store_warpgroup(self, array, x, at):
        """Store a warpgroup's tile along axes 1 and 3 of an array, whose address and strides are multiples of 16 bytes."""
        warpgroup.store(array, self.dtype(x), at, 1, 3, True)

    @inlined
    def store_tile(self, array, x, at):
        """Store a warp's float32 tile along axes 2 and 3 of an array."""
        store(array, x, at, 2, 3)

    @inlined
    def store_vector(self, array, x, spec, at):
        """Store a warp's vector of type `spec`."""
        store(array, x, at)


class AccumulateGradient(StoreGradient):
    """array += gradient, in float32. The array may have any strides. No two warps add to the same elements."""

    @inlined
    def store(self, array, x, at, vector_bytes):
        store(array, x + load(array, rt(x.rows, x.cols, self.dtype, x.layout), at, 1, 3), at, 1, 3)

    @inlined
    def store_warpgroup(self, array, x, at):
        warpgroup.store(array, x + warpgroup.load(array, rt(x.rows, x.cols, self.dtype), at, 1, 3), at, 1, 3)

    @inlined
    def store_tile(self, array, x, at):
        store(array, x + load(array, rt(x.rows, x.cols, self.dtype, x.layout), at, 2, 3), at, 2, 3)

    @inlined
    def store_vector(self, array, x, spec, at):
        store(array, x + load(array, spec, at), at)


def float32_output(accumulate: bool) -> StoreGradient:
    """How a gradient in float32 reaches its array."""
    return AccumulateGradient(fp32) if accumulate else StoreGradient(fp32)
