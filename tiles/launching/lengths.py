"""Lengths: numbers that record how a planner computes with them, so that its plan for one call becomes a function of all
lengths.

    trace = Trace()
    n = trace.variable("n", 100)
    plan = planner(n)                     # plain Python, which compares n > 64, and makes pack("<q", 2 * n)
    again = trace.function("n", plan)     # def again(n): unless n > 64: None; else pack("<q", 2 * n)
    again(101)

A Length has the value of the present call and knows how it was computed. Arithmetic gives Lengths. A condition on lengths (a
comparison, `if n`, int(n)) has its outcome in this call, which is recorded as a guard. The function serves all lengths for
which all guards hold, and returns None for others. So the planner's checks and choices by lengths are written once: the
function takes the same branches as the planner, or returns None.

A Length cannot be hashed (Untraceable), so no table can return a value computed for another length. A function that cannot be
traced, such as struct.pack, or whose trace would be long, such as a search, is called by `watched_call` or decorated with
`watched_function`: the generated function calls it again."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

_VARIABLE = re.compile(r"\b[a-z]\d+\b")  # in an expression: a variable of a function, and no constant
_OPERAND = r"([a-z]\d+|\d+|\(-\d+\))"
_OPERATION = re.compile(rf"(-?){_OPERAND}(?: (\+|-|\*|//) {_OPERAND})?")  # an expression of one operation
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
ARITHMETIC |= {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
REFUSALS = (
    ArithmeticError,
    TypeError,
    ValueError,
    struct.error,
)  # errors of functions that a planner calls, for lengths that these do not take
RESULTS = 1024  # that a watched function keeps
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Untraceable(TypeError):
    """A planner looks a length up in a table, which a Trace cannot record."""


class Length:
    """A number computed from lengths: its value in the current call, and the expression that computes it in any call."""

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
        equal = self.trace.record_guard(self.value == _value(other), f"{self.text} == {self.trace.text(other)}")
        if equal and isinstance(other, Length):
            other.text = self.text  # equal from now on
        elif equal:
            self.text = self.trace.text(other)
        return equal

    def fix(self) -> Any:
        """The value, recorded as a guard: the function serves only calls in which it is the same."""
        value = self.value
        self.trace.record_guard(True, f"{self.text} == {self.trace.text(value)}")
        self.text = self.trace.text(value)
        return value

    def __bool__(self) -> bool:
        return self != 0

    def __int__(self) -> int:
        return int(self.fix())

    def __float__(self) -> float:
        return float(self.fix())

    __index__ = __int__

    def __hash__(self) -> int:
        raise Untraceable("lengths cannot be looked up in a table; int(length) makes a plan for this one alone")

    def __neg__(self) -> Any:
        return self.trace.compute(-self.value, f"-{self.text}")

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
        return trace.compute(compute(self.value, _value(other)), f"{self.text} {sign} {trace.text(other)}")

    def reflected(self, other):
        trace = self.trace
        return trace.compute(compute(other, self.value), f"{trace.text(other)} {sign} {self.text}")

    def compare(self, other):
        trace = self.trace
        return trace.record_guard(compute(self.value, _value(other)), f"{self.text} {sign} {trace.text(other)}")

    if name in COMPARISONS:
        setattr(Length, f"__{name}__", compare)
    else:
        setattr(Length, f"__{name}__", forward)
        setattr(Length, f"__r{name}__", reflected)


for _name, _sign in (ARITHMETIC | COMPARISONS).items():
    _define(_name, _sign)


class Trace:
    """The record of one run of a planner."""

    def __init__(self):
        self.lines: list[tuple[str, str]] = []  # (variable, expression), or ("", condition), in order
        self.names: dict[str, str] = {}  # {expression: the variable that holds it}
        self.guards: set[str] = set()
        self.integers: set[str] = set()  # the variables that are ints
        self.constants: dict[str, Any] = {}
        self.known: dict[int, str] = {}  # the constants' names, by their identity

    def variable(self, name: str, value: int) -> Length:
        """An argument of the function. name: a letter and digits."""
        self.integers.add(name)
        return Length(self, value, name)

    def compute(self, value: Any, text: str) -> Any:
        """The value of an expression: a Length, or if it contains no variable, the number."""
        if not _VARIABLE.search(text):
            return value
        name = self.names.get(text)
        if name is None:
            name = self.names[text] = f"v{len(self.names)}"
            self.lines.append((name, text))
            if type(value) is int:
                self.integers.add(name)
        return Length(self, value, name)

    def record_guard(self, outcome: bool, condition: str) -> bool:
        """Record the outcome of a condition on lengths as a guard: the function serves calls with the same outcome."""
        guard = condition if outcome else f"not {condition}"
        if guard not in self.guards and _VARIABLE.search(condition):
            self.guards.add(guard)
            self.lines.append(("", guard))
        return outcome

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
        """The function of `parameter`, a pattern of nested variables, that returns such a result; it returns None
        for lengths for which a guard of this run does not hold, or which a function that it calls refuses."""
        return _function("lengths", [f"{parameter} = lengths"], self.lines, self.text(result), self.constants)

    def specialize(self, free: Sequence[str], fixed: dict[str, int], result: Any) -> Callable[..., Any] | None:
        """The recorded function, of the variables `free` alone; `fixed`: the values of the others, whose expressions are
        computed now. None: the function returns None for these values."""
        result_text = self.text(result)  # which may add to the constants
        space, known, lines = {**self.constants}, dict(fixed), []
        same: dict[str, str] = {}  # {variable, or expression: the variable that has its value}
        multiples = {name: (1, name) for name in self.integers}  # {variable: see _as_multiple}
        guards: set[str] = set()

        def substitute(text: str) -> str:
            return _VARIABLE.sub(lambda match: literal(match[0]) if match[0] in known else same.get(match[0], match[0]), text)

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
            elif name:
                text = substitute(text)
                if multiple := _as_multiple(text, multiples):
                    factor, variable = multiples[name] = multiple
                    if factor == 0:
                        known[name] = 0
                        continue
                    if factor == 1:
                        same[name] = variable
                        continue
                    text = f"{self.text(factor)} * {variable}"
                same[name] = same.setdefault(text, name)
                if same[name] == name:
                    lines.append((name, text))
            elif (guard := substitute(text)) not in guards:
                guards.add(guard)
                lines.append(("", guard))
        return _function(", ".join(free), [], lines, substitute(result_text), space)


def _as_multiple(text: str, multiples: dict[str, tuple[int, str]]) -> tuple[int, str] | None:
    """(a number, a variable) whose product an expression of one operation is, None if that is not known. multiples: the same of
    each variable that is an int. So all sizes of arrays that are multiples of one length take an operation each."""
    if not (parsed := _OPERATION.fullmatch(text)):
        return None
    minus, left, sign, right = parsed.groups()
    operands = [multiples.get(x) if x[0].isalpha() else (int(x.strip("()")), "") for x in (left, right) if x]
    if None in operands:
        return None
    (a, x), (b, y) = operands[0], operands[-1]  # type: ignore[misc]
    a = -a if minus else a
    if not sign:
        return (a, x) if minus else None
    if sign == "*":
        return None if x and y else (a * b, x or y)
    if sign == "//":
        return None if y or not b or a % b else (a // b, x)
    return (a + b if sign == "+" else a - b, x or y) if x == y or not a or not b else None


_CALL = re.compile(r"(C\d+)\((.*), \)")  # as `watched_call` writes it: of a constant
_NUMBERS, _CODES = re.compile(r"<[^sp]+"), re.compile(r"(\d*)(\D)")  # a struct's format: of numbers that lie close together


def _function(
    parameters: str, unpacking: list[str], lines: list[tuple[str, str]], result: str, constants: dict[str, Any]
) -> Any:
    """The function that Trace.function returns, generated from lines of a trace."""
    used, body, space = {*_VARIABLE.findall(result)}, [], {**constants, "refusals": REFUSALS}
    for name, text in reversed(lines):
        if not name or name in used:
            used.update(_VARIABLE.findall(text))
            body.append(f"{name} = {_fold_pack(text, space)}" if name else f"if not ({text}): return None")
    written = "\n        ".join([*unpacking, *reversed(body), f"return {result}"])
    source = f"def function({parameters}):\n    try:\n        {written}\n    except refusals:\n        return None\n"
    exec(compile(source, "<lengths>", "exec"), space)
    return space["function"]


def _fold_pack(text: str, space: dict[str, Any]) -> str:
    """The expression; if it calls a struct.Struct's pack, one with neighbouring constants packed to bytes, which enters its
    Struct into the space. Two in three numbers of a parameter block are constants, and packing a number takes 16 to 50 ns."""
    call = _CALL.fullmatch(text)
    packer = call and getattr(space[call[1]], "__self__", None)
    if not isinstance(packer, struct.Struct) or not _NUMBERS.fullmatch(packer.format):
        return text
    arguments, items = iter(call[2].split(", ")), []  # type: ignore[index]
    for count, code in _CODES.findall(packer.format[1:]):
        items += [(code, "" if code == "x" else next(arguments)) for _ in range(int(count or 1))]
    codes, left = packer.format[0], list[str]()
    for varies, group in itertools.groupby(items, lambda item: _VARIABLE.fullmatch(item[1]) is not None):
        run, values = zip(*group)
        if not varies and any(values):
            constant = struct.pack(packer.format[0] + "".join(run), *[eval(value, space) for value in values if value])
            run, values = (f"{len(constant)}s",), (repr(constant),)
        codes, left = codes + "".join(run), [*left, *filter(None, values)]
    name = f"P{len(space)}"
    space[name] = struct.Struct(codes).pack
    return f"{name}({', '.join(left)})"


def _value(x: Any) -> Any:
    """The value of x in the current call."""
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
    return trace.compute(function(*map(_value, args)), f"{trace.text(function)}({text})")


def watched_function(function: Callable) -> Callable:
    """Decorator: the function of numbers is not traced, but called again by the generated function: see `watched_call`. What it
    returned for the last RESULTS numbers is looked up, so that arguments that many lengths share, such as a number of chunks,
    cost a new length no search."""
    return functools.wraps(function)(functools.partial(watched_call, functools.lru_cache(RESULTS)(function)))
