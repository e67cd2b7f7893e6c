"""Machine code on its GPU: from disk or from the compiler, loaded when it is first needed.

Numba types and lowers one kernel at a time, because that is Python; NVVM and the linker run in other threads. So kernels that
are loaded inside `compile_together` take the time of all their Python, and of the last one's linking. Numba takes them in the
order of the requests: a call's kernels before those of its gradients (`prepare_next` of program.py)."""

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


class NumbaTurn:
    """A context in which Numba compiles one kernel. It begins when the turn `before` it is over."""

    def __init__(self, before: "NumbaTurn | None"):
        self.before, self.is_over = before, threading.Event()

    def __enter__(self) -> None:
        if self.before is not None:
            self.before.is_over.wait()

    def __exit__(self, *_: object) -> None:
        self.before = None
        self.is_over.set()


def machine_code(kernel, signature, gpu: Device, turn: NumbaTurn | None = None):
    """The kernel's machine code, from disk or from the compiler. RuntimeError: the GPU lacks its instructions."""
    name = digest.key(kernel, signature, gpu.arch)
    compiled = cache.load(name)
    if compiled is None:
        try:
            compiled = compile_kernel(kernel, signature, gpu.arch, turn)
        except CompileError as error:
            if error.missing_features:
                message = f"{title(kernel)} uses {', '.join(error.missing_features[:4])}, which {gpu} does not have"
                raise RuntimeError(f"{message}:\n{error.text}") from None
            raise
        cache.store(name, compiled)
    for line in compiled.warnings:
        warnings.warn(f"{kernel.py_func.__name__}: {line}", RuntimeWarning, stacklevel=2)
    return compiled


class LoadedKernel:
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


_loaded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(signature, ordinal): Future of a LoadedKernel}
_lock = threading.Lock()  # for this table, and _last_turn
_last_turn = NumbaTurn(None)  # of the kernel that was requested last
_last_turn.is_over.set()


class _PendingLoads(threading.local):
    """The futures that this thread will wait for, inside `compile_together`; None outside."""

    futures: list[Future] | None = None


_pending = _PendingLoads()


@contextlib.contextmanager
def compile_together() -> Iterator[list[Future]]:
    """A context in which `load(..., later=True)` returns None for a kernel that is not loaded yet, and a thread begins to
    compile it; at the end of the context all are loaded. Yields the list of their futures. Raises the first error of one."""
    outer, _pending.futures = _pending.futures, []
    futures = _pending.futures
    try:
        yield futures
    finally:
        _pending.futures = outer
    for future in futures:
        future.result()


def load(kernel, signature, gpu: Device, shared_bytes: int = 0, later: bool = False) -> LoadedKernel | None:
    """The kernel for these argument types on this GPU, compiled and loaded when it is first needed. later: may the result be
    None? See `compile_together`."""
    future, turn = _reserve(kernel, signature, gpu)
    if later and _pending.futures is not None and not future.done():
        _pending.futures.append(future)
        if turn:
            threading.Thread(
                target=_compile_and_load, args=(future, turn, kernel, signature, gpu), name=f"tiles: {title(kernel)}"
            ).start()
        return None
    if turn:
        _compile_and_load(future, turn, kernel, signature, gpu)
    code = future.result()
    with _lock:
        code.allow(shared_bytes)
    return code


def _reserve(kernel, signature, gpu) -> tuple[Future, NumbaTurn | None]:
    """(the future of the LoadedKernel, the turn in which the caller must compile it; None if another thread does or did)."""
    global _last_turn
    with _lock:
        known, key = _loaded.setdefault(kernel, {}), (signature, gpu.ordinal)
        future = known.get(key)
        if future is not None and not (future.done() and future.exception()):
            return future, None
        known[key] = future = Future()
        _last_turn = turn = NumbaTurn(_last_turn)
        return future, turn


def _compile_and_load(future, turn, kernel, signature, gpu):
    """Compile and load the kernel, and set the future to the result or the error."""
    try:
        with uncaptured():
            future.set_result(LoadedKernel(machine_code(kernel, signature, gpu, turn), gpu))
    except BaseException as error:
        future.set_exception(error)
    finally:
        turn.__exit__()  # compile_kernel has not, if the machine code was on disk
