"""What functions are told besides arrays, made plain: equal options then mean the same."""

import functools
import inspect
import re
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable)
THEIRS = {  # what flash-linear-attention and mamba_ssm call what we have under another name
    **dict.fromkeys(("output_final_state", "return_final_states", "return_final_state"), "return_state"),
    **dict.fromkeys(("g", "gk", "g_gamma", "log_decay"), "decay"),
    **dict.fromkeys(("initial_states", "h0"), "initial_state"),
    **dict.fromkeys(("sm_scale", "softmax_scale"), "scale"),
    **dict.fromkeys(("use_norm", "use_normalize"), "normalize"),
    "return_state": "return_final_states",
    "initial_state": "initial_states",
    "output_final_states": "return_final_states",
    "layer_idx": "layer",
    "num_layers": "layers",
    "feature_map_q": "q_map",
    "feature_map_k": "k_map",
    "head_first": 'layout="bhsd"',
    "use_qk_l2norm_in_kernel": "what q and k are: divide them by their norms before",
    "dt_limit": "always (0, inf): clamp dt before",
    "return_varlen_states": "return_final_states with cu_seqlens",
}
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


def by_other_names(function: F) -> F:
    """Decorator: a call that uses one of THEIRS is told what it is here. What is right costs a call more, and no check."""

    @functools.wraps(function)
    def call(*args, **given):
        try:
            return function(*args, **given)
        except TypeError as error:
            unknown = re.match(rf"{function.__qualname__}\(\) got an unexpected keyword argument '(\w+)'", str(error))
            ours = THEIRS.get(unknown[1]) if unknown else None
            if ours is None or (ours.isidentifier() and ours not in inspect.signature(function).parameters):
                raise
            raise TypeError(f"{error}; here that is {ours}") from None

    return cast(F, call)
