"""Inverses of unit lower triangular matrices: of 16 x 16 by a warp, and of 64 x 64, a chunk of the delta rule, by a warpgroup.

    smem = shared(.., high=TRIANGLE, low=TRIANGLE)      or LOWER_TRIANGLE
    x = inverse_transposed(a, high, low)

X (I + A)^T = I is solved by blocks of 16 columns, from the left to the right,

    D_i = (I + A_ii)^-1        N_ij = D_i A_ij        X_i = I_i D_i^T - sum over j < i of X_j N_ij^T

Each warp makes 16 rows of N, and then has 16 rows of X to itself: it reads N, and nothing of what other warps find. So from one
X_i to the next there is but one product. All of it is substitution: no power of A is taken, whose large elements would have to
cancel.
"""

import numpy as np

from tiles.compiling import ptx
from tiles.dtypes import bf16, fp32
from tiles.layout import QUAD
from tiles.op import inlined, lowers, op
from tiles.types import rt, st

from .. import warpgroup
from ..elementwise.create import zeros
from ..matmul.mma import mma_AB, mma_ABt
from ..memory.load_store import store
from ..shape.slicing import columns, hstack
from ..shape.subtile import subtile
from ..shape.transpose import swap_layout, transpose
from ..threads import lanes

BASE = 16  # rows and columns of a block
HALF = 8  # rows and columns of a matrix inside the base tile
BLOCK = rt(BASE, BASE, fp32)
TRIANGLE = st(64, 64, bf16, width=32)  # in panels of 16 columns, so that a block is a tile of its own
TRIANGLES = st(128, 64, bf16, width=32)  # two of them, for high and low parts
LOWER_TRIANGLE = st(64, 48, bf16, width=32)  # without the last panel, which has no block below the diagonal


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
        half, pivot_column = j // HALF * HALF, j % HALF
        pivot = {
            at: [ptx.shuffle(b, x, b.add(t, b.u32(QUAD * pivot_column))) for x in out[half, at]]
            for at in (0, HALF)
            if (half, at) in out
        }
        for below in (0, HALF):
            if below < half:
                continue
            factor = ptx.shuffle(b, l[_register(below, j)], b.add(first, b.u32(pivot_column // 2)))
            if below == half:
                factor = b.select(b.icmp_unsigned(">", row, b.u32(pivot_column)), factor, b.real(0))
            for at, ahead in pivot.items():
                out[below, at] = [b.fsub(x, b.fmul(factor, p)) for x, p in zip(out[below, at], ahead, strict=True)]
    zero = [b.real(0)] * 2
    return b.pack(out[0, 0] + out[HALF, 0] + zero + out[HALF, HALF])


def _register(row, column):
    """The index of a lane's register with the rows that begin at `row` (0 or 8) of a column."""
    return column // HALF * 4 + row // HALF * 2 + column % 2


# ---- 4 x 4 blocks, by a warpgroup -----------------------------------------------------------------------------------
@inlined
def split(x):
    """(high, low), whose sum is x with 16 bits, where bf16 has 8."""
    high = bf16(x)
    return high, bf16(x - fp32(high))


@inlined
def store_parts(high, low, x):
    """high + low = x, with 16 bits."""
    x_high, x_low = split(x)
    warpgroup.store(high, x_high)
    warpgroup.store(low, x_low)


@inlined
def store_block_parts(triangles, x, row, column):
    """high + low = x, with 16 bits, in a 16 x 16 block of the two TRIANGLEs, by one warp."""
    (high, low), (x_high, x_low) = triangles, split(x)
    store(block(high, row, column), x_high)
    store(block(low, row, column), x_low)


@inlined
def times(acc, x, high, low):
    """acc + x (high + low)^T, x being two parts as well."""
    x_high, x_low = x
    return mma_ABt(mma_ABt(mma_ABt(acc, x_high, high), x_high, low), x_low, high)


@inlined
def divided(a, inverse):
    """inverse a, by one warp; inverse: two parts."""
    (a_high, a_low), (high, low) = split(a), inverse
    right, acc = swap_layout(a_high), zeros(rt(BASE, a.cols, fp32))
    return mma_AB(mma_AB(mma_AB(acc, high, right), high, swap_layout(a_low)), low, right)


@inlined
def inverse_transposed(a, high, low):
    """The warps' rows, rt(16, 64, fp32), of (I + A)^-T, where A is the part below the diagonal of `a`, the warps' rt(16, 64,
    fp32); the rest is not looked at. high, low: shared TRIANGLEs, lower ones or not, for the warpgroup to use. Its warps meet
    twice, without a fence: neither wgmma nor TMA reads what they store there. Factors have 16 bits, sums are fp32."""
    inverse = inverse_unit_lower(warpgroup.diagonal_block(a))
    parts = split(-inverse)
    warpgroup.sync(fenced=False)
    store_parts(subtile(high, 64, 0, 32, 0), subtile(low, 64, 0, 32, 0), divided(columns(a, 32, 0), parts))
    store_parts(subtile(high, 64, 0, 16, 2), subtile(low, 64, 0, 16, 2), divided(columns(a, 16, 2), parts))
    warpgroup.sync(fenced=False)
    d = warpgroup.on_diagonal(transpose(inverse))
    x0 = columns(d, BASE, 0)
    first = split(x0)
    x1 = times(columns(d, BASE, 1), first, block(high, 1, 0), block(low, 1, 0))
    x2 = times(columns(d, BASE, 2), first, block(high, 2, 0), block(low, 2, 0))
    x3 = times(columns(d, BASE, 3), first, block(high, 3, 0), block(low, 3, 0))
    second = split(x1)
    x2 = times(x2, second, block(high, 2, 1), block(low, 2, 1))
    x3 = times(x3, second, block(high, 3, 1), block(low, 3, 1))
    x3 = times(x3, split(x2), block(high, 3, 2), block(low, 3, 2))
    return hstack(hstack(x0, x1), hstack(x2, x3))


@inlined
def block(tile, row, column):
    """A 16 x 16 block of a TRIANGLE."""
    return subtile(tile, BASE, row, BASE, column)
