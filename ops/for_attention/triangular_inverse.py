"""Inverses of unit lower triangular matrices: of 16 x 16 by a warp, and of 64 x 64, a chunk of the delta rule, by a warpgroup.

    smem = shared(.., high=TRIANGLE, low=TRIANGLE, inverse_high=DIAGONAL, inverse_low=DIAGONAL)
    x = inverse_transposed(a, high, low, inverse_high, inverse_low)

X (I + A)^T = I is solved by blocks of 16 columns, from the left to the right,

    X_i = (I_i - sum over j < i of X_j A_ij^T) (I + A_ii)^-T

where each warp has 16 rows of X to itself: it reads blocks of A and the inverses of those on the diagonal, and nothing of what
other warps find. All of it is substitution: no power of A is taken, whose large elements would have to cancel.
"""

import numpy as np

from tiles import ptx
from tiles.dtypes import bf16, fp32
from tiles.layout import QUAD
from tiles.op import inlined, lowers, op
from tiles.types import rt, st

from .. import warpgroup
from ..elementwise.compare import equal
from ..elementwise.create import col_index, zeros
from ..matmul.mma import mma_ABt
from ..shape.slicing import hstack
from ..shape.subtile import subtile
from ..threads import lanes

BASE = 16  # rows and columns of a block
HALF = 8  # rows and columns of a matrix inside the base tile
BLOCK = rt(BASE, BASE, fp32)
TRIANGLE = st(64, 64, bf16, width=32)  # in panels of 16 columns, so that a block is a tile of its own
DIAGONAL = st(64, 16, bf16)


# ---- a block, by a warp --------------------------------------------------------------------------------------------
@op
def inverse_unit_lower(tile):
    """(I + L)^-1 of an rt(16, 16, fp32), where L is the part of the tile below its diagonal; the rest is not looked at.

    By forward substitution, in fp32: as exact as the matrix allows, with no sums of large powers."""
    out = np.eye(BASE, dtype=np.float32)
    for j in range(BASE):
        out[j + 1 :] -= tile.array[j + 1 :, j : j + 1] * out[j : j + 1]
    return out


@lowers(inverse_unit_lower)
def _(tile):
    if tile != BLOCK:
        raise TypeError(f"inverse_unit_lower: takes {BLOCK}, got {tile}")
    return tile, _substitute


def _substitute(b, value):
    """Row j of the inverse is done once rows 0 to j - 1 are: then L[i, j] times it goes off every row i below.

    Lane 4 r + c holds rows r and r + 8, columns 2 c, 2 c + 1 and those plus 8. Row j is what its quad holds; column j of L is
    what one lane of each quad holds. The upper right 8 x 8 quarter stays 0 and is left out."""
    l, (t, first) = b.unpack(value), lanes.in_quad(b)
    row, column = b.lshr(b.lane(), b.u32(2)), b.mul(t, b.u32(2))

    def known(i, j):
        """This lane's element of I in the rows that begin at i and columns that begin at j."""
        return [
            b.select(b.icmp_unsigned("==", b.add(row, b.u32(i)), b.add(column, b.u32(j + k))), b.real(1), b.real(0))
            for k in (0, 1)
        ]

    out = {(0, 0): known(0, 0), (HALF, 0): [b.real(0)] * 2, (HALF, HALF): known(HALF, HALF)}
    for j in range(BASE - 1):
        half, within = j // HALF * HALF, j % HALF
        pivot = {
            at: [ptx.shuffle(b, x, b.add(t, b.u32(QUAD * within))) for x in out[half, at]]
            for at in (0, HALF)
            if (half, at) in out
        }
        for below in (0, HALF):
            if below < half:
                continue
            factor = ptx.shuffle(b, l[_register(below, j)], b.add(first, b.u32(within // 2)))
            if below == half:
                factor = b.select(b.icmp_unsigned(">", row, b.u32(within)), factor, b.real(0))
            for at, ahead in pivot.items():
                out[below, at] = [b.fsub(x, b.fmul(factor, p)) for x, p in zip(out[below, at], ahead, strict=True)]
    zero = [b.real(0)] * 2
    return b.pack(out[0, 0] + out[HALF, 0] + zero + out[HALF, HALF])


def _register(row, column):
    """Which of a lane's registers holds the rows that begin at `row` (0 or 8) of a column."""
    return column // HALF * 4 + row // HALF * 2 + column % 2


# ---- 4 x 4 blocks, by a warpgroup -----------------------------------------------------------------------------------
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
