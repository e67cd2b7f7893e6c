"""Masks and scores that are Python functions: by which name a call's plan knows them, and what they must give.

A plan is remembered by plain values, and torch's ops take nothing else: so a function goes by the digest of its code and of
what it names. An equal lambda, written twice, has the same name, and the kernel that was compiled for the first."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiles import static
from tiles.static import identity

if TYPE_CHECKING:
    from tiles.arrays import Form

TRIED = 4  # queries and keys that a function is tried on


@static
class _Function:
    """What a function is known by."""

    function: Callable


_KNOWN: dict[str, Callable] = {}


def named(option: str, function: Any) -> str | None:
    """The name of a function; None stays None. TypeError that names the option."""
    if function is None:
        return None
    if not inspect.isfunction(function):
        raise TypeError(f"{option}: must be a Python function, such as lambda b, h, i, j: j <= i: {option}={function!r}")
    name = f"{function.__name__} {identity(_Function(function))}"
    _KNOWN.setdefault(name, function)
    return name


def known(name: str | None) -> Callable | None:
    """The function of that name; None stays None."""
    return None if name is None else _KNOWN[name]


def reads(function: Callable, nth: int) -> bool:
    """Does the code of a function read its n-th argument, or pass it to a function within?"""
    code = function.__code__
    name = code.co_varnames[nth] if nth < code.co_argcount else None
    read = [x for at in dis.get_instructions(code) for x in (at.argval if isinstance(at.argval, tuple) else (at.argval,))]
    return name is None or name in code.co_cellvars or name in read


def evaluated(option: str, function: Callable, aux: Sequence[Form]) -> None:
    """Try a mask or score on a few places, with arrays of zeros like `aux`. TypeError that names the option: it cannot be
    called like that, a mask gives no truth values, a score no numbers, or either no array of queries by keys."""
    arrays = [np.broadcast_to(np.zeros((), np.dtype(form.dtype)), form.shape) for form in aux]
    i, j, s = np.zeros((TRIED, 1), int), np.zeros((1, TRIED), int), np.zeros((TRIED, TRIED), np.float32)
    called = f"{option}({'s, ' * (option == 'score')}b, h, i, j{''.join(f', aux{n}' for n in range(len(aux)))})"
    try:
        found = np.asarray(function(*([s] if option == "score" else []), 0, 0, i, j, *arrays))
        np.broadcast_to(found, s.shape)
    except Exception as error:
        raise TypeError(f"{option}: {called} fails on NumPy arrays: {type(error).__name__}: {error}") from error
    if (found.dtype == bool) != (option == "mask") or found.dtype.kind not in "bif":
        wanted = "truth values, such as j <= i" if option == "mask" else "numbers"
        raise TypeError(f"{option}: must give {wanted}; {called} gives {found.dtype}")
