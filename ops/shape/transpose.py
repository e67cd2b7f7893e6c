"""Transposes of register tiles and vectors, and changes of a tile's layout, inside the warp.

Both transpose each 8x8 matrix of a tile; a transpose also swaps the matrix at (i, j) with that at (j, i). A matrix of 2-byte
elements is transposed by movmatrix, one instruction. Of 4-byte elements lane L holds (L/4, 2(L%4)) and (L/4, 2(L%4) + 1) of
such a matrix, and wants (2(L%4), L/4) and (2(L%4) + 1, L/4). That takes two shuffles. Lanes of odd rows give their second
element in the first of them, so that every lane has exactly one element to give each time.
"""

from dataclasses import replace

import numpy as np

from tiles.compiling import ptx
from tiles.op import lowers, op
from tiles.types import rt, rv


@op(takes_operands=True)
def transpose(x):
    """x.T: a tile of the transposed shape in the same layout; a col_vec as row_vec and the reverse."""
    return np.ascontiguousarray(x.array.T)


@op(takes_operands=True)
def swap_layout(x):
    """x, a tile or vector, in the other layout: from "row" to "col", which mma's right operand has, or the reverse."""
    return x.array


@op(takes_operands=True)
def turned(x):
    """x.T, a tile or vector, in the other layout: the same registers, so it costs nothing. Scores K Q^T of keys by queries
    become scores of queries by keys, so ops that work on rows and columns apply to them as usual."""
    return np.ascontiguousarray(x.array.T)


OTHER = {"row": "col", "col": "row", "row_vec": "col_vec", "col_vec": "row_vec"}


def _transposing(name, result, to):
    """The rule of an op that gives the type result(x), where the 8x8 matrix at (row, col) of a tile goes to `to(row, col)`."""

    def rule(x):
        if not isinstance(x, (rt, rv)) or getattr(x, "partial", False):
            raise TypeError(f"{name}: takes a register tile or a whole vector, got {x}")
        if isinstance(x, rt) and x.dtype.itemsize == 1:
            raise TypeError(f"{name}: takes tiles of 2 or 4 bytes an element: {x.dtype}({name}(fp16(x))); got {x}")
        out = result(x)
        if isinstance(x, rt):
            return out, lambda b, v: b.pack(_matrices(b, x, out, b.unpack(v), to))
        return out, lambda b, v: b.pack((_to_pairs if x.by_quad else to_quads)(b, b.unpack(v)))

    return rule


def _transposed(x):
    return replace(x, rows=x.cols, cols=x.rows) if isinstance(x, rt) else replace(x, axis=OTHER[x.axis])


lowers(transpose)(_transposing("transpose", _transposed, lambda row, col: (col, row)))
lowers(swap_layout)(_transposing("swap_layout", lambda x: replace(x, layout=OTHER[x.layout]), lambda row, col: (row, col)))


@lowers(turned)
def _(x):
    if not isinstance(x, (rt, rv)):
        raise TypeError(f"turned: takes a register tile or vector, got {x}")
    return replace(_transposed(x), layout=OTHER[x.layout]), lambda _, value: value


def _matrices(b, spec, out, registers, to):
    """The registers of `out`, whose 8x8 matrix at `to(row, col)` is the transpose of the one at (row, col)."""
    step = 2 if spec.dtype.itemsize == 4 else 1  # registers that a lane holds of an 8x8 matrix
    sent = {spec.element(0, 2 * k): registers[step * k : step * (k + 1)] for k in range(spec.elements // 2)}
    transposed = _exchange(b) if step == 2 else lambda pair: [ptx.movmatrix(b, *pair)]
    transposed_pairs = {to(*at): transposed(pair) for at, pair in sent.items()}
    return [register for k in range(out.elements // 2) for register in transposed_pairs[out.element(0, 2 * k)]]


def _is_odd(b, x):
    return b.icmp_unsigned("!=", b.and_(x, b.u32(1)), b.u32(0))


def _exchange(b):
    """The function that transposes an 8x8 fp32 matrix, given as this lane's two registers."""
    lane = b.lane()
    row, t = b.lshr(lane, b.u32(2)), b.and_(lane, b.u32(3))
    odd, odd_bit = _is_odd(b, row), b.and_(row, b.u32(1))
    # element (2 t + h, row) is register row % 2 of lane 4 (2 t + h) + row / 2, which gives it in round h XOR row % 2
    first = b.add(b.add(b.mul(t, b.u32(8)), b.mul(odd_bit, b.u32(4))), b.lshr(row, b.u32(1)))
    sources = first, b.xor(first, b.u32(4))

    def exchange(pair):
        sent = b.select(odd, pair[1], pair[0]), b.select(odd, pair[0], pair[1])
        got = [ptx.shuffle(b, x, source) for x, source in zip(sent, sources, strict=True)]
        return [b.select(odd, got[1], got[0]), b.select(odd, got[0], got[1])]

    return exchange


def _to_pairs(b, registers):
    """Lane L has elements 8i + L/4, and gets 8i + 2(L%4) + {0, 1}."""
    source = b.mul(b.and_(b.lane(), b.u32(3)), b.u32(8))
    sources = source, b.or_(source, b.u32(4))
    return [ptx.shuffle(b, x, source) for x in registers for source in sources]


def to_quads(b, registers):
    """Lane L has elements 8i + 2(L%4) + {0, 1}, and gets 8i + L/4: lanes of odd rows send their second element."""
    lane = b.lane()
    row = b.lshr(lane, b.u32(2))
    source, odd = b.add(b.mul(b.and_(row, b.u32(1)), b.u32(4)), b.lshr(row, b.u32(1))), _is_odd(b, row)
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [ptx.shuffle(b, b.select(odd, high, low), source) for low, high in pairs]
