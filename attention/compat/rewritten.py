"""A function for FlexAttention, written anew for kernels: with further arguments, and in the words of ops.

lambda s, b, h, i, j: torch.tanh(s) + (i - j).abs() * self.slopes[h]
lambda s, b, h, i, j, self_slopes_0: ops.tanh(s) + ops.abs(i - j) * self_slopes_0[h]
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

OPERATORS = {  # torch's functions of two that are operators of Python
    "logical_and": ast.BitAnd, "bitwise_and": ast.BitAnd, "logical_or": ast.BitOr, "bitwise_or": ast.BitOr,
    "floor_divide": ast.FloorDiv, "remainder": ast.Mod, "fmod": ast.Mod, "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult,
    "true_divide": ast.Div,
}  # fmt: skip
COMPARISONS = {"eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE}
OF_ONE = "abs exp exp2 log log2 sqrt rsqrt reciprocal tanh sigmoid relu logical_not bitwise_not neg square".split()
METHODS = frozenset((*OF_ONE, *OPERATORS, *COMPARISONS, "clamp", "clip", "div", "float", "maximum", "minimum"))
POWERS = range(2, 9)
OPS = "ops_of_kernels"  # what the module of them is called in what is written

_written: WeakKeyDictionary = WeakKeyDictionary()  # {function: {what it reads from outside: the function made of it}}
_spoken: WeakKeyDictionary = WeakKeyDictionary()  # {function: its text}, of those that no file has


def spoken(text: str, space: dict[str, Any]) -> FunctionType:
    """The function that a text says, in which these names stand for these values."""
    made = eval(text, {"__builtins__": __builtins__, "__name__": __name__, **space})
    _spoken[made] = text
    return made


class Change(NamedTuple):
    """What becomes of a function's names. constants: what it reads from outside and stays; known: its arguments that are among
    what it reads; numbers: attributes that are numbers. arrays: by what they are called, the argument that each becomes, and is
    it an array of one number? further: all such arguments; passed_on: functions that it calls with all of them."""

    constants: dict[str, Any]
    known: frozenset[str]
    numbers: dict[str, Any]
    arrays: dict[str, tuple[str, bool]]
    passed_on: frozenset[str]
    further: tuple[str, ...]


def speaks_torch(f: FunctionType, constants: dict[str, Any]) -> bool:
    """Does it call what kernels know by another name: functions of torch, methods of arrays, powers?"""
    return bool(_torch(constants)) or _has_methods(f.__code__)


@functools.lru_cache(256)
def _has_methods(code: CodeType) -> bool:
    powers = {("BINARY_OP", "**"), ("BINARY_POWER", "")}
    return any(
        (x.opname in ("LOAD_ATTR", "LOAD_METHOD") and x.argval in METHODS) or (x.opname, x.argrepr) in powers
        for x in dis.get_instructions(code)
    )


def rewritten(name: str, f: FunctionType, change: Change) -> Any:
    """f with further arguments, in the words of ops; `name` is its own in errors."""
    constants = change.constants
    made = _written.setdefault(f, {})
    outside = tuple((variable, x if isinstance(x, int | float | str) else id(x)) for variable, x in constants.items())
    key = outside, *[tuple(x.items()) if isinstance(x, dict) else x for x in change[1:]]
    if key not in made:
        torch = _torch(constants)
        module = _module(name, f, _Writer(name, torch, change))
        read = {x.id for x in ast.walk(module) if isinstance(x, ast.Name)}
        kept = {variable: x for variable, x in constants.items() if variable in read}
        space = _named(f, read) | kept | {OPS: _ops()} | dict.fromkeys(torch, _ops())
        exec(compile(module, inspect.getfile(f), "exec"), space)
        made[key] = space["mod"], kept  # which are kept so that no other object gets their id
    return made[key][0]


def _torch(constants: dict[str, Any]) -> set[str]:
    return {variable for variable, x in constants.items() if isinstance(x, ModuleType) and x.__name__ == "torch"}


class _Writer(ast.NodeTransformer):
    """Puts the further arguments, numbers and functions of ops where arrays, attributes and torch's functions stand."""

    def __init__(self, name: str, torch: set[str], change: Change):
        self.name, self.torch, self.change = name, torch, change

    def visit_Name(self, node):
        return self._read(node.id, node)

    def visit_Attribute(self, node):
        text = ast.unparse(node)
        if text in self.change.numbers:
            return ast.Constant(self.change.numbers[text])
        if text in self.change.arrays:
            return self._read(text, node)
        if isinstance(node.value, ast.Name) and node.value.id in self.torch and not hasattr(_ops(), node.attr):
            if node.attr != "inf":
                advice = "say it with comparisons, & | ~, arithmetic and the maps of ops"
                raise NotImplementedError(f"{self.name}: calls torch.{node.attr}, which ops has not; {advice}")
            return ast.Constant(float("inf"))
        return self.generic_visit(node)

    def visit_Call(self, node):
        f = node.func
        if isinstance(f, ast.Name) and f.id in self.change.passed_on:
            node.args += [ast.Name(x, ast.Load()) for x in self.change.further]
        if isinstance(f, ast.Attribute) and f.attr in METHODS:
            by_module = isinstance(f.value, ast.Name) and f.value.id in self.torch
            of = [self.visit(x) for x in (*([] if by_module else [f.value]), *node.args)]
            said = {x.arg: x.value for x in node.keywords}
            if (found := _expressed(f.attr, of, said)) is not None:
                return found
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in POWERS:
            factors = [copy.deepcopy(node.left) for _ in range(int(node.right.value))]
            return functools.reduce(lambda x, y: ast.BinOp(x, ast.Mult(), y), factors)
        return node

    def _read(self, text, node):
        if text not in self.change.arrays:
            return node
        new, is_number = self.change.arrays[text]
        name = ast.Name(new, ast.Load())
        return ast.Subscript(name, ast.Constant(0), ast.Load()) if is_number else name


def _expressed(name: str, of: list[Any], said: dict[str, Any]) -> Any:
    """Torch's function of this name as operators and functions of ops; None: there is no such way to call it."""
    if name in ("clamp", "clip"):
        ends = dict(zip(("min", "max"), of[1:])) | said
        found = of[0]
        for end, op in ("min", "maximum"), ("max", "minimum"):
            found = _call(op, found, ends[end]) if end in ends and not _is_none(ends[end]) else found
        return found
    if name == "div" and len(of) == 2:
        mode = said.get("rounding_mode")
        if mode is None or getattr(mode, "value", "") == "floor":
            return ast.BinOp(of[0], ast.Div() if mode is None else ast.FloorDiv(), of[1])
    if said:
        return None
    match name, len(of):
        case ("float", 1):
            return of[0]
        case ("neg", 1):
            return ast.UnaryOp(ast.USub(), of[0])
        case ("logical_not" | "bitwise_not", 1):
            return ast.UnaryOp(ast.Invert(), of[0])
        case ("square", 1):
            return ast.BinOp(of[0], ast.Mult(), copy.deepcopy(of[0]))
        case (_, 2) if name in OPERATORS:
            return ast.BinOp(of[0], OPERATORS[name](), of[1])
        case (_, 2) if name in COMPARISONS:
            return ast.Compare(of[0], [COMPARISONS[name]()], [of[1]])
        case (_, count) if hasattr(_ops(), name) and count == (1 if name in OF_ONE else 2):
            return _call(name, *of)
    return None


def _call(name: str, *of: Any) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(OPS, ast.Load()), name, ast.Load()), [*of], [])


def _is_none(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _trees(f: FunctionType) -> Iterator[tuple[ast.AST, int]]:
    """What f was read from, and how many lines stand ahead: its own text, the file, or if that is no Python, f's lines."""
    if f in _spoken:
        yield ast.parse(_spoken[f]), 0
        return
    with contextlib.suppress(OSError, IndexError, SyntaxError):
        yield ast.parse("".join(inspect.findsource(f)[0])), 0
        return
    with contextlib.suppress(OSError, SyntaxError):
        lines, first = inspect.getsourcelines(f)
        yield ast.parse(textwrap.dedent("".join(lines))), max(first - 1, 0)


def _named(f: FunctionType, read: set[str]) -> dict[str, Any]:
    """The globals that what is written names: all of them would keep f, and the caller's arrays, for ever."""
    names, codes = {"__builtins__", "__name__", "__file__"}, [f.__code__]
    for code in codes:
        names |= {*code.co_names} & read
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return {name: x for name, x in f.__globals__.items() if name in names}


def _module(name: str, f: FunctionType, writer: _Writer) -> ast.Module:
    """The source of a module that makes `mod`, which is f without the arguments that are known and with the further ones."""
    node, known = _source(name, f), writer.change.known
    node.args.posonlyargs, node.args.args = [], [x for x in (*node.args.posonlyargs, *node.args.args) if x.arg not in known]
    node.args.kwonlyargs, node.args.kw_defaults, node.args.defaults = [], [], []
    for argument in node.args.args:
        argument.annotation = None
    node.args.args += [ast.arg(x) for x in writer.change.further]
    if isinstance(node, ast.Lambda):
        node.body = writer.visit(node.body)
        made: ast.stmt = ast.Assign([ast.Name("mod", ast.Store())], node)
    else:
        node.name, node.decorator_list, node.returns = "mod", [], None
        node.body = [writer.visit(x) for x in node.body]
        made = node
    return ast.fix_missing_locations(ast.Module([made], []))


def _source(name: str, f: FunctionType) -> Any:
    """The one `def` or `lambda` of f's line, arguments and name."""
    code, kind = f.__code__, ast.Lambda if f.__name__ == "<lambda>" else ast.FunctionDef
    arguments = [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]

    def is_its(node: Any, ahead: int) -> bool:
        if not isinstance(node, kind) or getattr(node, "name", "<lambda>") != f.__name__:
            return False
        lines = node.lineno, *[x.lineno for x in getattr(node, "decorator_list", ())]
        its = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return code.co_firstlineno - ahead in lines and its == arguments

    found: list[Any] = [node for tree, ahead in _trees(f) for node in ast.walk(tree) if is_its(node, ahead)]
    if len(found) > 1 and kind is ast.Lambda and hasattr(code, "co_positions"):  # since Python 3.11
        starts = {(line, column) for line, _, column, _ in code.co_positions()}
        found = [node for node in found if (node.body.lineno, node.body.col_offset) in starts]
    if len(found) != 1:
        advice = "write it as a `def` in a file, or call attention.forward with mask=, score= and aux="
        raise NotImplementedError(f"{name}: captures arrays or calls torch, and its source was not found; {advice}")
    return found[0]


@functools.cache
def _ops() -> ModuleType:
    import ops  # late, for Numba comes with it

    return ops
