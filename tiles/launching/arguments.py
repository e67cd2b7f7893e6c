"""A kernel's arguments: how each is typed, and the 8-byte slots that the machine code takes it in.

A kernel may declare its parameters by annotations:

    @cuda.jit
    def attend(gQ: tiled(QUERY), gO: array(4, bf16), gLse: array(3), length: INT, scale: FLOAT):

From these annotations come the types it is compiled with, with no array at hand (`declared`), and how arrays and numbers are
bound to it by their names (launch.Kernel.bind). Without them the arguments themselves decide (`parameter`).

The parameters may depend on an object that the kernel is made for. `params: record(slopes=array(2), cap=FLOAT)` are several
parameters under one name: the kernel reads params.slopes and params.cap, and they are bound by their own names.
"""

import collections
import functools
import math
import struct
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from ..compiling.numba_types import SCALARS, Value
from ..dtypes import dtype, fp32
from ..numba_names import TypingError, from_dtype, types
from ..types import gl, rt, rv, st, sv
from ..values import NUMBA_SCALARS, tensor
from . import tensor_maps
from .arrays import Array, Form
from .frameworks import describe
from .lengths import Length, watched_call

_NUMPY = {np.bool_: "?", np.int8: "b", np.uint8: "B", np.int16: "h", np.uint16: "H", np.int32: "i", np.uint32: "I"}
_NUMPY |= {np.int64: "q", np.uint64: "Q", np.float32: "f", np.float64: "d"}
_CODES = {from_dtype(np.dtype(kind)): code for kind, code in _NUMPY.items()}  # Numba's types and struct's codes
_PYTHON = {"?": bool, "f": float, "d": float}  # {code: the Python type of such a number}; all others are integers
_SCALARS: dict[type, types.Type] = {bool: types.boolean, int: types.int32, float: types.float32}
_SCALARS |= {kind: from_dtype(np.dtype(kind)) for kind in _NUMPY}
DATA = 4  # the slot of an array's address
WORD = 2**64 - 1
COMPILE_TIME_TYPES = (
    str,
    tuple,
    type,
    dtype,
    rt,
    rv,
    st,
    sv,
)  # types of values that a kernel is compiled with, and that might be passed as arguments by mistake
INT, LONG, FLOAT = types.int32, types.int64, types.float32  # the types of numbers in a kernel's declaration
ENDS = types.Array(types.int32, 1, "A")  # cu_seqlens
SEMAPHORES = types.Array(types.int32, 2, "A")  # counters by (batch and head, tile): how many warps have added to it


def array(rank: int, element_dtype: dtype = fp32) -> types.Array:
    """A parameter that is a global array, of any strides."""
    return types.Array(NUMBA_SCALARS[element_dtype.np], rank, "A")


def tiled(
    tile: st | sv, rank: int = 4, rows: int | EllipsisType | None = ..., cols: int | EllipsisType = ..., unit: int = 0
) -> gl:
    """A parameter that is a global array which TMA reads or writes: see tiles.tensor. rows, cols: the axes that a tile's rows
    and columns run along; by default those of (B, S, H, D), 1 and 3, and of other ranks the last two. A vector has no rows.
    ValueError: the array has no such axes, or TMA takes no such arrays."""
    is_tile = isinstance(tile, st)
    if not 1 + is_tile <= rank <= 5:
        raise ValueError(f"tiled: TMA takes arrays of {1 + is_tile} to 5 axes for {tile}, got {rank=}")
    default_axes = (1, 3) if rank == 4 else (rank - 2, rank - 1)
    rows, cols = (default_axes[0] if is_tile else None) if rows is ... else rows, default_axes[1] if cols is ... else cols
    if not is_tile and rows is not None:
        raise ValueError(f"tiled: {tile} is a vector, which runs along cols: rows must be None, got {rows=}")
    axes = [axis for axis in (rows, cols) if isinstance(axis, int) and -rank <= axis < rank]
    if len({axis % rank for axis in axes}) != 1 + is_tile:
        raise ValueError(f"tiled: rows and cols must be different axes of an array of {rank}, got {rows=}, {cols=}")
    return gl(tile, rank, None if rows is None else rows % rank, cols % rank, unit=unit)


@functools.cache
def _fields(names: tuple[str, ...]) -> Any:
    """The class of the values of records with these fields."""
    return collections.namedtuple("Record", names)


class Record:
    """Several parameters under one name. fields: {name: its declaration}. by_name: whether the kernel reads them by name;
    otherwise it reads them by position. See `record`."""

    def __init__(self, fields: dict[str, Any], by_name: bool = True):
        self.fields, self.by_name = fields, by_name

    def value(self, values: Sequence[Any]) -> tuple:
        """A record of these values."""
        return _fields(tuple(self.fields))(*values) if self.by_name else tuple(values)

    def type(self, types_: Sequence[types.Type]) -> types.Type:
        """The Numba type of a record of these types."""
        return types.BaseTuple.from_types(tuple(types_), _fields(tuple(self.fields)) if self.by_name else None)


def record(**fields: Any) -> Record:
    """A parameter that stands for several: an array(...), INT or FLOAT by the name of each."""
    return Record(fields)


def positional_record(**fields: Any) -> Record:
    """A `record` without names: a tuple, which a kernel can pass on as arguments, f(x, *aux)."""
    return Record(fields, by_name=False)


def _split_record(name: str, declared_type: Any) -> dict[str, Any]:
    """{parameter: its declaration}: the fields of a record, or a single parameter under its own name."""
    return declared_type.fields if isinstance(declared_type, Record) else {name: declared_type}


@functools.cache
def declared(function) -> dict[str, Any]:
    """{parameter: its declaration in a kernel's function}, in order; the fields of records stand under their own names.
    TypeError: some parameter has no annotation."""
    annotations = function.__annotations__
    missing = [name for name in _names(function) if name not in annotations]
    if missing:
        raise TypeError(
            f"{function.__name__}: {', '.join(missing)} must be annotated with array(...), tiled(...), INT or FLOAT"
        )
    return {
        part: declared_type
        for name in _names(function)
        for part, declared_type in _split_record(name, annotations[name]).items()
    }


def _names(function) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def parameter_names(function) -> list[str]:
    """The names of a kernel's parameters, with the fields of records in their place."""
    return [part for name in _names(function) for part in _split_record(name, function.__annotations__.get(name))]


def signature(kernel) -> tuple[types.Type, ...]:
    """The Numba types of a kernel's declared parameters."""
    specs = [
        Value(declared_type) if isinstance(declared_type, gl) else declared_type
        for declared_type in declared(kernel.py_func).values()
    ]
    return group_values(kernel, specs, Record.type)


def group_values(kernel, specs: Sequence[Any], make: Callable[[Record, list], Any] = Record.value):
    """One value for each name in `declared`, grouped as the kernel takes them: `make` puts the parts of a record together."""
    rest, annotations, groups = iter(specs), kernel.py_func.__annotations__, []
    for name in _names(kernel.py_func):
        declared_type = annotations.get(name)
        groups.append(
            make(declared_type, [next(rest) for _ in declared_type.fields]) if isinstance(declared_type, Record) else next(rest)
        )
    return tuple(groups)


class Parameter(NamedTuple):
    """One argument: its Numba type, and its 8-byte slots as the machine code takes them. An array also has its description and
    the slot for its address. A tensor has a single slot, which stands for its tensor map, and the map's encoding."""

    name: str
    type: types.Type
    slots: tuple[int, ...]
    value: Any
    array: Array | None = None
    place: int = 0
    encoding: tensor_maps.Encoding | None = None


def parameter(name: str, value: Any) -> Parameter:
    """The Parameter for the argument `name`. TypeError, ValueError, OverflowError that name it: it cannot be passed."""
    scalar = _SCALARS.get(type(value.value if isinstance(value, Length) else value))
    if scalar:
        return Parameter(name, scalar, (encode_number(name, scalar, value, WIDER_TYPES.get(_CODES[scalar], "")),), value)
    if isinstance(value, tensor):
        array = describe(value.array, name)
        encoding = encode_map(name, value.spec, array.form)
        return Parameter(name, _map_type(value.spec), (0,), value, array, 0, encoding)
    try:
        array = describe(value, name)
    except TypeError:
        if value is None or isinstance(value, COMPILE_TIME_TYPES) or callable(value):
            remedy = f"what it is compiled with, a kernel closes over: def make({name}): .. return kernel"
            raise TypeError(f"{name}: must be an array or a number: {name}={value!r:.60}; {remedy}") from None
        raise
    form = array.form
    slots = array_slots(form, array.pointer)
    try:
        ty = array_type(form.dtype, len(form.shape))
    except TypingError:
        raise TypeError(f"{name}: kernels know no elements of type {form.dtype}") from None
    return Parameter(name, ty, slots, value, array, DATA)


def parameters(kernel, args) -> list[Parameter]:
    """The Parameters for a kernel's arguments. A record is passed as a tuple, and each of its fields is a Parameter.
    Numbers get the types that the kernel declares, if it does. TypeError: there are more or fewer than it takes."""
    function, rows = kernel.py_func, []
    names = _names(function)
    if len(args) != len(names):
        rest = ", and a launch fills in no defaults" if function.__defaults__ and len(args) < len(names) else ""
        raise TypeError(f"{function.__name__} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}{rest}")
    for name, value in zip(names, args):
        declared_type = function.__annotations__.get(name)
        parts, values = _split_record(name, declared_type), value if isinstance(declared_type, Record) else (value,)
        if len(values) != len(parts):
            raise TypeError(f"{name}: takes {len(parts)} values ({', '.join(parts)}), got {len(values)}")
        rows += [_declared_parameter(*each) for each in zip(parts, parts.values(), values)]
    return rows


def types_of(kernel, params: Sequence[Parameter]) -> tuple[types.Type, ...]:
    """The Numba types of a kernel's arguments, from their Parameters."""
    return group_values(kernel, [p.type for p in params], Record.type)


def _declared_parameter(name, declared_type, value):
    """How an argument is passed that the kernel declares as `declared_type`: a number as that type, an absent tensor without a
    map."""
    if isinstance(declared_type, types.Type) and declared_type in _CODES:
        slot = encode_number(name, declared_type, value)
        return Parameter(name, declared_type, (slot,), _PYTHON.get(_CODES[declared_type], int)(value))
    if isinstance(declared_type, gl) and value is None:
        return Parameter(name, _map_type(declared_type), (0,), value)
    return parameter(name, value)


def array_slots(form: Form, pointer: int = 0) -> tuple[int, ...]:
    """An array as Numba's machine code takes it: the owner of the memory and its parent (none here), the number of elements,
    bytes an element, the address, shape and strides."""
    strides = form.strides if min(form.strides, default=0) >= 0 else [stride & WORD for stride in form.strides]
    return 0, 0, math.prod(form.shape), form.itemsize, pointer, *form.shape, *strides


def struct_format(declared_type: Any) -> str:
    """How `struct` packs a declared parameter's slots: for an array the numbers of `array_slots`, for a number itself. Slots
    that are filled later are packed as 0: that of an address, and that which stands for a tensor's map."""
    if isinstance(declared_type, gl):
        return "8x"
    if isinstance(declared_type, types.Array):
        return f"16x2q8x{2 * declared_type.ndim}q"
    return f"{_CODES[declared_type]}{8 - struct.calcsize(_CODES[declared_type])}x"


def encode_form(form: Form) -> tuple[int, ...]:
    """The slots of an array that follow from its form: the number of elements, bytes an element, shape, strides."""
    return math.prod(form.shape), form.itemsize, *form.shape, *form.strides


def dtype_name(scalar: types.Type) -> str:
    """The name of an array's elements, for their Numba type."""
    return SCALARS[scalar].np.name if scalar in SCALARS else str(scalar)


WIDER_TYPES = {"i": "np.int64", "f": "np.float64"}  # {code: the type to pass instead, if a number is too large}


def number_slot(code: str, value: Any) -> int:
    """The slot of a number that is packed so. struct.error, OverflowError: it does not fit."""
    return int.from_bytes(struct.pack(code, value), "little")


def encode_number(name: str, ty: types.Type, value, wider_type: str = "") -> int:
    """The slot of a number of this type. A TypeError names an argument that is no number, or no integer where one is needed;
    an OverflowError one that does not fit, and advises `wider_type`, a type that would hold it."""
    code = _CODES[ty]
    integral = code not in _PYTHON
    plain = value.value if isinstance(value, Length) else value
    if not isinstance(plain, Integral if integral else Real) and not isinstance(plain, np.bool_):
        raise TypeError(f"{name}: must be {'an integer' if integral else 'a number'}: {name}={value!r:.60}")
    try:
        return watched_call(number_slot, "<" + code, plain.item() if isinstance(plain, np.generic) else value)
    except (struct.error, OverflowError):
        advice = f"; pass {wider_type}({value})" if wider_type else ", as which the kernel declares it"
        raise OverflowError(f"{name}: {value} does not fit {ty}{advice}") from None


def encode_map(name: str, spec: gl | tensor_maps.TmaBox, form: Form) -> tensor_maps.Encoding:
    """The tensor map's encoding for the argument `name`. TypeError, ValueError that name it: TMA cannot read such an array."""
    try:
        return tensor_maps.encode_form(tensor_maps.tma_box(spec) if isinstance(spec, gl) else spec, form)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


@functools.cache
def _map_type(spec):
    return Value(spec)


@functools.cache
def array_type(name: str, rank: int) -> types.Array:
    """The Numba type of an array of these elements, with any strides. TypingError: kernels know none of that name."""
    element_type = np.dtype(name)
    if element_type.kind in "OSUMm":
        raise TypingError(name)
    return types.Array(NUMBA_SCALARS.get(element_type) or from_dtype(element_type), rank, "A")


def find_common_device(parameters):
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
