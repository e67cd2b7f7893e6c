"""Runs a kernel's own source on the CPU and stops at what the hardware would get wrong in silence.

The kernel language it accepts is what Numba accepts, seen by a whole warp: Python integers, floats, tuples, loops,
branches, tiles and ops; `cuda.blockIdx`, `gridDim`, `blockDim`, `syncthreads`; `threadIdx` and `laneid` as a value per
lane, which may be computed with but not branched on unless all 32 lanes agree. Global arrays are indexed by numbers that
are the same for the whole warp. `print` says which warp speaks.
"""
import builtins
import itertools
import types as python

import numpy as np
from greenlet import getcurrent
from numba import cuda

from ..layout import LANES
from .block import Block, Mbarrier, Named, Warp, seeded, span
from .shadow import Hazard

__all__ = ["Block", "Hazard", "Mbarrier", "Named", "Warp", "here", "interpret", "span"]


def here() -> Warp:
    """The warp that is running."""
    warp = getcurrent()
    if not isinstance(warp, Warp):
        raise RuntimeError("this op has a meaning only inside a kernel: run it with tiles.launch")
    return warp


def hazard_line():
    """The running warp and its line, as the end of a message; empty outside a kernel."""
    warp = getcurrent()
    return f"\n{warp}" if isinstance(warp, Warp) else ""


class Lanes:
    """A number per lane of the warp (cuda.threadIdx.x). A branch or an index may use it if all lanes agree."""

    __array_ufunc__ = None

    def __init__(self, values):
        self.values = np.asarray(values)

    def _uniform(self):
        if (self.values != self.values[0]).any():
            raise here().hazard(
                f"the lanes of this warp disagree ({self.values[0]} .. {self.values[-1]}): a branch or an index here would split the warp"
            )
        return self.values[0].item()

    __bool__ = lambda self: bool(self._uniform())
    __index__ = __int__ = lambda self: int(self._uniform())
    __float__ = lambda self: float(self._uniform())


for _op in "add sub mul floordiv mod and or xor lshift rshift eq ne lt le gt ge radd rsub rmul rfloordiv rmod".split():

    def _apply(self, other, name=f"__{_op}__"):
        return Lanes(getattr(self.values, name)(getattr(other, "values", other)))

    setattr(Lanes, f"__{_op}__", _apply)


class Cuda:
    """What `cuda` means inside an interpreted kernel."""

    laneid = property(lambda self: Lanes(np.arange(LANES)))
    threadIdx = property(lambda self: _xyz(Lanes(LANES * here().index + np.arange(LANES)), 0, 0))
    blockIdx = property(lambda self: _xyz(*here().block.index))
    gridDim = property(lambda self: _xyz(*here().block.grid))
    blockDim = property(lambda self: _xyz(LANES * here().block.size, 1, 1))

    def syncthreads(self):
        """Every thread of the block meets here."""
        block = here().block
        block.named(0, LANES * block.size).meet(here(), LANES * block.size)

    def __getattr__(self, name):
        raise here().hazard(f"cuda.{name} has no meaning for a whole warp; use tiles and ops")


def _xyz(x, y, z):
    return python.SimpleNamespace(x=x, y=y, z=z)


class Bounded(np.ndarray):
    """A global array that stops the kernel at an index outside it."""

    def __getitem__(self, index):
        return self._checked(super().__getitem__, index)

    def __setitem__(self, index, value):
        self._checked(super().__setitem__, index, value)

    def _checked(self, access, index, *value):
        if isinstance(getcurrent(), Warp):
            single = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Lanes) for i in single):
                index = tuple(int(i) if isinstance(i, Lanes) else i for i in single)
            if any(isinstance(i, int) and not 0 <= i < size for i, size in zip(single, self.shape)):
                raise here().hazard(f"index {index} is out of range for an array of shape {self.shape}")
        return access(index, *value)


def _say(*values, **options):
    builtins.print(f"[block {here().block.index}, warp {here().index}]", *values, **options)


def _rebind(function, seen):
    """The plain function with `cuda`, `print` and every cuda.jit helper in its globals and closure replaced in turn."""
    function = getattr(function, "py_func", function)
    if function in seen:
        return seen[function]

    def swap(value):
        if value is cuda:
            return Cuda()
        if hasattr(value, "py_func") or isinstance(value, python.FunctionType) and hasattr(value, "dispatcher"):
            return _rebind(value, seen)
        return value

    used = {n: function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__}
    space = {**function.__globals__, "print": _say, **{n: swap(v) for n, v in used.items()}}
    cells = tuple(python.CellType(swap(c.cell_contents)) for c in function.__closure__ or ())
    seen[function] = python.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    return seen[function]


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, python.CodeType):
            yield from _names(constant)


def interpret(kernel, grid, threads, args, shared=None, seed=None):
    """Run kernel[grid, threads](*args) here, block by block: NumPy arrays, tensors and numbers in, arrays written in place.

    grid: (x, y, z). threads: a multiple of 32. shared: the `tiles.shared` plan that the kernel opens. seed: None for the
    strict order (asynchronous work as late as possible), a number for a random one. Hazard: what went wrong, where."""
    if threads % LANES or not 0 < threads <= 1024:
        raise ValueError(f"threads: a multiple of {LANES} up to 1024, got {threads}")
    function, rng = _rebind(kernel, {}), seeded(seed)
    args = [np.float32(a) if isinstance(a, float) else a.view(Bounded) if isinstance(a, np.ndarray) else a for a in args]
    for z, y, x in itertools.product(*map(range, reversed(grid))):
        with np.errstate(all="ignore"):
            Block((x, y, z), grid, threads // LANES, shared, rng).run(function, args)
