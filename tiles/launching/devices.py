"""The CUDA driver, as the launching code uses it: errors by name, what a GPU is, and whose context is current."""

import contextlib
import functools
from dataclasses import dataclass

from cuda.bindings import driver

from ..targets import HOPPER, LARGE, Target

_ATTRIBUTE = driver.CUdevice_attribute


def check(result):
    """The results of a call of cuda.bindings.driver, without its status. RuntimeError, with CUDA's name and text of the error,
    if the call failed."""
    status, *values = result
    if status:
        _, name = driver.cuGetErrorName(status)
        _, words = driver.cuGetErrorString(status)
        raise RuntimeError(f"{_text(name)}: {_text(words)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _text(answer):
    return answer.decode() if isinstance(answer, bytes) else "an unknown CUDA error"


class Device:
    """One GPU. `context` is its primary context, which torch, CuPy, JAX and Numba use, too."""

    def __init__(self, ordinal):
        check(driver.cuInit(0))
        self.ordinal = ordinal
        self.handle = check(driver.cuDeviceGet(ordinal))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.name = check(driver.cuDeviceGetName(128, self.handle)).split(b"\0")[0].decode()
        major = self.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.target = Target(major, minor, "a" if major >= 9 else "")
        self.processors = self.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.cache_bytes = self.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self.shared_bytes = self.attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def attribute(self, number):
        """A CUdevice_attribute of this GPU."""
        return check(driver.cuDeviceGetAttribute(number, self.handle))

    @property
    def arch(self):
        """The name of the architecture that kernels are compiled for: "sm_90a"."""
        return str(self.target)

    def __str__(self):
        return f"GPU {self.ordinal}, {self.name} ({self.arch})"

    @contextlib.contextmanager
    def current(self):
        """This GPU's primary context is current inside, whatever it was before."""
        check(driver.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent())


device = functools.lru_cache(maxsize=None)(Device)
"""device(ordinal): the one Device of that number."""


@dataclass(frozen=True)
class Interpreter:
    """Stands for a GPU where kernels are interpreted: a Hopper with few multiprocessors, so that each block of a persistent
    grid goes through several tiles."""

    target: Target = HOPPER
    processors: int = 3
    cache_bytes: int = 64 * 2**20
    shared_bytes: int = LARGE

    def __str__(self):
        return "the interpreter"


INTERPRETER = Interpreter()


def machine(ordinal: int | None) -> Device | Interpreter:
    """The GPU of this CUDA ordinal, or for None (host memory) the interpreter."""
    return INTERPRETER if ordinal is None else device(ordinal)


TILES_PER_BLOCK = 8  # tiles that each block of an interpreted persistent grid goes through, if there are many tiles


def persistent(gpu: Device | Interpreter, tiles: int) -> int:
    """How many blocks a persistent grid for so many tiles has: one for each multiprocessor. In the interpreter as many as leave
    a few tiles to each, so that there are many blocks to run in processes."""
    return min(tiles, max(gpu.processors, tiles // TILES_PER_BLOCK) if gpu is INTERPRETER else gpu.processors)


@contextlib.contextmanager
def uncaptured():
    """Inside, allocations, copies on streams of our own and the loading of modules are not captured, and do not break the
    capture of a CUDA graph by this or another thread."""
    mode = check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(mode))
