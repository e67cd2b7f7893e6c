"""Masks and scores that are Python functions: by which name a call's plan knows them, and what they must give.

A plan is remembered by plain values, and torch's ops take nothing else: so a function goes by the digest of its code and of
what it names. An equal lambda, written twice, has the same name, and the kernel that was compiled for the first."""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import index
from types import CellType
from typing import TYPE_CHECKING, Any

import numpy as np

import ops
from tiles import static
from tiles.calls.torch_op import imported_module, is_compiling
from tiles.static import identity

if TYPE_CHECKING:
    from tiles.launching.arrays import Form

EXAMPLES = {"mask": "lambda b, h, i, j: j <= i", "score": "lambda s, b, h, i, j: s + j - i"}
LIBRARIES = "cupy", "jax", "numpy", "scipy", "torch"  # whose functions take arrays, but no tiles of a kernel
REMEDIES = {  # {words of an error of Python or NumPy: the remedy}
    "truth value of an array": "it has no `if`, `and`, `or`, `not` and no a < b < c: say & | ~ and where",
    "converted to Python scalars": "the functions of math take numbers: use those of ops, exp, log, sqrt, tanh, ...",
    "used as indices must be of integer": "index by whole numbers: i, j, b, h, arrays of integers, and what "
    "+ - * // % abs and minimum, maximum and where of ops make of these",
}
TRIAL_SIZE = 4  # queries and keys of a trial call of a function


@static
class _Function:
    """The identity of a Python function: functions that are equal in code and captured values are the same."""

    function: Callable


_FUNCTIONS: dict[str, Callable] = {}
_SINGLE_USE: deque[str] = deque()  # names of functions that serve one call each; the oldest are forgotten
_COUNTER = count()
MAX_SINGLE_USE = 1 << 16  # such names are kept, for the backward passes of a step


def register_function(option: str, function: Any) -> str | None:
    """The name under which a function is registered, None for None. TypeError: it is no function that kernels can use; the
    error names the option."""
    if function is None:
        return None
    in_graph = is_compiling()
    return _register(option, function, _captured_values(option, function) if in_graph else (), in_graph)


def _dynamo_hashes_floats() -> bool:
    """Can Dynamo hash a float that has become a symbol? (torch before 2.13 can only hash its text.)"""
    return tuple(int(part) for part in imported_module("torch").__version__.split(".")[:2]) >= (2, 13)


_dynamo_hashes_floats._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _captured_values(option: str, function: Any) -> tuple[Any, ...]:
    """The values that a function captures, in a form that Dynamo guards: Dynamo takes functions of the same code for equal, but
    guards values that are formatted, hashed or used as an index here, so that another number makes another graph. TypeError:
    the function captures something that is neither a number nor a string."""
    if not inspect.isfunction(function):
        return ()
    defaults, keyword_defaults = function.__defaults__ or (), {}
    try:
        cells, keyword_defaults = function.__closure__ or (), function.__kwdefaults__ or {}
    except (
        AttributeError
    ):  # made inside the graph: torch 2.13 has neither attribute, and then all captured values are constants
        cells = ()
    values = [*[cell.cell_contents for cell in cells], *defaults, *keyword_defaults.values()]
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            captured = (*function.__code__.co_freevars, *defaults, *keyword_defaults)
            raise TypeError(f"{option}: captures {captured}, whose first value torch.compile would keep: pass arrays in aux")
    return tuple(
        [
            hash(value)
            if isinstance(value, float) and _dynamo_hashes_floats()
            else index(value)
            if isinstance(value, int)
            else f"{value}"
            for value in values
        ]
    )


def _register(option: str, function: Any, captured: tuple[Any, ...], in_graph: bool) -> str:
    """The name of a function that captures these values. Dynamo calls this once for a graph, which then uses the function as
    long as the graph lives."""
    if not inspect.isfunction(function):
        if hasattr(function, "shape"):
            instead = "a mask that is an array goes in aux: mask=lambda b, h, i, j, allowed: allowed[i, j], aux=(allowed,)"
            problem = f"an array of shape {tuple(function.shape)}; {instead if option == 'mask' else 'pass it as bias'}"
            raise TypeError(f"{option}: must be a Python function, such as {EXAMPLES[option]}, not {problem}")
        raise TypeError(f"{option}: must be a Python function, such as {EXAMPLES[option]}: {option}={function!r:.200}")
    digest = identity(_Function(function))
    if isinstance(digest, bytes):
        name = f"{function.__name__} {digest.hex()[:32]}"
        _FUNCTIONS.setdefault(name, function)
        return name
    name = f"{function.__name__} of call {next(_COUNTER)}"  # it reads state that may change, so that its name serves one call
    _FUNCTIONS[name] = function
    if not in_graph:
        _SINGLE_USE.append(name)
    if len(_SINGLE_USE) > MAX_SINGLE_USE:
        _FUNCTIONS.pop(_SINGLE_USE.popleft())
    return name


_register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside


def find_function(name: str | None) -> Callable | None:
    """The function registered under this name, None for None. ValueError: this process has not registered it."""
    if name is not None and name not in _FUNCTIONS:
        raise ValueError(
            f"{name}: no function is registered under this name in this process: call attention.forward with it once before"
        )
    return None if name is None else _FUNCTIONS[name]


def reads_argument(function: Callable, nth: int) -> bool:
    """Does the code of a function read its n-th argument, or capture it in an inner function?"""
    code = function.__code__
    name = code.co_varnames[nth] if nth < code.co_argcount else None
    read = [x for at in dis.get_instructions(code) for x in (at.argval if isinstance(at.argval, tuple) else (at.argval,))]
    return name is None or name in code.co_cellvars or name in read


def _read_objects(function: Callable) -> dict[str, Any]:
    """{name: object} of the globals and captured variables that a function uses."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    return {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()} | {
        name: function.__globals__[name] for name in code.co_names if name in function.__globals__
    }


def _read_names(function: Callable) -> Iterator[tuple[str, Any]]:
    """(name, object) of what a function reads from its globals and captured variables: ("np", ..), ("np.where", ..)."""
    objects, name, value = _read_objects(function), "", None
    for instruction in dis.get_instructions(function.__code__):
        if value is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name, value = f"{name}.{instruction.argval}", getattr(value, instruction.argval, None)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            name, value = instruction.argval, objects.get(instruction.argval)
        else:
            name, value = "", None
        if value is not None:
            yield name, value


def check_function(option: str, function: Callable, aux: Sequence[Form]) -> None:
    """Call a mask or score function for a few queries and keys, with arrays of zeros for aux. TypeError, which names the
    option: the call fails; the function reads an array that is not in aux, or calls a function that kernels do not have; a mask
    does not return booleans, or a score not a number for each query and key."""
    for name, value in _read_names(function):
        if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
            raise TypeError(f"{option}: reads the array {name} from outside: pass it in aux, and take it as an argument")
        home = getattr(value, "__module__", None) or type(value).__module__
        if callable(value) and not isinstance(value, type) and home.partition(".")[0] in LIBRARIES:
            known = getattr(value, "__name__", name)
            cure = f"use ops.{known}" if hasattr(ops, known) else "use comparisons, & | ~, arithmetic and the maps of ops"
            raise TypeError(f"{option}: calls {name}, which kernels do not have; {cure}")
    arrays = [np.broadcast_to(np.zeros((), np.dtype(form.dtype)), form.shape) for form in aux]
    i, j, s = np.zeros((TRIAL_SIZE, 1), int), np.zeros((1, TRIAL_SIZE), int), np.zeros((TRIAL_SIZE, TRIAL_SIZE), np.float32)
    called = f"{option}({'s, ' * (option == 'score')}b, h, i, j{''.join(f', aux{n}' for n in range(len(aux)))})"
    try:
        with np.errstate(all="ignore"):  # the arrays are zeros
            result = function(*([s] if option == "score" else []), 0, 0, i, j, *arrays)
        if isinstance(result, (tuple, list, dict, type(None))):
            raise TypeError(f"it returns {'None' if result is None else f'a {type(result).__name__}'}")
        values = np.asarray(result)
        np.broadcast_to(values, s.shape)
    except Exception as error:
        cure = "".join(f"; {cure}" for words, cure in REMEDIES.items() if words in str(error))
        raise TypeError(f"{option}: {called} fails on NumPy arrays: {type(error).__name__}: {error}{cure}") from error
    if (values.dtype == bool) != (option == "mask") or values.dtype.kind not in "biuf":
        expected = "booleans, such as j <= i" if option == "mask" else "numbers"
        raise TypeError(f"{option}: must return {expected}; {called} returns {values.dtype}")
    if option == "score" and values.shape != s.shape:
        expected = "a number for each query and key, as s + j does"
        raise TypeError(f"score: must return {expected}; {called} returns the shape {values.shape} for {s.shape}")
