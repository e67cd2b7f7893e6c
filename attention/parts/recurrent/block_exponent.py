"""A common exponent of a whole state (block floating point), for Mamba-2 in float16.

A key counts dt times, so dt x and dt B C may be too large for float16 where x, B, C and the outputs are not. State and outputs
are therefore computed as 2^-e of what they are. e is the exponent before a chunk, e' the one after it:

    e' = max(0, log2 of the greatest dt of the chunk, e + log2 of the chunk's decay of the state)

What is rounded to float16 is then no greater than it is where every dt is 1, and for dt up to 1 nothing changes.
"""

from numpy import float32

from ops import abs, exp2, last_element, load, tile_max, warpgroup
from tiles import inlined, static

from .gates import CHUNK_COL_VEC

# The greatest element of an initial state with which float16 can do without an exponent, and the first exponent beyond it
MAX_ELEMENT, INITIAL_EXPONENT = 2.0**15, 16.0


@static
class BlockExponent:
    """The exponent e of a kernel. used: is there one, or is it always 0?"""

    used: bool

    @inlined
    def initial_exponent(self, s_t):
        """e before the first chunk, from the warp's part of the initial state. The four warps of the warpgroup vote."""
        if self.used:
            return float32(INITIAL_EXPONENT if warpgroup.reduce_any(tile_max(abs(s_t)) > MAX_ELEMENT) else 0.0)
        else:
            return float32(0)

    @inlined
    def ldexp(self, x, e):
        """x 2^e; x where exponents are not used."""
        if self.used:
            return x * exp2(e)
        else:
            return x

    @inlined
    def wait(self, vectors, j):
        """The vector b or a of the j-th chunk in its ring (gates.py)."""
        if self.used:
            return vectors.wait(j)
        else:
            return 0

    @inlined
    def next_exponent(self, e, b, a):
        """e' after a chunk with these vectors b and a in shared memory, where log2(dt) = b - a."""
        if self.used:
            log2_dt, decayed = float32(tile_max(load(b, CHUNK_COL_VEC) - load(a, CHUNK_COL_VEC))), float32(e + last_element(b))
            return max(max(log2_dt, decayed), float32(0))
        else:
            return e

    @inlined
    def shift_state_decay(self, b, e, e_next):
        """b + e - e': exp2 of it takes 2^-e S to 2^-e' S."""
        if self.used:
            return b + (e - e_next)
        else:
            return b

    @inlined
    def shift_key_decay(self, b, e_next):
        """b - e': exp2 of it takes what a key adds to S to what it adds to 2^-e' S."""
        if self.used:
            return b - e_next
        else:
            return b
