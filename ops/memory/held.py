"""A warp's tile in global memory as its lanes hold it: sums that many blocks add to, and that a later kernel takes up again.

    add_held(sums, part, (pair, row, 0))
    part = load_held(sums, rt(16, 64, fp32), (pair, row, 0))

The lanes' first elements lie side by side, then their second ones, and so on: each instruction of a warp adds or loads 128
bytes that lie together, from one address. What order rows and columns have there only a load of the same type knows.
"""

import numpy as np
from numba.cuda import types

from tiles import ptx
from tiles.builder import f32, i64
from tiles.dtypes import fp32
from tiles.interpreter import Touched, here, note
from tiles.interpreter.accesses import READ
from tiles.layout import LANES
from tiles.op import integer, lowers, op
from tiles.plumbing import SCALARS, void
from tiles.types import rt

from .shared_tiles import said


def _line(array, spec, at):
    """The part of a global array from index `at` on that a tile takes, as a line."""
    whole, start = np.asarray(array), int(np.dot([int(i) for i in at], array.strides)) // fp32.itemsize
    if not whole.flags.c_contiguous:
        raise here().hazard(f"held tiles lie in C-ordered arrays, and this one's strides are {array.strides}")
    if not 0 <= start <= whole.size - LANES * spec.elements:
        raise here().hazard(f"index {at} and a tile behind it are out of range for an array of shape {array.shape}")
    return whole.reshape(-1)[start : start + LANES * spec.elements]


def _places(spec):
    """Where in that line each of a tile's elements lies."""
    lane, index = np.arange(LANES)[:, None], np.arange(spec.elements)
    places = np.empty(spec.shape, np.int64)
    places[spec.element(lane, index)] = LANES * index + lane
    return places


@op
def add_held(target, value, at):
    """Add an fp32 tile in registers to what lies in a global array from index `at` on, as the lanes hold it: each element
    atomically, and nobody waits for it. target: C-ordered, of fp32; a tile takes as many elements as it has."""
    line = _line(target, value.spec, at)
    here().touches(target, READ)  # too: two blocks that add to one place must not do so at once
    line[_places(value.spec)] += value.array
    note(Touched, line, True)


@op
def load_held(source, spec, at):
    """The tile, of the type `spec`, that was added so."""
    line = _line(source, spec, at)
    note(Touched, line, False)
    return line[_places(spec)]


def _check(name, array, spec, at):
    if not isinstance(spec, rt) or spec.dtype is not fp32:
        raise TypeError(f"{name}: takes a register tile of fp32, got {spec}")
    if not isinstance(array, types.Array) or SCALARS.get(array.dtype) is not fp32:
        raise TypeError(f"{name}: takes a global array of fp32, got {array}")
    if not (isinstance(at, types.BaseTuple) and len(at) == array.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {array.ndim} integers for an array of {array.ndim} axes, got {said(at)}")


def _addresses(b, array, value, spec, at):
    """Of this lane's elements."""
    address, _, strides = b.array(array, value)
    for index, stride in zip(b.unpack(at), strides, strict=True):
        address = b.add(address, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
    address = ptx.opaque(b, b.add(address, b.zext(b.mul(b.lane(), b.u32(fp32.itemsize)), i64)))
    return [b.add(address, i64(LANES * fp32.itemsize * k)) for k in range(spec.elements)]


@lowers(add_held)
def _(target, value, at):
    _check("add_held", target, value, at)

    def emit(b, vtarget, registers, vat):
        for address, x in zip(_addresses(b, target, vtarget, value, vat), b.unpack(registers), strict=True):
            ptx.add_global(b, address, x)

    return void, emit


@lowers(load_held)
def _(source, spec: type, at):
    _check("load_held", source, spec, at)

    def emit(b, vsource, _, vat):
        return b.pack([b.asm(f32, "ld.global.f32 $0, [$1];", "=f,l", a) for a in _addresses(b, source, vsource, spec, vat)])

    return spec, emit
