"""The inverse of a unit lower triangular 64 x 64 matrix, by a warpgroup: that of a chunk of the delta rule.

    smem = shared(.., high=TRIANGLE, low=TRIANGLE, inverse_high=DIAGONAL, inverse_low=DIAGONAL)
    x = inverse_transposed(a, high, low, inverse_high, inverse_low)

X (I + A)^T = I is solved by blocks of 16 columns, from the left to the right,

    X_i = (I_i - sum over j < i of X_j A_ij^T) (I + A_ii)^-T

where each warp has 16 rows of X to itself: it reads blocks of A and the inverses of those on the diagonal, and nothing of what
other warps find. All of it is substitution: no power of A is taken, and what is small comes out small.
"""

from tiles.dtypes import bf16, fp32
from tiles.op import inlined
from tiles.types import rt, st

from . import warpgroup
from .compare import equal
from .make import col_index, zeros
from .mma import mma_ABt
from .parts import hstack
from .subtile import subtile
from .triangular import inverse_unit_lower

TRIANGLE = st(64, 64, bf16, width=32)  # in panels of 16 columns, so that a block is a tile of its own
DIAGONAL = st(64, 16, bf16)
BLOCK = rt(16, 16, fp32)


@inlined
def times(acc, x, high, low):
    """acc + x (high + low)^T, x being split in two as well: 16 bits of each factor, where bf16 has 8."""
    x_high = bf16(x)
    x_low = bf16(x - fp32(x_high))
    return mma_ABt(mma_ABt(mma_ABt(acc, x_low, high), x_high, low), x_high, high)


@inlined
def store_parts(high, low, x):
    """high + low = x, with 16 bits."""
    x_high = bf16(x)
    warpgroup.store(high, x_high)
    warpgroup.store(low, x - fp32(x_high))


@inlined
def identity(i):
    """The i-th 16 columns of this warp's rows of I."""
    return equal(warpgroup.row_index(BLOCK), col_index(BLOCK) + 16.0 * i)


@inlined
def inverse_transposed(a, high, low, inverse_high, inverse_low):
    """The warps' rows, rt(16, 64, fp32), of (I + A)^-T, where A is the part below the diagonal of `a`, the warps' rt(16, 64,
    fp32); the rest is not looked at. Shared tiles for the warpgroup to use: two TRIANGLEs and two DIAGONALs. Its warps meet
    twice. Factors have 16 bits, sums are fp32."""
    warpgroup.sync()
    own = warpgroup.own_block(a)
    store_parts(high, low, -a)
    store_parts(inverse_high, inverse_low, inverse_unit_lower(own))
    warpgroup.sync()
    x0 = times(zeros(BLOCK), identity(0), subtile(inverse_high, 16, 0), subtile(inverse_low, 16, 0))
    y1 = times(identity(1), x0, subtile(high, 16, 1, 16, 0), subtile(low, 16, 1, 16, 0))
    x1 = times(zeros(BLOCK), y1, subtile(inverse_high, 16, 1), subtile(inverse_low, 16, 1))
    left = hstack(x0, x1)
    y2 = times(identity(2), left, subtile(high, 16, 2, 32, 0), subtile(low, 16, 2, 32, 0))
    x2 = times(zeros(BLOCK), y2, subtile(inverse_high, 16, 2), subtile(inverse_low, 16, 2))
    y3 = times(identity(3), left, subtile(high, 16, 3, 32, 0), subtile(low, 16, 3, 32, 0))
    y3 = times(y3, x2, subtile(high, 16, 3, 16, 2), subtile(low, 16, 3, 16, 2))
    x3 = times(zeros(BLOCK), y3, subtile(inverse_high, 16, 3), subtile(inverse_low, 16, 3))
    return hstack(left, hstack(x2, x3))
