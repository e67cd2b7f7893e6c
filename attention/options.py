"""Checks of options, which are all arguments but arrays. A check returns a plain Python value, so that equal options compare
equal, whatever types the caller used."""

from numbers import Real
from typing import Any

import numpy as np

SCALE_RANGE = (2.0**-120, 2.0**120)  # float32 holds such a scale, and the scale times log2(e)


def check_flag(name: str, value: Any) -> bool:
    """The value as a bool; NumPy's bools are taken. TypeError: it is something else."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: must be a bool: {name}={value!r}")


def check_number(name: str, value: Any) -> float | None:
    """The value as a float, or None. TypeError: it is no real number."""
    if value is None or type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: must be a number or None: {name}={value!r}")
    return float(value)


def check_positive(name: str, value: Any) -> float | None:
    """The value as a float, or None: a softcap, or the epsilon of a norm. TypeError: it is no real number. ValueError: it is
    not within SCALE_RANGE."""
    number = check_number(name, value)
    if number is not None and not SCALE_RANGE[0] <= number <= SCALE_RANGE[1]:
        raise ValueError(f"{name}: must be positive, and finite in float32: {name}={value!r}")
    return number


def split_norm(name: str, norm: Any) -> tuple[Any, Any]:
    """(weights, bias) of a norm: (norm, None) of an RMS norm, the pair itself of a layer norm. TypeError: a tuple is no pair,
    or has None in it."""
    if type(norm) is not tuple:  # an Operand is a tuple of another type
        return norm, None
    if len(norm) != 2 or any([x is None for x in norm]):
        raise TypeError(f"{name}: must be weights, or a pair (weights, bias): a tuple of {len(norm)}")
    return norm


def check_accumulators(arrays: dict[str, Any]) -> None:
    """TypeError: one of these arguments is no array that gradients can be added to."""
    for name, x in arrays.items():
        if x is None or x is True:
            raise TypeError(f"{name}: must be a float32 array with accumulate=True, got {name}={x}")
