"""A driver that runs in host memory, for tests of launches: fixtures that conftest.py lends to all."""

import ctypes
import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda

from tiles.compiling.compiler import Compiled
from tiles.launching import loaded_code, tensor_maps
from tiles.targets import HOPPER

launching = sys.modules["tiles.launching.launch"]


class OnDevice:
    """An array said to lie on a GPU."""

    def __init__(self, array):
        self.array = array

    shape, dtype = property(lambda self: self.array.shape), property(lambda self: self.array.dtype)
    __cuda_array_interface__ = property(lambda self: {**self.array.__array_interface__, "stream": None})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is the host's. Kernels are not run: a launch reads its arguments as the driver would, and leaves
    them in `.launches`."""
    ok, gpu = driver.CUresult.CUDA_SUCCESS, SimpleNamespace(launches=[], current=1234, pushed=[], loaded=0, attributes=[])

    def replace(name, answer=lambda *_: ()):
        monkeypatch.setattr(driver, name, lambda *args: (ok, *answer(*args)))

    def launch(config, function, address, extra):
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        slots = [ctypes.cast(pointers[k], ctypes.POINTER(ctypes.c_uint64))[0] for k in range(gpu.count)]
        if gpu.current != 1234:
            return (INVALID_CONTEXT,)
        gpu.launches.append((int(config.hStream), slots, config))
        return (gpu.status,)

    def push(context):
        gpu.pushed.append(gpu.current)
        gpu.current = int(context)
        return ()

    def pop():
        gpu.current = gpu.pushed.pop()
        return (gpu.current,)

    def copy(to, source, nbytes, *_):
        ctypes.memmove(to, source, nbytes)
        return ()

    def load(*_):
        gpu.loaded += 1
        return (gpu.loaded,)

    gpu.status, gpu.count = ok, 0
    replace("cuInit"), replace("cuDeviceGet", lambda n: (n,)), replace("cuDeviceGetName", lambda *_: (b"Fake\0",))
    replace("cuDevicePrimaryCtxRetain", lambda d: (1234,)), replace("cuDeviceGetAttribute", lambda *_: (232448,))
    replace("cuCtxGetCurrent", lambda: (gpu.current,)), replace("cuCtxPushCurrent", push), replace("cuCtxPopCurrent", pop)
    replace("cuPointerGetAttribute", lambda *_: (0,)), replace("cuStreamSynchronize")
    replace("cuThreadExchangeStreamCaptureMode", lambda m: (m,)), replace("cuLibraryLoadData", load)
    replace("cuLibraryGetKernel", lambda *_: (5,)), replace("cuKernelGetFunction", lambda *_: (6,))
    replace("cuFuncSetAttribute", lambda f, a, n: gpu.attributes.append(n) or ())
    replace("cuMemcpyDtoH", copy), replace("cuMemcpyHtoD", copy)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    hopper = loaded_code.Device(0)
    hopper.target = HOPPER
    monkeypatch.setattr(launching, "device", lambda ordinal: hopper)
    monkeypatch.setattr(loaded_code, "machine_code", lambda *_: Compiled(b"", "k", ""))
    monkeypatch.setattr(loaded_code, "_loaded", loaded_code.weakref.WeakKeyDictionary())
    return gpu


def on_device(*shape, dtype=np.float32):
    return OnDevice(np.ones(shape, dtype))


@pytest.fixture
def encoded(gpu, monkeypatch):
    """A driver whose tensor maps are the address of the array, its extents, and zeros; yields what it was asked for: ("encode"
    or "move", address). Like the real one it wants a context, and maps that are moved at multiples of 64."""
    options = []

    class DriverMap:
        def __init__(self, _ptr):
            self.at = _ptr

        def getPtr(self):
            return self.at

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4)
    def encode(place, dtype, rank, pointer, extents, *_):
        options.append(("encode", pointer or 0))
        if place % 64:
            return int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
        if gpu.current != 1234:
            return int(INVALID_CONTEXT)
        words = pointer or 0, *(ctypes.c_uint64 * rank).from_address(extents)
        (ctypes.c_uint64 * 16).from_address(place)[:] = [*words, *[0] * (16 - len(words))]
        return int(gpu.status)

    address = ctypes.cast(encode, ctypes.c_void_p).value

    def move(tensor_map, pointer):
        options.append(("move", pointer))
        assert tensor_map.at % 64 == 0
        if gpu.current != 1234:
            return (INVALID_CONTEXT,)
        ctypes.c_uint64.from_address(tensor_map.at).value = pointer
        return (gpu.status,)

    monkeypatch.setattr(tensor_maps, "_map_encoder", functools.cache(lambda: tensor_maps.MapEncoder(address)))
    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", move)
    monkeypatch.setattr(driver, "CUtensorMap", DriverMap)
    yield options


INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT


def frames_of(bound):
    """The frames that the kernel keeps, the one used longest ago first."""
    return list(bound.kernel.frames.recent.values())


@cuda.jit
def takes(q, x, k, n):
    """A tensor's map, an array's seven parts, another tensor's map, a number."""
