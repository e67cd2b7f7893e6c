"""A user's array as a kernel sees it: an address, a form, and the object that owns the memory.

    array = describe(q, "q")                            torch, NumPy, CuPy, Numba, JAX, or anything that has
    array.pointer, array.form                           __cuda_array_interface__ or __dlpack__ (frameworks.py)

A form is all of an array but its address: it determines the code that serves it, and the code's parameters except addresses.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  makes "bfloat16" a name that np.dtype knows
import numpy as np
from cuda.bindings import driver

from .devices import check, device

ALIGNMENT = 16  # bytes: a form holds an address modulo this


class Form(NamedTuple):
    """All of an array but its address. strides: in bytes. dtype: its name. device: a CUDA ordinal; None is host memory.
    itemsize: bytes of an element. misalignment: the address modulo ALIGNMENT."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    itemsize: int
    misalignment: int = 0
    readonly: bool = False

    @property
    def extent(self) -> int:
        """Bytes from the lowest element's start to the highest's end; 0 if there is none."""
        if 0 in self.shape:
            return 0
        return sum([(n - 1) * abs(stride) for n, stride in zip(self.shape, self.strides)], self.itemsize)

    @property
    def steps(self) -> list[int]:
        """The strides of axes along which a step can be taken."""
        return [stride for n, stride in zip(self.shape, self.strides) if n > 1]

    @property
    def bits(self) -> int:
        """The address and the strides that are used, except that of the last axis, ORed: the lowest bit that is set says how
        many bytes can be moved at a time."""
        shape, strides, _, _, _, bits, _ = self
        for n, stride in zip(shape[:-1], strides):
            if n > 1:
                bits |= stride
        return bits

    def permuted(self, order) -> Form:
        """The form with its axes in another order."""
        shape, strides = self.shape, self.strides
        return self._replace(shape=tuple([shape[axis] for axis in order]), strides=tuple([strides[axis] for axis in order]))

    def spread(self, axis: int, extent: int) -> Form:
        """The form with one more axis, along which all elements are one: a stride of 0."""
        shape, strides = self.shape, self.strides
        return self._replace(shape=(*shape[:axis], extent, *shape[axis:]), strides=(*strides[:axis], 0, *strides[axis:]))


def c_ordered(shape: tuple[int, ...], dtype: str, device: int | None) -> Form:
    """The form of a C-ordered array at an aligned address."""
    size = ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize
    return Form(shape, contiguous(shape, size), dtype, device, size)


ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "int8": 1, "float8_e4m3fn": 1}


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-ordered array."""
    strides = tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=itemsize))
    return strides[::-1] if shape else ()


class Array(NamedTuple):
    """An array in memory. pointer: the address of its first element. owner: the user's object, which keeps the memory alive."""

    pointer: int
    form: Form
    owner: Any
    kind: Any  # a frameworks.Framework
    lease: Any = None  # a view of a DLPack capsule, held only because it keeps the memory alive

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between elements along each axis, in bytes."""
        return self.form.strides

    @property
    def dtype(self) -> str:
        """The name of the elements' dtype: 'bfloat16', 'float16', 'float32', ..."""
        return self.form.dtype

    @property
    def device(self) -> int | None:
        """The CUDA ordinal of its device; None is host memory."""
        return self.form.device

    @property
    def readonly(self) -> bool:
        """May it not be written?"""
        return self.form.readonly


ABSENT = -1  # the source of an array that was not passed: it has no elements


class Number(NamedTuple):
    """A number that comes with each call, behind the addresses. source: its place among these, counted from the end."""

    source: int


class Operand(NamedTuple):
    """An array that a launch is bound to. source: the place of its address among those of a call. form: possibly another view
    than the caller's."""

    source: int
    form: Form

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of its axes."""
        return self.form.shape

    @property
    def dtype(self) -> str:
        """The name of its elements' dtype."""
        return self.form.dtype

    def reshape(self, *shape: int) -> Operand:
        """This operand under another shape, in which -1 is the extent that is left over. ValueError: the shape has
        another number of elements, or would need a copy."""
        form, size = self.form, math.prod(self.form.shape)
        shape = tuple(size // max(1, -math.prod(shape)) if n == -1 else n for n in shape)
        if math.prod(shape) != size:
            raise ValueError(f"reshape: {form.shape} has another number of elements than {shape}")
        strides = _reshaped(form.shape, form.strides, shape)
        if strides is None:
            raise ValueError(f"reshape: from {form.shape} to {shape} needs a copy: strides={form.strides} bytes")
        return self._replace(form=form._replace(shape=shape, strides=strides))

    def swapaxes(self, one: int, other: int) -> Operand:
        """The operand with two axes swapped."""
        order = list(range(len(self.form.shape)))
        order[one], order[other] = order[other], order[one]
        return self.permuted(order)

    def permuted(self, order) -> Operand:
        """The operand with its axes in another order."""
        return self._replace(form=self.form.permuted(order))

    def spread(self, axis: int, extent: int) -> Operand:
        """The operand with one more axis, along which all elements are one."""
        return self._replace(form=self.form.spread(axis, extent))


def _reshaped(old: tuple[int, ...], steps: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of the same elements under another shape; None if that needs a copy. Going from the last axis to the first,
    axes of the old and the new shape are matched in groups whose extents have the same product."""
    if 0 in new:
        return contiguous(new, 1)
    runs = [(n, step) for n, step in zip(old, steps) if n != 1]
    strides: list[int] = []
    left, step = 1, 1
    for n in reversed(new):
        if n == 1:
            strides.append(step * left if strides else (steps[-1] if steps else 1))
            continue
        if left == 1:
            left, step = runs.pop()
        while left % n and runs and runs[-1][1] == left * step:  # spans several old axes, without a gap
            left *= runs.pop()[0]
        if left % n:
            return None
        strides.append(step)
        left, step = left // n, step * n
    return tuple(strides[::-1])


def numpy_view(pointer: int, form: Form, owner: Any = None) -> np.ndarray:
    """The elements at an address of host memory as a NumPy array (bfloat16 is ml_dtypes.bfloat16), read-only if the form says
    so; it keeps `owner` alive.

    Raises ValueError if the array does not lie in host memory.
    """
    if form.device is not None:
        raise ValueError(f"only host memory has a NumPy view: {form.device=}")
    return _raw(pointer, form, form.readonly, owner).view(form.dtype)


def host_copy(pointer: int, form: Form, stream: int) -> np.ndarray | None:
    """The elements of an array in device memory, copied to the host once the stream has come so far; None while the stream is
    captured into a CUDA graph, when there is nothing to wait for."""
    lowest, _ = ascending(form)
    memory = np.empty(form.extent, np.uint8)
    with device(form.device).current():
        if check(driver.cuStreamIsCapturing(stream)) != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return None
        check(driver.cuStreamSynchronize(stream))
        if memory.size:
            check(driver.cuMemcpyDtoH(memory.ctypes.data, pointer + lowest, memory.nbytes))
    return np.ndarray(form.shape, form.dtype, memory, -lowest if memory.size else 0, form.strides)


def fill(pointer: int, form: Form, value: float, stream: int) -> None:
    """array[...] = value, for 2- and 4-byte floats of any strides; device memory by memset on `stream`, with no kernel."""
    if form.device is None:
        numpy_view(pointer, form)[...] = value
        return
    if form.extent == 0:
        return
    bits = int(np.array(value, form.dtype).view(f"u{form.itemsize}"))
    lowest, form = ascending(form)
    memset = {2: driver.cuMemsetD2D16Async, 4: driver.cuMemsetD2D32Async}[form.itemsize]
    runs = [(1, 0), (1, 0)]  # (extent, stride), outermost first, axes that follow on each other merged
    axes = [(n, stride) for n, stride in zip(form.shape, form.strides) if n > 1]
    for n, stride in (*axes, (1, form.itemsize)):  # the last: memset's own elements lie side by side
        extent, step = runs[-1]
        if step == n * stride:
            runs[-1] = extent * n, stride
        else:
            runs.append((n, stride))
    *outer, (height, pitch), (width, _) = runs
    with device(form.device).current():
        for offset in _offsets(outer):
            check(memset(pointer + lowest + offset, pitch, bits, width, height, stream))


def _offsets(runs):
    """The offset of each index of the axes (extent, stride), lazily: np.ndindex would build the list of all indices first."""
    if not runs:
        yield 0
        return
    (extent, stride), *inner = runs
    for n in range(extent):
        for offset in _offsets(inner):
            yield n * stride + offset


# ---- overlaps ------------------------------------------------------------------------------------------------------
@functools.lru_cache(1024)
def overlap(a: Form, b: Form, distance: int) -> bool:
    """Whether two arrays share a byte, if b's first element lies `distance` bytes behind a's. The answer is exact, so
    interleaved views (q, k, v in one buffer) do not overlap; where it would take too long, they count as overlapping."""
    (behind_a, a), (behind_b, b) = ascending(a), ascending(b)
    distance += behind_b - behind_a
    if not -b.extent < distance < a.extent:
        return False
    start = 1 << 50  # any address will do: NumPy compares addresses and reads no memory
    try:
        return np.shares_memory(_raw(start, a), _raw(start + distance, b), max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def ascending(form: Form) -> tuple[int, Form]:
    """(the offset in bytes of the element at the lowest address, the same elements with no negative stride)"""
    start = sum(stride * (n - 1) for stride, n in zip(form.strides, form.shape) if stride < 0)
    return start, form._replace(strides=tuple(map(abs, form.strides)))


def overlaps_itself(form: Form) -> bool:
    """Whether two indices may name the same byte: some axis has a stride smaller than what the axes inside it cover."""
    covered = form.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(form.shape, form.strides) if n > 1):
        if stride < covered:
            return form.extent > 0
        covered += stride * (n - 1)
    return False


def _raw(pointer: int, form: Form, readonly: bool = True, owner: Any = None) -> np.ndarray:
    """The elements at an address, as untyped bytes (dtype void)."""
    return np.asarray(_Memory(pointer, form, readonly, owner))


class _Memory:
    """An object with the array interface, through which np.asarray makes an array of an address."""

    def __init__(self, pointer: int, form: Form, readonly: bool, owner: Any):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": form.shape,
            "strides": form.strides,
            "typestr": f"|V{form.itemsize}",
            "data": (pointer or 16, readonly),  # an empty array may lie nowhere; NumPy 2.2 takes 0 for no address at all
        }
