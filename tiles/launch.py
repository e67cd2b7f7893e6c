"""Launching: `tiles.launch(kernel, grid, block, shared=smem)(*args)` does what Numba leaves out.

    launch(kernel, grid, block)(q, k, out, 3, 0.5)        once, on the caller's current stream
    bound = launch(kernel, grid, block).bind(q, k, out, 3, 0.5)
    bound(stream, q2.data_ptr(), k2.data_ptr(), out2.data_ptr())     again and again, for other arrays of the same form

Where it runs: arrays in device memory on their GPU, arrays in host memory (and a kernel that takes no array) in the
interpreter. TILES_INTERPRET=1 sends device arrays to the interpreter, too: they are copied to the host, and what changed is
copied back; TILES_SEED=n makes the interpreter's order random, by that seed.

How arguments are typed: arrays of rank n as Numba's array(dtype, n, "A"), so strides never cost a compilation; `tensor` as
its TMA map, by value; bool as it is, int as int32, float as float32, so a growing value never costs one either; NumPy's
scalars as their own type, so np.int64(n) where 32 bits are too few.
"""

import ctypes
import math
import re
import threading
import warnings
import weakref

from cuda.bindings import driver

from . import cache, digest, tma
from .arguments import Parameter, parameter, same_place
from .arrays import current_stream, finish, stream_handle
from .compiler import compile_kernel
from .device import Device, check, device, uncaptured
from .fallback import Interpreted, forced

THREADS_END = 1024  # most threads of a block
STREAMS, READY = 64, 4096  # launch configurations, one a stream, and filled frames that a bound launch remembers


# ---- machine code --------------------------------------------------------------------------------------------------
_LACKS = re.compile(r"(?:Instruction|Feature|Modifier) '\.?([^']+)' (?:not supported on|requires) \.target")


def _machine_code(kernel, signature, target: Device):
    """The kernel's machine code, from disk or from the compiler. RuntimeError: the GPU lacks its instructions."""
    name = digest.key(kernel, signature, target.arch)
    compiled = cache.load(name)
    if compiled is None:
        try:
            compiled = compile_kernel(kernel, signature, target.arch)
        except Exception as error:
            lacks = list(dict.fromkeys(_LACKS.findall(str(error))))
            if lacks:
                title = kernel.py_func.__name__
                raise RuntimeError(f"{title} uses {', '.join(lacks[:4])}, which {target} does not have") from error
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
            found = known[signature, target.ordinal] = Loaded(_machine_code(kernel, signature, target), target)
        found.allow(shared_bytes)
        return found


# ---- launches ------------------------------------------------------------------------------------------------------
class Frame:
    """The arguments of launches: 8-byte slots, and the array of addresses through which the driver copies them; a tensor's is
    that of its map. Nothing changes it once it is filled, so any number of threads may launch from it.

    maps: {a tensor's place among the slots: its map}."""

    def __init__(self, slots, maps):
        self.slots, self.maps = (ctypes.c_uint64 * len(slots))(*slots), maps
        start = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * len(slots))(*range(start, start + 8 * len(slots), 8))
        for place, tensor_map in maps.items():
            self.pointers[place] = tensor_map.getPtr()
        self.address = ctypes.addressof(self.pointers)


class Ready:
    """A launch of which nothing is left to say: calling it is the driver's call. Any number of threads may call it at once."""

    __slots__ = ("bound", "config", "frame", "function")

    def __init__(self, bound: "Bound", config, frame: Frame):
        self.bound, self.config, self.frame, self.function = bound, config, frame, bound.function

    def __call__(self) -> None:
        (status,) = driver.cuLaunchKernelEx(self.config, self.function, self.frame.address, 0)
        if status:
            self._launch_in_context()

    def _launch_in_context(self):
        """The launch once more, after the driver has refused it: if another context, or none, is current on this thread, that
        is why. To look first would cost every launch a quarter of a microsecond."""
        bound = self.bound
        with bound.target.current():
            (status,) = driver.cuLaunchKernelEx(self.config, self.function, self.frame.address, 0)
        try:
            check((status,))
        except RuntimeError as error:
            raise RuntimeError(f"{bound.launch} on {bound.target}: {error}") from None


class Bound:
    """A launch ready to go: `bound(stream, *addresses)` is all that is left to say.

    stream: a handle. addresses: those of the arrays and of the tensors' arrays, in the order of the kernel's arguments; each
    must point to an array of the form that was bound, and a tensor's be a multiple of 16. Numbers stay as they were bound.
    Any number of threads may call it at once. What was launched before costs one lookup and the driver's call."""

    def __init__(self, launch: "Launch", parameters, target: Device):
        self.launch, self.target = launch, target
        self.nbytes = launch.shared.nbytes if launch.shared else 0
        self.function = load(launch.kernel, tuple(p.type for p in parameters), target, self.nbytes).function
        self.slots = [slot for p in parameters for slot in p.slots]
        self.places, self.encodings, at = [], [], 0
        for p in parameters:
            if p.array is not None:
                self.places.append(at + p.place)
                self.encodings.append(p.encoding)
            at += len(p.slots)
        self.configs: dict = {}
        self.ready: dict[tuple[int, ...], Ready] = {}  # by (stream, *addresses)

    def __call__(self, *where: int) -> None:
        ready = self.ready.get(where)
        if ready is None:
            if len(self.ready) >= READY:
                self.ready.clear()
            ready = self.ready[where] = self.prepare(*where)
        ready()

    def prepare(self, stream: int, *addresses: int) -> "Ready":
        """The launch on this stream and with these addresses, to be called without arguments."""
        if len(addresses) != len(self.places):
            raise TypeError(f"{self.launch} takes {len(self.places)} addresses, got {len(addresses)}")
        slots, maps = list(self.slots), {}
        for place, encoding, address in zip(self.places, self.encodings, addresses):
            if encoding is None:
                slots[place] = address
            else:
                maps[place] = tma.tensor_map(encoding, address, self.target)
        return Ready(self, self.configs.get(stream) or self._config(stream), Frame(slots, maps))

    def _config(self, stream):
        """The launch configuration for this stream."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.launch.block
        config.sharedMemBytes, config.hStream = self.nbytes, driver.CUstream(stream)
        if self.launch.cluster:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster = attribute.value.clusterDim
            cluster.x, cluster.y, cluster.z = self.launch.cluster
            config.attrs, config.numAttrs = [attribute], 1
        if len(self.configs) >= STREAMS:
            self.configs.clear()
        self.configs[stream] = config
        return config


class Launch:
    """What `launch` returns: call it with the kernel's arguments, or bind it to them."""

    def __init__(self, kernel, grid, block, shared, stream, cluster):
        if not hasattr(kernel, "py_func"):
            raise TypeError(f"launch: kernel must be a @cuda.jit function, got {kernel!r}")
        self.kernel, self.shared, self.stream = kernel, shared, stream
        self.grid, self.block = _extents("grid", grid), _extents("block", block)
        self.cluster = cluster and _extents("cluster", cluster)
        threads = self.block[0] * self.block[1] * self.block[2]
        limit = (kernel.targetoptions.get("launch_bounds") or (THREADS_END,))[0]
        if threads > limit:
            raise ValueError(f"launch: block={block} has {threads} threads, but {self.title} is made for up to {limit}")
        if shared is not None and not hasattr(shared, "nbytes"):
            raise TypeError(f"launch: shared must be a tiles.shared plan, got {shared!r}")
        if self.cluster and any(g % c for g, c in zip(self.grid, self.cluster)):
            raise ValueError(f"launch: {cluster=} must divide {grid=}")
        blocks = math.prod(self.cluster or (1,))
        if shared is not None and shared.blocks not in (1, blocks):
            raise ValueError(f"launch: {shared} is for clusters of {shared.blocks} blocks, got {cluster=}")

    @property
    def title(self):
        """The kernel's name."""
        return self.kernel.py_func.__name__

    def __str__(self):
        return f"launch({self.title}, {self.grid}, {self.block})"

    def parameters(self, args) -> list[Parameter]:
        """The arguments as they are passed."""
        code = self.kernel.py_func.__code__
        names = code.co_varnames[: code.co_argcount]
        if len(args) != len(names):
            raise TypeError(f"{self.title} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        return [parameter(name, value) for name, value in zip(names, args)]

    def bind(self, *args) -> "Bound | Interpreted":
        """This launch with its arguments, to be repeated with other arrays of the same forms: see Bound. Where it runs is
        settled here; arrays in host memory, or TILES_INTERPRET=1, give the same call in the interpreter."""
        return self._bind(self.parameters(args))

    def _bind(self, parameters):
        place = same_place(parameters)
        if place is None or forced():
            return Interpreted(self, parameters, None if place is None else device(place))
        return Bound(self, parameters, device(place))

    def __call__(self, *args) -> None:
        parameters = self.parameters(args)
        bound = self._bind(parameters)
        arrays = [p.array for p in parameters if p.array is not None]
        if self.stream is not None:
            stream = stream_handle(self.stream)
        else:
            stream = current_stream(arrays[0]) if arrays else 0
        bound(stream, *(a.pointer for a in arrays))
        for array in arrays:
            finish(array, stream)


def _extents(name, given):
    """A grid, block or cluster as (x, y, z)."""
    extents = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(extents) <= 3 or not all(hasattr(n, "__index__") and n > 0 for n in extents):
        raise ValueError(f"launch: {name} must be a positive integer or a tuple of up to three, got {given!r}")
    return tuple(map(int, extents)) + (1,) * (3 - len(extents))


def launch(kernel, grid, block, *, shared=None, stream=None, cluster=None) -> Launch:
    """`launch(kernel, grid, block)(*args)` runs a `@cuda.jit` kernel; `.bind(*args)` makes it ready to be run often.

    grid: blocks, block: threads, cluster: blocks of a cluster; each an integer or a tuple of up to three. shared: the
    `tiles.shared` plan that the kernel opens. stream: a handle or a stream object; by default the current stream of the
    first array's framework. A launch may be captured in a CUDA graph, its first one included.

    args: arrays (anything with `__dlpack__` or `__cuda_array_interface__`, NumPy's included), `tiles.tensor(...)` for TMA,
    numbers. All arrays lie on one GPU, or all in host memory: then the kernel runs in the interpreter.

    ValueError, TypeError: an argument is wrong. RuntimeError: the GPU lacks an instruction, or CUDA's own error by name.
    Hazard: the interpreter found what the hardware would get wrong in silence."""
    return Launch(kernel, grid, block, shared, stream, cluster)
