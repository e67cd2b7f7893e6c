"""Frameworks, one class for each: how to describe and allocate their arrays, and on which stream they work.

No framework is imported here: a caller who passes a tensor has imported its framework already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from cuda.bindings import driver

from .arrays import ALIGNMENT, Array, Form, contiguous, numpy_view
from .devices import check, device, machine, uncaptured
from .lengths import watched_call

ALIGNMENT_MASK = ALIGNMENT - 1  # the bits of an address that its form holds (Form.misalignment)
LEGACY_STREAM = 1  # CUDA's handle of the legacy default stream where 0 would mean "none given"
HOST, CUDA = (1, 3), (2, 13)  # DLPack: kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged


def describe(x: Any, name: str) -> Array:
    """Describe a user's array without copying it.

    `name` is the argument's name, for messages. Raises TypeError if x is no array, or lies in memory that kernels cannot read;
    NotImplementedError if x is a torch tensor that requires grad while grad mode is on."""
    return kind_of(x, name).describe(x, name)


def without_grad(x: Any) -> Any:
    """x, detached if it is a torch tensor that requires grad. For functions that read arrays or ask for their device, and whose
    results are not differentiable."""
    return x.detach() if getattr(x, "requires_grad", False) else x


def processors(x: Any) -> int:
    """How many multiprocessors work on an array: those of the GPU whose memory it lies in, 3 where kernels are interpreted.
    TypeError: x is no array."""
    return machine(describe(without_grad(x), "x").device).processors


def persistent_blocks(tiles: int, x: Any, each: int = 1, cluster: int = 1) -> int:
    """How many blocks a persistent kernel has, whose blocks work on one tile after the other (ops.persistent_tile): as many as
    run at once, or one for each tile where there are fewer tiles; of clusters of so many blocks, of which each works on a tile
    of its own. x: an array that is worked on. each: blocks that run at once on a multiprocessor."""
    return cluster * watched_call(min, tiles, each * processors(x) // cluster)


def kind_of(x: Any, name: str) -> Framework:
    """The framework that x belongs to; TypeError if x is no array."""
    return KIND_OF.get(type(x)) or _find_kind(x, name)


class Framework:
    """One framework's arrays. placement: the device of an array, in the framework's own type.

    allocator: a function without arguments that returns uninitialised, C-ordered memory on a placement; it keeps no array
    alive. address: of the first element of a new array. stream_context: a context in which allocators return memory for work
    on this stream, if the framework reuses memory by stream. waits: must `finish` be called after a launch?"""

    waits = False

    def describe(self, x: Any, name: str) -> Array:
        raise NotImplementedError

    def reader(self, needed: dict[str, bool]) -> Callable | None:
        """A function that reads arrays faster than Program._read, None if there is none. Its strides are in elements.
        needed: {name: must there be an array?}"""
        return None

    def build_guard(self, arrays: list, shapes: list, strides: list) -> tuple[Callable, Callable, Any, Callable] | None:
        """(a predicate: do arrays equal these in all but addresses? a predicate: must the first not be called now? a module
        whose `_current_level` must be negative for it; a function from a device to its current stream), None if the framework
        has no such guard: see remembered_calls.py. shapes, strides: of these arrays, in elements, None where others are
        allowed."""
        return None

    def placement(self, array: Array) -> Any:
        return array.device

    def allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        if placement is None:
            return partial(np.empty, shape, dtype)
        from numba import cuda

        def make():
            with cuda.gpus[placement]:
                return cuda.device_array(shape, np.dtype(dtype))

        return make

    def watched_allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        """The allocator of a shape with Lengths in it (lengths.py)."""
        return watched_call(self.allocator, placement, shape, dtype)

    def address(self, x: Any) -> int:
        return describe(x, "out").pointer

    def stream(self, x: Any, device: int) -> int:
        return 0

    def stream_context(self, stream: int, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def allocate_on(self, stream: int, device: int | None, make: Callable[[], Any]) -> Any:
        """A new array for a launch on another stream than the framework's current one: memory of the current one might be
        reused by work that does not wait for the launch."""
        if device is None:
            return make()
        with self.stream_context(stream, device):
            return make()

    def finish(self, stream: int) -> None:
        pass


class NumPy(Framework):
    def describe(self, x: np.ndarray, name: str) -> Array:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name}: masked arrays are not supported")
        pointer, readonly = x.__array_interface__["data"]
        return Array(
            pointer, Form(x.shape, x.strides, _name(x.dtype), None, x.itemsize, pointer & ALIGNMENT_MASK, readonly), x, self
        )


class OperandKind(Framework):
    """Operands, which stand for arrays of later calls (recording.py)."""

    def describe(self, x: Any, name: str) -> Array:
        return Array(x.source, x.form, x, self)

    def reader(self, needed: dict[str, bool]) -> Callable:
        raise TypeError("Operands have no addresses yet: a call on them is recorded")


class Torch(Framework):
    def __init__(self):
        self.torch = torch = sys.modules["torch"]
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # what torch.compile's own code asks and makes
        self.guards, self.empty = getattr(guards, "TensorGuards", None), getattr(guards, "_empty_strided_cuda", None)
        self.current = getattr(torch._C, "_cuda_getDevice", None)

    def describe(self, x: Any, name: str) -> Array:
        if x.requires_grad and self.torch.is_grad_enabled():
            raise NotImplementedError(no_backward(name))
        refuse_tangent(x, name)
        if x.is_nested:
            remedy = f"pass one that is packed, {name}.values()[None], and cu_seqlens={name}.offsets()"
            raise TypeError(f"{name}: is a NestedTensor, which no kernel reads; {remedy}")
        try:
            pointer, (dtype, size, ordinal) = x.data_ptr(), _torch_words(x.dtype, x.device)
            strides = tuple([size * stride for stride in x.stride()])
            if not pointer and x.numel():
                raise TypeError(f"{type(x).__name__} has no memory to address")
            for lazy, does, remedy in (x.is_neg(), "negates", "resolve_neg"), (x.is_conj(), "conjugates", "resolve_conj"):
                if lazy:
                    raise TypeError(f"torch {does} this view as it is read; pass {name}.{remedy}()")
        except (RuntimeError, TypeError) as error:  # sparse, meta, under vmap: no memory to address
            raise TypeError(f"{name}: {self.remedy(x, name) or error}") from error
        return Array(pointer, Form(tuple(x.shape), strides, dtype, ordinal, size, pointer & ALIGNMENT_MASK), x, self)

    def remedy(self, x: Any, name: str) -> str | None:
        """The remedy for a tensor without an address, where torch's message does not help; None if it does."""
        if x.layout is not self.torch.strided:
            return f"must be dense, as {name}.to_dense() is: {name}.layout={x.layout}"
        if self.torch._C._functorch.is_legacy_batchedtensor(x):
            cause = "is_grads_batched=True, or vectorize=True"
            return f"stands for many gradients at once ({cause}), which torch.func.vjp and torch.vmap compute instead"
        return None

    def reader(self, needed: dict[str, bool]) -> Callable:
        """One expression over all of them, as a loop would take half as long again.

        A tensor that requires grad while grad mode is on has a form of its own, which `describe` refuses; so has a view that
        torch negates as it is read: of float32 alone, the imaginary part of a complex64. The device is read as a
        number, which compares faster. Host tensors have -1, and so have those without memory, such as meta tensors: as these
        are at address 0 they have a form of their own, too."""

        def join_parts(template: str, absent: str) -> str:
            tests = (
                ("" if must else f"{absent} if {name} is None else ") + template.format(name) for name, must in needed.items()
            )
            return "".join(f"{one}, " for one in tests)

        odd = "{0}.requires_grad and grads() or type_{0} is FLOAT32 and {0}.is_neg()"
        kinds = join_parts(f"(type_{{0}} := {{0}}.dtype, {{0}}.get_device(), {odd})", "None")
        lengths = join_parts("({0}.shape, {0}.stride(), at_{0} & ALIGNMENT_MASK if (at_{0} := {0}.data_ptr()) else -1)", "None")
        space = {"grads": self.torch.is_grad_enabled, "ALIGNMENT_MASK": ALIGNMENT_MASK, "FLOAT32": self.torch.float32}
        return eval(f"lambda {', '.join(needed)}: (({kinds}), ({lengths}), ({join_parts('at_{0}', '0')}), None)", space)

    def build_guard(self, arrays: list, shapes: list, strides: list) -> tuple[Callable, Callable, Any, Callable] | None:
        stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        if self.guards is None or stream is None or any([x.is_nested for x in arrays]):
            return None
        modes, grads = self.torch._C._len_torch_dispatch_stack, self.torch.is_grad_enabled
        busy = (lambda: modes() or grads()) if any([x.requires_grad for x in arrays]) else modes
        try:
            check = self.guards(*arrays, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        except (RuntimeError, TypeError):  # of a torch that has another question by this name
            return None
        return (check, busy, self.torch.autograd.forward_ad, stream) if check(*arrays) else None

    def placement(self, array: Array) -> Any:
        return array.owner.device

    def allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        allocate, *form = self._allocation(placement, shape, dtype)
        return partial(allocate, *form)

    def watched_allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        return watched_call(partial, *self._allocation(placement, shape, dtype))

    def _allocation(self, placement: Any, shape: tuple[int, ...], dtype: str) -> tuple[Callable[..., Any], Any, Any, Any]:
        """(a function that makes a tensor there, its arguments)"""

        def slow(shape, strides, dtype):  # 0.4 us less than torch.empty
            return empty_strided(shape, strides, dtype=dtype, device=placement)

        def allocate_anywhere(*form):
            return (fast if current() == placement.index else slow)(*form)

        fast, current, empty_strided = self.empty, self.current, self.torch.empty_strided
        elsewhere = fast is None or placement.type != "cuda"
        make = slow if elsewhere else fast if self.has_single_gpu else allocate_anywhere  # fast: on the current device
        return make, shape, contiguous(shape, 1), getattr(self.torch, dtype)

    @cached_property
    def has_single_gpu(self) -> bool:
        """Does torch see a single GPU?"""
        return self.torch.cuda.device_count() == 1

    def address(self, x: Any) -> int:
        return x.data_ptr()

    def stream(self, x: Any, device: int) -> int:
        return self.torch._C._cuda_getCurrentRawStream(device)

    def stream_context(self, stream: int, device: int) -> AbstractContextManager[Any]:
        cuda = self.torch.cuda
        # torch's own handle of the legacy default stream is 0, and it refuses 1
        return cuda.stream(cuda.ExternalStream(0 if stream == LEGACY_STREAM else stream, device=device))


def no_backward(name: str) -> str:
    """The error message for a tensor that requires grad."""
    remedy = f"call under torch.no_grad(), or pass {name}.detach()"
    return f"{name}: requires grad, but this call computes no gradient of it; {remedy}"


def computes_tangents() -> bool:
    """Does torch, which must be imported, compute forward-mode derivatives now, as in torch.func.jvp?"""
    return sys.modules["torch"].autograd.forward_ad._current_level >= 0


def refuse_tangent(x: Any, name: str) -> None:
    """NotImplementedError, if forward-mode derivatives with respect to this tensor are being computed: a result without a
    tangent would pass for a constant."""
    if computes_tangents() and sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None:
        message = "there are no forward-mode derivatives (jvp, jacfwd, hessian)"
        raise NotImplementedError(f"{name}: has a tangent, and {message}; use reverse mode, or pass {name}.detach()")


@lru_cache
def _torch_words(dtype: Any, device: Any) -> tuple[str, int, int | None]:
    """A torch dtype's name and bytes, and a device's CUDA ordinal (None: host memory)."""
    if device.type not in ("cpu", "cuda"):
        raise TypeError(f"must lie in host or CUDA memory: device={str(device)!r}")
    return str(dtype).removeprefix("torch."), dtype.itemsize, device.index if device.type == "cuda" else None


class CuPy(Framework):
    def describe(self, x: Any, name: str) -> Array:
        pointer = x.data.ptr
        return Array(
            pointer, Form(x.shape, x.strides, _name(x.dtype), x.device.id, x.itemsize, pointer & ALIGNMENT_MASK), x, self
        )

    def allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        cupy = sys.modules["cupy"]

        def make():
            with cupy.cuda.Device(placement):
                return cupy.empty(shape, np.dtype(dtype))

        return make

    def stream(self, x: Any, device: int) -> int:
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr

    @contextmanager
    def stream_context(self, stream: int, device: int) -> Iterator[None]:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device), cuda.ExternalStream(stream):
            yield


class CudaArrayInterface(Framework):
    """Numba's device arrays, and whatever else has __cuda_array_interface__ (version 2 or 3)."""

    def describe(self, x: Any, name: str) -> Array:
        interface = x.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError(f"{name}: masked arrays are not supported")
        pointer, readonly = interface["data"]
        # the typestr of bfloat16 is "<V2", two bytes of anything, that of float8_e5m2 "<f1", which NumPy does not read itself:
        # only the object's own dtype says more
        typestr = interface["typestr"]
        shape, dtype = tuple(map(int, interface["shape"])), np.dtype(x.dtype if typestr == "<f1" else typestr)
        strides = tuple(map(int, interface.get("strides") or contiguous(shape, dtype.itemsize)))
        named = str(getattr(x, "dtype", dtype)) if dtype.kind == "V" else _name(dtype)
        where = Form(shape, strides, named, _ordinal(pointer), dtype.itemsize, pointer & ALIGNMENT_MASK, bool(readonly))
        return Array(pointer, where, x, self)

    def stream(self, x: Any, device: int) -> int:
        return x.__cuda_array_interface__.get("stream") or 0


class DLPack(Framework):
    """Whatever has __dlpack__. cuda.core reads the capsule; its view keeps the memory as long as the Array lives."""

    def describe(self, x: Any, name: str) -> Array:
        from cuda.core.utils import StridedMemoryView

        place, ordinal = map(int, x.__dlpack_device__())
        if place not in HOST + CUDA:
            raise TypeError(f"{name}: must lie in host or CUDA memory: its DLPack device is {(place, ordinal)}")
        try:
            view = StridedMemoryView.from_dlpack(x, stream_ptr=LEGACY_STREAM if place in CUDA else -1)
            size = view.dtype.itemsize
        except (BufferError, RuntimeError, TypeError, NotImplementedError) as error:
            raise TypeError(f"{name}: {error}") from error
        strides = contiguous(view.shape, size) if view.strides is None else tuple(size * s for s in view.strides)
        placement = ordinal if place in CUDA else None
        where = Form(
            tuple(view.shape), strides, _name(view.dtype), placement, size, view.ptr & ALIGNMENT_MASK, bool(view.readonly)
        )
        return Array(view.ptr, where, x, self, view)


class Jax(DLPack):
    """jax.Array on one device. Described through DLPack, which also keeps JAX from donating the buffer meanwhile.

    JAX arrays are immutable and from_dlpack would leave their memory outside JAX's allocator (which holds most of the
    card), so a result is written into the buffer of a new jnp.empty, which no other code has read, and `finish` waits for
    the kernel before any can.
    """

    def describe(self, x: Any, name: str) -> Array:
        if len(x.devices()) != 1:
            raise ValueError(f"{name}: must lie on one device: {name}.devices()={x.devices()}")
        x.block_until_ready()
        array = super().describe(x, name)
        return array._replace(form=array.form._replace(readonly=True))

    waits = True

    def placement(self, array: Array) -> Any:
        (device,) = array.owner.devices()
        return device

    def allocator(self, placement: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        return partial(sys.modules["jax"].numpy.empty, shape, np.dtype(dtype), device=placement)

    def finish(self, stream: int) -> None:
        check(driver.cuStreamSynchronize(stream))


class JaxBuffer(DLPack):
    """The buffers that jax.experimental.buffer_callback passes to its function: memory of XLA's, ready on XLA's stream."""


_KINDS = {
    "numpy.ndarray": NumPy,
    "tiles.Operand": OperandKind,
    "torch.Tensor": Torch,
    "cupy.ndarray": CuPy,
    "jaxlib.ArrayImpl": Jax,
    "jax.ArrayImpl": Jax,
    "jax.Buffer": JaxBuffer,
}
KIND_OF: dict[type, Framework] = {}  # classes seen so far
_INTERFACE, _DLPACK = CudaArrayInterface(), DLPack()


def _find_kind(x: Any, name: str) -> Framework:
    """The framework of x, by the name of its first known base class, which is stored in KIND_OF; otherwise by its array
    protocol."""
    cls = type(x)
    for base in cls.__mro__:
        if kind := _KINDS.get(f"{base.__module__.partition('.')[0]}.{base.__name__}"):
            return KIND_OF.setdefault(cls, kind())
    if hasattr(x, "__cuda_array_interface__"):
        return _INTERFACE
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _DLPACK
    if isinstance(x, (list, tuple)):
        cure = "make an array of it: torch.tensor(..), np.array(..)"
        raise TypeError(f"{name}: must be an array, not a {cls.__name__}: {name}={x!r:.60}; {cure}")
    class_name = f"{cls.__module__}.{cls.__qualname__}"
    message = f"{name}={x!r:.60}; NumPy's, torch's, CuPy's, JAX's and Numba's are"
    raise TypeError(f"{name}: must be an array with __cuda_array_interface__ or __dlpack__, not {class_name}: {message}")


def _name(dtype: np.dtype) -> str:
    """'float16' for np.float16, and '>f2' for one in foreign byte order, which no kernel reads."""
    return dtype.name if dtype.isnative else dtype.str


def _ordinal(pointer: int) -> int:
    """CUDA ordinal of the device that holds the pointer; the current device for NULL, an empty array's address."""
    if not pointer:
        return int(check(driver.cuCtxGetDevice()))
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(driver.cuPointerGetAttribute(ordinal, pointer)))


# ---- streams, and what follows a launch --------------------------------------------------------------
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
    is_number = hasattr(stream, "__index__") and not isinstance(stream, bool) and not getattr(stream, "shape", ())
    if is_number and int(stream) >= 0:
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):  # older torch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(f"stream: must be a handle (an integer >= 0) or a CUDA stream object: {stream=}")


def repeated(x: Any, count: int) -> Any:
    """An array of any framework with one more axis ahead, along which all elements are one: a view with a stride of 0."""
    if hasattr(x, "spread"):  # an Operand
        return x.spread(0, count)
    return x[None].expand(count, *x.shape) if hasattr(x, "expand") else np.broadcast_to(x[None], (count, *x.shape))


def placed(host: np.ndarray, kind: Framework, placement: Any, ordinal: int | None) -> Any:
    """An array of this framework on a placement, with the elements of a C-ordered array in host memory; that array itself if
    the placement is host memory. A CUDA graph that is being captured does not record the copy."""
    if ordinal is None:
        return host
    with uncaptured(), device(ordinal).current():
        new = kind.allocator(placement, host.shape, host.dtype.name)()
        check(driver.cuMemcpyHtoD(kind.address(new), host.ctypes.data, host.nbytes))
        return new


def fetched(array: Array, name: str, stream: int) -> np.ndarray:
    """The elements of an array in host memory, after all work on `stream`. ValueError: it is in device memory and not
    C-ordered."""
    form = array.form
    if form.device is None:
        return numpy_view(array.pointer, form, array.owner)
    if form.strides != contiguous(form.shape, form.itemsize):
        raise ValueError(f"{name}: must be C-ordered: {name}.strides={form.strides} bytes, {name}.shape={form.shape}")
    host = np.empty(form.shape, form.dtype)
    with device(form.device).current():
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuMemcpyDtoH(host.ctypes.data, array.pointer, host.nbytes))
    return host


def finish(array: Array, stream: int) -> None:
    """Do what the array's framework needs between a launch on `stream` and handing the result back.

    torch, CuPy and Numba order later work by stream and need nothing. JAX works on streams of its own that wait for
    nobody, and may reuse an input's memory as soon as Python forgets it: the host waits for `stream`.
    """
    if array.device is not None:
        array.kind.finish(stream)
