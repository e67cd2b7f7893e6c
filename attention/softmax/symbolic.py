"""What a mask or a score in Python does, as terms; and functions written of terms.

    found = traced(lambda s, b, h, i, j, caps: caps[h] * tanh(s / caps[h]), (1,), scored=True)
    found.term                                  # mul(element(caps, h), tanh(truediv(s, element(caps, h))))
    written(found.names, found.term.of[1])      # def written(s, b, h, i, j, aux0): t0 = aux0[h]; ...; return t2

The function is run once, on terms that note what is done to them. score_derivative.py follows the chain rule through them,
algebra.py looks for what is built in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import ops
from tiles.op import Op

NAME_LETTERS = str.maketrans(".-+", "___")  # what stands in numbers, and in names does not
POSITIONS = "b", "h", "i", "j"
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "and_": "&", "or_": "|"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
OPERATORS |= COMPARISONS
OP_NAMES = {
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}  # as ops
WITHOUT_GRADIENT = *COMPARISONS, *OP_NAMES, "and_", "or_", "invert", "extent"  # which have no slope anywhere


class ScoreTerm:
    """What a function does with its arguments: `does` to `of`, which are terms and numbers. number: terms are made of those
    with lower ones. moves: has it a derivative, by the score or by an element of an array?"""

    __array_ufunc__ = None  # NumPy's numbers leave `2 * term` to us
    __hash__ = object.__hash__
    numbers = itertools.count()

    def __init__(self, does: str, *of: Any):
        self.does, self.of, self.number = does, of, next(ScoreTerm.numbers)
        moving = does not in WITHOUT_GRADIENT and any([x.moves for x in of if isinstance(x, ScoreTerm)])
        self.moves: bool = does in ("s", "element") or moving

    def noted(self, operation: Op, args: tuple) -> ScoreTerm:
        """An op of it (see Op)."""
        if getattr(ops, operation.name, None) is not operation.face and operation.name != "fp32":
            raise TypeError(f"calls {operation.name}, of which nobody knows the derivative")
        return args[0] if operation.name == "fp32" else ScoreTerm(OP_NAMES.get(operation.name, operation.name), *args)

    def __bool__(self):
        raise TypeError("decides by a value that kernels alone know: choose with `where`, combine with & | ~")

    def __neg__(self):
        return ScoreTerm("neg", self)

    def __invert__(self):
        return ScoreTerm("invert", self)

    def __abs__(self):
        return ScoreTerm("abs", self)


for _name in OPERATORS:
    setattr(ScoreTerm, f"__{_name.strip('_')}__", lambda self, other, does=_name: ScoreTerm(does, self, other))
    if _name not in COMPARISONS:
        setattr(ScoreTerm, f"__r{_name.strip('_')}__", lambda self, other, does=_name: ScoreTerm(does, other, self))


class TracedArray(ScoreTerm):
    """An array of aux in a function that is traced; it has so many axes."""

    def __init__(self, name: str, axes: int):
        super().__init__(name)
        self.shape, self.ndim = tuple([ScoreTerm("extent", self, axis) for axis in range(axes)]), axes
        self.elements: dict[tuple, ScoreTerm] = {}  # by the numbers of their indices

    def __getitem__(self, index: Any) -> ScoreTerm:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise TypeError(f"reads an array of {self.ndim} axes by {len(index)} indices")
        said = tuple([("term", x.number) if isinstance(x, ScoreTerm) else x for x in index])
        return self.elements.setdefault(said, ScoreTerm("element", self, *index))

    def __iter__(self):
        raise TypeError("goes through the elements of an array")


class TracedFunction(NamedTuple):
    """A function as terms of its arguments."""

    term: Any
    arguments: tuple[ScoreTerm, ...]

    @property
    def names(self) -> list[str]:
        """The names of its arguments."""
        return [x.does for x in self.arguments]


def trace_function(function: Callable, axes: Sequence[int], scored: bool) -> TracedFunction:
    """A mask or a score as terms. axes: how many axes each array of aux has. scored: is it a score? TypeError: it does
    something that terms cannot express."""
    arguments = (
        *map(ScoreTerm, ("s", *POSITIONS) if scored else POSITIONS),
        *(TracedArray(f"aux{n}", rank) for n, rank in enumerate(axes)),
    )
    try:
        return TracedFunction(function(*arguments), arguments)
    except (AttributeError, IndexError) as error:
        raise TypeError(str(error)) from None


def subterms(*roots: Any) -> list[ScoreTerm]:
    """All terms that these are made of, themselves included, in the order in which they were made."""
    found: dict[int, ScoreTerm] = {}
    todo = [x for x in roots if isinstance(x, ScoreTerm)]
    while todo:
        x = todo.pop()
        if x.number not in found:
            found[x.number] = x
            todo += [y for y in x.of if isinstance(y, ScoreTerm)]
    return [found[number] for number in sorted(found)]


def build_function(names: Sequence[str], result: Any) -> Callable:
    """A function of kernel code, with arguments of these names, that returns a term or a tuple of terms."""
    results = result if isinstance(result, tuple) else (result,)
    space: dict[str, Any] = {"__name__": __name__}
    said: dict[Any, str] = {}  # by term
    lines: dict[str, str] = {}  # what is said by each name

    def text(x: Any) -> str:
        if isinstance(x, ScoreTerm):
            return said[x]
        if type(x) in (bool, int) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if not isinstance(x, (float, np.number)):
            raise TypeError(f"counts with {x!r}")
        name = f"c_{type(x).__name__}_{x}".translate(NAME_LETTERS)
        space[name] = x
        return name

    for x in subterms(*results):
        if not x.of:
            said[x] = x.does
            continue
        of = [text(y) for y in x.of]
        if x.does in OPERATORS:
            line = f"{of[0]} {OPERATORS[x.does]} {of[1]}"
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
    source = "\n    ".join([f"def written({', '.join(names)}):", *body, f"return {found}"]) + "\n"
    exec(compile(source, "<written>", "exec"), space)
    space["written"].__doc__ = source
    return space["written"]
