"""One number of a global array of any dtype. (Numba's own indexing takes elements of 16 and of 8 bits for integers, or for
types of its own, whose conversions are not linked.)

scale = load_number(gScale, (0,))
"""

import numpy as np

from tiles.compiling.builder import f32, i32, i64
from tiles.compiling.numba_types import SCALARS
from tiles.dtypes import fp32
from tiles.interpreter import AccessStep, current_warp, note
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.types import rt

from .shared_tiles import describe_index

LOAD = {1: "ld.global.b8 $0, [$1];", 2: "{.reg .b16 x;\nld.global.b16 x, [$1];\nmov.b32 $0, {x, x};}"}


@op
def load_number(source, at):
    """source[at] in float32, for every lane that asks. source: a global array of any dtype; at: an index for each axis."""
    if not all(0 <= i < size for i, size in zip(at, source.shape, strict=True)):
        raise current_warp().hazard(f"index {tuple(at)} is out of range for an array of shape {source.shape}")
    element = np.asarray(source)[tuple(slice(i, i + 1) for i in at)]
    note(AccessStep, element, False)
    return np.float32(element.ravel()[0])


@lowers(load_number)
def _(source, at):
    if not isinstance(source, types.Array) or source.dtype not in SCALARS:
        raise TypeError(f"load_number: takes a global array of {', '.join(map(str, SCALARS.values()))}, got {source}")
    if not (isinstance(at, types.BaseTuple) and len(at) == source.ndim and all(map(integer, at))):
        raise TypeError(f"load_number: `at` must be {source.ndim} integers, got {describe_index(at)}")

    def emit(b, array, at):
        address, _, strides = b.array(source, array)
        for index, stride in zip(b.unpack(at), strides, strict=True):
            address = b.add(address, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
        dtype = SCALARS[source.dtype]
        if dtype is fp32:
            return b.asm(f32, "ld.global.f32 $0, [$1];", "=f,l", address)
        word = b.asm(i32, LOAD[dtype.itemsize], "=r,l", address)
        return b.elements(rt(32, 32, dtype), b.pack([word]))[0]

    return types.float32, emit
