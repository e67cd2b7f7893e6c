"""How much code a kernel has, compared with others, before anybody compiles it: of several kernels that a call needs, the one
with the most code is compiled first (tiles/launching/loaded_code.py), as the linker takes longest for it."""

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from ..op import OPS

OP = 20  # Python's instructions that a call of an op counts for
NAMES, ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_DEREF"), ("LOAD_ATTR", "LOAD_METHOD")  # instructions that name a function or a module


@functools.cache
def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    return [(x.opname, x.argval) for x in dis.get_instructions(code)]


def estimate_size(kernel: Any) -> int:
    """The number of Python's instructions of a kernel, with those of its helpers at each place that names them, as they are
    inlined; 0 if it names what cannot be looked up."""
    with contextlib.suppress(Exception):
        return _count(kernel.py_func, {})
    return 0


def _count(function: Callable, known: dict[tuple, int]) -> int:
    """The number of instructions of a function or a method, with its helpers'. known: the numbers of others."""
    plain, receiver = (function.__func__, function.__self__) if isinstance(function, MethodType) else (function, None)
    key = plain, id(receiver)
    if key not in known:
        known[key] = 0  # for a function that calls itself
        known[key] = sum(1 + _count_inlined(value, known) for value in _named_values(plain, receiver))
    return known[key]


def _count_inlined(value: Any, known: dict[tuple, int]) -> int:
    """The number of instructions that the name of a value adds: those of a helper, OP for an op, else 0."""
    value = getattr(value, "py_func", value)
    if not isinstance(value, (FunctionType, MethodType)):
        return 0
    return OP if isinstance(value, FunctionType) and value in OPS else _count(value, known)


def _named_values(function: Callable, receiver: Any) -> Iterator[Any]:
    """For each instruction the value that it names, or None if that is not known before the kernel runs. `module.f` is two
    instructions, which name a module and a function. receiver: what a method belongs to."""
    code, value = function.__code__, None
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    for opname, argument in _instructions(code):
        if opname in NAMES:
            value = cells[argument].cell_contents if argument in cells else function.__globals__.get(argument)
        elif opname in ATTRIBUTES and value is not None:
            value = getattr(value, argument, None)
        else:
            value = receiver if opname.startswith("LOAD_FAST") and argument == "self" else None
        yield value
