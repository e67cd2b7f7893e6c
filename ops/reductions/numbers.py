"""One number of a global array of any dtype. (Numba's own indexing takes elements of 16 and of 8 bits for integers.)

scale = load_number(gScale, (0,))
"""

from tiles import fp32, inlined, rt

from ..memory.load_store import load
from .reduce import tile_sum

NUMBER = rt(16, 16, fp32).row_vec  # of which the array has the first element, and the others are 0


@inlined
def load_number(source, at):
    """source[at] in float32, for every lane of a warp. source: a global array of any dtype, with one element along its last
    axis."""
    return tile_sum(load(source, NUMBER, at))
