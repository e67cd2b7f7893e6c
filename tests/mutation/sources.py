"""Sources as mutations see them: functions with names that stay, and edits by place in the syntax tree.

A mutation is named `path::function::fault#ordinal`, for example `tiles/ring.py::ring.slot::+for-#1`. The function is the
qualified name, without `<locals>`; a lowering, which is called `_`, has the name of its decorator: `lowers(ring.fill).emit`.
Code outside functions has the name of its class, or none. The ordinal counts equal faults of a function. So names stay what
they are while lines move and the rest of the file changes.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGES = "tiles", "ops", "attention", "fuse"
UNSEEN = {"__repr__", "__str__", "__format__"}  # functions whose text is for people
SAID = re.compile(r"((log|logging|warnings)\.\w+|(.*\.)?(warn|print|\w*[eE]rror|Hazard|hazard)|TypeVar)")  # so are calls
LEAVES = ast.Name | ast.Constant | ast.expr_context | ast.operator | ast.cmpop | ast.unaryop | ast.boolop | ast.arg | ast.alias
COMMENT = re.compile(rb"#[^\n]*")


class Edit(NamedTuple):
    """`text` in place of the bytes [start, end) of a file."""

    start: int
    end: int
    text: bytes


class Mutation(NamedTuple):
    """A small fault of a file of this repository: its name, and what it makes of the file."""

    name: str
    path: str
    edits: tuple[Edit, ...]

    @property
    def function(self) -> str:
        return self.name.split("::")[1]

    def applied(self, data: bytes) -> bytes:
        """The file's bytes with the fault; all that the edits do not name is as it was."""
        for edit in sorted(self.edits, reverse=True):
            data = data[: edit.start] + edit.text + data[edit.end :]
        return data


class SourceFile:
    """A file of Python, by its bytes: the places of nodes are counted in them."""

    def __init__(self, path: str, data: bytes):
        self.path, self.data, self.tree = path, data, ast.parse(data)
        self.lines = [0]
        for line in data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes [start, end) that a node takes; a function or a class begins with its decorators."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
        at = first is not node  # the decorator's own @
        start = self.lines[first.lineno - 1] + first.col_offset - at
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.data[start:end]

    def replaced(self, node: ast.AST, text: bytes) -> Edit:
        return Edit(*self.span(node), text)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit | None:
        """The operator `old` between two operands becomes `new`; comments there do not count."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = COMMENT.sub(lambda actual: b" " * len(actual[0]), self.data[start:end])
        actual = re.search(rb"\s+".join(map(re.escape, old.encode().split())), gap)
        return actual and Edit(start + actual.start(), start + actual.end(), new.encode())

    @functools.cached_property
    def functions(self) -> dict[str, ast.AST]:
        """{name: function, class or, under "", the module}."""
        actual = {"": self.tree}

        def walk(node, above):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    name = inputs = ".".join(filter(None, [above, own_name(child)]))
                    count = 1
                    while name in actual:  # one that is defined again, such as a property's setter
                        name = f"{inputs}~{(count := count + 1)}"
                    actual[name] = child
                    walk(child, name)
                elif not isinstance(child, ast.expr):
                    walk(child, above)

        walk(self.tree, "")
        return actual

    @functools.cached_property
    def names(self) -> dict[ast.AST, str]:
        return {node: name for name, node in self.functions.items()}

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """(function, node) of all code whose faults somebody could notice, in the order of the text: no docstrings,
        annotations, decorators, imports, texts, logging, errors that are raised, nor what only type checkers read."""

        def walk(node, above):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, LEAVES):
                    continue
                name = self.names.get(child, above)
                if unseen(child) or getattr(node, "annotation", None) is child or child in getattr(node, "decorator_list", []):
                    continue
                if getattr(node, "returns", None) is child or (isinstance(node, ast.Assert) and child is node.msg):
                    continue
                yield name, child
                yield from walk(child, name)

        yield from walk(self.tree, "")


def own_name(node) -> str:
    """A function's or a class' name; that of its decorator if it has no name."""
    if node.name != "_" or not node.decorator_list:
        return node.name
    return re.sub("::+", ":", ast.unparse(node.decorator_list[0]).replace(" ", ""))


def dotted(node) -> str:
    """`a.b.c` of an expression that ends so."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


def unseen(node) -> bool:
    """Does no fault of this node show, except in what people read?"""
    match node:
        case ast.FunctionDef(name=name) if name in UNSEEN:
            return True
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=func):
            return bool(SAID.fullmatch(dotted(func)))
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test) or "__name__" in ast.unparse(test)
        case ast.AnnAssign(value=None):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


def sources(root: Path = ROOT) -> list[str]:
    """The packages' files of Python, as paths from the root."""
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    return [file.relative_to(root).as_posix() for file in files]
