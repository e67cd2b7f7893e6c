"""Symbolic tracing of mask and score functions: a function as terms, and functions built from terms.

    found = trace_function(lambda s, b, h, i, j, caps: caps[h] * tanh(s / caps[h]), (1,), is_score=True)
    found.term                                  # mul(element(caps, h), tanh(truediv(s, element(caps, h))))
    build_function(found.names, found.term.args[1])      # def built(s, b, h, i, j, aux0): t0 = aux0[h]; ...; return t2

The function is called once, with terms that record the operations on them. score_derivative.py applies the chain rule to them,
algebra.py looks for windows, ALiBi and scale factors among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import ops
from tiles.op import Op

NAME_LETTERS = str.maketrans(".-+", "___")  # characters of numbers that names cannot have
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
WITHOUT_GRADIENT = *COMPARISONS, *OP_NAMES, "and_", "or_", "invert", "extent"  # whose derivative is 0


class ScoreTerm:
    """An operation `op` on `args`, which are terms and numbers. number: in the order in which terms are made. has_gradient: may
    its derivative by the score, or by an element of an array, be other than 0?"""

    __array_ufunc__ = None  # so that `2 * term` of a NumPy number calls __rmul__
    __hash__ = object.__hash__
    numbers = itertools.count()

    def __init__(self, op: str, *args: Any):
        self.op, self.args, self.number = op, args, next(ScoreTerm.numbers)
        has_gradient = op not in WITHOUT_GRADIENT and any([x.has_gradient for x in args if isinstance(x, ScoreTerm)])
        self.has_gradient: bool = op in ("s", "element") or has_gradient

    def noted(self, operation: Op, args: tuple) -> ScoreTerm:
        """The term for an op of `ops` on terms (see tiles.op.Op)."""
        if getattr(ops, operation.name, None) is not operation.op_function and operation.name != "fp32":
            raise TypeError(f"calls {operation.name}, which has no derivative here")
        return args[0] if operation.name == "fp32" else ScoreTerm(OP_NAMES.get(operation.name, operation.name), *args)

    def __bool__(self):
        raise TypeError("converts a value to bool, which kernels cannot: choose with `where`, combine with & | ~")

    def __neg__(self):
        return ScoreTerm("neg", self)

    def __invert__(self):
        return ScoreTerm("invert", self)

    def __abs__(self):
        return ScoreTerm("abs", self)


for _name in OPERATORS:
    setattr(ScoreTerm, f"__{_name.strip('_')}__", lambda self, other, op=_name: ScoreTerm(op, self, other))
    if _name not in COMPARISONS:
        setattr(ScoreTerm, f"__r{_name.strip('_')}__", lambda self, other, op=_name: ScoreTerm(op, other, self))


class TracedArray(ScoreTerm):
    """An array of aux, with so many axes, in a function that is traced."""

    def __init__(self, name: str, axes: int):
        super().__init__(name)
        self.shape, self.ndim = tuple([ScoreTerm("extent", self, axis) for axis in range(axes)]), axes
        self.elements: dict[tuple, ScoreTerm] = {}  # {numbers of the indices: element}

    def __getitem__(self, index: Any) -> ScoreTerm:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise TypeError(f"reads an array of {self.ndim} axes by {len(index)} indices")
        key = tuple([("term", x.number) if isinstance(x, ScoreTerm) else x for x in index])
        return self.elements.setdefault(key, ScoreTerm("element", self, *index))

    def __iter__(self):
        raise TypeError("iterates over an array")


class TracedFunction(NamedTuple):
    """A traced function. term: its result. arguments: terms for its arguments."""

    term: Any
    arguments: tuple[ScoreTerm, ...]

    @property
    def names(self) -> list[str]:
        """The names of the function's arguments."""
        return [x.op for x in self.arguments]


def trace_function(function: Callable, axes: Sequence[int], is_score: bool) -> TracedFunction:
    """A mask or score function as terms. axes: how many axes each array of aux has. is_score: is it a score function?
    TypeError: it uses an operation that terms cannot express."""
    arguments = (
        *map(ScoreTerm, ("s", *POSITIONS) if is_score else POSITIONS),
        *(TracedArray(f"aux{n}", rank) for n, rank in enumerate(axes)),
    )
    try:
        return TracedFunction(function(*arguments), arguments)
    except (AttributeError, IndexError) as error:
        raise TypeError(str(error)) from None


def subterms(*roots: Any) -> list[ScoreTerm]:
    """The terms that these depend on, themselves included, in the order in which they were made."""
    terms: dict[int, ScoreTerm] = {}
    todo = [x for x in roots if isinstance(x, ScoreTerm)]
    while todo:
        x = todo.pop()
        if x.number not in terms:
            terms[x.number] = x
            todo += [y for y in x.args if isinstance(y, ScoreTerm)]
    return [terms[number] for number in sorted(terms)]


def build_function(names: Sequence[str], result: Any) -> Callable:
    """A Python function for kernels, with arguments of these names, that returns a term or a tuple of terms."""
    results = result if isinstance(result, tuple) else (result,)
    space: dict[str, Any] = {"__name__": __name__}
    names_of: dict[Any, str] = {}  # {term: the variable that holds it}
    lines: dict[str, str] = {}  # {expression: the variable that holds it}

    def text(x: Any) -> str:
        if isinstance(x, ScoreTerm):
            return names_of[x]
        if type(x) in (bool, int) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if not isinstance(x, (float, np.number)):
            raise TypeError(f"uses {x!r}, which is no number")
        name = f"c_{type(x).__name__}_{x}".translate(NAME_LETTERS)
        space[name] = x
        return name

    for x in subterms(*results):
        if not x.args:
            names_of[x] = x.op
            continue
        args = [text(y) for y in x.args]
        if x.op in OPERATORS:
            line = f"{args[0]} {OPERATORS[x.op]} {args[1]}"
        elif x.op in ("neg", "invert"):
            line = f"{'-' if x.op == 'neg' else '~'}{args[0]}"
        elif x.op == "element":
            line = f"{args[0]}[{', '.join(args[1:])}]"
        elif x.op == "extent":
            line = f"{args[0]}.shape[{args[1]}]"
        else:
            space[x.op] = getattr(ops, x.op)
            line = f"{x.op}({', '.join(args)})"
        names_of[x] = lines.setdefault(line, f"t{len(lines)}")
    returned = ", ".join(map(text, results))
    returned = f"({returned},)" if isinstance(result, tuple) else returned
    body = [f"{name} = {line}" for line, name in lines.items()]
    source = "\n    ".join([f"def built({', '.join(names)}):", *body, f"return {returned}"]) + "\n"
    space["__source__"] = source  # for the key of kernels that it becomes part of
    exec(compile(source, "<built>", "exec"), space)
    space["built"].__doc__ = source
    return space["built"]
