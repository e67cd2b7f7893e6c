"""Identifiers: the names of arguments, results and variables, none of which may be taken already."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Iterable
from typing import Any


def unused(name: str, used_names: Iterable[str]) -> str:
    """The name, with a number appended if it is taken."""
    number, candidate, used_names = 1, name, set(used_names)
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def identifiers(keys: Iterable[Any], used_names: Iterable[str]) -> tuple[str, ...]:
    """Identifiers for the keys of a dictionary of results: the keys, made valid where they are not, and with a number appended
    where Python or `used_names` has the name."""
    result = list[str]()
    for key in keys:
        word = unicodedata.normalize("NFKC", str(key))  # as Python reads it
        word = "".join([one if f"a{one}".isidentifier() else "_" for one in word])
        result.append(unused(word if word.isidentifier() else f"out_{word}", (*used_names, *result, *keyword.kwlist)))
    return tuple(result)


def array(name: str) -> str:
    """The kernel's parameter for the array that a variable is read from: gX for x."""
    return f"g{name[0].upper()}{name[1:]}"
