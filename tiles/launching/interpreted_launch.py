"""Launches that run in the interpreter: arrays in host memory as they are, arrays in device memory by a copy."""

import contextlib
import contextvars
import functools
import logging
import os
import weakref

import numpy as np
from cuda.bindings import driver

from ..compiling.compiler import check_types
from ..interpreter import interpret
from ..values import tensor
from .arguments import group_values, parameter_names, parameters, types_of
from .arrays import ABSENT, Number, Operand, numpy_view
from .checks import check_options
from .devices import INTERPRETER, check

log = logging.getLogger(__name__)
_announced: list[str] = []
_runner: contextvars.ContextVar = contextvars.ContextVar("runner", default=None)
_typed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(types, architecture) that Numba accepts}


def interprets_all() -> bool:
    """Does TILES_INTERPRET send every launch to the CPU?"""
    return os.environ.get("TILES_INTERPRET", "0") not in ("", "0")


@contextlib.contextmanager
def run_by(run):
    """A context in which interpreted launches call run(kernel, grid, threads, args, shared, seed, cluster) instead of
    `interpret`."""
    token = _runner.set(run)
    try:
        yield
    finally:
        _runner.reset(token)


def _choose_runner():
    """The function that runs a kernel on the CPU, by TILES_INTERPRET: the interpreter its source, the emulator its PTX ("ptx",
    which is sm_90a's, or the name of an architecture)."""
    if run := _runner.get():
        return run
    setting = os.environ.get("TILES_INTERPRET", "0")
    if setting in ("", "0", "1"):
        return interpret
    if setting != "ptx" and not setting.startswith("sm_"):
        raise ValueError(f"TILES_INTERPRET must be 1, ptx or an architecture such as sm_80, got {setting!r}")
    from ..emulator import emulate

    return functools.partial(emulate, arch="sm_90a" if setting == "ptx" else setting)


class InterpretedLaunch:
    """A launch in the interpreter, called like a BoundLaunch: `bound(stream, *addresses)`.

    values: for each of the kernel's parameters (arguments.declared) a number, a Number, or an Operand and the spec of the tiles
    that its array is cut into."""

    def __init__(self, launch, values, gpu):
        if launch.block[1:] != (1, 1):
            raise ValueError(f"{launch}: the interpreter takes blocks of one axis")
        self.launch, self.values, self.gpu = launch, values, gpu
        self.count = sum(1 for value, _ in values if isinstance(value, Operand) and value.source != ABSENT)

    def __call__(self, stream: int, *addresses: int) -> None:
        if len(addresses) != self.count:
            raise TypeError(f"{self.launch} takes {self.count} addresses, got {len(addresses)}")
        self.run(stream, addresses)

    def run(self, stream: int, addresses, execute=None) -> None:
        """Run the kernel, with a sequence of addresses from which each array takes the one at its place (Operand.source).
        execute: runs the kernel in place of the interpreter; it takes the same arguments."""
        _announce(self.launch.title)
        operands = [value for value, _ in self.values if isinstance(value, Operand)]
        places = [(0 if value.source == ABSENT else addresses[value.source], value.form) for value in operands]
        self._check_memory(places)
        with contextlib.ExitStack() as stack:
            if self.gpu is None:
                views = [numpy_view(*place) for place in places]
            else:
                views = stack.enter_context(mirror_arrays(self.gpu, stream, places))
            rest, args = iter(views), []
            for value, spec in self.values:
                view = next(rest) if isinstance(value, Operand) else resolve_number(value, addresses)
                args.append(_tensor_over(view, spec) if spec and view is not None else view)
            args = group_values(self.launch.kernel, args)
            run = execute or _choose_runner()
            self._check(args, compiled=execute is None and run is not interpret)
            seed = os.environ.get("TILES_SEED")
            launch, cluster = self.launch, self.launch.cluster or (1, 1, 1)
            if run is interpret and launch.overlaps_previous:
                run = functools.partial(interpret, overlaps_previous=True)
            run(launch.kernel, launch.grid, launch.block[0], args, launch.shared, int(seed) if seed else None, cluster)

    def _check_memory(self, places):
        """ValueError: an array with elements lies nowhere, as a result does that the call neither passes nor allocates. A GPU
        would not tell, as long as the kernel does not touch it."""
        if all(address or not form.extent for address, form in places):
            return
        all_names = parameter_names(self.launch.kernel.py_func)
        names = [name for name, (value, _) in zip(all_names, self.values) if isinstance(value, Operand)]
        name, form = next((name, form) for name, (address, form) in zip(names, places) if form.extent and not address)
        raise ValueError(
            f"{self.launch.title}: {name} has no memory, but elements: shape={form.shape}; bind a parameter to None if the "
            "call has no array for it"
        )

    def _check(self, args, compiled):
        """Raise the errors of a GPU and its compiler: ValueError for too much shared memory, or Numba's own errors. compiled:
        is the kernel compiled before it runs, and so typed anyway?"""
        launch, gpu = self.launch, INTERPRETER if self.gpu is None else self.gpu
        check_shared_size(launch.shared, gpu)
        arch = check_options().types
        if arch is None or compiled:
            return
        types = types_of(launch.kernel, parameters(launch.kernel, args))
        known = _typed.setdefault(launch.kernel, set())
        if (types, arch) not in known:
            check_types(launch.kernel, types, arch)
            known.add((types, arch))


def resolve_number(value, addresses):
    """The value of a Number, which comes with the addresses; any other value as it is."""
    return addresses[value.source] if isinstance(value, Number) else value


def check_shared_size(shared, gpu):
    """ValueError: the kernel takes more shared memory than a block can have there."""
    if shared and shared.nbytes > gpu.shared_bytes:
        limit = f"{gpu} has {gpu.shared_bytes}; fewer stages or smaller tiles take less"
        raise ValueError(f"shared: {shared.nbytes} bytes a block, but {limit}")


def _tensor_over(view, spec):
    return tensor(view, spec.tile, spec.rows, spec.cols, spec.unit)


@contextlib.contextmanager
def mirror_arrays(gpu, stream, places):
    """NumPy copies of device arrays, each given as (address, form). They alias where the arrays do, and what has changed at the
    end is copied back. The stream is waited for first."""
    ranges: list[list[int]] = []  # disjoint [start, end), ascending
    for start, end in sorted(filter(None, (byte_range(*place) for place in places))):
        if ranges and start < ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([start, end])
    with gpu.current():
        check(driver.cuStreamSynchronize(stream))
        copies = {start: np.empty(end - start, np.uint8) for start, end in ranges}
        for start, copy in copies.items():
            check(driver.cuMemcpyDtoH(copy.ctypes.data, start, copy.nbytes))
        before = {start: copy.copy() for start, copy in copies.items()}
        yield [_view(*place, copies) for place in places]
        for start, copy in copies.items():
            changed = np.flatnonzero(copy != before[start])
            if changed.size:
                part = copy[changed[0] : changed[-1] + 1]
                check(driver.cuMemcpyHtoD(start + int(changed[0]), part.ctypes.data, part.nbytes))


def byte_range(pointer, form):
    """[start, end) of the bytes that an array's elements lie in; None if it has none."""
    if 0 in form.shape:
        return None
    reach = [(n - 1) * stride for n, stride in zip(form.shape, form.strides)]
    return pointer + sum(r for r in reach if r < 0), pointer + sum(r for r in reach if r > 0) + form.itemsize


def _view(pointer, form, copies):
    dtype = np.dtype(form.dtype)
    if 0 in form.shape:
        return np.empty(form.shape, dtype)
    start = max(s for s in copies if s <= pointer)
    return np.ndarray(form.shape, dtype, copies[start], pointer - start, form.strides)


def _announce(title):
    if not _announced:
        _announced.append(title)
        log.warning("%s runs in the interpreter, which is slow and checks every access (shown once)", title)
