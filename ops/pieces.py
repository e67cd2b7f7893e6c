"""Stores of register tiles to aligned global arrays, 16 bytes a lane.

A lane of an accumulator holds pairs of neighbouring columns, 4 bytes of a row at a time. The four lanes of a quad hold a row
between them; they exchange their pairs so that each ends up with eight neighbouring columns:

    before, lane t:   columns 2t, 2t+1 of each of four chunks of eight
    after,  lane t:   all eight columns of chunk t
"""

from llvmlite import ir

from tiles import layout, ptx
from tiles.plumbing import SCALARS, i32, i64
from tiles.types import rt

CHUNK = 8  # columns of 2 bytes that one lane stores
QUAD = 4
PIECE = 16  # bytes of a chunk


def check(name, array, spec):
    """TypeError if tiles of type `spec` cannot be stored to this array in pieces of 16 bytes."""
    if not isinstance(spec, rt) or spec.layout != "row" or spec.cols % (QUAD * CHUNK) or SCALARS[array.dtype].itemsize != 2:
        raise TypeError(
            f"{name}: aligned stores take tiles of 32, 64, 96, ... columns, in row layout, and arrays of bf16 or fp16, "
            f"got {spec}, {array}"
        )


def misaligned(array, at, cols):
    """What keeps a NumPy array from being stored to in pieces of 16 bytes, or None."""
    steps = [stride for axis, stride in enumerate(array.strides) if axis != cols % array.ndim and array.shape[axis] > 1]
    if array.strides[cols] != array.itemsize or any(stride % PIECE for stride in steps) or array.ctypes.data % PIECE:
        return f"the array (strides {array.strides}, address {array.ctypes.data:#x}) is not aligned to {PIECE} bytes"
    if at[cols] % CHUNK or array.shape[cols] % CHUNK:
        return f"columns from {at[cols]} of {array.shape[cols]} are not multiples of {CHUNK}"
    return None


def _transpose_quad(b, x):
    """x[k] of lane t becomes x[t] of lane k, within each quad."""
    x, lane = list(x), b.lane()
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        odd = b.icmp_unsigned("!=", b.and_(lane, b.u32(bit)), b.u32(0))
        for low, high in pairs:
            got = ptx.shuffle_xor(b, b.select(odd, x[low], x[high]), bit)
            x[low], x[high] = b.select(odd, got, x[low]), b.select(odd, x[high], got)
    return x


def lower_store(ty, spec, rows, cols, first_row):
    """The lowering of an aligned store by a warp whose first row is `first_row(b)` of the tile."""
    stored = rt(spec.rows, spec.cols, SCALARS[ty.dtype])

    def lower(b, array, value, at, *_):
        data, extents, strides = b.array(ty, array)
        at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
        lane, r, c = b.lane(), rows % ty.ndim, cols % ty.ndim
        at[r] = b.add(at[r], b.zext(b.add(b.lshr(lane, b.u32(2)), first_row(b)), i64))
        at[c] = b.add(at[c], b.zext(b.mul(b.and_(lane, b.u32(QUAD - 1)), b.u32(CHUNK)), i64))
        start = data
        for index, stride in zip(at, strides):
            start = b.add(start, b.mul(index, stride))
        registers = b.unpack(value) if stored == spec else b.unpack(b.from_elements(stored, b.elements(spec, value)))
        place = {layout.element(0, 2 * k, spec.cols): register for k, register in enumerate(registers)}
        for row in sorted({row for row, _ in place}):
            line = b.add(start, b.mul(ir.Constant(i64, row), strides[r]))
            inside = b.icmp_unsigned("<", b.add(at[r], ir.Constant(i64, row)), extents[r])
            for col in range(0, spec.cols, QUAD * CHUNK):
                piece = _transpose_quad(b, [place[row, col + CHUNK * k] for k in range(QUAD)])
                fits = b.and_(inside, b.icmp_unsigned("<", b.add(at[c], ir.Constant(i64, col)), extents[c]))
                text = "{.reg .pred p;\nsetp.ne.u32 p, $5, 0;\n@p st.global.v4.b32 [$0], {$1, $2, $3, $4};}"
                b.do(text, b.add(line, ir.Constant(i64, 2 * col)), *piece, b.zext(fits, i32))

    return lower
