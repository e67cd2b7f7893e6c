"""The derivatives of a score in Python, as another function in Python.

    def score_and_grad(s, b, h, i, j, caps):        # lambda s, b, h, i, j, caps: caps[h] * tanh(s / caps[h])
        t0 = caps[h]
        t1 = s / t0
        t2 = tanh(t1)
        ...
        return (t3, t6,)                            # the score, and its derivative by s

The function is run once, on terms that note what is done to them; the chain rule goes back through these, and what it finds is
written down as a function of the same arguments, for kernels to call where they call a score. A derivative by s that is 1, as
that of everything that adds to s, is known to be. So are the elements of arrays that a score reads, their indices and its
derivatives by them (`Read`): what is needed for the arrays' own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ops import exp, sigmoid, tanh, where

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
    normal = where(x == 0.0, 0.5, y / x)  # the share of a normal distribution that is below x
    return (g * (normal + x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))),)


def _gelu_tanh(g, y, x):
    t = tanh(SLOPE * (x + CUBIC * x * x * x))
    return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (SLOPE + 3 * SLOPE * CUBIC * x * x)),)


GRADIENT_RULES: dict[str, Callable] = {  # of y = f(x, ..) with the derivative g by y: those by x, ..
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


# ---- what follows ----------------------------------------------------------------------------------------------------
class AuxRead(NamedTuple):
    """A place at which a score reads an element of an array of aux. array: which array. place(b, h, i, j, *aux): the number of
    the element in C order, -1 if the index is outside. by(s, b, h, i, j, *aux): the score's derivative with respect to the
    element."""

    array: int
    place: Callable
    by: Callable


class Derivatives(NamedTuple):
    """The derivatives of a score. score_and_grad(s, b, h, i, j, *aux): (the score, its derivative with respect to s).
    even: is that derivative 1?"""

    score_and_grad: Callable
    linear: bool
    reads: tuple[AuxRead, ...]


def differentiate(score: Callable, axes: Sequence[int]) -> Derivatives:
    """The Derivatives of a score. axes: how many axes each array of aux has. TypeError: an operation of the score has no
    derivative here."""
    try:
        found = trace_function(score, axes, scored=True)
        slopes = _backpropagate(found.term)
        s, elements = found.arguments[0], [x for x in slopes if x.does == "element"]
        slope, names = slopes.get(s, 0.0), found.names
        if any([y is s for x in elements for y in subterms(*x.of)]):
            raise TypeError("reads an array where s says")
        number = {name: n - names.index("j") - 1 for n, name in enumerate(names)}
        reads = [
            AuxRead(number[x.of[0].does], build_function(names[1:], _element_index(*x.of)), build_function(names, slopes[x]))
            for x in elements
        ]
        return Derivatives(build_function(names, (found.term, slope)), _is_number(slope, 1), tuple(reads))
    except TypeError as error:
        raise TypeError(f"score: has no derivative: {score.__name__} {error}") from None


def _element_index(array: TracedArray, *index: Any) -> ScoreTerm:
    """The number of the element that an index names, -1 if it is outside."""
    flat: Any = ScoreTerm("mul", 0, array.shape[0])
    inside: Any = ScoreTerm("le", 0, array.shape[0])
    for extent, at in zip(array.shape, index):
        flat, inside = flat * extent + at, inside & (at >= 0) & (at < extent)
    return ScoreTerm("where", inside, flat, -1.0)


def _backpropagate(root: Any) -> dict[ScoreTerm, Any]:
    """The derivatives of a term with respect to those that it was made of, where there are any."""
    slopes: dict[ScoreTerm, Any] = {root: 1.0} if isinstance(root, ScoreTerm) else {}
    for y in reversed(subterms(root)):
        if y in slopes and y.moves and y.does not in ("s", "element"):
            for x, slope in zip(y.of, GRADIENT_RULES[y.does](slopes[y], y, *y.of)):
                if isinstance(x, ScoreTerm) and x.moves:
                    slopes[x] = _plus(slopes.get(x, 0.0), slope)
    return slopes
