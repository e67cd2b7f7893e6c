"""A warpgroup's tile in global memory as its lanes hold it: sums that many blocks add to, and that a later kernel takes up again.

    warpgroup.add_held(sums, part, (pair, number, 0))
    part = warpgroup.load_held(sums, rt(16, 64, fp32), (pair, number, 0))

Four of a lane's elements lie side by side, those of the next lane behind them, through all four warps; then comes every lane's
next four. So no lane gives another what it holds, a warp moves 512 bytes that lie side by side, and 16 bytes are added by one
instruction: shared memory has no part in it. What order rows and columns have there only a load of the same type knows.

They are ops of `ops.warpgroup`.
"""

import numpy as np
from llvmlite import ir
from numba.cuda import types

from tiles import ptx
from tiles.builder import f32, i64
from tiles.dtypes import fp32
from tiles.interpreter import Touched, here, note
from tiles.layout import LANES
from tiles.op import integer, lowers, op
from tiles.plumbing import SCALARS, void
from tiles.types import rt

from ..threads.warps import FOUR_WARPS, THREADS
from .shared_tiles import said

WORD = 4  # elements that lie side by side


def _places(array, spec, at, rank):
    """(the part of a global array from index `at` on, as a line, the place there of each element that warp `rank` holds)."""
    whole, start = np.asarray(array), int(np.dot([int(i) for i in at], array.strides)) // fp32.itemsize
    count = THREADS * spec.elements
    if not whole.flags.c_contiguous or start % WORD or whole.ctypes.data % 16:
        raise here().hazard(f"held tiles lie at multiples of 16 bytes of a C-ordered array: index {at} of strides {array.strides}")
    if not 0 <= start <= whole.size - count:
        raise here().hazard(f"index {at} and {count} elements behind it are out of range for an array of shape {array.shape}")
    lane, index = np.arange(LANES)[:, None], np.arange(spec.elements)
    order = np.empty(spec.shape, np.int64)
    order[spec.element(lane, index)] = index // WORD * THREADS * WORD + (LANES * rank + lane) * WORD + index % WORD
    return whole.reshape(-1)[start : start + count], order


@op
def add_held(target, value, at):
    """Add a tile to what lies in a global array from index `at` on, as the lanes hold it: by the four warps, each its part, an
    element at a time and atomically. value: fp32 in registers. target: C-ordered, in fp32, where a part begins at a multiple of
    16 bytes; it takes 128 elements for each that a lane holds."""
    line, order = _places(target, value.spec, at, here().rank)
    line[order] += value.array
    note(Touched, line[: order.size], True)


@op
def load_held(source, spec, at):
    """The tile that was added so, as the warps' `spec`."""
    line, order = _places(source, spec, at, here().rank)
    note(Touched, line[: order.size], False)
    return line[order]


def _check(name, array, spec, at):
    if not isinstance(spec, rt) or spec.dtype is not fp32:
        raise TypeError(f"{name}: takes a register tile of fp32, got {spec}")
    if not isinstance(array, types.Array) or SCALARS.get(array.dtype) is not fp32:
        raise TypeError(f"{name}: takes a global array of fp32, got {array}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {said(at)}")


def _words(b, array, value, spec, at):
    """The address of each four of this lane's elements."""
    address, _, strides = b.array(array, value)
    for index, stride in zip(b.unpack(at), strides, strict=True):
        address = b.add(address, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
    thread = b.add(b.mul(FOUR_WARPS.emit_rank(b), b.u32(LANES)), b.lane())
    address = b.add(address, b.zext(b.mul(thread, b.u32(WORD * fp32.itemsize)), i64))
    return [b.add(address, i64(THREADS * fp32.itemsize * k)) for k in range(0, spec.elements, WORD)]


@lowers(add_held)
def _(target, value, at):
    _check("add_held", target, value, at)

    def emit(b, vtarget, registers, vat):
        elements = b.unpack(registers)
        for k, address in enumerate(_words(b, target, vtarget, value, vat)):
            ptx.add_global(b, address, elements[WORD * k : WORD * (k + 1)])

    return void, emit


@lowers(load_held)
def _(source, spec: type, at):
    _check("load_held", source, spec, at)
    four = ir.LiteralStructType([f32] * WORD)

    def emit(b, vsource, _, vat):
        words = [
            b.asm(four, "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", address)
            for address in _words(b, source, vsource, spec, vat)
        ]
        return b.pack([x for word in words for x in b.unpack(word)])

    return spec, emit
