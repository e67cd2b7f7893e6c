"""Launches that run in the interpreter: arrays in host memory as they are, arrays in device memory by a copy."""

import contextlib
import functools
import logging
import os

import numpy as np
from cuda.bindings import driver

from .arrays import numpy_view
from .device import check
from .interpreter import interpret
from .values import tensor

log = logging.getLogger(__name__)
_said: list[str] = []


def forced() -> bool:
    """Does TILES_INTERPRET send every launch to the interpreter?"""
    return os.environ.get("TILES_INTERPRET", "0") not in ("", "0")


class Interpreted:
    """A launch in the interpreter, called like a Bound one: `bound(stream, *addresses)`."""

    def __init__(self, launch, parameters, target):
        if launch.block[1:] != (1, 1):
            raise ValueError(f"{launch}: the interpreter takes blocks of one axis")
        self.launch, self.parameters, self.target = launch, parameters, target

    def prepare(self, stream: int, *addresses: int) -> functools.partial:
        """The same on this stream and with these addresses, to be called without arguments."""
        return functools.partial(self, stream, *addresses)

    def __call__(self, stream: int, *addresses: int) -> None:
        _announce(self.launch.title)
        arrays = [p.array for p in self.parameters if p.array is not None]
        if len(addresses) != len(arrays):
            raise TypeError(f"{self.launch} takes {len(arrays)} addresses, got {len(addresses)}")
        arrays = [array._replace(pointer=address) for array, address in zip(arrays, addresses)]
        with contextlib.ExitStack() as stack:
            if self.target is None:
                views = [numpy_view(array) for array in arrays]
            else:
                views = stack.enter_context(mirrored(self.target, stream, arrays))
            rest, args = iter(views), []
            for p in self.parameters:
                view = p.value if p.array is None else next(rest)
                args.append(_cut(view, p.value.spec) if p.encoding else view)
            seed = os.environ.get("TILES_SEED")
            launch, cluster = self.launch, self.launch.cluster or (1, 1, 1)
            interpret(launch.kernel, launch.grid, launch.block[0], args, launch.shared, int(seed) if seed else None, cluster)


def _cut(view, spec):
    return tensor(view, spec.tile, spec.rows, spec.cols, spec.unit)


@contextlib.contextmanager
def mirrored(target, stream, arrays):
    """NumPy copies of device arrays, which alias where the arrays do; what has changed at the end goes back. The stream is
    waited for first."""
    spans: list[list[int]] = []  # disjoint [start, end), ascending
    for start, end in sorted(filter(None, map(span, arrays))):
        if spans and start < spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([start, end])
    with target.current():
        check(driver.cuStreamSynchronize(stream))
        copies = {start: np.empty(end - start, np.uint8) for start, end in spans}
        for start, copy in copies.items():
            check(driver.cuMemcpyDtoH(copy.ctypes.data, start, copy.nbytes))
        before = {start: copy.copy() for start, copy in copies.items()}
        yield [_view(array, copies) for array in arrays]
        for start, copy in copies.items():
            changed = np.flatnonzero(copy != before[start])
            if changed.size:
                part = copy[changed[0] : changed[-1] + 1]
                check(driver.cuMemcpyHtoD(start + int(changed[0]), part.ctypes.data, part.nbytes))


def span(array):
    """[start, end) of the bytes that an array's elements lie in; None if it has none."""
    if 0 in array.shape:
        return None
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides)]
    return array.pointer + sum(r for r in reach if r < 0), array.pointer + sum(r for r in reach if r > 0) + array.form.itemsize


def _view(array, copies):
    dtype = np.dtype(array.dtype)
    if 0 in array.shape:
        return np.empty(array.shape, dtype)
    start = max(s for s in copies if s <= array.pointer)
    return np.ndarray(array.shape, dtype, copies[start], array.pointer - start, array.strides)


def _announce(title):
    if not _said:
        _said.append(title)
        log.warning("%s runs in the interpreter, slowly and under supervision; this is said once", title)
