"""Matrix products: which there are, and those of one warp.

A warp multiplies by mma.sync (sm_80 and later), from registers or straight from shared memory, and has the result at once; a
warpgroup by wgmma (sm_90), whose result is pending: see ops.warpgroup. `SUPPORTED[family]` names all of them.
"""

from typing import NamedTuple

import numpy as np

from tiles import ptx
from tiles.dtypes import bf16, dtype, fp16, fp32
from tiles.interpreter import here
from tiles.op import lowers, op
from tiles.types import rt, st

from .memory import matrix_addresses

STEP = 16  # rows, columns and contracted elements that operands come in


class Product(NamedTuple):
    """A product's operands in words (n and k multiples of 16), and the dtypes that a and b have in common."""

    acc: str
    a: str
    b: str
    dtypes: tuple[dtype, ...]

    def __str__(self):
        return f"{self.acc}, {self.a} and {self.b}, where a and b are both {' or both '.join(map(str, self.dtypes))}"


_WARP = "acc rt(m, n, fp32)", "a rt(m, k) or st(m, k)"
_GROUP = "acc rt(16, n, fp32)", "a rt(16, k) or st(64, k)"
SUPPORTED = {
    "sm_80": {
        "mma_AB": Product(*_WARP, "b rt(k, n, col) or st(k, n)", (bf16, fp16)),
        "mma_ABt": Product(*_WARP, "b rt(n, k) or st(n, k)", (bf16, fp16)),
    },
    "sm_90": {
        "warpgroup.mma_AB": Product(*_GROUP, "b st(k, n)", (bf16, fp16)),
        "warpgroup.mma_ABt": Product(*_GROUP, "b st(n, k)", (bf16, fp16)),
    },
}
"""{family: {op: what it takes}}; a GPU has the families up to its own, sm_90's on Hopper alone."""


def _array(operand):
    """The elements of a tile, wherever it lies."""
    return (operand.array if hasattr(operand, "array") else here().read(operand, fence=False)).astype(np.float32)


def _held(operand, layout):
    """The register tile that an operand is, or becomes by ldmatrix."""
    return rt(operand.rows, operand.cols, operand.dtype, layout)


def _check(name, acc, a, b, transposed):
    """TypeError if this is no row of the table; returns (m, n, k)."""
    product, layout = SUPPORTED["sm_80"][name], "row" if transposed else "col"
    ok = all(isinstance(x, (rt, st)) and x.dtype in product.dtypes and not (x.rows % STEP or x.cols % STEP) for x in (a, b))
    ok = ok and all(isinstance(x, st) or x == _held(x, side) for x, side in ((a, "row"), (b, layout)))
    if ok and a.dtype == b.dtype:
        n, k = b.shape if transposed else b.shape[::-1]
        if a.cols == k and acc == rt(a.rows, n, fp32):
            return a.rows, n, k
    there = "; ".join(f"{other} takes {takes}" for other, takes in SUPPORTED["sm_80"].items())
    raise TypeError(f"{name}: got {acc}, {a} and {b}. {there} (n, m and k multiples of {STEP})")


def _left(b, operand, value):
    """fragment(band, along): the four registers of a 16x16 base tile of the left operand."""
    steps = operand.cols // STEP
    if isinstance(operand, rt):
        registers = b.unpack(value)
        return lambda band, along: registers[4 * (band * steps + along) :][:4]
    addresses = list(matrix_addresses(b, operand, _held(operand, "row"), value, b.u32(0)))
    return lambda band, along: ptx.ldmatrix(b, addresses[band * steps + along])


def _right(b, operand, value, layout):
    """fragments(column, along): the right operand's two registers for eight columns of the product and those for the next
    eight, of a 16x16 base tile. The instruction takes neighbours, and ldmatrix brings them so: other registers would have to
    be moved, two for each product."""
    steps = operand.shape[layout == "row"] // STEP
    if isinstance(operand, rt):
        registers = b.unpack(value)
        tiles = (registers[4 * i :][:4] for i in range(len(registers) // 4))
        pairs = [(tile[::2], tile[1::2]) for tile in tiles]  # see tiles/layout.py
        return lambda column, along: pairs[column * steps + along]
    addresses = list(matrix_addresses(b, operand, _held(operand, layout), value, b.u32(0), turned=True))

    def fragments(column, along):
        tile = ptx.ldmatrix(b, addresses[column * steps + along], transposed=layout == "col")
        return tile[:2], tile[2:]

    return fragments


def _product(face, transposed):
    """Complete the op `face`: acc + a @ b, with b as stored or transposed."""

    @lowers(face)
    def _(acc, a, b):
        (m, n, k), layout = _check(face.__name__, acc, a, b, transposed), "row" if transposed else "col"

        def emit(builder, vacc, va, vright):
            c = builder.unpack(vacc)
            left, right = _left(builder, a, va), _right(builder, b, vright, layout)
            for along in range(k // STEP):
                bands = [left(band, along) for band in range(m // STEP)]
                for column in range(n // STEP):
                    for half, pair in enumerate(right(column, along)):
                        for band, fragment in enumerate(bands):
                            at = slice(start := band * n // 2 + column * 8 + half * 4, start + 4)
                            c[at] = ptx.mma(builder, a.dtype, c[at], fragment, pair)
            return builder.pack(c)

        return acc, emit


@op
def mma_AB(acc, a, b):
    """acc + a @ b in fp32, by one warp. acc: rt(m, n, fp32); a: rt(m, k) or st(m, k); b: rt(k, n, layout="col") or st(k, n);
    a and b both bf16 or both fp16. Shared operands are read 16 x 16 at a time, between the products."""
    return acc.array + _array(a) @ _array(b)


@op
def mma_ABt(acc, a, b):
    """acc + a @ b.T in fp32, by one warp. b: rt(n, k) or st(n, k); acc and a as for mma_AB."""
    return acc.array + _array(a) @ _array(b).T


_product(mma_AB, transposed=False)
_product(mma_ABt, transposed=True)
