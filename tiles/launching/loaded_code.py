"""Machine code on its GPU: from disk or from the compiler, loaded when it is first needed.

Numba types and lowers one kernel at a time, because that is Python; NVVM and the linker run in other threads. So kernels that
are loaded inside `compile_together` take the time of all their Python, and of the last one's linking. Numba takes a call's
kernels before those of its gradients (`prepare_next` of program.py), and of a call those with the most code first: they take
the linker up to ten times as long as others, which is then over when Numba is."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

from cuda.bindings import driver

from ..compiling import cache, digest
from ..compiling.code_size import estimate_size
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
            limit = f"{self.gpu} has {self.gpu.shared_bytes}; fewer stages or smaller tiles take less"
            raise ValueError(f"shared: {nbytes} bytes a block, but {limit}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self.gpu.current():
            check(driver.cuFuncSetAttribute(self.function, limit, nbytes))
        self.dynamic = nbytes


_loaded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(signature, ordinal): Future of a LoadedKernel}
_lock = threading.Lock()  # for this table, and _last_turn
_last_turn = NumbaTurn(None)  # of the kernel that is compiled last
_last_turn.is_over.set()


class Batch:
    """Kernels that are loaded at the same time. futures: of all of them. requests: the arguments of `_compile_and_load` but for
    the turn, of those that nobody compiles yet."""

    def __init__(self) -> None:
        self.futures: list[Future] = []
        self.requests: list[tuple] = []

    def __bool__(self) -> bool:
        return bool(self.futures)

    def start(self) -> None:
        """Compile what was requested, in a thread for each kernel."""
        requests, self.requests = self.requests, []
        if len(requests) > 1:
            requests.sort(key=lambda request: estimate_size(request[1]), reverse=True)
        for future, kernel, *rest in requests:
            request = future, _next_turn(), kernel, *rest
            threading.Thread(target=_compile_and_load, args=request, name=f"tiles: {title(kernel)}").start()


class _CurrentBatch(threading.local):
    """The Batch of this thread, inside `compile_together`; None outside."""

    batch: Batch | None = None


_current = _CurrentBatch()


@contextlib.contextmanager
def compile_together() -> Iterator[Batch]:
    """A context in which `load(..., later=True)` returns None for a kernel that is not loaded yet; at the end of the context
    all are compiled and loaded. Yields their Batch. Raises the first error of one."""
    outer, batch = _current.batch, Batch()
    _current.batch = batch
    try:
        yield batch
    finally:
        _current.batch = outer
        for waiting in (outer, batch):  # a thread that compiles one of these may wait for a kernel of the outer batch
            if waiting is not None:
                waiting.start()
    for future in batch.futures:
        future.result()


def load(kernel, signature, gpu: Device, shared_bytes: int = 0, later: bool = False) -> LoadedKernel | None:
    """The kernel for these argument types on this GPU, compiled and loaded when it is first needed. later: may the result be
    None? See `compile_together`."""
    (future, is_new), batch = _reserve(kernel, signature, gpu), _current.batch
    if later and batch is not None and not future.done():
        batch.futures.append(future)
        if is_new:
            batch.requests.append((future, kernel, signature, gpu))
        return None
    if batch is not None:  # a thread that compiles this kernel may wait for one of the batch
        batch.start()
    if is_new:
        _compile_and_load(future, _next_turn(), kernel, signature, gpu)
    code = future.result()
    with _lock:
        code.allow(shared_bytes)
    return code


def _reserve(kernel, signature, gpu) -> tuple[Future, bool]:
    """(the future of the LoadedKernel, whether it is new: then the caller must compile it)"""
    with _lock:
        known, key = _loaded.setdefault(kernel, {}), (signature, gpu.ordinal)
        future = known.get(key)
        if future is not None and not (future.done() and future.exception()):
            return future, False
        known[key] = future = Future()
        return future, True


def _next_turn() -> NumbaTurn:
    """The turn behind all others."""
    global _last_turn
    with _lock:
        _last_turn = turn = NumbaTurn(_last_turn)
        return turn


def wait_for_numba() -> None:
    """Return when Numba has compiled all kernels that were asked for."""
    _last_turn.is_over.wait()


def _compile_and_load(future, turn, kernel, signature, gpu):
    """Compile and load the kernel, and set the future to the result or the error."""
    try:
        with uncaptured():
            future.set_result(LoadedKernel(machine_code(kernel, signature, gpu, turn), gpu))
    except BaseException as error:
        future.set_exception(error)
    finally:
        turn.__exit__()  # compile_kernel has not, if the machine code was on disk
