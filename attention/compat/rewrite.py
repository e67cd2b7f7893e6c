"""Rewrites a function written for FlexAttention as one for our kernels: with further arguments instead of captured arrays, and
with functions of `ops` instead of torch's.

    lambda s, b, h, i, j: torch.tanh(s) + (i - j).abs() * self.slopes[h]
    lambda s, b, h, i, j, self_slopes_0: ops.tanh(s) + ops.abs(i - j) * self_slopes_0[h]"""

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

OPERATORS = {  # torch's binary functions that are operators in Python
    "logical_and": ast.BitAnd, "bitwise_and": ast.BitAnd, "logical_or": ast.BitOr, "bitwise_or": ast.BitOr,
    "floor_divide": ast.FloorDiv, "remainder": ast.Mod, "fmod": ast.Mod, "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult,
    "true_divide": ast.Div,
}  # fmt: skip
COMPARISONS = {"eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE}
UNARY_OPS = "abs exp exp2 log log2 sqrt rsqrt reciprocal tanh sigmoid relu logical_not bitwise_not neg square".split()
TORCH_METHODS = frozenset((*UNARY_OPS, *OPERATORS, *COMPARISONS, "clamp", "clip", "div", "float", "maximum", "minimum"))
POWERS = range(2, 9)
OPS_NAME = "ops_of_kernels"  # the name of the `ops` module in rewritten functions

_rewritten_functions: WeakKeyDictionary = WeakKeyDictionary()  # {function: {constants and spec: the rewritten function}}
_source_texts: WeakKeyDictionary = WeakKeyDictionary()  # {function: its text}, of functions that function_from_text made


def function_from_text(text: str, space: dict[str, Any]) -> FunctionType:
    """Evaluate the text of a function in which the names of `space` stand for its values."""
    function = eval(text, {"__builtins__": __builtins__, "__name__": __name__, **space})
    _source_texts[function] = text
    return function


class RewriteSpec(NamedTuple):
    """How to rewrite a function's names. constants: what it reads from outside and keeps; bound: its arguments that are bound
    to constants; numbers: attributes that are numbers. arrays: by the text that names each, the argument that replaces it, and
    whether the array has a single number. new_arguments: all these arguments; receives_arrays: the functions it calls that take
    all of them."""

    constants: dict[str, Any]
    bound: frozenset[str]
    numbers: dict[str, Any]
    arrays: dict[str, tuple[str, bool]]
    receives_arrays: frozenset[str]
    new_arguments: tuple[str, ...]


def uses_torch_ops(f: FunctionType, constants: dict[str, Any]) -> bool:
    """Does the function call something that kernels know by another name: torch functions, methods of arrays, powers?"""
    return bool(_torch_names(constants)) or _uses_torch_methods(f.__code__)


@functools.lru_cache(256)
def _uses_torch_methods(code: CodeType) -> bool:
    powers = {("BINARY_OP", "**"), ("BINARY_POWER", "")}
    return any(
        (x.opname in ("LOAD_ATTR", "LOAD_METHOD") and x.argval in TORCH_METHODS) or (x.opname, x.argrepr) in powers
        for x in dis.get_instructions(code)
    )


def rewrite(name: str, f: FunctionType, spec: RewriteSpec) -> Any:
    """f with further arguments and with functions of `ops`; `name` is what errors call it."""
    constants = spec.constants
    cache = _rewritten_functions.setdefault(f, {})
    outside = tuple((variable, x if isinstance(x, int | float | str) else id(x)) for variable, x in constants.items())
    key = outside, *[tuple(x.items()) if isinstance(x, dict) else x for x in spec[1:]]
    if key not in cache:
        torch = _torch_names(constants)
        module = _build_module(name, f, _RewriteNames(name, torch, spec))
        read = {x.id for x in ast.walk(module) if isinstance(x, ast.Name)}
        retained = {variable: x for variable, x in constants.items() if variable in read}
        space = _select_globals(f, read) | retained | {OPS_NAME: _ops()} | dict.fromkeys(torch, _ops())
        exec(compile(module, inspect.getfile(f), "exec"), space)
        cache[key] = space["mod"], retained  # `retained` lives on, so that no other object gets one of these ids
    return cache[key][0]


def _torch_names(constants: dict[str, Any]) -> set[str]:
    return {variable for variable, x in constants.items() if isinstance(x, ModuleType) and x.__name__ == "torch"}


class _RewriteNames(ast.NodeTransformer):
    """Replaces arrays, attributes and torch functions in a function's syntax tree by arguments, numbers and functions of
    `ops`."""

    def __init__(self, name: str, torch: set[str], spec: RewriteSpec):
        self.name, self.torch, self.spec = name, torch, spec

    def visit_Name(self, node):
        return self._read(node.id, node)

    def visit_Attribute(self, node):
        text = ast.unparse(node)
        if text in self.spec.numbers:
            return ast.Constant(self.spec.numbers[text])
        if text in self.spec.arrays:
            return self._read(text, node)
        if isinstance(node.value, ast.Name) and node.value.id in self.torch and not hasattr(_ops(), node.attr):
            if node.attr != "inf":
                advice = "use comparisons, & | ~, arithmetic and the elementwise functions of ops"
                raise NotImplementedError(f"{self.name}: calls torch.{node.attr}, which ops does not have; {advice}")
            return ast.Constant(float("inf"))
        return self.generic_visit(node)

    def visit_Call(self, node):
        f = node.func
        if isinstance(f, ast.Name) and f.id in self.spec.receives_arrays:
            node.args += [ast.Name(x, ast.Load()) for x in self.spec.new_arguments]
        if isinstance(f, ast.Attribute) and f.attr in TORCH_METHODS:
            by_module = isinstance(f.value, ast.Name) and f.value.id in self.torch
            operands = [self.visit(x) for x in (*([] if by_module else [f.value]), *node.args)]
            keywords = {x.arg: x.value for x in node.keywords}
            if (expression := _express_with_ops(f.attr, operands, keywords)) is not None:
                return expression
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in POWERS:
            factors = [copy.deepcopy(node.left) for _ in range(int(node.right.value))]
            return functools.reduce(lambda x, y: ast.BinOp(x, ast.Mult(), y), factors)
        return node

    def _read(self, text, node):
        if text not in self.spec.arrays:
            return node
        new, is_number = self.spec.arrays[text]
        name = ast.Name(new, ast.Load())
        return ast.Subscript(name, ast.Constant(0), ast.Load()) if is_number else name


def _express_with_ops(name: str, operands: list[Any], keywords: dict[str, Any]) -> Any:
    """A call of a torch function as operators and functions of `ops`; None if there is no such expression."""
    if name in ("clamp", "clip"):
        ends = dict(zip(("min", "max"), operands[1:])) | keywords
        expression = operands[0]
        for end, op in ("min", "maximum"), ("max", "minimum"):
            expression = _call(op, expression, ends[end]) if end in ends and not _is_none(ends[end]) else expression
        return expression
    if name == "div" and len(operands) == 2:
        mode = keywords.get("rounding_mode")
        if mode is None or getattr(mode, "value", "") == "floor":
            return ast.BinOp(operands[0], ast.Div() if mode is None else ast.FloorDiv(), operands[1])
    if keywords:
        return None
    match name, len(operands):
        case ("float", 1):
            return operands[0]
        case ("neg", 1):
            return ast.UnaryOp(ast.USub(), operands[0])
        case ("logical_not" | "bitwise_not", 1):
            return ast.UnaryOp(ast.Invert(), operands[0])
        case ("square", 1):
            return ast.BinOp(operands[0], ast.Mult(), copy.deepcopy(operands[0]))
        case (_, 2) if name in OPERATORS:
            return ast.BinOp(operands[0], OPERATORS[name](), operands[1])
        case (_, 2) if name in COMPARISONS:
            return ast.Compare(operands[0], [COMPARISONS[name]()], [operands[1]])
        case (_, count) if hasattr(_ops(), name) and count == (1 if name in UNARY_OPS else 2):
            return _call(name, *operands)
    return None


def _call(name: str, *operands: Any) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(OPS_NAME, ast.Load()), name, ast.Load()), [*operands], [])


def _is_none(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _parse_sources(f: FunctionType) -> Iterator[tuple[ast.AST, int]]:
    """(syntax tree, lines before it) of each text that may contain f: its own text, its file, or, if the file is not Python,
    f's lines."""
    if f in _source_texts:
        yield ast.parse(_source_texts[f]), 0
        return
    with contextlib.suppress(OSError, IndexError, SyntaxError):
        yield ast.parse("".join(inspect.findsource(f)[0])), 0
        return
    with contextlib.suppress(OSError, SyntaxError):
        lines, first = inspect.getsourcelines(f)
        yield ast.parse(textwrap.dedent("".join(lines))), max(first - 1, 0)


def _select_globals(f: FunctionType, read: set[str]) -> dict[str, Any]:
    """The globals that the rewritten code names: keeping all of them would keep f, and the caller's arrays, alive for ever."""
    names, codes = {"__builtins__", "__name__", "__file__"}, [f.__code__]
    for code in codes:
        names |= {*code.co_names} & read
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return {name: x for name, x in f.__globals__.items() if name in names}


def _build_module(name: str, f: FunctionType, writer: _RewriteNames) -> ast.Module:
    """The syntax tree of a module that defines `mod`: f without its bound arguments and with the new ones."""
    node, bound = _find_source(name, f), writer.spec.bound
    node.args.posonlyargs, node.args.args = [], [x for x in (*node.args.posonlyargs, *node.args.args) if x.arg not in bound]
    node.args.kwonlyargs, node.args.kw_defaults, node.args.defaults = [], [], []
    for argument in node.args.args:
        argument.annotation = None
    node.args.args += [ast.arg(x) for x in writer.spec.new_arguments]
    if isinstance(node, ast.Lambda):
        node.body = writer.visit(node.body)
        statement: ast.stmt = ast.Assign([ast.Name("mod", ast.Store())], node)
    else:
        node.name, node.decorator_list, node.returns = "mod", [], None
        node.body = [writer.visit(x) for x in node.body]
        statement = node
    return ast.fix_missing_locations(ast.Module([statement], []))


def _find_source(name: str, f: FunctionType) -> Any:
    """The one `def` or `lambda` that matches f's line, arguments and name."""
    code, kind = f.__code__, ast.Lambda if f.__name__ == "<lambda>" else ast.FunctionDef
    arguments = [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]

    def is_source(node: Any, ahead: int) -> bool:
        if not isinstance(node, kind) or getattr(node, "name", "<lambda>") != f.__name__:
            return False
        lines = node.lineno, *[x.lineno for x in getattr(node, "decorator_list", ())]
        parameters = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return code.co_firstlineno - ahead in lines and parameters == arguments

    nodes: list[Any] = [node for tree, ahead in _parse_sources(f) for node in ast.walk(tree) if is_source(node, ahead)]
    if len(nodes) > 1 and kind is ast.Lambda and hasattr(code, "co_positions"):  # since Python 3.11
        starts = {(line, column) for line, _, column, _ in code.co_positions()}
        nodes = [node for node in nodes if (node.body.lineno, node.body.col_offset) in starts]
    if len(nodes) != 1:
        advice = "write it as a `def` in a file, or call attention.forward with mask=, score= and aux="
        raise NotImplementedError(f"{name}: captures arrays or calls torch, and its source was not found; {advice}")
    return nodes[0]


@functools.cache
def _ops() -> ModuleType:
    import ops  # late, for Numba comes with it

    return ops
