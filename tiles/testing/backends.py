"""Where a kernel runs under test: what it means, what it is compiled to, and the card.

Each takes a kernel and its arguments, or an ordinary function that launches kernels, with NumPy arrays; outputs are written in
place."""

import functools
import time
import unittest
import weakref
from typing import Any

import numpy as np
from numba import cuda

from ..compiling import digest
from ..compiling.compiler import Lowered
from ..dtypes import bf16, fp8e4m3
from ..emulator import ExecutionCounts, emulate, forget, program
from ..emulator.flow import pressure
from ..interpreter import interpret
from ..launching.arguments import parameters, types_of
from ..launching.devices import INTERPRETER
from ..launching.interpreted_launch import check_shared_size, run_by
from ..launching.launch import Launch
from ..numba_names import DeviceNDArray
from ..values import tensor

ONE = 1, 1, 1
REGISTERS = 160  # that hold values at once, from where on ptxas may need more than the 255 that a thread has
_looked_at: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(types, architecture)}
_kept_kernels: dict[tuple, Any] = {}  # those that ran as compiled last, by their digest and code
KEPT = 32  # of these
PATIENCE = 10  # seconds for the card
HUNG: list[str] = []  # the kernel that hangs: nothing can run on the GPU any more, and waiting for it would hang as well


def meaning(kernel: Any, *args: Any, **options: Any) -> Any:
    """Run kernel(*args) by its meaning, in the interpreter. Hazard: what the hardware would silently get wrong.

    options: grid, its blocks, a number or up to three (by default one cluster); warps=1, those of a block; shared=None, the
    storage that the kernel opens; cluster=1, its blocks; seed=None, or a number for a random order of what is asynchronous.

    A function that is no kernel is called with args and options as they are; its launches run here, and its result is
    returned. The same holds for `ptx` and `gpu`."""
    return _run(interpret, kernel, args, options)


def ptx(kernel: Any, *args: Any, arch: str = "sm_90a", **options: Any) -> ExecutionCounts | Any:
    """Run kernel(*args) as compiled for `arch`, on the CPU (docs/emulator.md); returns counts of what it did. Arguments as in
    `meaning`.

    If the text has a wgmma, setmaxnreg or memory of a thread's own, or needs many registers, machine code is made, too.
    AssertionError: something lies in local memory or spills, or ptxas complains."""
    return _run(functools.partial(_as_compiled, arch=arch), kernel, args, options)


def _run(run, kernel, args, options):
    if not _is_kernel(kernel):
        with run_by(run):
            return kernel(*args, **options)
    launch, seed = _launch(kernel, **options)
    return run(kernel, launch.grid, launch.block[0], args, launch.shared, seed, launch.cluster or ONE)


def _same_code(kernel, types, arch):
    """The kernel that was run before of those that the same code makes of the same values: a test makes one for each of its
    parameters, also where these are arguments of a launch."""
    name = digest.key(kernel, types, arch), id(kernel.py_func.__code__)
    backend_kernel = _kept_kernels.pop(name, kernel) if name[0] else kernel
    _kept_kernels[name] = backend_kernel
    while len(_kept_kernels) > KEPT:
        forget(_kept_kernels.pop(next(iter(_kept_kernels))))
    return backend_kernel


def _as_compiled(kernel, grid, threads, args, shared, seed, cluster, arch):
    """Run a kernel in the emulator; its machine code is looked at once for each kernel and types."""
    types = types_of(kernel, parameters(kernel, args))
    kernel = _same_code(kernel, types, arch)
    known = _looked_at.setdefault(kernel, set())
    if (types, arch) not in known:
        lowered = Lowered(kernel, types, arch)
        text = program(kernel, types, arch, lowered)
        by_capability = text.local or any(at.opcode.startswith(("wgmma", "setmaxnreg")) for at in text.code)
        if by_capability or pressure(text) >= REGISTERS:
            code = lowered.machine_code()
            assert not code.local_bytes and not code.spill_bytes and not code.warnings, code.log
        known.add((types, arch))
    return emulate(kernel, grid, threads, args, shared, seed, cluster, arch)


def gpu(kernel: Any, *args: Any, **options: Any) -> Any:
    """Run kernel(*args) on the GPU, on copies of the arrays, which are copied back. Arguments as in `meaning`; a function gets
    torch's arrays. TimeoutError: the kernel hangs."""
    if HUNG:
        raise TimeoutError(f"the GPU is still busy with {HUNG[0]}, which hangs")
    if not _is_kernel(kernel):
        return _called_with_torch(kernel, args, options)
    launch, _ = _launch(kernel, **options)
    roots: dict[int, tuple] = {}
    arguments: list[Any] = []
    for a in args:
        if isinstance(a, tensor):
            spec = a.spec
            arguments.append(tensor(_on_device(a.array, roots), spec.tile, spec.rows, spec.cols, spec.unit))  # type: ignore[arg-type]
        else:
            arguments.append(_on_device(a, roots) if isinstance(a, np.ndarray) else a)
    launch(*arguments)
    done = cuda.event(timing=False)
    done.record()
    deadline = time.monotonic() + PATIENCE
    while not done.query():
        if time.monotonic() > deadline:
            HUNG.append(kernel.py_func.__qualname__)
            raise TimeoutError(f"{HUNG[0]}: not done after {PATIENCE} seconds: the kernel hangs")
    for bits, device in roots.values():
        device.copy_to_host(bits)
    return None


def _is_kernel(function):
    return hasattr(function, "py_func")


def _launch(kernel, grid=None, warps=1, shared=None, cluster=1, seed=None, **unknown):
    """(The launch that is meant, seed); what it cannot be is refused in tiles.launch's words."""
    if unknown:
        raise TypeError(
            f"run() got an unexpected keyword argument {min(unknown)!r}; a kernel takes its arguments in their order, "
            "and run grid, warps, shared, cluster and seed"
        )
    launch = Launch(kernel, cluster if grid is None else grid, 32 * warps, shared, None, cluster if cluster != 1 else None)
    check_shared_size(shared, INTERPRETER)
    return launch, seed


# ---- on the card ---------------------------------------------------------------------------------------------------
def _on_device(array, roots):
    """A view of a device copy of the array's root, with the array's offset, shape and strides."""
    root = base = array
    while base is not None:  # as_strided puts an object of its own between a view and its base
        root = base if isinstance(base, np.ndarray) else root
        base = getattr(base, "base", None)
    if id(root) not in roots:
        bits = root.view(f"u{root.itemsize}")  # Numba's copies know no bf16
        roots[id(root)] = bits, cuda.to_device(bits)
    device = roots[id(root)][1]
    data = device.gpu_data.view(array.ctypes.data - root.ctypes.data)
    return _View(array, DeviceNDArray(array.shape, array.strides, array.dtype, gpu_data=data))


class _View:
    """A Numba array with the strides that it was given: Numba takes one whose rows are all one for contiguous."""

    def __init__(self, array, view):
        self.view, self.shape, self.dtype = view, array.shape, array.dtype
        self.__cuda_array_interface__ = view.__cuda_array_interface__ | {"strides": array.strides}


AS_BITS = {
    bf16.np: ("int16", "bfloat16"),
    fp8e4m3.np: ("uint8", "float8_e4m3fn"),
}  # how they travel: torch and NumPy share these


def to_torch(x: np.ndarray):
    """A copy on the card."""
    import torch

    x = np.array(x, order="C")  # not ascontiguousarray, which makes an axis where there is none
    bits, name = AS_BITS.get(x.dtype, (x.dtype, ""))
    on_gpu = torch.from_numpy(x.view(bits)).cuda()
    return on_gpu.view(getattr(torch, name)) if name else on_gpu


def to_numpy(x) -> np.ndarray:
    """A torch tensor, brought back."""
    import torch

    for host_dtype, (bits, name) in AS_BITS.items():
        if x.dtype == getattr(torch, name):
            return x.view(getattr(torch, bits)).cpu().numpy().view(host_dtype)
    return x.cpu().numpy()


def _called_with_torch(function, args, named):
    """function(*args, **named) with torch's arrays on the card; what it wrote and what it returned comes back."""
    try:
        from torch import Tensor
    except ImportError:
        raise unittest.SkipTest("needs torch: on a GPU a function gets torch's arrays") from None
    keys = [*range(len(args)), *named]
    arguments_by_key = dict(zip(keys, [*args, *named.values()]))
    torch_arguments = {key: to_torch(a) if isinstance(a, np.ndarray) else a for key, a in arguments_by_key.items()}
    returned = function(*(torch_arguments[k] for k in range(len(args))), **{name: torch_arguments[name] for name in named})
    for key, array in arguments_by_key.items():
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = to_numpy(torch_arguments[key])

    def to_host(x):
        """torch's arrays as NumPy's, also those in tuples and lists."""
        if isinstance(x, tuple | list):
            items = map(to_host, x)
            return list(items) if isinstance(x, list) else tuple(items)
        return to_numpy(x) if isinstance(x, Tensor) else x

    return to_host(returned)
