"""The line of a kernel that an error is about, as Numba shows it, under the head of the function that it stands in. Numba takes
the last `def` before it, whose body may have ended: a lambda's line then stands under somebody else's."""

import ast
import linecache
import os

from numba.cuda.core.ir import Loc


def statement_at(loc: Loc) -> str:
    """'File "kernels.py", line 7:', and the line, with the one before it and the head of their function."""
    lines = linecache.getlines(loc.filename)
    if loc.maybe_decorator or not 0 < loc.line <= len(lines):
        return loc.strformat()
    line, head = lines[loc.line - 1].rstrip(), _head(lines, loc.line)
    before = loc.line - 1 if head and head < loc.line else loc.line
    source_lines = [text.rstrip() for text in lines[before - 1 : loc.line]]
    if head and head < before:
        source_lines = [lines[head - 1].rstrip(), f"{' ' * (_indent(lines[head - 1]) + 4)}<source elided>", *source_lines]
    text = "\n".join([*source_lines, " " * _indent(line) + "^"])
    return f'\nFile "{_shown_path(loc.filename)}", line {loc.line}:\n{text}'


def _head(lines, line) -> int | None:
    """The line of the `def` of the innermost function, or None if that is a lambda, there is none, or this is no Python."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell of a notebook with commands of its own
        return None
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or 0)]
    inner = max(nodes, key=lambda node: (node.lineno, node.col_offset), default=None)
    return None if inner is None or isinstance(inner, ast.Lambda) else inner.lineno


def _indent(text):
    return len(text) - len(text.lstrip())


def _shown_path(file):
    try:
        return os.path.relpath(file)
    except ValueError:  # another drive
        return file
