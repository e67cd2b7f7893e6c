"""What functions are told besides arrays, made plain: equal options then mean the same."""

from numbers import Real
from typing import Any

import numpy as np

SCALES = (2.0**-120, 2.0**120)  # float32 holds the scale, and the scale times log2(e)


def flag(name: str, value: Any) -> bool:
    """A bool, NumPy's included. TypeError that names the option."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: must be a bool: {name}={value!r}")


def number(name: str, value: Any) -> float | None:
    """A float, or None. TypeError that names the option."""
    if value is None or type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: must be a number or None: {name}={value!r}")
    return float(value)


def positive(name: str, value: Any) -> float | None:
    """A softcap, or what a norm adds; TypeError, ValueError."""
    found = number(name, value)
    if found is not None and not SCALES[0] <= found <= SCALES[1]:
        raise ValueError(f"{name}: must be positive, and finite in float32: {name}={value!r}")
    return found


def norm_parts(name: str, norm: Any) -> tuple[Any, Any]:
    """(weights, bias) of a norm, None for what there is not; TypeError."""
    if type(norm) is not tuple:  # an Operand is one of another kind
        return norm, None
    if len(norm) != 2 or any([x is None for x in norm]):
        raise TypeError(f"{name}: must be weights, or a pair (weights, bias): a tuple of {len(norm)}")
    return norm
