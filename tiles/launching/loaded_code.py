"""Machine code on its GPU: from disk or from the compiler, loaded when it is first asked for.

Numba types and lowers one kernel at a time, for that is Python; NVVM and the linker then work beside it. So kernels that are
asked for `together` take the time of all their Python, and of the last one's linking."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

from cuda.bindings import driver

from ..compiling import cache, digest
from ..compiling.compiler import CompileError, compile_kernel, title
from .devices import Device, check, uncaptured


def machine_code(kernel, signature, gpu: Device):
    """The kernel's machine code, from disk or from the compiler. RuntimeError: the GPU lacks its instructions."""
    name = digest.key(kernel, signature, gpu.arch)
    compiled = cache.load(name)
    if compiled is None:
        try:
            compiled = compile_kernel(kernel, signature, gpu.arch)
        except CompileError as error:
            if error.lacks:
                uses = f"{title(kernel)} uses {', '.join(error.lacks[:4])}, which {gpu} does not have"
                raise RuntimeError(f"{uses}:\n{error.text}") from None
            raise
        cache.store(name, compiled)
    for line in compiled.warnings:
        warnings.warn(f"{kernel.py_func.__name__}: {line}", RuntimeWarning, stacklevel=2)
    return compiled


class Loaded:
    """A kernel's machine code on one GPU. It is never unloaded: a captured CUDA graph may hold it."""

    def __init__(self, compiled, gpu: Device):
        self.gpu, self.dynamic = gpu, 0
        with gpu.current(), uncaptured():
            library = check(driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0))
            kernel = check(driver.cuLibraryGetKernel(library, compiled.name.encode()))
            self.function = check(driver.cuKernelGetFunction(kernel))

    def allow(self, nbytes):
        """Let launches have this much dynamic shared memory. ValueError: the GPU has less."""
        if nbytes <= self.dynamic:
            return
        if nbytes > self.gpu.shared_bytes:
            raise ValueError(f"shared: {nbytes} bytes a block, but {self.gpu} has {self.gpu.shared_bytes}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.gpu.current():
            check(driver.cuFuncSetAttribute(self.function, limit, nbytes))
        self.dynamic = nbytes


_loaded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(signature, ordinal): Future of a Loaded}
_lock = threading.Lock()  # for this table


class _Asking(threading.local):
    """Of this thread: the futures that it will wait for, inside `together`."""

    coming: list[Future] | None = None


_asking = _Asking()


@contextlib.contextmanager
def together() -> Iterator[list[Future]]:
    """Inside, `load(..., later=True)` gives None for machine code that is not there yet, which threads begin to make; at the
    end all is there. Yields what is waited for. Raises the first error of one."""
    outer, _asking.coming = _asking.coming, []
    coming = _asking.coming
    try:
        yield coming
    finally:
        _asking.coming = outer
    for future in coming:
        future.result()


def load(kernel, signature, gpu: Device, shared_bytes: int = 0, later: bool = False) -> Loaded | None:
    """The kernel for these argument types on this GPU, compiled and loaded when first asked for. later: None will do, see
    `together`."""
    future, begin = _future(kernel, signature, gpu)
    if later and _asking.coming is not None and not future.done():
        _asking.coming.append(future)
        if begin:
            threading.Thread(target=_make, args=(future, kernel, signature, gpu), name=f"tiles: {title(kernel)}").start()
        return None
    if begin:
        _make(future, kernel, signature, gpu)
    code = future.result()
    with _lock:
        code.allow(shared_bytes)
    return code


def _future(kernel, signature, gpu) -> tuple[Future, bool]:
    """(where the machine code will be, whether the caller is to make it): it is nowhere yet, or could not be made."""
    with _lock:
        known, key = _loaded.setdefault(kernel, {}), (signature, gpu.ordinal)
        future = known.get(key)
        if future is not None and not (future.done() and future.exception()):
            return future, False
        known[key] = future = Future()
        return future, True


def _make(future, kernel, signature, gpu):
    """Compile and load the kernel, and give the outcome to those who wait for the future."""
    try:
        with uncaptured():
            future.set_result(Loaded(machine_code(kernel, signature, gpu), gpu))
    except BaseException as error:
        future.set_exception(error)
