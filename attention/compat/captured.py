"""FlexAttention's functions capture arrays; forward's are given them:

    docs = torch.tensor([0, 0, 1])
    lambda b, h, i, j: docs[i] == docs[j]            becomes    lambda b, h, i, j, docs: docs[i] == docs[j],  aux=(docs,)

So the function is written anew from its source. `torch.where`, `torch.exp` and so on in it become the maps of ops.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

_written: WeakKeyDictionary = WeakKeyDictionary()  # {function: {what it reads from outside: the function made of it}}


def freed(functions: dict[str, Any]) -> tuple[dict[str, Any], tuple]:
    """({name: function}, aux): the functions that are not None, with all arrays that any of them captures as further arguments,
    and these arrays. NotImplementedError, by the function's name, where that cannot be done."""
    found = {name: (f, _outside(name, f)) for name, f in functions.items() if f is not None}
    arrays = [(name, variable, x) for name, (_, outside) in found.items() for variable, x in _captured(name, outside).items()]
    further = tuple(f"{variable}_{n}" for n, (_, variable, _) in enumerate(arrays))
    written: dict[str, Any] = {}
    for name, (f, outside) in found.items():
        mine = {variable: new for (owner, variable, _), new in zip(arrays, further) if owner == name}
        constants = {variable: x for variable, x in outside.items() if variable not in mine}
        written[name] = _rewritten(name, f, constants, mine, further)
    return written, tuple(x for *_, x in arrays)


def _outside(name: str, f: Any) -> dict[str, Any]:
    """What f reads from outside: variables of the functions around it, globals, and arguments with defaults: `docs=docs`."""
    if not isinstance(f, FunctionType):
        advice = "pass a function that reads its arrays itself, not a partial or an object"
        raise NotImplementedError(f"{name}: is not served; {advice}: {f!r}")
    code, defaults = f.__code__, f.__defaults__ or ()
    found = {variable: f.__globals__[variable] for variable in code.co_names if variable in f.__globals__}
    found |= {variable: cell.cell_contents for variable, cell in zip(code.co_freevars, f.__closure__ or ())}
    return found | dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults))


def _captured(name: str, outside: dict[str, Any]) -> dict[str, Any]:
    """{variable: array}: the arrays among what a function reads from outside."""
    found = {variable: x for variable, x in outside.items() if _is_array(x)}
    for variable, x in outside.items():
        if isinstance(x, FunctionType) and any(map(_is_array, _outside(variable, x).values())):
            raise NotImplementedError(f"{name}: calls {variable}, which captures arrays; write both as one function")
    for variable, x in found.items():
        if not x.ndim:
            raise NotImplementedError(f"{name}: captures {variable}, an array of one number; capture {variable}.item()")
    return found


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and any(hasattr(x, way) for way in ("__dlpack__", "__cuda_array_interface__"))


def _rewritten(name: str, f: Any, constants: dict[str, Any], mine: dict[str, str], further: tuple[str, ...]) -> Any:
    """f with further arguments, `mine` saying which of its variables become which; f itself if there is nothing to do."""
    torch = {variable for variable, x in constants.items() if isinstance(x, ModuleType) and x.__name__ == "torch"}
    if not further and not torch:
        return f
    known = _written.setdefault(f, {})
    key = further, tuple(mine), tuple((variable, id(x)) for variable, x in constants.items())
    if key not in known:
        space = _named(f) | constants | dict.fromkeys(torch, _ops())
        exec(compile(_module(name, f, mine, further, torch), inspect.getfile(f), "exec"), space)
        known[key] = space["mod"], constants  # which are kept so that no other object gets their id
    return known[key][0]


def _named(f: FunctionType) -> dict[str, Any]:
    """The globals that f or a function in it names: all of them would keep f, and the caller's arrays, for ever."""
    names, codes = {"__builtins__", "__name__", "__file__"}, [f.__code__]
    for code in codes:
        names |= {*code.co_names}
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return {name: x for name, x in f.__globals__.items() if name in names}


def _module(name: str, f: FunctionType, mine: dict[str, str], further: tuple[str, ...], torch: set[str]) -> ast.Module:
    """The source of a module that makes `mod`, which is f with its variables renamed and with further arguments."""
    node = _source(name, f)
    plain = len(node.args.args) - len(node.args.defaults)
    node.args.args[plain:], node.args.defaults = [], []
    node.args.args += [ast.arg(x) for x in further]
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(ast.Name(module), called) if module in torch and not hasattr(_ops(), called):
                advice = "say it with comparisons, & | ~, arithmetic and the maps of ops"
                raise NotImplementedError(f"{name}: calls torch.{called}, which ops has not; {advice}")
            case ast.Name(variable):
                inner.id = mine.get(variable, variable)
    made: ast.stmt = node
    if isinstance(node, ast.Lambda):
        made = ast.Assign([ast.Name("mod", ast.Store())], node)
    else:
        node.name, node.decorator_list, node.returns = "mod", [], None
        for argument in node.args.args:
            argument.annotation = None
    return ast.fix_missing_locations(ast.Module([made], []))


def _source(name: str, f: FunctionType) -> Any:
    """The one `def` or `lambda` of f's arguments and name in the lines that it was read from."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
    except (OSError, SyntaxError):
        found = []
    else:
        arguments = list(inspect.signature(f).parameters)
        kind = ast.Lambda if f.__name__ == "<lambda>" else ast.FunctionDef
        nodes = [node for node in ast.walk(tree) if isinstance(node, kind)]
        found = [x for x in nodes if [a.arg for a in x.args.args] == arguments and getattr(x, "name", "<lambda>") == f.__name__]
    if len(found) != 1:
        advice = "write it as a `def` in a file, or call attention.forward with mask=, score= and aux="
        raise NotImplementedError(f"{name}: captures arrays or calls torch, and its source was not found; {advice}")
    return found[0]


@functools.cache
def _ops() -> ModuleType:
    import ops  # late, for Numba comes with it

    return ops
