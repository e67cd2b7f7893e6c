"""Checks of the values of arrays, and TILES_CHECK, which selects them.

Values in host memory are always checked. To read those in device memory a call must wait for its stream, so this is done only
on request. A schema (schema.py) says what an argument holds; this module says what values such an argument may have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import Form, host_copy, numpy_view

ARCHITECTURE = "sm_90a"  # for which kernels are typed at their first launch in the interpreter


class CheckOptions(NamedTuple):
    """types: the architecture for which Numba types a kernel at its first launch in the interpreter, or None. values: whether
    the values of arrays in device memory are checked, too."""

    types: str | None
    values: bool


def check_options() -> CheckOptions:
    """The CheckOptions that TILES_CHECK selects: docs/debugging.md has the table."""
    setting = os.environ.get("TILES_CHECK", "")
    if setting.startswith("sm_"):
        return CheckOptions(setting, False)
    if setting not in ("", "0", "1"):
        raise ValueError(f"TILES_CHECK must be 0, 1 or an architecture such as sm_80, got {setting!r}")
    return CheckOptions(None if setting == "0" else ARCHITECTURE, setting == "1")


WrongValue = tuple[Any, str] | None  # the index of a wrong value, and what it must be


class ValueRule(NamedTuple):
    """A condition on the values of an argument. wrong: a function of its elements and of the extents of axes that finds the
    first wrong one. remedy: what to pass instead."""

    wrong: Callable[[np.ndarray, Mapping[str, int]], WrongValue]
    remedy: str


def _above_0(values: np.ndarray, extents: Mapping[str, int]) -> WrongValue:
    above = np.argwhere(values > 0)
    return (above[0], "must not be above 0") if len(above) else None


def _no_ends(axis: str) -> Callable[[np.ndarray, Mapping[str, int]], WrongValue]:
    def wrong(ends: np.ndarray, extents: Mapping[str, int]) -> WrongValue:
        if ends[0] != 0:
            return (0,), "must begin at 0"
        down = np.flatnonzero(ends[1:] < ends[:-1])
        if down.size:
            return (down[0] + 1,), f"must ascend, and this comes after {ends[down[0]]}"
        if ends[-1] != extents[axis]:
            return (len(ends) - 1,), f"must end at {extents[axis]}, the length of all sequences together"
        return None

    return wrong


def _no_lengths(lengths: np.ndarray, extents: Mapping[str, int]) -> WrongValue:
    most = extents["seqlen_k"] * extents.get("pages_per_seq", 1)  # if there are pages, so many keys each
    outside = np.argwhere((lengths < 0) | (lengths > most))
    return (outside[0], f"must be from 0 to {most}") if len(outside) else None


LOG = ValueRule(
    _above_0,
    "it is the logarithm of what is kept: pass log(a) for a factor a from 0 to 1, "
    "or for what a layer projects a gate of attention.gates",
)
RATE = ValueRule(_above_0, "exp(dt * A) is what is kept: pass -exp(A_log)")
SUMS = "it says where the sequences end: pass 0 and the running sums of their lengths"
LENGTHS = "seqlen", "seqlen_q", "seqlen_k", "seqlen_new"  # axes of packed sequences (tiles/calls/axes.py)
ENDS, ENDS_Q, ENDS_K, ENDS_NEW = (ValueRule(_no_ends(axis), SUMS) for axis in LENGTHS)
KEY_LENGTHS = ValueRule(_no_lengths, "it says how many of a sequence's keys are in use: pass a number of those that it has")
KEY_STARTS = ValueRule(
    _no_lengths, "it says how many of a sequence's keys come before its first: pass a number of those that it has"
)


class Check:
    """A step of a program (program.py) that reads arrays and launches nothing. rows: for each array its name, its place among
    the addresses, its form, and the Values that it must have."""

    def __init__(self, rows: Sequence[tuple[str, int, Form, ValueRule]], extents: Mapping[str, int]):
        self.rows, self.extents = rows, extents

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """ValueError that names the argument, its value, and where it stands."""
        for name, place, form, (wrong, remedy) in self.rows:
            values = read(addresses[place], form, stream)
            cause = None if values is None or not values.size else wrong(values, self.extents)
            if cause:
                index, must = cause
                at = ", ".join(str(int(i)) for i in index)
                raise ValueError(f"{name}: {must}: {name}[{at}]={values[tuple(index)]}, {name}.shape={form.shape}; {remedy}")


def read(pointer: int, form: Form, stream: int) -> Any:
    """An array's elements; None while a CUDA graph is captured, because there are no values yet."""
    return numpy_view(pointer, form) if form.device is None else host_copy(pointer, form, stream)
