"""The table of elementwise maps: what each means in NumPy and in torch, and how a kernel writes it.

    "silu": ElementwiseMap(1, numpy=..., torch=..., form="silu({})")

In a proof a map is an opaque function unless `field` names an operation of a field of numbers (algebra/identity.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tiles import bf16, fp8e4m3, fp16, fp32, int8

SQRT_2 = math.sqrt(2.0)
FP8 = "float8_e4m3fn"
BYTES = {FP8: fp8e4m3, "int8": int8}  # dtypes of one byte, of weights and of casts
CASTS = {"fp32": fp32, "bf16": bf16, "fp16": fp16} | {str(d): d for d in BYTES.values()}  # maps that round


class ElementwiseMap(NamedTuple):
    """A function of elements. arity: its number of arguments. numpy: its meaning. torch: the name of torch's function. form:
    how a kernel writes it, with a gap for each argument. field: the name of the same operation in a field of numbers
    (algebra/identity.py), "" if there is none."""

    arity: int
    numpy: Callable
    torch: str
    form: str
    field: str = ""


def _sigmoid(x):
    with np.errstate(over="ignore"):  # exp(-x) is infinite where the sigmoid is 0
        return 1 / (1 + np.exp(-x))


def _gelu(x):
    return x * 0.5 * (1 + _erf(x / SQRT_2))


_erf = np.vectorize(math.erf, otypes=[float])


def _call(name: str, numpy: Callable, torch: str = "", arity: int = 1, field: str = "") -> ElementwiseMap:
    return ElementwiseMap(arity, numpy, torch or name, f"{name}({', '.join(['{}'] * arity)})", field)


MAPS = {
    "add": ElementwiseMap(2, np.add, "add", "{} + {}", "add"),
    "sub": ElementwiseMap(2, np.subtract, "sub", "{} - {}", "sub"),
    "mul": ElementwiseMap(2, np.multiply, "mul", "{} * {}", "mul"),
    "div": ElementwiseMap(2, np.divide, "div", "{} / {}", "div"),
    "neg": ElementwiseMap(1, np.negative, "neg", "-{}", "neg"),
    "less": ElementwiseMap(2, np.less, "lt", "less({}, {})"),
    "less_equal": ElementwiseMap(2, np.less_equal, "le", "less_equal({}, {})"),
    "greater": ElementwiseMap(2, np.greater, "gt", "greater({}, {})"),
    "greater_equal": ElementwiseMap(2, np.greater_equal, "ge", "greater_equal({}, {})"),
    "where": _call("where", np.where, arity=3),
    "maximum": _call("maximum", np.maximum, arity=2),
    "minimum": _call("minimum", np.minimum, arity=2),
    "exp": _call("exp", np.exp, field="exp"),
    "exp2": _call("exp2", np.exp2),
    "log": _call("log", np.log),
    "sqrt": _call("sqrt", np.sqrt),
    "rsqrt": _call("rsqrt", lambda x: 1 / np.sqrt(x)),
    "tanh": _call("tanh", np.tanh),
    "sigmoid": _call("sigmoid", _sigmoid),
    "silu": _call("silu", lambda x: x * _sigmoid(x), "nn.functional.silu"),
    "gelu": _call("gelu", _gelu, "nn.functional.gelu"),
    "relu": _call("relu", lambda x: np.maximum(x, 0), "relu"),
    "abs": _call("abs", np.abs),
}
MAPS["widened"] = ElementwiseMap(1, lambda x: x, "", "widened({})", "same")  # bytes as the 16-bit dtype of other arrays
MAPS |= {
    name: ElementwiseMap(1, dtype.round, "", f"fp32({name}({{}}))", "same" * (dtype is fp32)) for name, dtype in CASTS.items()
}


def of_torch(name: str) -> Any:
    """The torch function of a map."""
    import torch

    function: Any = torch
    for part in MAPS[name].torch.split("."):
        function = getattr(function, part)
    return function
