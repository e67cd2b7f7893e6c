"""One test, three ways: a test is valid shapes, a reference in float64 and a device body, swept by `run`.

    def test_exp2(run, sample):
        @cuda.jit
        def body(x, y):                                       # the device body: registers from global memory and back
            store(y, exp2(load(x, rt(16, 64, fp32), (0, 0))), (0, 0))

        x, y = sample((16, 64)), blank((16, 64))
        run(body, x, y)
        close(y, np.exp2(wide(x)), ulp=2)

`run` is a fixture with three values: `meaning` (the interpreter: NumPy meanings under the sanitizer), `ptx` (compiled for
sm_90a, and what came of it executed by the emulator) and `gpu` (the card). Outputs start as NaN, inputs are fresh each time
from a seed that a failure prints, and NaN never passes unless the reference says NaN.

Sweeps are pairs, not products: each value of a parameter occurs, most pairs of neighbours occur, and the largest tile
occurs once. `pairs(xs, ys)` walks both lists at once until the longer ends.
"""

import itertools
import time

import numpy as np
import pytest
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray

import tiles
from tiles import bf16, emulator, fp16, fp32, interpreter, tensor
from tiles.arguments import parameter
from tiles.compiler import Lowered

REGISTERS = 255  # of a thread, at most
MARGIN, CANARY = 5, 96  # elements on every side of a guarded array; what they are
EPS = {fp32: 2.0**-23, fp16: 2.0**-10, bf16: 2.0**-7}  # from 1 to the next number
END = {fp32: 2.0**128 * (1 - 2.0**-25), fp16: 65520.0, bf16: 2.0**128 * (1 - 2.0**-9)}  # from here on: inf
TINY = {fp32: 2.0**-126, fp16: 2.0**-24, bf16: 2.0**-126}  # an error below this is none (fp32 units flush to 0)


def pairs(*lists):
    """Tuples that walk all lists at once, the shorter ones again and again."""
    longest = max(map(len, lists))
    return list(itertools.islice(zip(*map(itertools.cycle, lists), strict=False), longest))


def blank(shape, dtype=fp32):
    """An output: NaN everywhere."""
    return np.full(shape, np.nan, dtype.np)


def guarded(shape, dtype=fp32, order=None, step=1):
    """A NaN-filled array inside a larger one of canaries, its axes laid out in `order`, every `step`-th element used: the view,
    and a function that checks that nothing around it was touched."""
    order = order or range(len(shape))
    root = np.full([shape[a] * step + 2 * MARGIN for a in order], CANARY, dtype.np)
    view = root[tuple(slice(MARGIN, MARGIN + shape[a] * step, step) for a in order)].transpose(np.argsort(list(order)))
    outside = np.ones(root.shape, bool)
    outside[tuple(slice(MARGIN, MARGIN + shape[a] * step, step) for a in order)] = False
    before = root.copy()
    view[...] = np.nan

    def check():
        assert (root[outside] == before[outside]).all(), "memory around the array was written"

    return view, check


def roomy(shape, dtype, order=None, step=1):
    """A NaN-filled array whose address and strides are multiples of 16 bytes inside a larger one of canaries, its axes laid
    out in `order` (the last stays last), every `step`-th element of the others used; and a check of the canaries."""
    order = tuple(order or range(len(shape)))
    assert order[-1] == len(shape) - 1 and shape[-1] * dtype.itemsize % 16 == 0
    extents = [shape[a] * step + 2 for a in order[:-1]] + [shape[-1] + 32]
    memory = np.zeros(np.prod(extents) + 16, dtype.np)
    start = -memory.ctypes.data % 16 // dtype.itemsize
    root = memory[start : start + np.prod(extents)].reshape(extents)
    root[...] = CANARY
    place = tuple(slice(1, 1 + shape[a] * step, step) for a in order[:-1]) + (slice(16, 16 + shape[-1]),)
    view = root[place].transpose(np.argsort(order))
    view[...] = np.nan

    def check():
        kept, view[...] = view.copy(), CANARY
        untouched = (wide(memory[start : start + root.size]) == CANARY).all()
        untouched &= not wide(memory[:start]).any() and not wide(memory[start + root.size :]).any()
        view[...] = kept
        assert untouched, "memory around the array was written"

    return view, check


def wide(array):
    """The array in float64."""
    return np.asarray(array).astype(np.float64)


def close(got, want, ulp=0.0, atol=0.0, dtype=None):
    """|got - want| <= ulp units in the last place of the result's dtype (or `dtype`) + atol; inf and NaN where `want` has them
    or is too large."""
    dtype = dtype or tiles.dtypes.dtype_of(got)
    got, want = wide(got), np.broadcast_to(wide(want), np.shape(got))
    want = np.where(np.abs(want) >= END[dtype], np.copysign(np.inf, want), want)
    finite = np.isfinite(want)
    same = np.where(np.isnan(want), np.isnan(got), got == want)
    assert same[~finite].all(), _worst(got, want, ~finite & ~same)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 2.0**-149), where=finite, out=np.zeros(want.shape)))) * EPS[dtype]
    allowed = ulp * np.maximum(unit, TINY[dtype] * EPS[dtype]) + atol + (TINY[dtype] if np.any(ulp) else 0)
    wrong = finite & ~(np.abs(got - np.where(finite, want, 0)) <= allowed)
    assert not wrong.any(), _worst(got, want, wrong)


def _worst(got, want, wrong):
    at = np.argwhere(wrong)
    first = tuple(at[0])
    return f"{len(at)} of {got.size} elements, first at {first}: got {got[first]!r}, want {want[first]!r}" if len(at) else ""


# ---- backends ------------------------------------------------------------------------------------------------------
def meaning(kernel, *args, warps=1, shared=None, seed=None, blocks=1):
    """Run one block, or a cluster of `blocks`, in the interpreter."""
    interpreter.interpret(kernel, (blocks, 1, 1), 32 * warps, args, shared, seed, (blocks, 1, 1))


def ptx(kernel, *args, warps=1, shared=None, seed=None, blocks=1, arch="sm_90a"):
    """Compile for Hopper and run one block, or a cluster of `blocks`, as compiled, on the CPU; what it did is counted. Where
    the text has a wgmma, or more registers than a thread can have, machine code is made, too: nothing may lie in local
    memory, and ptxas may complain of nothing."""
    types = tuple(parameter(f"argument {k}", a).type for k, a in enumerate(args))
    lowered = Lowered(kernel, types, arch, lines=True)
    text = emulator.program(kernel, types, arch, lowered)
    if len(text.widths) > REGISTERS or any(at.opcode.startswith("wgmma") for at in text.code):
        found = lowered.machine_code()
        assert (found.local_bytes, found.spill_bytes, found.warnings) == (0, 0, [])
    return emulator.emulate(kernel, (blocks, 1, 1), 32 * warps, args, shared, seed, (blocks, 1, 1), arch, lowered)


def ways(counts, prefix=""):
    """How often at most one bank was asked for different words in a pass, by instructions whose opcodes begin so."""
    return {times for opcode, times in counts.ways.items() if opcode.startswith(prefix)}


def _on_device(array, roots):
    """The same view of a device copy of the array's root."""
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


PATIENCE = 10  # seconds
HUNG = []  # the kernel that hangs, if one does: nothing can run on the GPU any more, and waiting for it would hang as well


def gpu(kernel, *args, warps=1, shared=None, blocks=1):
    """Run one block, or a cluster of `blocks`, on the card, on copies of the arrays."""
    roots, given = {}, []
    for a in args:
        if isinstance(a, tensor):
            given.append(tensor(_on_device(a.array, roots), a.spec.tile, a.spec.rows, a.spec.cols, a.spec.unit))
        else:
            given.append(_on_device(a, roots) if isinstance(a, np.ndarray) else a)
    if HUNG:
        pytest.fail(f"the GPU is still busy with {HUNG[0]}, which hangs")
    tiles.launch(kernel, blocks, 32 * warps, shared=shared, cluster=blocks if blocks > 1 else None)(*given)
    done = cuda.event(timing=False)
    done.record()
    deadline = time.monotonic() + PATIENCE
    while not done.query():
        if time.monotonic() > deadline:
            HUNG.append(kernel.py_func.__qualname__)
            pytest.fail(f"not done after {PATIENCE} seconds: the kernel hangs")
    for bits, device in roots.values():
        device.copy_to_host(bits)


BACKENDS = {"meaning": meaning, "ptx": ptx, "gpu": gpu}
