"""Transposes of register tiles and vectors, inside the warp.

A tile is transposed by 8x8 matrices: 2-byte ones by movmatrix, one instruction each. In fp32 lane L holds of such a matrix the
elements (L/4, 2(L%4)) and (L/4, 2(L%4) + 1) and wants (2(L%4), L/4) and (2(L%4) + 1, L/4): two shuffles, in which odd rows
go first with their second element, so that every lane has one element to give each time.
"""

from dataclasses import replace

import numpy as np

from tiles import ptx
from tiles.dtypes import fp32
from tiles.op import lowers, op
from tiles.types import rt, rv


@op
def transpose(x):
    """x.T: a tile of the transposed shape in the same layout; a col_vec as row_vec and the reverse."""
    return np.ascontiguousarray(x.array.T)


@lowers(transpose)
def _(x):
    if isinstance(x, rt):
        out = replace(x, rows=x.cols, cols=x.rows)
        return out, lambda b, v: b.pack(_tile(b, x, out, b.unpack(v)))
    if isinstance(x, rv) and not x.partial:
        out = replace(x, axis={"col_vec": "row_vec", "row_vec": "col_vec"}[x.axis])
        return out, lambda b, v: b.pack((_to_places if x.by_quad else _to_quads)(b, b.unpack(v)))
    raise TypeError(f"transpose: takes a register tile or a whole vector, got {x}")


def _tile(b, spec, out, registers):
    step = 2 if spec.dtype is fp32 else 1  # registers that a lane holds of an 8x8 matrix
    given = {spec.element(0, 2 * k): registers[step * k : step * (k + 1)] for k in range(spec.elements // 2)}
    move = _exchange(b) if step == 2 else lambda pair: [ptx.movmatrix(b, *pair)]
    moved = {(col, row): move(pair) for (row, col), pair in given.items()}
    return [register for k in range(out.elements // 2) for register in moved[out.element(0, 2 * k)]]


def _is_odd(b, x):
    return b.icmp_unsigned("!=", b.and_(x, b.u32(1)), b.u32(0))


def _exchange(b):
    """The function that transposes an 8x8 fp32 matrix, given as this lane's two registers."""
    lane = b.lane()
    row, place = b.lshr(lane, b.u32(2)), b.and_(lane, b.u32(3))
    odd, odd_bit = _is_odd(b, row), b.and_(row, b.u32(1))
    # element (2 place + h, row) is register row % 2 of lane 4 (2 place + h) + row / 2, which gives it in round h XOR row % 2
    first = b.add(b.add(b.mul(place, b.u32(8)), b.mul(odd_bit, b.u32(4))), b.lshr(row, b.u32(1)))
    sources = first, b.xor(first, b.u32(4))

    def exchange(pair):
        given = b.select(odd, pair[1], pair[0]), b.select(odd, pair[0], pair[1])
        got = [ptx.shuffle(b, x, source) for x, source in zip(given, sources, strict=True)]
        return [b.select(odd, got[1], got[0]), b.select(odd, got[0], got[1])]

    return exchange


def _to_places(b, registers):
    """Lane L has elements 8i + L/4, and wants 8i + 2(L%4) + {0, 1}."""
    source = b.mul(b.and_(b.lane(), b.u32(3)), b.u32(8))
    sources = source, b.or_(source, b.u32(4))
    return [ptx.shuffle(b, x, source) for x in registers for source in sources]


def _to_quads(b, registers):
    """Lane L has elements 8i + 2(L%4) + {0, 1}, and wants 8i + L/4: lanes of odd rows give their second element."""
    lane = b.lane()
    row = b.lshr(lane, b.u32(2))
    source, odd = b.add(b.mul(b.and_(row, b.u32(1)), b.u32(4)), b.lshr(row, b.u32(1))), _is_odd(b, row)
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [ptx.shuffle(b, b.select(odd, high, low), source) for low, high in pairs]
