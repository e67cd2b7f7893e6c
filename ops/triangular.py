"""Triangular tiles in the registers of one warp. (Those of a warpgroup: inverse.py.)"""

import numpy as np

from tiles import ptx
from tiles.dtypes import fp32
from tiles.layout import QUAD
from tiles.op import lowers, op
from tiles.types import rt

from . import quads

BASE = 16  # rows and columns
HALF = 8  # rows and columns of a matrix inside the base tile
BLOCK = rt(BASE, BASE, fp32)


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
    what one lane of each quad holds. In front of the diagonal halves that stay 0 are left out."""
    l, (place, first) = b.unpack(value), quads.place(b)
    row, column = b.lshr(b.lane(), b.u32(2)), b.mul(place, b.u32(2))

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
            at: [ptx.shuffle(b, x, b.add(place, b.u32(QUAD * within))) for x in out[half, at]]
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
