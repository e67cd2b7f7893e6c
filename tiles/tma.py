"""Tensor maps: how TMA is told where an array lies and what box of it to copy.

    form = describe(q, "q").form
    maps = maps_of(encoding(gl(tile, 4, 1, 3), form), device)        # once for arrays of this form
    maps[q.data_ptr()]                                               # the device address of the map of one of them

A map depends on the array's address and form, the tile and the GPU, and on nothing else, so a map found by these is never
stale. Maps lie in device memory and are passed to kernels by address.

**Why a map is never freed or changed.** A kernel in flight, or a captured CUDA graph that will be replayed, may hold its
address; nobody can tell when the last one is done. So the first ROOM maps of a GPU stay for good (8 MiB). When the room is
used up, which takes as many different addresses and shapes, every further map lives for one launch, in memory that is
allocated, written and freed in the order of that launch's stream; slower, and as safe. Only a launch that is being captured
still gets maps that stay: its graph owns them.
"""

import functools
import threading
from typing import NamedTuple

from cuda.bindings import driver

from .arrays import Form
from .device import Device, capturing, check, uncaptured
from .ptx import tma_axes
from .types import gl

ROOM = 65536  # maps of a GPU that stay
MAP_BYTES = 128
SLAB = 512  # maps to one allocation
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
    box = {spec.cols: tile.panel_cols, spec.rows: tile.rows}
    return Encoding(
        tile.dtype.tma,
        tuple(form.shape[axis] for axis in axes),
        strides,
        tuple(box.get(axis, 1) for axis in axes),
        f"{tile.width}B",
        "L2_256B" if form.shape[inner] * form.itemsize >= 256 else "L2_128B",
    )


def check_address(pointer: int):
    """ValueError if TMA cannot begin at this address."""
    if pointer % ALIGNMENT:
        raise ValueError(f"the address must be a multiple of {ALIGNMENT} bytes, got {pointer:#x}")


def encode(form: Encoding, pointer: int):
    """The driver's 128 bytes for an array at this address."""
    check_address(pointer)
    u64, u32, rank = driver.cuuint64_t, driver.cuuint32_t, len(form.extents)
    return check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{form.dtype}"),
            rank,
            pointer,
            [u64(n) for n in form.extents],
            [u64(n) for n in form.strides],
            [u32(n) for n in form.box],
            [u32(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{form.swizzle}"),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{form.promotion}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


class Full(Exception):
    """A GPU's room for maps that stay is used up."""


class Arena:
    """A GPU's memory for tensor maps."""

    def __init__(self, device: Device):
        self.device, self.lock, self.used, self.slab, self.left = device, threading.RLock(), 0, 0, 0
        with device.current():
            self.stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def keep(self, tensor_map, beyond=False) -> int:
        """The address of a copy of this map that stays. `beyond`: even if there is no room."""
        with self.lock:
            if self.used >= ROOM and not beyond:
                raise Full
            with self.device.current(), uncaptured():
                if not self.left:
                    self.slab, self.left = int(check(driver.cuMemAlloc(SLAB * MAP_BYTES))), SLAB
                address = self.slab + (SLAB - self.left) * MAP_BYTES
                check(driver.cuMemcpyHtoDAsync(address, tensor_map.getPtr(), MAP_BYTES, self.stream))
                check(driver.cuStreamSynchronize(self.stream))
            self.left -= 1
            self.used += 1
            return address

    def lend(self, tensor_maps, stream):
        """(addresses of copies of these maps, a function that takes them back): for one launch on this stream, between the
        two; both with the GPU's context current."""
        if capturing(stream):
            return [self.keep(m, beyond=True) for m in tensor_maps], lambda: None
        base = check(driver.cuMemAllocAsync(MAP_BYTES * len(tensor_maps), stream))
        places = [int(base) + MAP_BYTES * k for k in range(len(tensor_maps))]
        for place, m in zip(places, tensor_maps):
            check(driver.cuMemcpyHtoDAsync(place, m.getPtr(), MAP_BYTES, stream))
        return places, lambda: check(driver.cuMemFreeAsync(base, stream))


arena = functools.lru_cache(maxsize=None)(Arena)
"""arena(device): the one Arena of a GPU."""


class Maps(dict):
    """The maps of arrays of one form, by the arrays' addresses: a dict that makes what it lacks, or raises Full."""

    def __init__(self, form: Encoding, device: Device):
        super().__init__()
        self.form, self.arena = form, arena(device)

    def __missing__(self, pointer):
        with self.arena.lock:
            if pointer not in self:
                self[pointer] = self.arena.keep(encode(self.form, pointer))
        return self[pointer]


_maps: dict[tuple[Encoding, Device], Maps] = {}


def maps_of(form: Encoding, device: Device) -> Maps:
    """The one Maps of arrays of this form on this GPU; once the GPU's room is used up, an empty one that nobody keeps."""
    found = _maps.get((form, device))
    if found is None:
        found = Maps(form, device)
        if found.arena.used < ROOM:
            found = _maps.setdefault((form, device), found)
    return found
