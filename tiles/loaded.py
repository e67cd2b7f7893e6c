"""Machine code on its GPU: from disk or from the compiler, loaded when it is first asked for."""

import threading
import warnings
import weakref

from cuda.bindings import driver

from . import cache, digest
from .compiler import CompileError, compile_kernel, title
from .device import Device, check, uncaptured


def machine_code(kernel, signature, target: Device):
    """The kernel's machine code, from disk or from the compiler. RuntimeError: the GPU lacks its instructions."""
    name = digest.key(kernel, signature, target.arch)
    compiled = cache.load(name)
    if compiled is None:
        try:
            compiled = compile_kernel(kernel, signature, target.arch)
        except CompileError as error:
            if error.lacks:
                uses = f"{title(kernel)} uses {', '.join(error.lacks[:4])}, which {target} does not have"
                raise RuntimeError(f"{uses}:\n{error.text}") from None
            raise
        cache.store(name, compiled)
    for line in compiled.warnings:
        warnings.warn(f"{kernel.py_func.__name__}: {line}", RuntimeWarning, stacklevel=2)
    return compiled


class Loaded:
    """A kernel's machine code on one GPU. It is never unloaded: a captured CUDA graph may hold it."""

    def __init__(self, compiled, target: Device):
        self.target, self.dynamic = target, 0
        with target.current(), uncaptured():
            library = check(driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0))
            kernel = check(driver.cuLibraryGetKernel(library, compiled.name.encode()))
            self.function = check(driver.cuKernelGetFunction(kernel))

    def allow(self, nbytes):
        """Let launches have this much dynamic shared memory. ValueError: the GPU has less."""
        if nbytes <= self.dynamic:
            return
        if nbytes > self.target.shared_bytes:
            raise ValueError(f"shared: {nbytes} bytes a block, but {self.target} has {self.target.shared_bytes}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.target.current():
            check(driver.cuFuncSetAttribute(self.function, limit, nbytes))
        self.dynamic = nbytes


_loaded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(signature, ordinal): Loaded}
_lock = threading.RLock()  # compiling is not for two threads at once


def load(kernel, signature, target: Device, shared_bytes: int = 0) -> Loaded:
    """The kernel for these argument types on this GPU, compiled and loaded when first asked for."""
    with _lock:
        known = _loaded.setdefault(kernel, {})
        found = known.get((signature, target.ordinal))
        if found is None:
            with uncaptured():
                compiled = machine_code(kernel, signature, target)
            found = known[signature, target.ordinal] = Loaded(compiled, target)
        found.allow(shared_bytes)
        return found
