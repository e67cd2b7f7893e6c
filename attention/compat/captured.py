"""FlexAttention's functions capture arrays; forward's are given them:

    docs = torch.tensor([0, 0, 1])
    lambda b, h, i, j: docs[i] == docs[j]            becomes    lambda b, h, i, j, docs: docs[i] == docs[j],  aux=(docs,)

So the function is written anew from its source (rewritten.py), and with it the functions that it calls: what and_masks and
or_masks of torch join, too. Bound methods and partials are functions some of whose arguments are known; arrays and numbers that
are attributes, as of a module in `self.table[h]`, are captured like others.

torch.compile sees which array is reached by which path, `f.__closure__[0].cell_contents`, and the rest as a constant.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from operator import index
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .rewritten import Change, rewritten, speaks_torch, spoken

Path = tuple[tuple[str, Any], ...]  # how something is reached from a function: (("closure", 0), ("attribute", "table"))
JOINED = {"and_masks": " & ", "or_masks": " | "}
_joined: WeakKeyDictionary = WeakKeyDictionary()  # {what torch's and_masks or or_masks gave: the same as one expression}
_inlined: WeakKeyDictionary = WeakKeyDictionary()  # {a function that another one calls: the same for kernels}
_of_graphs = SimpleNamespace()  # what torch.compile traces: unlike a dictionary, it is looked at anew each time


class Reads(NamedTuple):
    """What a function reads from outside. given: what the caller has of it; function: the same, with arguments that are known
    by now. paths: from `given` to each. arrays: by what they are called in it, "docs" or "self.table". numbers: those that are
    attributes. called: functions of the caller's. others: the rest."""

    given: Any
    function: Any
    known: frozenset[str]
    paths: dict[str, Path]
    arrays: dict[str, Any]
    numbers: dict[str, Any]
    called: dict[str, Reads]
    others: dict[str, Any]

    @property
    def captures(self) -> bool:
        """Are there arrays, in what it calls too?"""
        return bool(self.arrays) or any(x.captures for x in self.called.values())

    def every(self, kind: str) -> Iterator[tuple[str, Any, Path]]:
        """All arrays or numbers, in what it calls too, with the paths to them."""
        yield from ((text, x, self.paths[text]) for text, x in getattr(self, kind).items())
        for text, called in self.called.items():
            yield from ((inner, x, (*self.paths[text], *path)) for inner, x, path in called.every(kind))


class Written(NamedTuple):
    """Functions in the words of kernels. arrays: the further arguments, in order. paths: to each array, from the function of a
    name."""

    functions: dict[str, Any]
    arrays: list[Any]
    paths: list[tuple[str, Path]]


def freed(functions: dict[str, Any]) -> tuple[dict[str, Any], tuple]:
    """({name: function}, aux): the functions that are not None, with all arrays that any of them captures as further arguments,
    and these arrays. NotImplementedError, by the function's name, where that cannot be done."""
    some = {name: f for name, f in functions.items() if f is not None}
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_compiling():
        written = _written(some)
        return written.functions, tuple([_whole(x) for x in written.arrays])
    names, given = tuple(some), tuple(some.values())
    held = tuple([_guarded(_reached(some[name], path)) for name, path in _held(names, *given)])
    key, paths = _of_graph(names, held, *given)
    aux = tuple([_whole(_reached(some[name], path)) for name, path in paths])
    return {name: getattr(_of_graphs, f"{name}_{key}") for name in names}, aux


def _held(names: tuple[str, ...], *functions: Any) -> tuple:
    """The paths to numbers that are written down."""
    every = [(name, _reads(name, f, ()).every(kind)) for name, f in zip(names, functions) for kind in ("numbers", "others")]
    return tuple([(name, path) for name, found in every for _, x, path in found if isinstance(x, (int, float, str))])


def _of_graph(names: tuple[str, ...], held: tuple, *functions: Any) -> tuple[int, tuple]:
    """The number of what these are written as, in a graph that is for these numbers alone, and the paths to arrays."""
    written, key = _written(dict(zip(names, functions))), len(vars(_of_graphs))
    for name, function in written.functions.items():
        setattr(_of_graphs, f"{name}_{key}", function)
    return key, tuple(written.paths)


_held._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside
_of_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _guarded(x: Any) -> Any:
    """What Dynamo compares of a number before it runs the graph again."""
    return hash(x) if isinstance(x, float) else index(x) if isinstance(x, int) else f"{x}"


def _reached(x: Any, path: Path) -> Any:
    """What lies at the end of a path, by steps that Dynamo follows."""
    for how, where in path:
        if how == "attribute":
            x = getattr(x, where)
        elif how == "item":
            x = x[where]
        elif how == "closure":
            x = x.__closure__[where].cell_contents
        else:
            x = x.__globals__[where]
    return x


def _whole(x: Any) -> Any:
    """An array with axes: of one number, an array of one element."""
    return x if x.ndim else x.reshape(1)


def _written(functions: dict[str, Any]) -> Written:
    found = {name: _reads(name, f, ()) for name, f in functions.items()}
    every = [(name, *one) for name, reads in found.items() for one in reads.every("arrays")]
    kept = [*{id(x): one for one in reversed(every) for x in [one[2]]}.values()][::-1]  # what is read twice is one argument
    further = tuple(f"{text.replace('.', '_')}_{n}" for n, (_, text, *_) in enumerate(kept))
    new = {id(x): argument for argument, (_, _, x, _) in zip(further, kept)}
    written = {name: _free(name, reads, new, further) for name, reads in found.items()}
    return Written(written, [x for _, _, x, _ in kept], [(name, path) for name, *_, path in kept])


def _free(name: str, reads: Reads, new: dict[int, str], further: tuple[str, ...]) -> Any:
    """The function with further arguments, `new` saying which array is which; itself if there is nothing to do."""
    arrays = {text: (new[id(x)], not x.ndim) for text, x in reads.arrays.items()}
    passed_on = frozenset(variable for variable, x in reads.called.items() if x.captures)
    called = {v: _for_kernels(_free(name, x, new, further if v in passed_on else ())) for v, x in reads.called.items()}
    plain = reads.function is reads.given and not (further or called or reads.numbers)
    if plain and not speaks_torch(reads.function, reads.others):
        return reads.function
    change = Change(reads.others | called, reads.known, reads.numbers, arrays, passed_on, further)
    return rewritten(name, reads.function, change)


def _for_kernels(f: FunctionType) -> Any:
    """A function that another one calls."""
    if f not in _inlined:
        from tiles import inlined  # late, for Numba comes with it

        _inlined[f] = inlined(f)
    return _inlined[f]


def _reads(name: str, given: Any, above: tuple[Any, ...]) -> Reads:
    """What a function reads from outside: variables of the functions around it, globals, and arguments that are known. above:
    those that call it."""
    if masks := _masks(given):
        f, known = _joined[given], dict[str, Path]()
        paths: dict[str, Path] = {f"mask_{n}": (("closure", 0), ("item", n)) for n in range(len(masks))}
    else:
        f, way, known = _arguments(name, given)
        paths = {variable: (*way, ("global", variable)) for variable in f.__code__.co_names if variable in f.__globals__}
        cells = zip(f.__code__.co_freevars, enumerate(f.__closure__ or ()))
        paths |= {variable: (*way, ("closure", n)) for variable, (n, cell) in cells if cell != CellType()} | known
    outside = {variable: _reached(given, path) for variable, path in paths.items()}
    arrays = {variable: x for variable, x in outside.items() if _is_array(x)}
    numbers: dict[str, Any] = {}
    for text, root, x in _attributes(f.__code__, outside):
        if _is_array(x):
            arrays[text] = x
        elif isinstance(x, (bool, int, float)) and not isinstance(outside[root], ModuleType):
            numbers[text] = x
        paths[text] = (*paths[root], *[("attribute", one) for one in text.split(".")[1:]])
    called = {v: _reads(v, x, (*above, f)) for v, x in outside.items() if _is_callers(x) and x not in (f, *above)}
    others = {variable: x for variable, x in outside.items() if variable not in arrays and variable not in called}
    return Reads(given, f, frozenset(known), paths, arrays, numbers, called, others)


def _arguments(name: str, given: Any) -> tuple[Any, Path, dict[str, Path]]:
    """The function behind a partial, a method or an object that is called, the path to it, and paths to its arguments that are
    known: those with defaults, too, as in `docs=docs`."""
    f, first, told = given, tuple[Path, ...](), dict[str, Path]()
    way: Path = ()
    while not isinstance(f, FunctionType):
        if isinstance(f, functools.partial):
            first = (*[(*way, ("attribute", "args"), ("item", n)) for n in range(len(f.args))], *first)
            told = {one: (*way, ("attribute", "keywords"), ("item", one)) for one in f.keywords} | told
            step = "func"
        elif isinstance(f, MethodType):
            first, step = ((*way, ("attribute", "__self__")), *first), "__func__"
        elif isinstance(getattr(f, "forward", None), MethodType):  # a module of torch's
            step = "forward"
        elif isinstance(getattr(f, "__call__", None), MethodType):  # noqa: B004
            step = "__call__"
        else:
            raise NotImplementedError(f"{name}: is not served; pass a function of Python's, whose source is there: {f!r:.80}")
        f, way = getattr(f, step), (*way, ("attribute", step))
    code, defaults = f.__code__, f.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    known: dict[str, Path] = {one: (*way, ("attribute", "__defaults__"), ("item", n)) for n, one in enumerate(last)}
    known |= {one: (*way, ("attribute", "__kwdefaults__"), ("item", one)) for one in f.__kwdefaults__ or {}}
    return f, way, known | dict(zip(code.co_varnames, first)) | told


def _masks(f: Any) -> tuple[Any, ...]:
    """What torch's and_masks or or_masks has joined, of what it gave, which is now an expression in _joined; () of all else."""
    if not isinstance(f, FunctionType) or not (f.__module__ or "").startswith("torch.nn.attention"):
        return ()
    symbol = JOINED.get(f.__qualname__.partition(".")[0])
    if symbol is None or not f.__closure__:
        return ()
    masks = f.__closure__[0].cell_contents
    if f not in _joined:
        space = {f"mask_{n}": mask for n, mask in enumerate(masks)}
        _joined[f] = spoken(f"lambda b, h, i, j: {symbol.join(f'{one}(b, h, i, j)' for one in space)}", space)
    return masks


def _attributes(code: CodeType, outside: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The attributes that a function reads of what lies outside: ("self.table", "self", the array)."""
    for root, names in _chains(code):
        said, at = root, outside.get(root)
        for name in names:
            if at is None or _is_array(at):  # whose methods are no attributes from outside
                break
            said, at = f"{said}.{name}", getattr(at, name, None)
            yield said, root, at


@functools.lru_cache(256)
def _chains(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The names of which code reads attributes, and these: ("self", ("inner", "table"))."""
    found: list[tuple[str, tuple[str, ...]]] = []
    root, names = "", tuple[str, ...]()
    for instruction in dis.get_instructions(code):
        if root and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, instruction.argval)
            continue
        if names:
            found.append((root, names))
        name = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        is_name = isinstance(name, str) and instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST"
        root, names = name if is_name else "", ()
    return tuple(found)


def _is_callers(x: Any) -> bool:
    """Is it a function that the caller wrote, or torch's joined ones?"""
    if isinstance(x, (functools.partial, MethodType)):
        return _is_callers(x.func if isinstance(x, functools.partial) else x.__func__)
    if not isinstance(x, FunctionType):
        return False
    from tiles.digest import covered  # late

    return bool(_masks(x)) or not (covered(x.__module__ or "") or hasattr(x, "dispatcher"))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and any(hasattr(x, way) for way in ("__dlpack__", "__cuda_array_interface__"))
