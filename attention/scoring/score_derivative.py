"""Derivatives of a score function, as other functions that kernels call.

    def score_and_grad(s, b, h, i, j, caps):        # lambda s, b, h, i, j, caps: caps[h] * tanh(s / caps[h])
        t0 = caps[h]
        t1 = s / t0
        t2 = tanh(t1)
        ...
        return (t3, t6,)                            # the score, and its derivative by s

The function is traced once (symbolic.py); the chain rule goes back through the terms, and the results are built as functions of
the same arguments, which kernels call in place of the score. A derivative by s that is 1, as of any term added to s, is
recognised. For gradients of the arrays of aux there are also the elements that a score reads, their indices, and its
derivatives by them (`AuxRead`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ops import exp, sigmoid, tanh, where

from ..parts.scores import ScoreModWithGrad
from .symbolic import ScoreTerm, TracedArray, build_function, subterms, trace_function

LN_2 = math.log(2)
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # of gelu_tanh


# ---- the chain rule --------------------------------------------------------------------------------------------------
def _plus(x: Any, y: Any) -> Any:
    return y if _is_number(x, 0) else x if _is_number(y, 0) else x + y


def _times(x: Any, y: Any) -> Any:
    if _is_number(x, 0) or _is_number(y, 0):
        return 0.0
    return y if _is_number(x, 1) else x if _is_number(y, 1) else x * y


def _is_number(x: Any, value: float) -> bool:
    return not isinstance(x, ScoreTerm) and x == value


def _gelu(g, y, x):
    normal = where(x == 0.0, 0.5, y / x)  # the normal distribution function of x
    return (g * (normal + x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))),)


def _gelu_tanh(g, y, x):
    t = tanh(SLOPE * (x + CUBIC * x * x * x))
    return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (SLOPE + 3 * SLOPE * CUBIC * x * x)),)


GRADIENT_RULES: dict[
    str, Callable
] = {  # {op: (g, y, *args) -> the derivatives by args}, for y = op(*args) with the derivative g by y
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, _times(-1.0, g)),
    "mul": lambda g, y, a, b: (_times(g, b), _times(g, a)),
    "product": lambda g, y, a, b: (_times(g, b), _times(g, a)),
    "truediv": lambda g, y, a, b: (g / b, _times(-1.0, g) * y / b),
    "floordiv": lambda g, y, a, b: (0.0, 0.0),
    "mod": lambda g, y, a, b: (g, _times(-1.0, g) * (a // b)),
    "neg": lambda g, y, x: (_times(-1.0, g),),
    "where": lambda g, y, mask, a, b: (0.0, where(mask, g, 0.0), where(mask, 0.0, g)),
    "maximum": lambda g, y, a, b: (where(a >= b, g, 0.0), where(a >= b, 0.0, g)),
    "minimum": lambda g, y, a, b: (where(a <= b, g, 0.0), where(a <= b, 0.0, g)),
    "fma": lambda g, y, a, b, c: (_times(g, b), _times(g, a), g),
    "exp2": lambda g, y, x: (_times(g, LN_2 * y),),
    "exp": lambda g, y, x: (_times(g, y),),
    "log2": lambda g, y, x: (g / (LN_2 * x),),
    "log": lambda g, y, x: (g / x,),
    "abs": lambda g, y, x: (where(x > 0.0, g, where(x < 0.0, _times(-1.0, g), 0.0)),),
    "relu": lambda g, y, x: (where(x > 0.0, g, 0.0),),
    "sqrt": lambda g, y, x: (_times(g, 0.5) / y,),
    "rsqrt": lambda g, y, x: (_times(g, -0.5 * y * y * y),),
    "reciprocal": lambda g, y, x: (_times(g, -y * y),),
    "tanh": lambda g, y, x: (_times(g, 1.0 - y * y),),
    "sigmoid": lambda g, y, x: (_times(g, y * (1.0 - y)),),
    "silu": lambda g, y, x: (_times(g, sigmoid(x) + y * (1.0 - sigmoid(x))),),
    "softplus": lambda g, y, x: (_times(g, sigmoid(x)),),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


# ---- the derivatives ---------------------------------------------------------------------------------------------------
class AuxRead(NamedTuple):
    """A read of an element of an array of aux. array: the array's number. element_index(b, h, i, j, *aux): the index of the
    element in C order, -1 if it is out of range. gradient(s, b, h, i, j, *aux): the score's derivative by the element."""

    array: int
    element_index: Callable
    gradient: Callable


class Derivatives(NamedTuple):
    """The derivatives of a score. score_and_grad(s, b, h, i, j, *aux): (the score, its derivative with respect to s).
    linear: is that derivative 1?"""

    score_and_grad: Callable
    linear: bool
    reads: tuple[AuxRead, ...]


@functools.lru_cache(256)
def differentiate(score: Callable, axes: tuple[int, ...]) -> Derivatives:
    """The Derivatives of a score function. axes: how many axes each array of aux has. TypeError: an operation of the score has
    no derivative here."""
    try:
        traced = trace_function(score, axes, is_score=True)
        grads = _backpropagate(traced.term)
        s, elements = traced.arguments[0], [x for x in grads if x.op == "element"]
        grad, names = grads.get(s, 0.0), traced.names
        if any([y is s for x in elements for y in subterms(*x.args)]):
            raise TypeError("indexes an array by s")
        number = {name: n - names.index("j") - 1 for n, name in enumerate(names)}
        reads = [
            AuxRead(number[x.args[0].op], build_function(names[1:], _element_index(*x.args)), build_function(names, grads[x]))
            for x in elements
        ]
        return Derivatives(build_function(names, (traced.term, grad)), _is_number(grad, 1), tuple(reads))
    except TypeError as error:
        raise TypeError(f"score: has no derivative: {score.__name__} {error}") from None


def scored_with_grad(score: Callable, axes: tuple[int, ...], signed_distance: bool) -> ScoreModWithGrad:
    """The variant for a score function in gradients, where it does not matter whether no query sees a key after its own
    position (`signed_distance`)."""
    derivatives = differentiate(score, axes)
    return ScoreModWithGrad(score, derivatives.score_and_grad, derivatives.linear)


def _element_index(array: TracedArray, *index: Any) -> ScoreTerm:
    """The index in C order of an element, -1 if it is out of range."""
    flat: Any = ScoreTerm("mul", 0, array.shape[0])
    inside: Any = ScoreTerm("le", 0, array.shape[0])
    for extent, at in zip(array.shape, index):
        flat, inside = flat * extent + at, inside & (at >= 0) & (at < extent)
    return ScoreTerm("where", inside, flat, -1.0)


def _backpropagate(root: Any) -> dict[ScoreTerm, Any]:
    """{subterm: the derivative of the term by it}, where it is not 0."""
    grads: dict[ScoreTerm, Any] = {root: 1.0} if isinstance(root, ScoreTerm) else {}
    for y in reversed(subterms(root)):
        if y in grads and y.has_gradient and y.op not in ("s", "element"):
            for x, grad in zip(y.args, GRADIENT_RULES[y.op](grads[y], y, *y.args)):
                if isinstance(x, ScoreTerm) and x.has_gradient:
                    grads[x] = _plus(grads.get(x, 0.0), grad)
    return grads
