"""An op of your own: what it means and, below, what it becomes."""

import numpy as np

from ops.elementwise.arithmetic import fmax, fmin
from tiles import lowers, op, rt
from tiles.op import number


@op
def clamp(tile, low, high):
    """Each element of tile, held between the numbers low and high; NaN becomes low."""
    return np.fmin(np.fmax(tile.array, low), high)


@lowers(clamp)
def _(tile, low, high):
    if not (isinstance(tile, rt) and number(low) and number(high)):
        raise TypeError(f"clamp: takes a register tile and two numbers, got {tile}, {low} and {high}")

    def emit(b, tile_value, low_value, high_value):
        least, most = b.real(low_value), b.real(high_value)
        elements = b.elements(tile, tile_value)  # those that this lane holds, as fp32
        return b.from_elements(tile, [fmin(b, fmax(b, e, least), most) for e in elements])

    return tile, emit
