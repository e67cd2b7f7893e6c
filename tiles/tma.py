"""Tensor maps: how TMA is told where an array lies and what box of it to copy.

    form = describe(q, "q").form
    tensor_map(encoding(gl(tile, 4, 1, 3), form), q.data_ptr(), device)      # the driver's 128 bytes

A map depends on the array's address and form, the tile and the GPU, and on nothing else, so a map that is found again is
never stale.

**Maps are passed by value**, as `__grid_constant__` parameters (compiler.py). The driver copies them when a kernel is launched,
and a node of a CUDA graph keeps its own copy: here a map is an ordinary object, free to go once the launch has returned. In
global memory it would have to outlive every kernel and graph that holds its address, and every block would need a proxy fence
before it (CUDA C++ Programming Guide, on tensor maps that were copied there).
"""

import functools
from typing import NamedTuple

from cuda.bindings import driver

from .device import Device, check
from .forms import Form
from .ptx import tma_axes
from .types import gl

MAPS = 4096  # maps that are remembered
ALIGNMENT = 16  # bytes, of the base address and of strides
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


def encoding(spec: gl, form: Form) -> Encoding:
    """How TMA is told of an array of this form, cut into tiles as `spec` says. TypeError or ValueError: what TMA cannot do."""
    tile, axes = spec.tile, tma_axes(spec)
    if form.dtype != tile.dtype.np.name:
        raise TypeError(f"{tile} is copied from and to arrays of {tile.dtype.np.name}, got {form.dtype}")
    if len(form.shape) != spec.rank:
        raise TypeError(f"{spec} is cut from arrays of {spec.rank} axes, got shape {form.shape}")
    if 0 in form.shape or max(form.shape) >= EXTENT_END:
        raise ValueError(f"TMA takes axes of 1 to 2**32 - 1 elements, got shape {form.shape}")
    if tile.rows > BOX_END:
        raise ValueError(f"TMA copies at most {BOX_END} rows at a time, got {tile}")
    inner = axes[0]
    if form.shape[inner] > 1 and form.strides[inner] != form.itemsize:
        raise ValueError(
            f"axis {inner}, along which a tile's columns run, must be contiguous, "
            f"got strides {form.strides} bytes of shape {form.shape}"
        )
    unused = -(-form.shape[inner] * form.itemsize // ALIGNMENT) * ALIGNMENT  # legal, for axes that no step is taken along
    strides = tuple(form.strides[axis] if form.shape[axis] > 1 else unused for axis in axes[1:])
    if any(s % ALIGNMENT or not 0 <= s < STRIDE_END for s in strides):
        raise ValueError(
            f"strides must be multiples of {ALIGNMENT} bytes below 2**40, but for axis {inner}; "
            f"got strides {form.strides} bytes of shape {form.shape}"
        )
    box = spec.extents | {spec.cols: tile.panel_cols}
    return Encoding(
        tile.dtype.tma,
        tuple(form.shape[axis] for axis in axes),
        strides,
        tuple(box.get(axis, 1) for axis in axes),
        tile.swizzle,
        "L2_256B" if form.shape[inner] * form.itemsize >= 256 else "L2_128B",
    )


def check_address(pointer: int):
    """ValueError if TMA cannot begin at this address."""
    if pointer % ALIGNMENT:
        raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, got {pointer:#x}")


def encode(form: Encoding, pointer: int):
    """The driver's CUtensorMap of an array at this address. Some context must be current."""
    check_address(pointer)
    u64, u32, rank = driver.cuuint64_t, driver.cuuint32_t, len(form.extents)
    return check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{form.dtype}"),
            rank,
            pointer,
            [u64(n) for n in form.extents],
            [u64(n) for n in form.strides or (ALIGNMENT,)],  # of one axis: the driver wants an array, and reads none of it
            [u32(n) for n in form.box],
            [u32(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{form.swizzle}"),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{form.promotion}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@functools.lru_cache(MAPS)
def tensor_map(form: Encoding, pointer: int, device: Device):
    """The map of an array at this address of this GPU, whose context need not be current; made once for the newest MAPS."""
    with device.current():
        return encode(form, pointer)
