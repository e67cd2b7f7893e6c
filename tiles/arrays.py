"""A user's array as a kernel sees it: an address, a form, and who owns the memory.

    array = describe(q, "q")                            torch, NumPy, CuPy, Numba, JAX, or anything that has
    stream = current_stream(array)                      __cuda_array_interface__ or __dlpack__
    out = empty_like_caller(array, shape, "bfloat16")   out.owner is the caller's kind of array
    ...                                                 launch on `stream`
    finish(array, stream)                               then hand out.owner back

What a form is: forms.py. What each framework does: frameworks.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver

from .device import check
from .forms import FORMS, Form, c_ordered, elements_meet, form, overlaps_itself, raw
from .frameworks import KIND_OF, Array, Kind, describe

__all__ = [
    "FORMS", "Array", "Form", "Kind", "at", "c_ordered", "current_stream", "describe", "empty_like_caller", "fill", "finish",
    "form", "numpy_view", "overlaps", "overlaps_itself", "stream_handle",
]  # fmt: skip


def at(pointer: int, where: Form) -> Array:
    """The Array at an address, for what has no object of any framework; whoever uses it keeps the memory alive."""
    return Array(pointer, where, None, KIND_OF[Array])


def empty_like_caller(array: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Uninitialised, C-ordered memory of the same kind and on the same device as `array`; `.owner` is the new object.

    A type that we know only by a protocol gives a Numba device array, or a NumPy array for host memory.
    """
    kind = array.kind
    return describe(kind.maker(kind.home(array), shape, dtype)(), "out")._replace(readonly=False)


def current_stream(array: Array) -> int:
    """Handle of the stream on which the array's framework works now; 0 is the legacy default stream.

    torch and CuPy: their current stream of the array's device. Numba: the stream the array is bound to, or the default
    one. An object with only __cuda_array_interface__: the stream it names. JAX and DLPack know no current stream: the
    legacy default one, for which `describe` made the contents ready. Only the first array of a call is asked: what the
    others wait for is the caller's to order, as it is with any explicit stream.
    """
    return 0 if array.device is None else array.kind.stream(array.owner, array.device)


def stream_handle(stream: Any) -> int:
    """Handle of a `stream=` argument: an integer >= 0, or a stream of torch, CuPy, or with __cuda_stream__.

    Raises TypeError for anything else.
    """
    if hasattr(stream, "__index__") and not isinstance(stream, bool) and int(stream) >= 0:
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):  # older torch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(f"stream: must be a handle (an integer >= 0) or a CUDA stream object: {stream=}")


def finish(array: Array, stream: int) -> None:
    """Do what the array's framework needs between a launch on `stream` and handing the result back.

    torch, CuPy and Numba order later work by stream and need nothing. JAX works on streams of its own that wait for
    nobody, and may reuse an input's memory as soon as Python forgets it: the host waits for `stream`.
    """
    if array.device is not None:
        array.kind.finish(stream)


def numpy_view(array: Array) -> np.ndarray:
    """The same memory as a NumPy array (bfloat16 is ml_dtypes.bfloat16); read-only if the array is.

    Raises ValueError if the array does not lie in host memory.
    """
    if array.device is not None:
        raise ValueError(f"only host memory has a NumPy view: {array.device=}")
    return raw(array.pointer, array.form, array.readonly, array).view(array.dtype)


def fill(array: Array, value: float, stream: int) -> None:
    """array[...] = value, for 2- and 4-byte floats of any strides; device memory by memset on `stream`, with no kernel.

    The device's context must be current.
    """
    if array.device is None:
        numpy_view(array)[...] = value
        return
    if array.form.extent == 0:
        return
    size = array.form.itemsize
    bits = int(np.array(value, array.dtype).view(f"u{size}"))
    memset = {2: driver.cuMemsetD2D16Async, 4: driver.cuMemsetD2D32Async}[size]
    runs = [(1, 0), (1, 0)]  # (extent, stride), outermost first, axes that follow on each other merged
    for n, stride in zip(array.shape, array.strides):
        extent, step = runs[-1]
        if step == n * stride:
            runs[-1] = extent * n, stride
        else:
            runs.append((n, stride))
    *outer, (height, pitch), (width, _) = runs
    for index in np.ndindex(*(n for n, _ in outer)):
        offset = sum(i * stride for i, (_, stride) in zip(index, outer))
        check(memset(array.pointer + offset, pitch, bits, width, height, stream))


def overlaps(a: Array, b: Array) -> bool:
    """Whether a byte belongs to elements of both. Exact, so interleaved views (q, k, v in one buffer) do not overlap.

    Strides must not be negative. The rare case that is too hard to decide counts as overlapping.
    """
    distance = b.pointer - a.pointer
    return -b.form.extent < distance < a.form.extent and elements_meet(a.form, b.form, distance)
