"""A kernel's arguments: how each is typed, and the 8-byte slots that the machine code takes it in."""

import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.np.numpy_support import from_dtype

from . import tma
from .forms import FORMS, Form
from .frameworks import Array, describe
from .plumbing import Value
from .types import gl
from .values import NUMBA_SCALARS, tensor

_NUMPY = {np.bool_: "?", np.int8: "b", np.uint8: "B", np.int16: "h", np.uint16: "H", np.int32: "i", np.uint32: "I"}
_NUMPY |= {np.int64: "q", np.uint64: "Q", np.float32: "f", np.float64: "d"}
_SCALARS: dict[type, tuple[str, types.Type]] = {  # struct's code and Numba's type
    bool: ("?", types.boolean),
    int: ("i", types.int32),
    float: ("f", types.float32),
    **{kind: (code, from_dtype(np.dtype(kind))) for kind, code in _NUMPY.items()},
}
DATA = 4  # the slot of an array's address


class Parameter(NamedTuple):
    """One argument: its Numba type, and its 8-byte slots as the machine code takes them. Of an array also its description and
    which slot its address goes to; of a tensor, besides, how TMA is told of it: its one slot stands for the map."""

    name: str
    type: types.Type
    slots: tuple[int, ...]
    value: Any
    array: Array | None = None
    place: int = 0
    encoding: tma.Encoding | None = None


def parameter(name: str, value: Any) -> Parameter:
    """How the argument `name` is passed. TypeError, ValueError or OverflowError that names it: it cannot be."""
    scalar = _SCALARS.get(type(value))
    if scalar:
        code, ty = scalar
        try:
            bits = struct.pack("<" + code, value).ljust(8, b"\0")
        except (struct.error, OverflowError):
            wide = "np.int64" if code == "i" else "np.float64"
            raise OverflowError(f"{name}: {value} does not fit {ty}; pass {wide}({value})") from None
        return Parameter(name, ty, (int.from_bytes(bits, "little"),), value)
    if isinstance(value, tensor):
        array = describe(value.array, name)
        try:
            ty, encoding = _map(value.spec, array.form)
            tma.check_address(array.pointer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        return Parameter(name, ty, (0,), value, array, 0, encoding)
    array = describe(value, name)
    form = array.form
    # Numba's array: who owns the memory (nobody here), who counts references, elements, bytes of one, address, shape, strides
    slots = (0, 0, math.prod(form.shape), form.itemsize, array.pointer, *form.shape, *(s % 2**64 for s in form.strides))
    try:
        ty = _array_type(form.dtype, len(form.shape))
    except TypingError:
        raise TypeError(f"{name}: kernels know no elements of type {form.dtype}") from None
    return Parameter(name, ty, slots, value, array, DATA)


@functools.lru_cache(FORMS)
def _map(spec: gl, form: Form):
    return _map_type(spec), tma.encoding(spec, form)


@functools.cache
def _map_type(spec):
    return Value(spec)


@functools.cache
def _array_type(dtype, rank):
    named = np.dtype(dtype)
    if named.kind in "OSUMm":
        raise TypingError(dtype)
    return types.Array(NUMBA_SCALARS.get(named) or from_dtype(named), rank, "A")


def same_place(parameters):
    """The CUDA ordinal that all arrays share; None: host memory, or no array at all."""
    first = None
    for p in parameters:
        if p.array is None:
            continue
        first = first or p
        if p.array.device != first.array.device:
            places = ["host memory" if x.array.device is None else f"GPU {x.array.device}" for x in (p, first)]
            raise TypeError(f"{p.name} lies in {places[0]}, but {first.name} in {places[1]}")
    return first.array.device if first else None
