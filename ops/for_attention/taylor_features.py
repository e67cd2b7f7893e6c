"""The features of a second-order Taylor series, of 16 numbers a row: the feature map of Based's linear attention.

    taylor(q, 1.0) @ taylor(k, 0.5).T = 1 + q k^T + (q k^T) ** 2 / 2

Of the 256 products x_i x_j half are there twice. Those at a distance of d columns, x_i x_(i + d mod 16), are the tile times
itself rotated by d columns. The nine rotations d = 0 to 8 have each product once, but for d = 8, whose second half repeats its
first and is free for the 1.
"""

from dataclasses import replace

import numpy as np

from tiles.compiling import ptx
from tiles.layout import QUAD
from tiles.op import lowers, number, op
from tiles.types import rt

from ..threads import lanes

BASE, HALF = 16, 8  # numbers of a row; the greatest cyclic distance of two of them
FEATURES = BASE * (HALF + 2)


@op
def taylor(x, squares):
    """The products of any two numbers of a row, 1, and the row itself, as rt(16, 160) of x's dtype. Column 16 d + i has x_i
    x_(i + d mod 16), up to d = 7; columns 128 to 135 have x_i x_(i + 8); then come 1, seven zeros, and x. x: rt(16, 16), of
    2-byte elements. squares: the factor of the products of d = 0. Products are rounded once, and squares again after they are
    multiplied by `squares`."""
    columns = np.arange(BASE)
    wide, input_dtype = x.array.astype(np.float64), x.array.dtype
    second = [(wide * wide[:, (columns + d) % BASE]).astype(input_dtype) for d in range(HALF + 1)]
    second[0] = (second[0].astype(np.float64) * np.float64(np.float32(squares).astype(input_dtype))).astype(input_dtype)
    second[HALF] = np.where(columns < HALF, second[HALF], (columns == HALF).astype(input_dtype))
    return np.concatenate([*second, x.array], axis=1)


@lowers(taylor)
def _(x, squares):
    if not (isinstance(x, rt) and x.shape == (BASE, BASE) and x.dtype.itemsize == 2 and x.layout == "row" and number(squares)):
        raise TypeError(f"taylor: takes a 2-byte rt(16, 16) in row layout and a number, got {x} and {squares}")

    def emit(b, value, factor):
        factor = b.real(factor)
        registers, factor = b.unpack(value), b.pair(x.dtype, factor, factor)
        t, quad = lanes.in_quad(b)
        both = b.pair(x.dtype, b.real(1), b.real(1))
        one = b.select(b.icmp_unsigned("==", t, b.u32(0)), b.and_(both, b.u32(0xFFFF)), b.u32(0))

        def rotated(left, right, pairs):
            """A row's two registers, its columns moved to the left by `pairs` pairs: a lane gives the half that is wanted."""
            if pairs % QUAD == 0:
                return (right, left) if pairs else (left, right)
            wraps = b.icmp_unsigned("<", t, b.u32(pairs))
            source = b.or_(quad, b.and_(b.add(t, b.u32(pairs)), b.u32(QUAD - 1)))
            sent = b.select(wraps, right, left), b.select(wraps, left, right)
            return tuple(ptx.shuffle(b, half, source) for half in sent)

        def between(first, second):
            """The upper element of one register, then the lower one of the other."""
            return b.or_(b.lshr(first, b.u32(16)), b.shl(second, b.u32(16)))

        features = [[b.u32(0)] * 4 for _ in range(HALF + 1)]
        for row in (0, 1):
            row_registers = registers[row], registers[row + 2]
            even = [rotated(*row_registers, pairs) for pairs in range(QUAD + 1)]
            for d in range(HALF + 1):
                other = even[d // 2] if d % 2 == 0 else map(between, even[d // 2], even[d // 2 + 1])
                products = [ptx.mul_pair(b, x.dtype, m, o) for m, o in zip(row_registers, other, strict=True)]
                if d == 0:
                    products = [ptx.mul_pair(b, x.dtype, p, factor) for p in products]
                features[d][row], features[d][row + 2] = products if d < HALF else (products[0], one)
        return b.pack([r for block in (*features, registers) for r in block])

    return replace(x, cols=FEATURES), emit
