"""What becomes of a gradient that is found: two objects with the same methods, one a way."""

from ops import load, store, warpgroup
from tiles import dtype, fp32, inlined, rt, static


@static
class Written:
    """It is written, rounded to the array's dtype, in columns that lie together."""

    dtype: dtype

    @inlined
    def store(self, array, x, at, piece):
        """A warp's tile, an array's axes 1 and 3; piece: the bytes that address and strides are multiples of."""
        store(array, self.dtype(x), at, 1, 3, piece)

    @inlined
    def store_four(self, array, x, at):
        """A warpgroup's, of an array whose address and strides are multiples of 16 bytes."""
        warpgroup.store(array, self.dtype(x), at, 1, 3, True)

    @inlined
    def store_sums(self, array, x, at):
        """A warp's tile of float32, an array's axes 2 and 3."""
        store(array, x, at, 2, 3)

    @inlined
    def store_vector(self, array, x, spec, at):
        """A warp's vector, which is a `spec`."""
        store(array, x, at)


class Added(Written):
    """It is added to what the array holds, in float32, wherever its elements lie. Nobody else adds to the same ones."""

    @inlined
    def store(self, array, x, at, piece):
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
    """What becomes of a gradient of float32."""
    return Added(fp32) if adds else Written(fp32)
