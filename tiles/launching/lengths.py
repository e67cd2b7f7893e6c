"""Numbers that a planner computes with while it is watched, so that its plan for one call's lengths becomes a function of any.

    trace = Trace()
    n = trace.variable("n", 100)
    plan = planner(n)                     # plain Python, which asks n > 64, and makes pack("<q", 2 * n)
    again = trace.function("n", plan)     # def again(n): unless n > 64: None; else pack("<q", 2 * n)
    again(101)

A Length has the value of the present call and knows how it was computed. Arithmetic gives Lengths. A question (a comparison,
`if n`, int(n)) is answered for this call, and the answer is recorded. The function holds for all lengths with the same answers,
and returns None for others. So what a planner checks, refuses and chooses by a length needs no second description: the function
takes every turn that the planner took, or none.

A Length cannot be hashed, so no table can pass on what was found for another one (Untraceable). What cannot be watched, such as
struct.pack, or would be a long trace, such as a search, is called by `made` or decorated with `follows`: the function calls it
again.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

_VARIABLE = re.compile(r"\b[a-z]\d+\b")  # in an expression: a variable of a function, and no constant
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
ARITHMETIC |= {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
REFUSALS = ArithmeticError, TypeError, ValueError, struct.error  # of what a planner calls, for lengths that it does not take
QUESTIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Untraceable(TypeError):
    """A planner looks a length up in a table, where it cannot be watched."""


class Length:
    """A number, or what was made of one: its value in the call at hand, and the expression that gives it in any."""

    __slots__ = ("text", "trace", "value")
    __lt__: Callable[[Any, Any], bool]  # and other operators: see _define
    __floordiv__: Callable[[Any, Any], Any]
    __rfloordiv__: Callable[[Any, Any], Any]
    __mod__: Callable[[Any, Any], Any]
    __rmod__: Callable[[Any, Any], Any]

    def __init__(self, trace: Trace, value: Any, text: str):
        self.trace, self.value, self.text = trace, value, text

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        equal = self.trace.record_answer(self.value == _value(other), f"{self.text} == {self.trace.text(other)}")
        if equal and isinstance(other, Length):
            other.text = self.text  # from here on they are one
        elif equal:
            self.text = self.trace.text(other)
        return equal

    def fixed(self) -> Any:
        """Its value, in all calls that the function is to hold for."""
        value = self.value
        self.trace.record_answer(True, f"{self.text} == {self.trace.text(value)}")
        self.text = self.trace.text(value)
        return value

    def __bool__(self) -> bool:
        return self != 0

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    __index__ = __int__

    def __hash__(self) -> int:
        raise Untraceable("lengths cannot be looked up in a table; int(length) makes a plan for this one alone")

    def __neg__(self) -> Any:
        return self.trace.computed(-self.value, f"-{self.text}")

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __floor__(self) -> Any:
        return watched_call(math.floor, self)

    def __ceil__(self) -> Any:
        return watched_call(math.ceil, self)

    def __round__(self, digits: int | None = None) -> Any:
        return watched_call(round, self, digits)

    def __repr__(self) -> str:
        return f"{self.text}={self.value}"


def _define(name: str, sign: str) -> None:
    compute = getattr(operator, f"__{name}__")

    def forward(self, other):
        trace = self.trace
        return trace.computed(compute(self.value, _value(other)), f"{self.text} {sign} {trace.text(other)}")

    def reflected(self, other):
        trace = self.trace
        return trace.computed(compute(other, self.value), f"{trace.text(other)} {sign} {self.text}")

    def ask(self, other):
        trace = self.trace
        return trace.record_answer(compute(self.value, _value(other)), f"{self.text} {sign} {trace.text(other)}")

    if name in QUESTIONS:
        setattr(Length, f"__{name}__", ask)
    else:
        setattr(Length, f"__{name}__", forward)
        setattr(Length, f"__r{name}__", reflected)


for _name, _sign in (ARITHMETIC | QUESTIONS).items():
    _define(_name, _sign)


class Trace:
    """One run of a planner that is watched."""

    def __init__(self):
        self.lines: list[tuple[str, str]] = []  # (variable, what it is), or ("", what must be true), in order
        self.names: dict[str, str] = {}  # what was computed before: the variable that has it
        self.answers: set[str] = set()
        self.constants: dict[str, Any] = {}
        self.known: dict[int, str] = {}  # the constants' names, by their identity

    def variable(self, name: str, value: int) -> Length:
        """A number that the function is given: a letter and digits."""
        return Length(self, value, name)

    def computed(self, value: Any, text: str) -> Any:
        """What an expression gives: a Length, or if no variable is left in it, the value."""
        if not _VARIABLE.search(text):
            return value
        name = self.names.get(text)
        if name is None:
            name = self.names[text] = f"v{len(self.names)}"
            self.lines.append((name, text))
        return Length(self, value, name)

    def record_answer(self, answer: bool, question: str) -> bool:
        """A question about lengths, answered: the function holds where the answer is the same."""
        said = question if answer else f"not {question}"
        if said not in self.answers and _VARIABLE.search(question):
            self.answers.add(said)
            self.lines.append(("", said))
        return answer

    def text(self, x: Any) -> str:
        """The expression that gives x, which may be a tuple or list with Lengths in it."""
        if isinstance(x, Length):
            return x.text
        if type(x) is int:
            return repr(x) if x >= 0 else f"({x})"
        if not _trace_of(x):
            name = self.known.setdefault(id(x), f"C{len(self.known)}")
            self.constants[name] = x  # which keeps the identity its own
            return name
        items = "".join(f"{self.text(item)}, " for item in x)
        if type(x) is list:
            return f"[{items}]"  # and what calls of a class of named tuples do, without the call
        return f"({items})" if type(x) is tuple else f"{self.text(tuple.__new__)}({self.text(type(x))}, ({items}))"

    def function(self, parameter: str, result: Any) -> Callable[[Any], Any]:
        """The function of `parameter`, variables in an order and nesting as they come, that gives such a result; or None, where
        lengths are not like those of this run, or what it calls refuses them."""
        return _function("lengths", [f"{parameter} = lengths"], self.lines, self.text(result), self.constants)

    def narrowed(self, free: Sequence[str], fixed: dict[str, int], result: Any) -> Callable[..., Any] | None:
        """The same function of the variables `free` alone, those that are `fixed` having these values: what follows from them
        is computed now. None: it gives nothing for them."""
        gives = self.text(result)  # which may add to the constants
        space, known, lines = {**self.constants}, dict(fixed), []

        def filled(text: str) -> str:
            return _VARIABLE.sub(lambda found: literal(found[0]) if found[0] in known else found[0], text)

        def literal(name: str) -> str:
            value = known[name]
            if type(value) is int:
                return repr(value) if value >= 0 else f"({value})"
            space[f"F{name}"] = value
            return f"F{name}"

        for name, text in self.lines:
            if all([one in known for one in _VARIABLE.findall(text)]):
                try:
                    value = eval(text, space, known)
                except REFUSALS:
                    return None
                if name:
                    known[name] = value
                elif not value:
                    return None
            else:
                lines.append((name, filled(text)))
        return _function(", ".join(free), [], lines, filled(gives), space)


def _function(parameters: str, first: list[str], lines: list[tuple[str, str]], result: str, constants: dict[str, Any]) -> Any:
    """What Trace.function gives, of lines of a trace."""
    used, body = {*_VARIABLE.findall(result)}, []
    for name, text in reversed(lines):
        if not name or name in used:
            used.update(_VARIABLE.findall(text))
            body.append(f"{name} = {text}" if name else f"if not ({text}): return None")
    written = "\n        ".join([*first, *reversed(body), f"return {result}"])
    source = f"def function({parameters}):\n    try:\n        {written}\n    except refusals:\n        return None\n"
    space = {**constants, "refusals": REFUSALS}
    exec(compile(source, "<lengths>", "exec"), space)
    return space["function"]


def _value(x: Any) -> Any:
    """The value of x in the call at hand."""
    if isinstance(x, Length):
        return x.value
    if not _trace_of(x):
        return x
    values = [_value(item) for item in x]
    return values if type(x) is list else tuple(values) if type(x) is tuple else type(x)(*values)


def _trace_of(x: Any) -> Trace | None:
    """The trace of the Lengths in x, if there are any."""
    if isinstance(x, Length):
        return x.trace
    if isinstance(x, (tuple, list)):
        return next((trace for trace in map(_trace_of, x) if trace), None)
    return None


def watched_call(function: Callable, *args: Any) -> Any:
    """function(*args), or where Lengths are among these, in tuples and lists, too, a Length that has this value. The function
    must depend on nothing else, and change nothing."""
    trace = _trace_of(args)
    if trace is None:
        return function(*args)
    text = "".join(f"{trace.text(x)}, " for x in args)
    return trace.computed(function(*map(_value, args)), f"{trace.text(function)}({text})")


def follows(function: Callable) -> Callable:
    """A function of numbers whose result follows from the lengths among them: see `made`."""
    return functools.wraps(function)(functools.partial(watched_call, function))
