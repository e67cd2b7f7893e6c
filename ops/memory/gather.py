"""Gathering from a global array at the indices of a vector or a tile: `docs[i]`, `bias[head, i, j]`."""

import operator

import numpy as np

from tiles.compiling.builder import f32, i1, i32, i64
from tiles.compiling.numba_types import SCALARS, spec_of
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import AccessStep, is_recording, note
from tiles.numba_names import types
from tiles.op import integer, lowers
from tiles.types import rt, rv
from tiles.values import Tile

from ..elementwise.arithmetic import broadcast

# What a type of elements is loaded as: PTX, the register, its letter
LOADS = {types.float32: ("f32", f32, "f"), types.int64: ("b64", i64, "l"), types.uint64: ("b64", i64, "l")}
LOADS |= {types.int32: ("b32", i32, "r"), types.uint32: ("b32", i32, "r")}
LOADS |= {types.int16: ("s16", i32, "r"), types.uint16: ("u16", i32, "r")}
LOADS |= {types.int8: ("s8", i32, "r"), types.uint8: ("u8", i32, "r"), types.boolean: ("u8", i32, "r")}
LOADS |= {scalar: ("u16", i32, "r") for scalar, dtype in SCALARS.items() if dtype in (bf16, fp16)}
UNSIGNED = types.uint32, types.uint64


def _parts(index):
    """The type that rules see for each part of an index."""
    return tuple(map(spec_of, index)) if isinstance(index, types.BaseTuple) else (index,)


def gathered(source, index):
    """source[index], by element: an index is a whole number in a vector or tile of fp32, which broadcast, or an integer.
    In fp32, so integers are exact up to 2 ** 24. Outside the array: 0."""
    index = index if isinstance(index, tuple) else (index,)
    places = np.broadcast_arrays(*[np.trunc(i.array).astype(np.int64) if isinstance(i, Tile) else np.int64(i) for i in index])
    inside = np.logical_and.reduce([(i >= 0) & (i < size) for i, size in zip(places, source.shape, strict=True)])
    values = np.zeros(inside.shape, np.float32)
    values[inside] = np.asarray(source)[tuple(i[inside] for i in places)].astype(np.float32)
    if is_recording() and inside.any():  # so many elements of it, here or there
        first = np.asarray(source)[(slice(0, 1),) * source.ndim].reshape(1)
        note(AccessStep, np.broadcast_to(first, np.count_nonzero(inside)), False)
    return values


@lowers(operator.getitem, gathered)
def _(array, index):
    parts = _parts(index)
    if not isinstance(array, types.Array) or not any(isinstance(part, (rt, rv)) for part in parts):
        return None
    if len(parts) != array.ndim or not all(isinstance(part, (rt, rv)) or integer(part) for part in parts):
        raise TypeError(
            f"an index must have {array.ndim} parts for an array of {array.ndim} axes, each a vector, a tile or an integer, "
            f"got {', '.join(map(str, parts))}"
        )
    if array.dtype not in LOADS:
        raise TypeError(f"an array that is read by a vector of indices must hold numbers of 8 to 64 bits, got {array}")
    shapes = [part for part in parts if isinstance(part, (rt, rv))]
    if any(part.dtype is not fp32 for part in shapes):
        raise TypeError(f"indices are whole numbers in fp32, got {', '.join(map(str, shapes))}")
    out = broadcast("index", *shapes)
    ptx, register, letter = LOADS[array.dtype]
    zero = "0f00000000" if register is f32 else "0"
    move = {f32: "f32", i32: "b32", i64: "b64"}[register]
    text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{move} $0, {zero};\n@p ld.global.{ptx} $0, [$1];}}"

    def real(b, word):
        if array.dtype in SCALARS:
            return word if register is f32 else b.elements(rt(32, 32, SCALARS[array.dtype]), b.pack([word]))[0]
        return b.uitofp(word, f32) if array.dtype in UNSIGNED else b.sitofp(word, f32)

    def lane(b, part, value):
        """The numbers of a part of the index, one for each of this lane's elements."""
        if not isinstance(part, (rt, rv)):
            return [b.sext(value, i64) if value.type.width < 64 else value] * out.elements
        elements = [b.fptosi(e, i32) for e in b.elements(part, value)]
        return [elements[k] for k in out.lane_index(part)] if isinstance(part, rv) and isinstance(out, rt) else elements

    def lower(b, array_value, value):
        data, extents, strides = b.array(array, array_value)
        values = b.unpack(value) if isinstance(index, types.BaseTuple) else [value]
        end = i64(2**31 - 1)
        limits = [b.trunc(b.select(b.icmp_unsigned("<", extent, end), extent, end), i32) for extent in extents]
        words: dict = {}
        elements = []
        for at in zip(*[lane(b, part, v) for part, v in zip(parts, values, strict=True)], strict=True):
            if at not in words:  # a vector's elements stand in many of a tile's
                address, inside = data, i1(1)
                for i, extent, limit, stride in zip(at, extents, limits, strides, strict=True):
                    narrow = i.type == i32  # and if it is negative, which zext gets wrong, nothing is read
                    inside = b.and_(inside, b.icmp_unsigned("<", i, limit if narrow else extent))
                    address = b.add(address, b.mul(b.zext(i, i64) if narrow else i, stride))
                word = b.asm(register, text, f"={letter},l,r", address, b.zext(inside, i32), effect=False)
                words[at] = real(b, word)
            elements.append(words[at])
        return b.from_elements(out, elements)

    return out, lower
