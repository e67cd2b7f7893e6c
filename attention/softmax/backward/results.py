"""How a gradient is stored: written, or added to what the array holds; two objects with the same methods."""

from ops import load, store, warpgroup, where
from tiles import dtype, fp32, inlined, rt, static


@inlined
def times(gradient, x):
    """gradient x; 0 where the gradient is 0, whatever x is: rows that no query sees, or that belong to nobody, may be NaN."""
    return where(gradient == 0.0, 0.0, gradient * x)


@static
class Written:
    """The gradient is written, rounded to the array's dtype; columns are adjacent."""

    dtype: dtype

    @inlined
    def store(self, array, x, at, vector_bytes):
        """Store a warp's tile along axes 1 and 3 of an array. vector_bytes: the bytes that its address and strides are
        multiples of."""
        store(array, self.dtype(x), at, 1, 3, vector_bytes)

    @inlined
    def store_four(self, array, x, at):
        """Store a warpgroup's tile to an array whose address and strides are multiples of 16 bytes."""
        warpgroup.store(array, self.dtype(x), at, 1, 3, True)

    @inlined
    def store_sums(self, array, x, at):
        """Store a warp's float32 tile along axes 2 and 3 of an array."""
        store(array, x, at, 2, 3)

    @inlined
    def store_vector(self, array, x, spec, at):
        """Store a warp's vector of type `spec`."""
        store(array, x, at)


class Added(Written):
    """The gradient is added to what the array holds, in float32, with any strides. Nobody else adds to the same elements."""

    @inlined
    def store(self, array, x, at, vector_bytes):
        store(array, x + load(array, rt(x.rows, x.cols, self.dtype, x.layout), at, 1, 3), at, 1, 3)

    @inlined
    def store_four(self, array, x, at):
        warpgroup.store(array, x + warpgroup.load(array, rt(x.rows, x.cols, self.dtype), at, 1, 3), at, 1, 3)

    @inlined
    def store_sums(self, array, x, at):
        store(array, x + load(array, rt(x.rows, x.cols, self.dtype, x.layout), at, 2, 3), at, 2, 3)

    @inlined
    def store_vector(self, array, x, spec, at):
        store(array, x + load(array, spec, at), at)


def of_sums(adds: bool) -> Written:
    """How a float32 gradient is stored."""
    return Added(fp32) if adds else Written(fp32)
