"""Arrays that end earlier, for kernels that share one array between sequences."""

from numba.cuda import types

from tiles.op import integer, lowers, op
from tiles.plumbing import i64


@op
def clip(array, axis, end):
    """The array without what lies from index `end` on along `axis`: loads give zeros there, stores leave it alone. `axis` must
    be known when the kernel is compiled."""
    return array[(slice(None),) * axis + (slice(0, max(end, 0)),)]


@lowers(clip)
def _(array, axis: int, end):
    if not isinstance(array, types.Array) or not integer(end) or not 0 <= axis < array.ndim:
        raise TypeError(f"clip: takes a global array, one of its axes and an integer, got {array}, {axis} and {end}")

    def emit(b, value, _, end):
        return b.clipped(array, value, axis, b.sext(end, i64) if end.type.width < 64 else end)

    return array, emit
