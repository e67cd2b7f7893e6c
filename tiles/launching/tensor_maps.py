"""Tensor maps: what TMA reads about an array: its address, extents, strides, and the box that it copies.

    encoding = encode_form(tma_box(gl(tile, 4, 1, 3)), describe(q, "q").form)
    write_maps([(0, 0, encoding.constants)], [q.data_ptr()], [place])     # the driver's 128 bytes, of the numbers at `place`
    set_address(tensor_map, q.data_ptr())                                 # ... which then speak of another array of this form

A map depends on the array's address and form, the tile, and on nothing else.

**Maps are passed by value**, as `__grid_constant__` parameters (compiler.py). The driver copies them when a kernel is launched,
and a node of a CUDA graph keeps its own copy: here a map is 128 bytes of a launch's parameter block, which the next launch may
overwrite. In global memory it would have to outlive every kernel and graph that holds its address, and every block would need a
proxy fence before it (CUDA C++ Programming Guide, on tensor maps that were copied there).
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cuda.bindings import driver

from ..compiling.ptx import tma_axes
from ..types import gl
from .arrays import ALIGNMENT, Form
from .devices import check

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
STRIDE_END, EXTENT_END, BOX_END = 2**40, 2**32, 256
CUDA_OF_TMA = 12000  # the version of CUDA that brought cuTensorMapEncodeTiled


class Encoding(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled besides the array's address, innermost axis first. strides: bytes, of all axes
    but the innermost. dtype, swizzle, promotion: the ends of the driver's names for them. Promotion is how much L2 fetches at
    once: no more than a row, or a row of 128 bytes would bring its neighbour's, of another head (8 % at head_dim 64)."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    promotion: str

    @property
    def constants(self) -> "MapConstants":
        """What the driver is told of all arrays that are cut like this one, whatever their extents."""
        return _map_constants(self.dtype, self.box, self.swizzle, self.promotion)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The extents, and behind them the strides: `count_numbers` of the rank."""
        return *self.extents, *(self.strides or (ALIGNMENT,))  # of one axis: the driver wants a stride, and reads none


class MapConstants(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled that do not follow from extents, strides and the address. before: dtype and rank.
    after: box, element strides, interleave, swizzle, promotion, what lies outside."""

    before: tuple[int, int]
    after: tuple[Any, ...]


class MapPlace:
    """Where a map is written to, and where its extents and strides are read from: addresses. arguments: of the driver's
    function, converted once for all maps with these constants; pointer is the one of them that each map has of its own."""

    __slots__ = ("address", "arguments", "constants", "extents", "pointer", "strides")

    def __init__(self, address: int, extents: int, strides: int):
        self.address, self.extents, self.strides = address, extents, strides
        self.pointer = ctypes.c_void_p()
        self.arguments: tuple[Any, ...] = ()
        self.constants: MapConstants | None = None

    def set_constants(self, constants: MapConstants) -> None:
        """Convert the arguments of maps with these constants."""
        address, extents, strides = map(ctypes.c_void_p.from_param, (self.address, self.extents, self.strides))
        self.arguments = address, *constants.before, self.pointer, extents, strides, *constants.after
        self.constants = constants


def count_numbers(rank: int) -> int:
    """How many extents and strides a map of an array of so many axes has."""
    return rank + max(rank - 1, 1)


@dataclass(frozen=True, eq=False)
class TmaBox:
    """What of an encoding follows from how the array is cut: its axes, innermost first, the box along them, the array's dtype,
    the driver's name of it, the swizzle. Types that are equal have one and the same, which is looked up by its identity."""

    spec: gl
    inner: int
    outer: tuple[int, ...]
    box: tuple[int, ...]
    dtype_name: str
    dtype: str
    swizzle: str


@functools.cache
def tma_box(spec: gl) -> TmaBox:
    """The TmaBox of a type. ValueError: TMA has no box of that size."""
    tile, (inner, *outer) = spec.tile, tma_axes(spec)
    if tile.rows > BOX_END:
        raise ValueError(f"TMA copies at most {BOX_END} rows at a time, got {tile}")
    box = spec.extents | {spec.cols: tile.panel_cols}
    boxes = tuple(box.get(axis, 1) for axis in (inner, *outer))
    return TmaBox(spec, inner, tuple(outer), boxes, tile.dtype.np.name, tile.dtype.tma, tile.swizzle)


def encode_form(box: TmaBox, form: Form) -> Encoding:
    """The Encoding of an array of this form, cut into these boxes. TypeError or
    ValueError: what TMA cannot do."""
    spec, inner, outer = box.spec, box.inner, box.outer
    shape, steps, size = form.shape, form.strides, form.itemsize
    if form.dtype != box.dtype_name:
        raise TypeError(f"{spec.tile} is copied from and to arrays of {box.dtype_name}, got {form.dtype}")
    if len(shape) != spec.rank:
        raise TypeError(f"{spec} is cut from arrays of {spec.rank} axes, got shape {shape}")
    if any(not 0 < extent < EXTENT_END for extent in shape):
        raise ValueError(f"TMA takes axes of 1 to 2**32 - 1 elements, got shape {shape}")
    if shape[inner] > 1 and steps[inner] != size:
        raise ValueError(
            f"axis {inner}, along which a tile's columns run, must be contiguous, got strides {steps} bytes of shape {shape}"
        )
    if form.misalignment:
        raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, and is {form.misalignment} past one")
    row = shape[inner] * size
    unused = -(-row // ALIGNMENT) * ALIGNMENT  # legal, for axes that no step is taken along
    strides = tuple([steps[axis] if shape[axis] > 1 else unused for axis in outer])
    for stride in strides:
        if stride % ALIGNMENT or not 0 <= stride < STRIDE_END:
            raise ValueError(
                f"strides must be multiples of {ALIGNMENT} bytes below 2**40, but for axis {inner}, of columns: make an array "
                f"with longer rows, and pass the slice of it that holds yours; got strides {steps} bytes of shape {shape}"
            )
    promotion = "L2_256B" if row >= 256 else "L2_128B"
    return Encoding(box.dtype, (shape[inner], *[shape[axis] for axis in outer]), strides, box.box, box.swizzle, promotion)


def decode_form(box: TmaBox, numbers: Sequence[int], device: int | None) -> Form:
    """The form of an array whose Encoding has these numbers; the strides of axes along which no step is taken may differ."""
    size, axes = box.spec.tile.dtype.itemsize, (box.inner, *box.outer)
    shape = dict(zip(axes, numbers))
    strides = dict(zip(axes, (size, *numbers[len(axes) :])))
    order = range(box.spec.rank)
    return Form(tuple([shape[axis] for axis in order]), tuple([strides[axis] for axis in order]), box.dtype_name, device, size)


def refuse_address(pointer: int):
    """ValueError: TMA cannot begin at this address."""
    raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, got {pointer:#x}")


@functools.cache
def _map_constants(dtype: str, box: tuple[int, ...], swizzle: str, promotion: str) -> MapConstants:
    numbers = ctypes.c_uint32 * len(box)
    before = int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}")), len(box)
    after = (
        ctypes.byref(numbers(*box)),
        ctypes.byref(numbers(*[1] * len(box))),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    return MapConstants(before, after)


_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int)  # without types of arguments: they would be converted in each call


@functools.cache
def _encode_tiled() -> Callable[..., int]:
    """The driver's cuTensorMapEncodeTiled, called by its address: cuda.bindings wants an object for each number and makes a map
    of its own, which takes longer than the driver does. A new length costs one call for each map of each launch."""
    address, _ = check(driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", CUDA_OF_TMA, 0))
    return _FUNCTION(address)


def write_maps(maps: Sequence[tuple[int, int, MapConstants]], addresses: Sequence[int], places: Sequence[MapPlace]) -> None:
    """Write tensor maps. maps: (which of the places, which of the addresses, what it is encoded with) for each. Places lie at
    multiples of MAP_ALIGNMENT. Some context must be current."""
    encode = _encode_tiled()
    for number, source, constants in maps:
        place, pointer = places[number], addresses[source]
        if pointer % ALIGNMENT:
            refuse_address(pointer)
        if place.constants is not constants:
            place.set_constants(constants)
        place.pointer.value = pointer
        status = encode(*place.arguments)
        if status:
            check((driver.CUresult(status),))


def set_address(tensor_map, pointer: int):
    """Let a driver's CUtensorMap speak of an array of the same form at another address. Some context must be current."""
    if pointer % ALIGNMENT:
        refuse_address(pointer)
    (status,) = driver.cuTensorMapReplaceAddress(tensor_map, pointer)
    if status:
        check((status,))
