"""An exponent that a whole state has in common (block floating point), for Mamba-2 in float16.

A key counts dt times, so dt x and dt B C may be too large for float16 where x, B, C and the outputs are not. A state and the
outputs are therefore computed as 2^-e of what they are,

    e' = max(0, log2 of the greatest dt in the chunk, e + log2 of what a state has decayed by at its end)

e before the chunk and e' after it. What is rounded to float16 is then no greater than it is where every dt is 1, and with steps
up to 1 nothing changes.
"""

from numpy import float32

from ops import abs, exp2, last_element, load, tile_max, warpgroup
from tiles import inlined, static

from .gates import DOWN

GREAT, FAR = 2.0**15, 16.0  # an element of a state that float16 may not hold for long, and what e begins with if there is one


@static
class BlockExponent:
    """The exponent e of a kernel. used: is there one, or is it always 0?"""

    used: bool

    @inlined
    def begin(self, s_t):
        """e before the first chunk, for the warp's part of the state that the warps begin with. The four warps meet."""
        if self.used:
            return float32(FAR if warpgroup.reduce_any(tile_max(abs(s_t)) > GREAT) else 0.0)
        else:
            return float32(0)

    @inlined
    def scaled(self, x, exponent):
        """2^exponent x"""
        if self.used:
            return x * exp2(exponent)
        else:
            return x

    @inlined
    def wait(self, vectors, j):
        """The vector of the j-th chunk in a ring of b or a (gates.py)."""
        if self.used:
            return vectors.wait(j)
        else:
            return 0

    @inlined
    def after(self, exponent, b, a):
        """e' after a chunk with these vectors b and a in shared memory."""
        if self.used:
            greatest, kept = float32(tile_max(load(b, DOWN) - load(a, DOWN))), float32(exponent + last_element(b))
            return max(max(greatest, kept), float32(0))
        else:
            return exponent

    @inlined
    def of_state(self, b, exponent, later):
        """b or the last b, as it takes 2^-e S to 2^-e' S. exponent: e; later: e'."""
        if self.used:
            return b + (exponent - later)
        else:
            return b

    @inlined
    def of_keys(self, b, later):
        """b or the last b, as it takes keys to 2^-e' S."""
        if self.used:
            return b - later
        else:
            return b
