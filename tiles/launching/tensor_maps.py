"""Tensor maps: what TMA reads about an array: its address, extents, strides, and the box that it copies.

    encoding = encode_form(tma_box(gl(tile, 4, 1, 3)), describe(q, "q").form)
    write_maps([(0, 0, encoding.constants)], [q.data_ptr()], places)      # the driver's 128 bytes, of numbers at places[0]
    set_address(tensor_map, q.data_ptr())                                 # ... which then speak of another array of this form

A map depends on the array's address and form, the tile, and on nothing else.

**Maps are passed by value**, as `__grid_constant__` parameters (compiler.py). The driver copies them when a kernel is launched,
and a node of a CUDA graph keeps its own copy: here a map is 128 bytes of a launch's parameter block, which the next launch may
overwrite. In global memory it would have to outlive every kernel and graph that holds its address, and every block would need a
proxy fence before it (CUDA C++ Programming Guide, on tensor maps that were copied there).
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    """The arguments of cuTensorMapEncodeTiled that do not follow from extents, strides and the address. box, steps: extents and
    element strides, arrays of C. words: interleave, swizzle, promotion, what lies outside."""

    dtype: int
    rank: int
    box: Any
    steps: Any
    words: tuple[int, ...]


class MapPlace(NamedTuple):
    """Where a map is written to, and where its extents and strides are read from: addresses."""

    address: int
    extents: int
    strides: int


ARGUMENTS, POINTER = 12, 3  # of cuTensorMapEncodeTiled; which one is the array's address


class MapPlaces:
    """The MapPlaces of a frame, and records of the arguments with which the driver writes maps there. maps: what the records
    were written for; of the same maps all arguments stay but the arrays' addresses. contents: of each record, the place and the
    constants, which other launches of a kernel mostly share."""

    __slots__ = ("contents", "maps", "places", "records", "start")

    def __init__(self, places: Sequence[MapPlace]):
        self.places = places
        self.maps: Sequence[tuple[int, int, MapConstants]] | None = None
        self.contents: list[tuple[int, MapConstants | None]] = [(-1, None)] * len(places)
        self.records = (ctypes.c_uint64 * (ARGUMENTS * len(places)))()
        self.start = ctypes.c_void_p(ctypes.addressof(self.records))

    def set_maps(self, maps: Sequence[tuple[int, int, MapConstants]]) -> None:
        """Write the records for these maps: see write_maps."""
        for n, (number, _, constants) in enumerate(maps):
            before = self.contents[n]
            if before[0] != number or before[1] is not constants:
                place, (dtype, rank, box, steps, words) = self.places[number], constants
                arguments = place.address, dtype, rank, 0, place.extents, place.strides, ctypes.addressof(box)
                self.records[ARGUMENTS * n : ARGUMENTS * (n + 1)] = [*arguments, ctypes.addressof(steps), *words]
                self.contents[n] = number, constants
        self.maps = maps


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
    numbers, of_dtype = ctypes.c_uint32 * len(box), getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}")
    words = (
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    return MapConstants(int(of_dtype), len(box), numbers(*box), numbers(*[1] * len(box)), words)


class MapEncoder:
    """Calls the driver's cuTensorMapEncodeTiled by its address, once for each record. cuda.bindings wants an object for each
    number and makes a map of its own, which takes longer than the driver does, and so does ctypes with twelve arguments. So
    after the first calls a loop in machine code is compiled beside them (compiling/host_code.py)."""

    def __init__(self, address: int):
        self.address, self.calls = address, 0
        self.encode: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * ARGUMENTS)(address)
        self.encode_records: Callable[[Any, int], int] = self._encode_one_by_one

    def _encode_one_by_one(self, records: Any, count: int) -> int:
        self.calls += 1
        if self.calls == ONE_BY_ONE:
            threading.Thread(target=self._compile).start()
        size = ctypes.sizeof(ctypes.c_uint64) * ARGUMENTS
        for n in range(count):
            if status := self.encode(*(ctypes.c_uint64 * ARGUMENTS).from_address(records.value + size * n)):
                return status
        return 0

    def _compile(self) -> None:
        from ..compiling.host_code import compile_loop

        with suppress(RuntimeError):  # an LLVM without code for this processor: maps go on one by one
            self.encode_records = compile_loop(self.address, ARGUMENTS) or self.encode_records


ONE_BY_ONE = 32  # launches of a process whose maps are encoded one by one, as the first call's are


@functools.cache
def _map_encoder() -> MapEncoder:
    address, _ = check(driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", CUDA_OF_TMA, 0))
    return MapEncoder(address)


def write_maps(maps: Sequence[tuple[int, int, MapConstants]], addresses: Sequence[int], places: MapPlaces) -> None:
    """Write tensor maps. maps: (which of the places, which of the addresses, what it is encoded with) for each. Places lie at
    multiples of MAP_ALIGNMENT. Some context must be current."""
    if places.maps is not maps:
        places.set_maps(maps)
    records, at = places.records, POINTER
    for _, source, _ in maps:
        records[at] = pointer = addresses[source]
        if pointer % ALIGNMENT:
            refuse_address(pointer)
        at += ARGUMENTS
    status = _map_encoder().encode_records(places.start, len(maps))
    if status:
        check((driver.CUresult(status),))


def set_address(tensor_map, pointer: int):
    """Let a driver's CUtensorMap speak of an array of the same form at another address. Some context must be current."""
    if pointer % ALIGNMENT:
        refuse_address(pointer)
    (status,) = driver.cuTensorMapReplaceAddress(tensor_map, pointer)
    if status:
        check((status,))
