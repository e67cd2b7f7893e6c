"""What kernels are swept over: shapes and dtypes, and outputs in which a missing or a stray write shows."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..dtypes import dtype, fp32, int8

CANARY = 96  # what lies around a guarded array
MARGIN, ROOM = 5, 16  # elements of it on every side; where it must be aligned, along the last axis


def pairs(*lists: Iterable) -> list[tuple]:
    """Tuples that walk all lists at once, repeating the shorter ones: for pytest.mark.parametrize. Each value occurs, and most
    pairs of neighbours. A full product would only take longer."""
    columns = list(map(list, lists))
    longest = max(map(len, columns))
    return list(itertools.islice(zip(*map(itertools.cycle, columns), strict=False), longest))


def blank(shape: int | tuple[int, ...], dtype: dtype = fp32) -> np.ndarray:
    """An output: NaN everywhere, or -128 where there is no NaN, so that what nobody writes does not pass."""
    return np.full(shape, _unwritten(dtype), dtype.np)


def _unwritten(dtype: dtype) -> float:
    """The number of an element that nobody has written."""
    return -128 if dtype is int8 else np.nan


def guarded(
    shape: Sequence[int], dtype: dtype = fp32, order: Sequence[int] | None = None, step: int = 1, aligned: bool = False
) -> tuple[np.ndarray, Callable[[], None]]:
    """(An output like `blank`'s inside a larger array, a function that asserts that nothing around it was written.)

    order: how its axes are laid out, the outermost first; by default as they are. step: only every step-th element is used.
    aligned: its address and strides are multiples of 16 bytes, and the last axis stays innermost, its elements adjacent."""
    order = tuple(order or range(len(shape)))
    last = len(shape) - 1
    steps, margins = [step] * len(shape), [MARGIN] * len(shape)
    if aligned:
        if order[-1] != last or shape[last] * dtype.itemsize % 16:
            raise ValueError(f"aligned: {shape=} of {dtype} in {order=} has no rows of multiples of 16 bytes")
        steps[last], margins = 1, [step] * last + [ROOM]
    extents = [shape[a] * steps[a] + 2 * margins[a] for a in order]
    memory = np.zeros(int(np.prod(extents)) + 16, dtype.np)
    start = -memory.ctypes.data % 16 // dtype.itemsize
    root = memory[start : start + int(np.prod(extents))].reshape(extents)
    place = tuple(slice(margins[a], margins[a] + shape[a] * steps[a], steps[a]) for a in order)
    view = root[place].transpose(np.argsort(order))
    root[...] = CANARY
    before = memory.copy().view(f"u{dtype.itemsize}")
    view[...] = _unwritten(dtype)

    def check():
        copy = view.copy()
        view[...] = CANARY
        untouched = np.array_equal(memory.view(before.dtype), before)
        view[...] = copy
        assert untouched, "memory around the array was written"

    return view, check
