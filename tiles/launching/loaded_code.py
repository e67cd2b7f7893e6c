"""Machine code on its GPU: from disk or from the compiler, loaded when it is first needed.

Numba types and lowers one kernel at a time, for that is Python; NVVM and the linker then work beside it. So kernels that are
asked for `together` take the time of all their Python, and of the last one's linking. Numba takes them in the order in which
they were asked for: a call's own come before those of its gradients (`meanwhile` of program.py), whoever is ready first."""

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


class Turn:
    """A kernel's turn with Numba, which begins when that of the kernel `before` it is over."""

    def __init__(self, before: "Turn | None"):
        self.before, self.is_over = before, threading.Event()

    def __enter__(self) -> None:
        if self.before is not None:
            self.before.is_over.wait()

    def __exit__(self, *_: object) -> None:
        self.before = None
        self.is_over.set()


def machine_code(kernel, signature, gpu: Device, turn: Turn | None = None):
    """The kernel's machine code, from disk or from the compiler. RuntimeError: the GPU lacks its instructions."""
    name = digest.key(kernel, signature, gpu.arch)
    compiled = cache.load(name)
    if compiled is None:
        try:
            compiled = compile_kernel(kernel, signature, gpu.arch, turn)
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
_lock = threading.Lock()  # for this table, and _last
_last = Turn(None)  # of the kernel that was asked for last
_last.is_over.set()


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
    """The kernel for these argument types on this GPU, compiled and loaded when it is first needed. later: None will do, see
    `together`."""
    future, turn = _future(kernel, signature, gpu)
    if later and _asking.coming is not None and not future.done():
        _asking.coming.append(future)
        if turn:
            threading.Thread(target=_make, args=(future, turn, kernel, signature, gpu), name=f"tiles: {title(kernel)}").start()
        return None
    if turn:
        _make(future, turn, kernel, signature, gpu)
    code = future.result()
    with _lock:
        code.allow(shared_bytes)
    return code


def _future(kernel, signature, gpu) -> tuple[Future, Turn | None]:
    """(where the machine code will be, the turn in which the caller is to make it). None: it is there, or another makes it."""
    global _last
    with _lock:
        known, key = _loaded.setdefault(kernel, {}), (signature, gpu.ordinal)
        future = known.get(key)
        if future is not None and not (future.done() and future.exception()):
            return future, None
        known[key] = future = Future()
        _last = turn = Turn(_last)
        return future, turn


def _make(future, turn, kernel, signature, gpu):
    """Compile and load the kernel, and give the outcome to those who wait for the future."""
    try:
        with uncaptured():
            future.set_result(Loaded(machine_code(kernel, signature, gpu, turn), gpu))
    except BaseException as error:
        future.set_exception(error)
    finally:
        turn.__exit__()  # it may not have come: the machine code was on disk
