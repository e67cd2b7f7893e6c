"""An array's form, all of it but its address, and what follows from that alone: where its elements lie among each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  makes "bfloat16" a name that np.dtype knows
import numpy as np

FORMS = 4096  # how many forms are remembered; a forgotten one is only slower, never wrong


@dataclass(frozen=True, eq=False)
class Form:
    """All of an array but its address: shape, strides (bytes), dtype's name, CUDA ordinal (None: host memory).

    Forms are interned by `form`, so they hash and compare by identity: a validated call is found by one cheap lookup.
    `extent` is how many bytes lie between the lowest element's start and the highest's end; 0 if there is none.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    itemsize: int
    extent: int


@lru_cache(FORMS)
def form(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int | None, itemsize: int) -> Form:
    """The one Form of these values (strides in bytes)."""
    reach = sum((n - 1) * abs(stride) for n, stride in zip(shape, strides))
    return Form(shape, strides, dtype, device, itemsize, 0 if 0 in shape else reach + itemsize)


def c_ordered(shape: tuple[int, ...], dtype: str, device: int | None) -> Form:
    """The form of a C-ordered array."""
    size = np.dtype(dtype).itemsize
    return form(shape, contiguous(shape, size), dtype, device, size)


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-ordered array."""
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides[: len(shape)]))


def overlaps_itself(form: Form) -> bool:
    """Whether two indices may name the same byte: an axis steps less than what the axes inside it cover."""
    covered = form.itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(form.shape, form.strides) if n > 1):
        if stride < covered:
            return form.extent > 0
        covered += stride * (n - 1)
    return False


@lru_cache(FORMS)
def elements_meet(a: Form, b: Form, distance: int) -> bool:
    """Whether a byte belongs to elements of both, where b's first element lies `distance` bytes behind a's. True if that is
    too hard to decide. Strides must not be negative."""
    start = 1 << 50  # any address: NumPy solves for equal addresses and reads nothing
    first, second = raw(start, a), raw(start + distance, b)
    try:
        return np.shares_memory(first, second, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def raw(pointer: int, form: Form, readonly: bool = True, owner: Any = None) -> np.ndarray:
    """The elements at an address, as bytes of no type; keeps `owner` alive as long as the view lives."""
    return np.asarray(_Memory(pointer, form, readonly, owner))


class _Memory:
    """What np.asarray takes an address from."""

    def __init__(self, pointer: int, form: Form, readonly: bool, owner: Any):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": form.shape,
            "strides": form.strides,
            "typestr": f"|V{form.itemsize}",
            "data": (pointer or 16, readonly),  # an empty array may lie nowhere; NumPy 2.2 takes 0 for no address at all
        }
