"""The derivatives of a score in Python, as another function in Python.

    def bent(s, b, h, i, j, caps):                  # lambda s, b, h, i, j, caps: caps[h] * tanh(s / caps[h])
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

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import ops
from ops import exp, sigmoid, tanh, where
from tiles.op import Op

LN_2 = math.log(2)
LETTERS = str.maketrans(".-+", "___")  # what stands in numbers, and in names does not
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)  # of gelu_tanh
PLACES = "b", "h", "i", "j"
SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "and_": "&", "or_": "|"}
SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Term:
    """What a function does with its arguments: `does` to `of`, which are terms and numbers. number: terms are made of those
    with lower ones. moves: has it a derivative, by the score or by an element of an array?"""

    __array_ufunc__ = None  # NumPy's numbers leave `2 * term` to us
    __hash__ = object.__hash__
    numbers = itertools.count()

    def __init__(self, does: str, *of: Any):
        self.does, self.of, self.number = does, of, next(Term.numbers)
        moving = does not in EVEN and any([x.moves for x in of if isinstance(x, Term)])
        self.moves: bool = does in ("s", "element") or moving

    def noted(self, operation: Op, args: tuple) -> Term:
        """An op of it (see Op)."""
        if getattr(ops, operation.name, None) is not operation.face and operation.name != "fp32":
            raise TypeError(f"calls {operation.name}, of which nobody knows the derivative")
        return args[0] if operation.name == "fp32" else Term(operation.name, *args)

    def __bool__(self):
        raise TypeError("decides by a value that kernels alone know: choose with `where`, combine with & | ~")

    def __neg__(self):
        return Term("neg", self)

    def __invert__(self):
        return Term("invert", self)

    def __abs__(self):
        return Term("abs", self)


for _name in SIGNS:
    setattr(Term, f"__{_name.strip('_')}__", lambda self, other, does=_name: Term(does, self, other))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Term, f"__r{_name.strip('_')}__", lambda self, other, does=_name: Term(does, other, self))


class Array(Term):
    """An array of so many axes that the function reads."""

    def __init__(self, name: str, axes: int):
        super().__init__(name)
        self.shape, self.ndim = tuple([Term("extent", self, axis) for axis in range(axes)]), axes
        self.elements: dict[tuple, Term] = {}  # by the numbers of their indices

    def __getitem__(self, index: Any) -> Term:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise TypeError(f"reads an array of {self.ndim} axes by {len(index)} indices")
        said = tuple([("term", x.number) if isinstance(x, Term) else x for x in index])
        return self.elements.setdefault(said, Term("element", self, *index))

    def __iter__(self):
        raise TypeError("goes through the elements of an array")


# ---- the chain rule --------------------------------------------------------------------------------------------------
def _plus(x: Any, y: Any) -> Any:
    return y if _is(x, 0) else x if _is(y, 0) else x + y


def _times(x: Any, y: Any) -> Any:
    if _is(x, 0) or _is(y, 0):
        return 0.0
    return y if _is(x, 1) else x if _is(y, 1) else x * y


def _is(x: Any, value: float) -> bool:
    return not isinstance(x, Term) and x == value


def _gelu(g, y, x):
    normal = where(x == 0.0, 0.5, y / x)  # the share of a normal distribution that is below x
    return (g * (normal + x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))),)


def _gelu_tanh(g, y, x):
    t = tanh(SLOPE * (x + CUBIC * x * x * x))
    return (g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (SLOPE + 3 * SLOPE * CUBIC * x * x)),)


BACK: dict[str, Callable] = {  # of y = f(x, ..) with the derivative g by y: those by x, ..
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
EVEN = "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert", "extent", *(f.__name__ for f in (
    ops.less, ops.less_equal, ops.greater, ops.greater_equal, ops.equal, ops.not_equal))  # fmt: skip  # have no slope anywhere


# ---- what follows ----------------------------------------------------------------------------------------------------
class Read(NamedTuple):
    """An element of the array-th array that a score reads. place(b, h, i, j, *aux) says which, counted from the first one in
    the order of C; -1 where the index lies outside. by(s, b, h, i, j, *aux) is the score's derivative by it."""

    array: int
    place: Callable
    by: Callable


class Derivatives(NamedTuple):
    """Of a score. bent(s, b, h, i, j, *aux): (the score, its derivative by s). even: is that derivative 1?"""

    bent: Callable
    even: bool
    reads: tuple[Read, ...]


def derivatives(score: Callable, axes: Sequence[int]) -> Derivatives:
    """Of a score that reads arrays of so many axes. TypeError: it does what has no derivative here."""
    s, *places = (Term(name) for name in ("s", *PLACES))
    arrays = [Array(f"aux{n}", rank) for n, rank in enumerate(axes)]
    try:
        found = score(s, *places, *arrays)
        slopes = _back(found)
    except (TypeError, AttributeError, IndexError) as error:
        raise TypeError(f"score: has no derivative: {score.__name__} {error}") from None
    names = [*PLACES, *(x.does for x in arrays)]
    slope = slopes.get(s, 0.0)
    elements = [x for x in slopes if x.does == "element"]
    for x in elements:
        if any(y.does == "s" for y in _below(*x.of)):
            raise TypeError(f"score: has no derivative: {score.__name__} reads an array where s says")
    number = {x.does: n for n, x in enumerate(arrays)}
    reads = [Read(number[x.of[0].does], _written(names, _place(*x.of)), _written(["s", *names], slopes[x])) for x in elements]
    return Derivatives(_written(["s", *names], (found, slope)), _is(slope, 1), tuple(reads))


def _place(array: Array, *index: Any) -> Term:
    """Which element of an array an index says; -1 for none."""
    flat: Any = Term("mul", 0, array.shape[0])
    inside: Any = Term("le", 0, array.shape[0])
    for extent, at in zip(array.shape, index):
        flat, inside = flat * extent + at, inside & (at >= 0) & (at < extent)
    return Term("where", inside, flat, -1.0)


def _below(*roots: Any) -> list[Term]:
    """These and all that they are made of, in the order in which they were made."""
    found: dict[int, Term] = {}
    todo = [x for x in roots if isinstance(x, Term)]
    while todo:
        x = todo.pop()
        if x.number not in found:
            found[x.number] = x
            todo += [y for y in x.of if isinstance(y, Term)]
    return [found[number] for number in sorted(found)]


def _back(root: Any) -> dict[Term, Any]:
    """The derivatives of a term by those that it was made of, and have any."""
    slopes: dict[Term, Any] = {root: 1.0} if isinstance(root, Term) else {}
    for y in reversed(_below(root)):
        if y in slopes and y.moves and y.does not in ("s", "element"):
            for x, slope in zip(y.of, BACK[y.does](slopes[y], y, *y.of)):
                if isinstance(x, Term) and x.moves:
                    slopes[x] = _plus(slopes.get(x, 0.0), slope)
    return slopes


def _written(names: Sequence[str], result: Any) -> Callable:
    """A function of arguments of these names that gives a term, or a tuple of terms."""
    results = result if isinstance(result, tuple) else (result,)
    space: dict[str, Any] = {"__name__": __name__}
    said: dict[Any, str] = {}  # by term
    lines: dict[str, str] = {}  # what is said by each name

    def text(x: Any) -> str:
        if isinstance(x, Term):
            return said[x]
        if type(x) in (bool, int) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if not isinstance(x, (float, np.number)):
            raise TypeError(f"score: has no derivative: it counts with {x!r}")
        name = f"c_{type(x).__name__}_{x}".translate(LETTERS)
        space[name] = x
        return name

    for x in _below(*results):
        if not x.of:
            said[x] = x.does
            continue
        of = [text(y) for y in x.of]
        if x.does in SIGNS:
            line = f"{of[0]} {SIGNS[x.does]} {of[1]}"
        elif x.does in ("neg", "invert"):
            line = f"{'-' if x.does == 'neg' else '~'}{of[0]}"
        elif x.does == "element":
            line = f"{of[0]}[{', '.join(of[1:])}]"
        elif x.does == "extent":
            line = f"{of[0]}.shape[{of[1]}]"
        else:
            space[x.does] = getattr(ops, x.does)
            line = f"{x.does}({', '.join(of)})"
        said[x] = lines.setdefault(line, f"t{len(lines)}")
    found = ", ".join(map(text, results))
    found = f"({found},)" if isinstance(result, tuple) else found
    body = [f"{name} = {line}" for line, name in lines.items()]
    source = "\n    ".join([f"def derivative({', '.join(names)}):", *body, f"return {found}"]) + "\n"
    exec(compile(source, "<derivative>", "exec"), space)
    space["derivative"].__doc__ = source
    return space["derivative"]
