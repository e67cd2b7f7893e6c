"""Tensor maps: how TMA is told where an array lies and what box of it to copy.

    form = describe(q, "q").form
    encoded(encoding(cut(gl(tile, 4, 1, 3)), form))      # the driver's 128 bytes, for any array of this form
    move(tensor_map, q.data_ptr())                       # ... for this one, once they are where they are to lie

A map depends on the array's address and form, the tile, and on nothing else.

**Maps are passed by value**, as `__grid_constant__` parameters (compiler.py). The driver copies them when a kernel is launched,
and a node of a CUDA graph keeps its own copy: here a map is 128 bytes of a launch's parameter block, which the next launch may
overwrite. In global memory it would have to outlive every kernel and graph that holds its address, and every block would need a
proxy fence before it (CUDA C++ Programming Guide, on tensor maps that were copied there).
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

from cuda.bindings import driver

from ..compiling.ptx import tma_axes
from ..types import gl
from .arrays import ALIGNMENT, Form
from .devices import check

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
MAPS, SOMEWHERE = 512, 2**20  # maps that are remembered; an address that an encoded map begins with, of nobody
STRIDE_END, EXTENT_END, BOX_END = 2**40, 2**32, 256


class Encoding(NamedTuple):
    """What cuTensorMapEncodeTiled is told besides the array's address, innermost axis first. strides: bytes, of all axes but
    the innermost. dtype, swizzle, promotion: the ends of the driver's names for them. Promotion is how much L2 fetches at
    once: no more than a row, or a row of 128 bytes would bring its neighbour's, of another head (8 % at head_dim 64)."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    promotion: str


@dataclass(frozen=True, eq=False)
class TmaBox:
    """What of an encoding follows from how the array is cut: its axes, innermost first, the box along them, the array's dtype,
    the driver's name of it, the swizzle. Types that are equal have one and the same, which is looked up by its identity."""

    spec: gl
    inner: int
    outer: tuple[int, ...]
    box: tuple[int, ...]
    named: str
    dtype: str
    swizzle: str


@functools.cache
def cut(spec: gl) -> TmaBox:
    """The TmaBox of a type. ValueError: TMA has no box of that size."""
    tile, (inner, *outer) = spec.tile, tma_axes(spec)
    if tile.rows > BOX_END:
        raise ValueError(f"TMA copies at most {BOX_END} rows at a time, got {tile}")
    box = spec.extents | {spec.cols: tile.panel_cols}
    boxes = tuple(box.get(axis, 1) for axis in (inner, *outer))
    return TmaBox(spec, inner, tuple(outer), boxes, tile.dtype.np.name, tile.dtype.tma, tile.swizzle)


def encoding(how: TmaBox, form: Form) -> Encoding:
    """How TMA is told of an array of this form, which is cut like that. TypeError or
    ValueError: what TMA cannot do."""
    spec, inner, outer = how.spec, how.inner, how.outer
    shape, steps, size = form.shape, form.strides, form.itemsize
    if form.dtype != how.named:
        raise TypeError(f"{spec.tile} is copied from and to arrays of {how.named}, got {form.dtype}")
    if len(shape) != spec.rank:
        raise TypeError(f"{spec} is cut from arrays of {spec.rank} axes, got shape {shape}")
    if any(not 0 < extent < EXTENT_END for extent in shape):
        raise ValueError(f"TMA takes axes of 1 to 2**32 - 1 elements, got shape {shape}")
    if shape[inner] > 1 and steps[inner] != size:
        raise ValueError(
            f"axis {inner}, along which a tile's columns run, must be contiguous, got strides {steps} bytes of shape {shape}"
        )
    if form.past:
        raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, and is {form.past} past one")
    row = shape[inner] * size
    unused = -(-row // ALIGNMENT) * ALIGNMENT  # legal, for axes that no step is taken along
    strides = tuple([steps[axis] if shape[axis] > 1 else unused for axis in outer])
    for stride in strides:
        if stride % ALIGNMENT or not 0 <= stride < STRIDE_END:
            raise ValueError(
                f"strides must be multiples of {ALIGNMENT} bytes below 2**40, but for axis {inner}; "
                f"got strides {steps} bytes of shape {shape}"
            )
    promotion = "L2_256B" if row >= 256 else "L2_128B"
    return Encoding(how.dtype, (shape[inner], *[shape[axis] for axis in outer]), strides, how.box, how.swizzle, promotion)


def form(how: TmaBox, said: Encoding, device: int | None) -> Form:
    """The form of the array that TMA was told of; of axes along which no step is taken the strides may be others."""
    size, axes = how.spec.tile.dtype.itemsize, (how.inner, *how.outer)
    shape = dict(zip(axes, said.extents, strict=True))
    strides = dict(zip(axes, (size, *said.strides), strict=True))
    order = range(how.spec.rank)
    return Form(tuple([shape[axis] for axis in order]), tuple([strides[axis] for axis in order]), how.named, device, size)


def check_address(pointer: int):
    """ValueError if TMA cannot begin at this address."""
    if pointer % ALIGNMENT:
        raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, got {pointer:#x}")


@functools.cache
def _words(dtype: str, box: tuple[int, ...], swizzle: str, promotion: str):
    """The driver's words for what maps have in common: (dtype, rank), (box, element strides, interleave, swizzle, promotion,
    what lies outside)."""
    u32 = driver.cuuint32_t
    return (getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"), len(box)), (
        [u32(n) for n in box],
        [u32(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def encode(form: Encoding, pointer: int):
    """The driver's CUtensorMap of an array at this address. Some context must be current."""
    check_address(pointer)
    u64 = driver.cuuint64_t
    before, after = _words(form.dtype, form.box, form.swizzle, form.promotion)
    extents, strides = [u64(n) for n in form.extents], [u64(n) for n in form.strides]
    # of one axis: the driver wants an array, and reads none of it
    return check(driver.cuTensorMapEncodeTiled(*before, pointer, extents, strides or [u64(ALIGNMENT)], *after))


@functools.lru_cache(MAPS)
def encoded(form: Encoding) -> bytes:
    """A map of some array of this form, to be moved to its address. Often several have it: a call's keys and values, queries of
    one call and the next. Some context must be current."""
    driver_map = encode(form, SOMEWHERE)  # which owns what getPtr points to, and must outlive the copy
    return ctypes.string_at(driver_map.getPtr(), MAP_BYTES)


def move(tensor_map, pointer: int):
    """Let a driver's CUtensorMap speak of an array of the same form at another address. Some context must be current."""
    check_address(pointer)
    (status,) = driver.cuTensorMapReplaceAddress(tensor_map, pointer)
    if status:
        check((status,))
