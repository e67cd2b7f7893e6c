"""Masks and scores that are Python functions: by which name a call's plan knows them, and what they must give.

A plan is remembered by plain values, and torch's ops take nothing else: so a function goes by the digest of its code and of
what it names. An equal lambda, written twice, has the same name, and the kernel that was compiled for the first."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import index
from types import CellType
from typing import TYPE_CHECKING, Any

import numpy as np

import ops
from tiles import static
from tiles.static import identity
from tiles.torch_op import compiling

if TYPE_CHECKING:
    from tiles.arrays import Form

EXAMPLES = {"mask": "lambda b, h, i, j: j <= i", "score": "lambda s, b, h, i, j: s + j - i"}
LIBRARIES = "cupy", "jax", "numpy", "scipy", "torch"  # whose functions take arrays, but no tiles of a kernel
REMEDIES = {  # of what Python or NumPy say
    "truth value of an array": "it has no `if`, `and`, `or`, `not` and no a < b < c: say & | ~ and where",
    "converted to Python scalars": "the functions of math take numbers: use those of ops, exp, log, sqrt, tanh, ...",
}
TRIAL_SIZE = 4  # queries and keys that a function is tried on


@static
class _Function:
    """What a function in Python is known by: functions that are equal in code and contents are one."""

    function: Callable


_FUNCTIONS: dict[str, Callable] = {}
_SINGLE_USE: deque[str] = deque()  # the names that are of one call each, which are forgotten in time
_COUNTER = count()
MAX_SINGLE_USE = 1 << 16  # such names: a backward pass asks for those of the step


def register_function(option: str, function: Any) -> str | None:
    """The name by which a function is known, None for None. TypeError: it is no function that can be used, and the error names
    the option."""
    if function is None:
        return None
    in_graph = compiling()
    return _register(option, function, _captured_values(option, function) if in_graph else (), in_graph)


def _dynamo_hashes_floats() -> bool:
    """Does Dynamo know the hash of a float that has become a symbol? (torch before 2.13 knows the hash of its text.)"""
    return tuple(int(part) for part in sys.modules["torch"].__version__.split(".")[:2]) >= (2, 13)


_dynamo_hashes_floats._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _captured_values(option: str, function: Any) -> tuple[Any, ...]:
    """What a function holds, in a form that Dynamo guards: it takes functions of the same code for equal, but guards what is
    written out, hashed or used as an index here. So another number makes another graph. TypeError: the function holds
    something that is neither a number nor a word."""
    if not inspect.isfunction(function):
        return ()
    defaults, keyword_defaults = function.__defaults__ or (), {}
    try:
        cells, keyword_defaults = function.__closure__ or (), function.__kwdefaults__ or {}
    except AttributeError:  # made in the graph: torch 2.13 has neither, and makes it a function only of what are constants
        cells = ()
    values = [*[cell.cell_contents for cell in cells], *defaults, *keyword_defaults.values()]
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            what = (*function.__code__.co_freevars, *defaults, *keyword_defaults)
            raise TypeError(f"{option}: holds {what}, of which torch.compile would keep the first value: pass arrays in aux")
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
    """The name of a function that holds this. Dynamo asks once, for a graph, which then uses the function as long as it
    lives."""
    if not inspect.isfunction(function):
        if hasattr(function, "shape"):
            instead = "a mask that is an array goes in aux: mask=lambda b, h, i, j, seen: seen[i, j], aux=(seen,)"
            given = f"an array of shape {tuple(function.shape)}; {instead if option == 'mask' else 'pass it as bias'}"
            raise TypeError(f"{option}: must be a Python function, such as {EXAMPLES[option]}, and this is {given}")
        raise TypeError(f"{option}: must be a Python function, such as {EXAMPLES[option]}: {option}={function!r:.200}")
    digest = identity(_Function(function))
    if isinstance(digest, bytes):
        name = f"{function.__name__} {digest.hex()[:32]}"
        _FUNCTIONS.setdefault(name, function)
        return name
    name = f"{function.__name__} of call {next(_COUNTER)}"  # it reads what may change: no other call's name serves it
    _FUNCTIONS[name] = function
    if not in_graph:
        _SINGLE_USE.append(name)
    if len(_SINGLE_USE) > MAX_SINGLE_USE:
        _FUNCTIONS.pop(_SINGLE_USE.popleft())
    return name


_register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside


def find_function(name: str | None) -> Callable | None:
    """The function with this name, None for None. ValueError: this process has not seen it."""
    if name is not None and name not in _FUNCTIONS:
        raise ValueError(f"{name}: this process knows no function by that name: pass it to attention.forward once before")
    return None if name is None else _FUNCTIONS[name]


def reads_argument(function: Callable, nth: int) -> bool:
    """Does the code of a function read its n-th argument, or pass it to a function within?"""
    code = function.__code__
    name = code.co_varnames[nth] if nth < code.co_argcount else None
    read = [x for at in dis.get_instructions(code) for x in (at.argval if isinstance(at.argval, tuple) else (at.argval,))]
    return name is None or name in code.co_cellvars or name in read


def _read_objects(function: Callable) -> dict[str, Any]:
    """The objects that a function uses from around it, without its arguments and Python's builtins."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    return {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()} | {
        name: function.__globals__[name] for name in code.co_names if name in function.__globals__
    }


def _read_names(function: Callable) -> Iterator[tuple[str, Any]]:
    """What the code of a function reads from around it, as names: ("np", ..), ("np.where", ..), ("self.table", ..)."""
    space, said, at = _read_objects(function), "", None
    for instruction in dis.get_instructions(function.__code__):
        if at is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            said, at = f"{said}.{instruction.argval}", getattr(at, instruction.argval, None)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            said, at = instruction.argval, space.get(instruction.argval)
        else:
            said, at = "", None
        if at is not None:
            yield said, at


def check_function(option: str, function: Callable, aux: Sequence[Form]) -> None:
    """Call a mask or score for a few places, with arrays of zeros in place of aux. TypeError, which names the option: it
    cannot be called like that; it reads an array that is not in aux, or calls something that kernels do not have; a mask does
    not return truth values, or a score not a number for each query and key."""
    for said, value in _read_names(function):
        if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
            raise TypeError(f"{option}: reads the array {said} from around it: pass it in aux, and take it as an argument")
        home = getattr(value, "__module__", None) or type(value).__module__
        if callable(value) and not isinstance(value, type) and home.partition(".")[0] in LIBRARIES:
            name = getattr(value, "__name__", said)
            cure = f"use ops.{name}" if hasattr(ops, name) else "say it with comparisons, & | ~, arithmetic and the maps of ops"
            raise TypeError(f"{option}: calls {said}, which kernels have not; {cure}")
    arrays = [np.broadcast_to(np.zeros((), np.dtype(form.dtype)), form.shape) for form in aux]
    i, j, s = np.zeros((TRIAL_SIZE, 1), int), np.zeros((1, TRIAL_SIZE), int), np.zeros((TRIAL_SIZE, TRIAL_SIZE), np.float32)
    called = f"{option}({'s, ' * (option == 'score')}b, h, i, j{''.join(f', aux{n}' for n in range(len(aux)))})"
    try:
        with np.errstate(all="ignore"):  # zeros stand for what arrays hold
            given = function(*([s] if option == "score" else []), 0, 0, i, j, *arrays)
        if isinstance(given, (tuple, list, dict, type(None))):
            raise TypeError(f"it gives {'nothing' if given is None else f'a {type(given).__name__}'}")
        found = np.asarray(given)
        np.broadcast_to(found, s.shape)
    except Exception as error:
        cure = "".join(f"; {cure}" for words, cure in REMEDIES.items() if words in str(error))
        raise TypeError(f"{option}: {called} fails on NumPy arrays: {type(error).__name__}: {error}{cure}") from error
    if (found.dtype == bool) != (option == "mask") or found.dtype.kind not in "biuf":
        wanted = "truth values, such as j <= i" if option == "mask" else "numbers"
        raise TypeError(f"{option}: must give {wanted}; {called} gives {found.dtype}")
    if option == "score" and found.shape != s.shape:
        wanted = "a number for each query and key, as s + j does"
        raise TypeError(f"score: must give {wanted}; {called} gives {found.shape} of {s.shape}")
