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
from tiles.types import fp32, rt

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


def check_rows(name, x, squares):
    """TypeError: x is no rt(16, 16) of 2-byte elements, or `squares` no number."""
    if not (isinstance(x, rt) and x.shape == (BASE, BASE) and x.dtype.itemsize == 2 and x.layout == "row" and number(squares)):
        raise TypeError(f"{name}: takes a 2-byte rt(16, 16) in row layout and a number, got {x} and {squares}")


def rotate_row(b, left, right):
    """A row's two registers with its columns moved to the left by 0 to 8, one after the other."""
    t, quad = lanes.in_quad(b)

    def rotated(pairs):
        """The row with its columns moved by `pairs` pairs: a lane gives the half that is wanted."""
        if pairs % QUAD == 0:
            return (right, left) if pairs else (left, right)
        wraps = b.icmp_unsigned("<", t, b.u32(pairs))
        source = b.or_(quad, b.and_(b.add(t, b.u32(pairs)), b.u32(QUAD - 1)))
        sent = b.select(wraps, right, left), b.select(wraps, left, right)
        return tuple(ptx.shuffle(b, half, source) for half in sent)

    def between(first, second):
        """The upper element of one register, then the lower one of the other."""
        return b.or_(b.lshr(first, b.u32(16)), b.shl(second, b.u32(16)))

    even = [rotated(pairs) for pairs in range(QUAD + 1)]
    return (even[d // 2] if d % 2 == 0 else tuple(map(between, even[d // 2], even[d // 2 + 1])) for d in range(HALF + 1))


@lowers(taylor)
def _(x, squares):
    check_rows("taylor", x, squares)

    def emit(b, value, factor):
        factor = b.real(factor)
        registers, factor = b.unpack(value), b.pair(x.dtype, factor, factor)
        t, _ = lanes.in_quad(b)
        both = b.pair(x.dtype, b.real(1), b.real(1))
        one = b.select(b.icmp_unsigned("==", t, b.u32(0)), b.and_(both, b.u32(0xFFFF)), b.u32(0))
        features = [[b.u32(0)] * 4 for _ in range(HALF + 1)]
        for row in (0, 1):
            row_registers = registers[row], registers[row + 2]
            for d, other in enumerate(rotate_row(b, *row_registers)):
                products = [ptx.mul_pair(b, x.dtype, m, o) for m, o in zip(row_registers, other, strict=True)]
                if d == 0:
                    products = [ptx.mul_pair(b, x.dtype, p, factor) for p in products]
                features[d][row], features[d][row + 2] = products if d < HALF else (products[0], one)
        return b.pack([r for block in (*features, registers) for r in block])

    return replace(x, cols=FEATURES), emit


@op
def taylor_gradients(df, x, squares):
    """The gradients of rows x, as fp32, from those of their features, df, of taylor(x, squares):

        dx_i = df_i + sum over d of df_(d, i) x_(i + d) + df_(d, i - d) x_(i - d)        indices modulo 16

    where d goes from 0, whose terms are multiplied by `squares`, to 8, whose second half is no product. df: rt(16, 160) of x's
    dtype."""
    columns, wide, features = np.arange(BASE), x.array.astype(np.float64), df.array.astype(np.float64)
    out = features[:, BASE * (HALF + 1) :].copy()
    for d in range(HALF + 1):
        part = features[:, BASE * d : BASE * (d + 1)] * (np.float64(np.float32(squares)) if d == 0 else 1.0)
        part = np.where(columns < HALF, part, 0) if d == HALF else part
        out += part * wide[:, (columns + d) % BASE] + (part * wide)[:, (columns - d) % BASE]
    return out.astype(np.float32)


@lowers(taylor_gradients)
def _(df, x, squares):
    check_rows("taylor_gradients", x, squares)
    if df != replace(x, cols=FEATURES):
        raise TypeError(f"taylor_gradients: takes gradients of features as {replace(x, cols=FEATURES)}, got {df}")

    def emit(b, gradients, value, factor):
        registers, blocks = b.unpack(value), b.unpack(gradients)
        twice = b.fmul(b.real(factor), b.real(2))
        t, quad = lanes.in_quad(b)
        last, source = b.icmp_unsigned("==", t, b.u32(QUAD - 1)), b.or_(quad, b.and_(b.sub(t, b.u32(1)), b.u32(QUAD - 1)))

        def floats(*two):
            """The four elements of a row's two registers."""
            return b.elements(x, b.pack(two))

        def move(left_low, left_high, right_low, right_high):
            """A row's four numbers, all moved to the right by a pair of columns: the last pair of a half goes to the other."""
            four = [b.select(last, u, v) for u, v in ((right_low, left_low), (right_high, left_high))]
            four += [b.select(last, u, v) for u, v in ((left_low, right_low), (left_high, right_high))]
            return [ptx.shuffle(b, y, source) for y in four]

        def add(total, term):
            return term if total is None else b.fadd(total, term)

        def differentiate(row):
            """The gradients of a row's four numbers."""
            row_registers = registers[row], registers[row + 2]
            numbers, dx = floats(*row_registers), floats(blocks[4 * (HALF + 1) + row], blocks[4 * (HALF + 1) + row + 2])
            terms = [[None] * 4 for _ in range(QUAD + 1)]  # what moves to the right by so many pairs: low, high of both halves
            for d, rotated in enumerate(rotate_row(b, *row_registers)):
                block = floats(blocks[4 * d + row], blocks[4 * d + row + 2])
                if d == 0:
                    dx = [b.fadd(g, b.fmul(twice, b.fmul(h, y))) for g, h, y in zip(dx, block, numbers, strict=True)]
                    continue
                other = floats(*rotated)
                for k in range(4 if d < HALF else 2):
                    dx[k] = b.fadd(dx[k], b.fmul(block[k], other[k]))
                    # by an odd distance low numbers become high ones, high ones low ones of the next pair
                    pairs, place = ((d + k % 2) // 2, k ^ 1) if d % 2 else (d // 2, k)
                    terms[pairs][place] = add(terms[pairs][place], b.fmul(block[k], numbers[k]))
            total = terms[QUAD - 1]
            for pairs in range(QUAD - 2, -1, -1):
                total = [add(u, v) for u, v in zip(terms[pairs], move(*total), strict=True)]
            for k in range(4):
                dx[k] = b.fadd(dx[k], total[k])
                if terms[QUAD][k ^ 2] is not None:  # by half of the columns
                    dx[k] = b.fadd(dx[k], terms[QUAD][k ^ 2])
            return dx

        upper, lower = differentiate(0), differentiate(1)
        return b.pack([*upper[:2], *lower[:2], *upper[2:], *lower[2:]])

    return replace(x, dtype=fp32), emit
