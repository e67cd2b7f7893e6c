"""Conversions: a dtype called on a tile or vector, `p = bf16(p)`.

Between dtypes of 2 and 4 bytes every element stays in its lane, for a lane holds pairs of neighbours of either. Of fp8 and int8
a lane holds runs of four: lane t of a quad has columns 2t, 2t + 1 of each eight, and wants 4t .. 4t + 3 of the first two eights
taken together, and of the next two. Two pairs are rounded into one register before the quad exchanges them: that takes two
shuffles for 32 columns of a row, and two more back.
"""

from dataclasses import replace

import numpy as np

from tiles.compiling.builder import i32
from tiles.dtypes import OPERANDS, SUMS, bf16, fp16, fp32
from tiles.op import lowers
from tiles.types import rt, rv

from ..threads.lanes import gather, spread

LOW, HIGH = 0x5410, 0x7632  # prmt: the lower and the upper halves of two registers


def _conversion(to):
    def meaning(x):
        return x.array.astype(np.float32)

    def rule(x):
        if not isinstance(x, (rt, rv)):
            raise TypeError(f"{to}: converts a register tile or vector, got {x}")
        try:
            out = replace(x, dtype=to)
        except ValueError as error:
            raise TypeError(f"{to}: {error}; got {x}") from None
        return out, lambda b, v: b.pack(converted(b, x, out, v))

    lowers(to, meaning, takes_operands=True, takes_sums=True)(rule)


def converted(b, x, out, value):
    """The registers of `out`, which differs in its dtype at most, from a value of type x."""
    if out == x:
        return b.unpack(value)
    if isinstance(x, rv) or x.dtype.run == out.dtype.run:
        return b.unpack(b.from_elements(out, b.elements(x, value)))
    return _narrowed(b, x, out, b.elements(x, value)) if out.dtype.run > x.dtype.run else _widened(b, x, out, b.unpack(value))


def _groups(x):
    """For each 32 columns of a row of which a lane has a share (in column layout 32 rows of a column): which of the lane's
    elements begin its pairs."""
    along, across = x.shape[:: 1 if x.layout == "row" else -1]
    return [
        [band * across // 2 + 4 * eighth + half for eighth in range(first, first + 4)]
        for band in range(along // 16)
        for first in range(0, across // 8, 4)
        for half in (0, 2)
    ]


def halves_of(b, x, y, half):
    """A half of x and one of y, in one register: LOW or HIGH ones, or as a register says."""
    if isinstance(half, int):
        return b.asm(i32, f"prmt.b32 $0, $1, $2, {half};", "=r,r,r", x, y, effect=False)
    return b.asm(i32, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", x, y, half, effect=False)


def _narrowed(b, x, out, elements):
    words = []
    for pairs in _groups(x):
        four = [b.quad(out.dtype, *(elements[k + i] for k in pairs[start::2] for i in (0, 1))) for start in (0, 1)]
        left, right = gather(b, *four)
        words.append([halves_of(b, left, right, half) for half in (LOW, HIGH)])
    return [words[k + row][side] for k in range(0, len(words), 2) for side in (0, 1) for row in (0, 1)]


def _widened(b, x, out, registers):
    order, mixed = [], []
    for k, pairs in enumerate(_groups(x)):
        words = [registers[k // 2 * 4 + 2 * side + k % 2] for side in (0, 1)]
        mixed += spread(b, *(halves_of(b, *words, half) for half in (LOW, HIGH)))
        order += [pair + i for start in (0, 1) for pair in pairs[start::2] for i in (0, 1)]
    if out.dtype in (fp16, bf16):  # two at once, and exact
        halves = [half for word in mixed for half in b.widened(x.dtype, word, out.dtype)]
        return [half for _, half in sorted(zip(order[::2], halves), key=lambda pair: pair[0])]
    elements = dict(zip(order, b.elements(x, b.pack(mixed)), strict=True))
    return b.unpack(b.from_elements(out, [elements[k] for k in range(len(elements))]))


for _dtype in (fp32, fp16, bf16, *OPERANDS, *SUMS):
    _conversion(_dtype)
