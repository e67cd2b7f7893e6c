"""Numba's refusals in plain words: what is wrong, what to do instead, and the line of the kernel. Numba itself says so under
its passes, candidates and contexts, a page or more.

What ops refuse does not come here: that is said in plain words from the start (numba_types.py). What no row of the table knows
stays as Numba says it.
"""

import contextlib
import os
import re
import traceback
from linecache import getline

from numba.core.errors import NumbaError
from numba.cuda.core.byteflow import State
from numba.cuda.core.ir import Loc
from numba.cuda.errors import UnsupportedBytecodeError

from .numba_members import plain_function
from .source_lines import statement_at

LANGUAGE = "kernels are numbers, tuples, named tuples, tiles, ops, `if`, `for ... in range(...)`, `while`"


def _untyped(name, kind):
    """The error message for a global, or a variable of the enclosing function, that kernels cannot read."""
    if kind == "function":
        return plain_function(name)
    if kind == "type" and name in ("st", "sv", "ring", "pipeline", "barrier", "shared"):
        usage = "it is laid out on the host, smem = shared(name=st(...)), and opened, smem.open()"
        return f"{name} is a type that kernels do not make: {usage}"
    if kind == "type":
        return f"{name} is a class that kernels cannot call: values made in a kernel are tuples and typing.NamedTuple's"
    if kind in ("dict", "list"):
        return f"{name} is a {kind}, which kernels cannot read: take what is needed before the kernel, or make it a tuple"
    return (
        f"{name} is an object of class {kind.rpartition('.')[2]}, which kernels cannot read: an array is an argument of the "
        "launch, a number is to be read before the kernel, and an object that a kernel asks is a @tiles.static one"
    )


def _no_attribute(name, owner):
    if owner.startswith("array("):
        return (
            f"an array in a kernel has no attribute {name!r}: it has shape, strides, ndim, size, dtype, elements; got {owner}"
        )
    if owner.startswith(("list(", "reflected list(")):
        return f"kernels have no lists that change: use a tuple, or tiles in a loop (asked for {name!r})"
    if module := re.match(r"Module\(<module '([\w.]+)'", owner):
        return f"{module[1]}.{name} is nothing that kernels know: import what is done to tiles from ops"
    if owner.startswith("type[shared("):
        parts = "`a, b = smem.open()` gives a kernel its parts, in their order"
        return f"{name!r} is not read from shared storage: {parts}; got {owner[5:-1]}"
    if owner.startswith("SharedMemory("):
        usage = "`(a,) = smem.open()` takes its one item out, smem.open().a does so by name"
        return f"opened shared storage has no item {name!r}: {usage}; got {owner}"
    return f"{owner} has no attribute {name!r}"


def _two_types(one, other, name):
    subject = "a value" if name.startswith("$") else re.sub(r"\.\d+$", "", name)
    return (
        f"{subject} is {one} on one way to this line and {other} on another, through a loop or an `if`: a name keeps its type. "
        "Make both the same (a dtype, called, converts: bf16(t)), or give the second another name"
    )


def _no_conversion(have, want, name):
    if "return_value" in name and want == "none":
        return f"a kernel returns nothing, and this one returns {have}: store what it finds to an array that it is given"
    return f"{name} is {want} and cannot become {have}"


def _not_for_these(function, args):
    """The message for types without an implementation."""
    name = re.sub(r"<(?:built-in function|class|function|intrinsic|ufunc) '?([\w.]+).*", r"\1", function)
    if name == "exception_match":
        return f"kernels catch no exceptions by class: {LANGUAGE}"
    if name in ("zeros", "empty", "ones", "full", "arange", "array", "zeros_like", "empty_like"):
        return f"kernels make no arrays: numpy.{name} is for the host; ops.zeros(tile) makes a tile of registers"
    if name == "setitem" and re.search(r"\b(rt|col_vec|row_vec)\(", args):
        return f"a tile is not assigned to elements of an array: store(array, tile, (row, col)) does that; got {args}"
    if name == "getitem" and args.startswith("Tuple("):
        return f"a tuple of several types is indexed by numbers that are known when the kernel is compiled; got {args}"
    if name == "add" and "Literal[str](" in args:
        return "kernels have no texts that are put together, as an f-string is: print(t) prints a tile, a vector or a number"
    if name in ("setitem", "getitem"):
        return f"cannot be indexed so, or not with such a value: {name} of {args}"
    return f"{name} is not for {args}; {LANGUAGE}"


def _not_bound(signature, missing, callee):
    return f"{callee}{signature}: {missing}"


def _lengths(want, have):
    return f"there are {want} names on the left of =, and {have} values on the right"


def _unsupported(feature):
    remedy = "; import it outside of the function" * ("IMPORT_NAME" in feature)
    return f"kernels cannot say this: {feature.strip().rstrip('.')}{remedy}; {LANGUAGE}"


_SHOWN = re.compile(r'^File "(.*)", line (\d+):\n(?:.*\n)*?\s*\^$', re.MULTILINE)
_CALLED = re.compile(r"During: typing of call at (.+) \((\d+)\)")
_CALLEE = re.compile(r"resolving callee type: .*?<function (?:.*\.)?(\w+) at ")
ROWS = (  # what Numba says, and what we say of its parts
    (r"Unknown attribute '(\w+)' of type (.+)", _no_attribute),
    (r"Untyped global name '([^']+)': Cannot determine Numba type of <class '(.+)'>", _untyped),
    (r"Cannot unify (.+) and (.+) for '([^']+)'", _two_types),
    (r"No conversion from (.+) to (\S+) for '([^']+)'", _no_conversion),
    (r"\('wrong tuple length for .*', 'expected (\d+), got (\d+)'\)", _lengths),
    (r"No implementation of function Function\((.+)\) found for signature:\s+>>> \w+\((.*)\)", _not_for_these),
    (r"Cannot bind 'args=.*' to signature '(\(.*\))' due to \"TypeError: (.*)\"", _not_bound),
    (
        r"Invalid use of (.+) with parameters \((.*)\)",
        lambda construct, args: f"{construct} is called with ({args}), and is no function",
    ),
    (r"Use of unsupported NumPy function '([\w.]+)'", lambda name: f"kernels do not know {name}: {LANGUAGE}"),
    (r"(The '.*' construct is not supported.*?)\.+ Raised from", _unsupported),
    (r"(Use of unsupported opcode .*) found", _unsupported),
    (
        r"The (use of yield in a closure) is unsupported",
        lambda construct: _unsupported(f"{construct}, as in tuple(.. for .. in ..)"),
    ),
    (r"(?:NameError: )?(name '\w+' is not defined)", str),
)


@contextlib.contextmanager
def translate_errors(function):
    """Inside, what Numba refuses of this function or of what it calls is a TypeError in plain words; a NameError for a name
    that nobody defined."""
    try:
        yield
    except (NumbaError, NotImplementedError, UnsupportedBytecodeError) as error:
        if (plain := translate_error(error, function)) is None:
            raise
        raise plain from None


def translate_error(error, function):
    """The exception that says it so; None if no row knows it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error) or _refused_opcode(error))  # without Numba's colours
    message = re.sub(r"^(Failed in .* pipeline \(step: .*\)\n)+", "", text)
    for pattern, words in ROWS:
        if match := re.match(pattern, message):
            parts = list(match.groups())
            if words is _not_bound:
                callee = _CALLEE.search(message)
                parts.append(callee[1] if callee else "")
            kind = NameError if words is str else TypeError
            return kind(f"{words(*parts)}{_places(error, message, function)}")
    return None


def _places(error, message, function):
    """The line as Numba shows it, and the lines that call the function that it is in."""
    quoted_line, calls = _SHOWN.search(message), [(file, int(line)) for file, line in _CALLED.findall(message)]
    if quoted_line:
        calls = [(file, line) for file, line in calls if line != int(quoted_line[2])]
    called = "".join(f"\n  called at {os.path.basename(file)}:{line} `{getline(file, line).strip()}`" for file, line in calls)
    place = Loc(quoted_line[1], int(quoted_line[2])) if quoted_line else _where(error, function)
    return f"\n\n{statement_at(place).strip()}{called}"


def _refused_opcode(error):
    """Which instruction Numba read when it raised an error that says nothing; empty if it read none."""
    instructions = [frame.f_locals.get("inst") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [inst.opname for inst in instructions if hasattr(inst, "opname")]
    return f"Use of unsupported opcode {names[0]} found" if names else ""


def _where(error, function):
    """The Loc of the statement that Numba was about, if it does not say so."""
    location, at = Loc(function.__code__.co_filename, function.__code__.co_firstlineno), error.__traceback__
    while at:
        names = at.tb_frame.f_locals
        for name in ("self", "inst"):
            location = getattr(names.get(name), "loc", None) or location
        if isinstance(names.get("state"), State):  # it reads bytecode
            location = Loc(location.filename, names["state"].get_inst().lineno)
        at = at.tb_next
    return location
