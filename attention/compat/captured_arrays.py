"""FlexAttention's functions capture arrays; attention.forward's take them as further arguments:

    docs = torch.tensor([0, 0, 1])
    lambda b, h, i, j: docs[i] == docs[j]            becomes    lambda b, h, i, j, docs: docs[i] == docs[j],  aux=(docs,)

So the function is rewritten from its source (rewrite.py), together with the functions that it calls, such as those that
torch's and_masks and or_masks join. A bound method or a partial is a function with some arguments bound. Arrays and numbers
that are attributes, such as a module's in `self.table[h]`, are captured like the others.

Under torch.compile this module runs while tracing: Dynamo sees each array by the path that reaches it,
`f.__closure__[0].cell_contents`, and everything else as a constant."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from operator import index
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .rewrite import RewriteSpec, function_from_text, rewrite, uses_torch_ops

Path = tuple[tuple[str, Any], ...]  # the steps from a function to an object: (("closure", 0), ("attribute", "table"))
JOINING_SYMBOLS = {"and_masks": " & ", "or_masks": " | "}
_masks_as_expressions: WeakKeyDictionary = WeakKeyDictionary()  # {result of and_masks or or_masks: one expression}
_inlined: WeakKeyDictionary = WeakKeyDictionary()  # {a function that another one calls: its inlined form}
_graph_functions = SimpleNamespace()  # attributes that Dynamo reads anew in each trace, unlike a dictionary


class FunctionReads(NamedTuple):
    """What a function reads from outside. original: the caller's object; function: the Python function behind it; bound: the
    arguments of it that are bound. paths: from `original` to each object. arrays: by the text that names them in the function,
    "docs" or "self.table". numbers: those that are attributes. callees: the caller's functions that it calls. others:
    everything else."""

    original: Any
    function: Any
    bound: frozenset[str]
    paths: dict[str, Path]
    arrays: dict[str, Any]
    numbers: dict[str, Any]
    callees: dict[str, FunctionReads]
    others: dict[str, Any]

    @property
    def captures(self) -> bool:
        """Does the function, or a function that it calls, capture arrays?"""
        return bool(self.arrays) or any(x.captures for x in self.callees.values())

    def walk(self, kind: str) -> Iterator[tuple[str, Any, Path]]:
        """(text, object, path from `original`) of all arrays or numbers, including those of the functions that it calls."""
        yield from ((text, x, self.paths[text]) for text, x in getattr(self, kind).items())
        for text, callees in self.callees.items():
            yield from ((inner, x, (*self.paths[text], *path)) for inner, x, path in callees.walk(kind))


class RewrittenFunctions(NamedTuple):
    """The functions rewritten for kernels. arrays: the further arguments, in order. paths: for each array, the name of a
    function and the path to the array from it."""

    functions: dict[str, Any]
    arrays: list[Any]
    paths: list[tuple[str, Path]]


def lift_captured_arrays(functions: dict[str, Any]) -> tuple[dict[str, Any], tuple]:
    """({name: function}, aux): the functions that are not None, with all arrays that any of them captures as further arguments,
    and these arrays. NotImplementedError, with the function's name: its source cannot be rewritten."""
    present = {name: f for name, f in functions.items() if f is not None}
    from tiles.calls.torch_op import imported_module  # imported late, because it imports Numba

    torch = imported_module("torch")
    if torch is None or not torch.compiler.is_compiling():
        written = _rewrite_all(present)
        return written.functions, tuple([_with_axis(x) for x in written.arrays])
    names, original = tuple(present), tuple(present.values())
    constants = tuple([_guard_value(_follow_path(present[name], path)) for name, path in _constant_paths(names, *original)])
    key, paths = _register_for_graph(names, constants, *original)
    aux = tuple([_with_axis(_follow_path(present[name], path)) for name, path in paths])
    return {name: getattr(_graph_functions, f"{name}_{key}") for name in names}, aux


def _constant_paths(names: tuple[str, ...], *functions: Any) -> tuple:
    """(function name, path) of each number or string that the rewritten source contains as a constant."""
    kinds = "numbers", "others"
    reads = [(name, _find_reads(name, f, ()).walk(kind)) for name, f in zip(names, functions) for kind in kinds]
    return tuple([(name, path) for name, objects in reads for _, x, path in objects if isinstance(x, (int, float, str))])


def _register_for_graph(names: tuple[str, ...], constants: tuple, *functions: Any) -> tuple[int, tuple]:
    """Rewrite the functions for a graph that holds for these constants alone. Returns the number under which they are stored,
    and the paths to their arrays."""
    written, key = _rewrite_all(dict(zip(names, functions))), len(vars(_graph_functions))
    for name, function in written.functions.items():
        setattr(_graph_functions, f"{name}_{key}", function)
    return key, tuple(written.paths)


_constant_paths._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside
_register_for_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _guard_value(x: Any) -> Any:
    """The value by which Dynamo guards a constant before it runs the graph again."""
    return hash(x) if isinstance(x, float) else index(x) if isinstance(x, int) else f"{x}"


def _follow_path(x: Any, path: Path) -> Any:
    """The object at the end of a path, reached by steps that Dynamo can trace."""
    for step, key in path:
        if step == "attribute":
            x = getattr(x, key)
        elif step == "item":
            x = x[key]
        elif step == "closure":
            x = x.__closure__[key].cell_contents
        else:
            x = x.__globals__[key]
    return x


def _with_axis(x: Any) -> Any:
    """The array, or for an array without axes an array of one element."""
    return x if x.ndim else x.reshape(1)


def _rewrite_all(functions: dict[str, Any]) -> RewrittenFunctions:
    reads_of = {name: _find_reads(name, f, ()) for name, f in functions.items()}
    reads_of_arrays = [(name, *one) for name, reads in reads_of.items() for one in reads.walk("arrays")]
    # an array that is read twice is one argument
    distinct = [*{id(x): one for one in reversed(reads_of_arrays) for x in [one[2]]}.values()][::-1]
    new_arguments = tuple(f"{text.replace('.', '_')}_{n}" for n, (_, text, *_) in enumerate(distinct))
    new = {id(x): argument for argument, (_, _, x, _) in zip(new_arguments, distinct)}
    written = {name: _rewrite_with_arrays(name, reads, new, new_arguments) for name, reads in reads_of.items()}
    return RewrittenFunctions(written, [x for _, _, x, _ in distinct], [(name, path) for name, *_, path in distinct])


def _rewrite_with_arrays(name: str, reads: FunctionReads, new: dict[int, str], new_arguments: tuple[str, ...]) -> Any:
    """The function with further arguments; `new` maps id(array) to its argument. The function itself if nothing changes."""
    arrays = {text: (new[id(x)], not x.ndim) for text, x in reads.arrays.items()}
    receives_arrays = frozenset(variable for variable, x in reads.callees.items() if x.captures)
    callees = {
        v: _inline_for_kernels(_rewrite_with_arrays(name, x, new, new_arguments if v in receives_arrays else ()))
        for v, x in reads.callees.items()
    }
    plain = reads.function is reads.original and not (new_arguments or callees or reads.numbers)
    if plain and not uses_torch_ops(reads.function, reads.others):
        return reads.function
    spec = RewriteSpec(reads.others | callees, reads.bound, reads.numbers, arrays, receives_arrays, new_arguments)
    return rewrite(name, reads.function, spec)


def _inline_for_kernels(f: FunctionType) -> Any:
    """The inlined device function of a function that another one calls."""
    if f not in _inlined:
        from tiles import inlined  # imported late, because it imports Numba

        _inlined[f] = inlined(f)
    return _inlined[f]


def _find_reads(name: str, original: Any, outer_functions: tuple[Any, ...]) -> FunctionReads:
    """What a function reads from outside: closure variables, globals, and bound arguments. outer_functions: the functions that
    call it."""
    if masks := _joined_masks(original):
        f, bound = _masks_as_expressions[original], dict[str, Path]()
        paths: dict[str, Path] = {f"mask_{n}": (("closure", 0), ("item", n)) for n in range(len(masks))}
    else:
        f, step_path, bound = _unwrap_callable(name, original)
        paths = {variable: (*step_path, ("global", variable)) for variable in f.__code__.co_names if variable in f.__globals__}
        cells = zip(f.__code__.co_freevars, enumerate(f.__closure__ or ()))
        paths |= {variable: (*step_path, ("closure", n)) for variable, (n, cell) in cells if cell != CellType()} | bound
    outside = {variable: _follow_path(original, path) for variable, path in paths.items()}
    arrays = {variable: x for variable, x in outside.items() if _is_array(x)}
    numbers: dict[str, Any] = {}
    for text, root, x in _read_attributes(f.__code__, outside):
        if _is_array(x):
            arrays[text] = x
        elif isinstance(x, (bool, int, float)) and not isinstance(outside[root], ModuleType):
            numbers[text] = x
        paths[text] = (*paths[root], *[("attribute", one) for one in text.split(".")[1:]])
    callees = {
        v: _find_reads(v, x, (*outer_functions, f))
        for v, x in outside.items()
        if _is_user_function(x) and x not in (f, *outer_functions)
    }
    others = {variable: x for variable, x in outside.items() if variable not in arrays and variable not in callees}
    return FunctionReads(original, f, frozenset(bound), paths, arrays, numbers, callees, others)


def _unwrap_callable(name: str, original: Any) -> tuple[Any, Path, dict[str, Path]]:
    """The function behind a partial, a method or a callable object, the path to it, and the paths to its bound arguments,
    including defaults, as in `docs=docs`."""
    f, first, by_keyword = original, tuple[Path, ...](), dict[str, Path]()
    step_path: Path = ()
    while not isinstance(f, FunctionType):
        if isinstance(f, functools.partial):
            first = (*[(*step_path, ("attribute", "args"), ("item", n)) for n in range(len(f.args))], *first)
            by_keyword = {one: (*step_path, ("attribute", "keywords"), ("item", one)) for one in f.keywords} | by_keyword
            step = "func"
        elif isinstance(f, MethodType):
            first, step = ((*step_path, ("attribute", "__self__")), *first), "__func__"
        elif isinstance(getattr(f, "forward", None), MethodType):  # a module of torch's
            step = "forward"
        elif isinstance(getattr(f, "__call__", None), MethodType):  # noqa: B004
            step = "__call__"
        else:
            raise NotImplementedError(f"{name}: is not supported; pass a Python function whose source can be read: {f!r:.80}")
        f, step_path = getattr(f, step), (*step_path, ("attribute", step))
    code, defaults = f.__code__, f.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    bound: dict[str, Path] = {one: (*step_path, ("attribute", "__defaults__"), ("item", n)) for n, one in enumerate(last)}
    bound |= {one: (*step_path, ("attribute", "__kwdefaults__"), ("item", one)) for one in f.__kwdefaults__ or {}}
    return f, step_path, bound | dict(zip(code.co_varnames, first)) | by_keyword


def _joined_masks(f: Any) -> tuple[Any, ...]:
    """The masks that torch's and_masks or or_masks joined into f, whose expression is then in _masks_as_expressions; () for any
    other function."""
    if not isinstance(f, FunctionType) or not (f.__module__ or "").startswith("torch.nn.attention"):
        return ()
    symbol = JOINING_SYMBOLS.get(f.__qualname__.partition(".")[0])
    if symbol is None or not f.__closure__:
        return ()
    masks = f.__closure__[0].cell_contents
    if f not in _masks_as_expressions:
        space = {f"mask_{n}": mask for n, mask in enumerate(masks)}
        _masks_as_expressions[f] = function_from_text(
            f"lambda b, h, i, j: {symbol.join(f'{one}(b, h, i, j)' for one in space)}", space
        )
    return masks


def _read_attributes(code: CodeType, outside: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(text, root, value) of each attribute that a function reads of an object from outside: ("self.table", "self", the
    array)."""
    for root, names in _attribute_chains(code):
        text, at = root, outside.get(root)
        for name in names:
            if at is None or _is_array(at):  # an array's methods are not captured attributes
                break
            text, at = f"{text}.{name}", getattr(at, name, None)
            yield text, root, at


@functools.lru_cache(256)
def _attribute_chains(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name, attributes) of each chain of attribute reads in the code: ("self", ("inner", "table"))."""
    chains: list[tuple[str, tuple[str, ...]]] = []
    root, names = "", tuple[str, ...]()
    for instruction in dis.get_instructions(code):
        if root and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names = (*names, instruction.argval)
            continue
        if names:
            chains.append((root, names))
        name = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        is_name = isinstance(name, str) and instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST"
        root, names = name if is_name else "", ()
    return tuple(chains)


def _is_user_function(x: Any) -> bool:
    """Is x a function that the caller wrote, or one that torch's and_masks or or_masks made?"""
    if isinstance(x, (functools.partial, MethodType)):
        return _is_user_function(x.func if isinstance(x, functools.partial) else x.__func__)
    if not isinstance(x, FunctionType):
        return False
    from tiles.compiling.digest import is_covered  # imported late, because it imports Numba

    return bool(_joined_masks(x)) or not (is_covered(x.__module__ or "") or hasattr(x, "dispatcher"))


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and any(hasattr(x, protocol) for protocol in ("__dlpack__", "__cuda_array_interface__"))
