"""Layout of generated code in lines of at most WIDTH columns, broken where `ruff format` breaks them.

    target = call(a, b)          target = call(         target = call(        target = (
                                     a, b                   a,                    first * second
                                 )                          b,                    + third
                                                        )                     )

So a formatter leaves a generated module that somebody keeps as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 120
BINDS = [" + ", " - "], [" * ", " / ", " // ", " @ "]  # operators at which expressions break, those of least precedence first


def format_assignments(values: Iterable[tuple[str, str]], indent: int = 4) -> list[str]:
    """Lines of code that assign these (name, expression), in order. One line assigns several names if they fit and none of its
    expressions reads a name that it assigns."""
    lines = list[list[tuple[str, str]]]()
    for name, value in values:
        before = lines[-1] if lines else []
        needs_line = not before or any(re.search(rf"(?<![\w.]){one}\b", value) for one, _ in before)
        if needs_line or sum(len(one) + len(value) + 4 for one, value in [*before, (name, value)]) - 1 > WIDTH - indent:
            lines.append([])
        lines[-1].append((name, value))
    return [f"{', '.join(one for one, _ in line)} = {', '.join(value for _, value in line)}" for line in lines]


def break_lines(lines: Sequence[str]) -> Iterator[str]:
    """The lines of code with those that are too long broken into several. The contents of open brackets are joined first."""
    statement = ""
    for line in lines:
        stripped = line.lstrip()
        statement = line if not statement else (statement.rstrip(", ") if stripped[0] in ")]}" else statement) + stripped
        if _depth(statement.partition("  # ")[0]) > 0:
            statement += "" if statement.endswith("(") else " "
        else:
            yield from _break_line(statement)
            statement = ""


def _break_line(line: str) -> list[str]:
    """The lines into which a line of code breaks, if it is too long."""
    code, separator, comment = line.partition("  # ")
    indent = len(code) - len(code.lstrip())
    if len(line) <= WIDTH or not code.strip():
        return [line]
    if separator:
        return [f"{' ' * indent}# {comment}", *_break_line(code)]
    if len(several := _split_assignment(code)) > 1:
        return [part for one in several for part in _break_line(one)]
    target, equals, value = code.strip().partition(" = ")
    if not equals or _depth(target):
        target, value = "", code.strip()
    head = target + equals if target else ""
    if len(several := cut_at_commas(value)) > 1 and head:
        lines = [part for one in several for part in _lay_out(one, indent + 4, ",")]
        return [f"{' ' * indent}{head}(", *lines, " " * indent + ")"]
    if head and (len(_operands(value)) > 1 or len(head) + indent + value.index("(") >= WIDTH or value.endswith("()")):
        return [f"{' ' * indent}{head}(", *_lay_out(value, indent + 4, ""), " " * indent + ")"]
    tail = ":" if value.endswith(":") else ""
    return _lay_out(value.removesuffix(":"), indent, tail, head)


def _lay_out(text: str, indent: int, tail: str, head: str = "") -> list[str]:
    """The lines of an expression that is in brackets or is a call: one line if it fits, otherwise several, broken at operators
    or inside the call's brackets. head, tail: the text before and after it."""
    pad = " " * indent
    if len(line := pad + head + text + tail) <= WIDTH:
        return [line]
    operands = _operands(text) if not head else [text]
    if len(operands) > 1:
        parts = [_lay_out(part, indent, tail * (n == len(operands) - 1)) for n, part in enumerate(operands)]
        return [line for part in parts for line in part]
    start = _last_bracket(text)
    if start < 0:
        return [line]
    inside = text[start + 1 : -1]
    called = text[start] == "(" and re.search(r"[\w)\]]$", text[:start])  # else brackets are around one operand
    if len(inside) + indent + 4 <= WIDTH or not called:
        inner_lines = _lay_out(inside, indent + 4, "")
    else:
        inner_lines = [line for one in cut_at_commas(inside) for line in _lay_out(one, indent + 4, ",")]
    return [pad + head + text[: start + 1], *inner_lines, f"{pad}{text[-1]}{tail}"]


def _depth(text: str) -> int:
    """How many brackets are open at the end of the text."""
    return sum(text.count(one) for one in "([{") - sum(text.count(one) for one in ")]}")


def _places_outside_brackets(text: str) -> Iterator[int]:
    """The places in the text that are not inside brackets."""
    depth = 0
    for n, one in enumerate(text):
        depth -= one in ")]}"
        if not depth:
            yield n
        depth += one in "([{"


def _operands(text: str) -> list[str]:
    """The operands of the operators of least precedence in an expression, each with the operator in front of it; the whole
    expression if it has no operators."""
    outside = {*_places_outside_brackets(text)}
    for operators in BINDS:
        places = [n for n in sorted(outside) if any(text.startswith(one, n) for one in operators)]
        if places:
            return [text[a:b].strip() for a, b in zip([0, *places], [*places, len(text)])]
    return [text]


def _last_bracket(text: str) -> int:
    """The place of the bracket that the text's last character closes; -1 if it closes none."""
    if text[-1] not in ")]":
        return -1
    return max(n for n in _places_outside_brackets(text) if text[n] in "([")


def cut_at_commas(text: str) -> list[str]:
    """The arguments of a call, from their text."""
    places = [n for n in _places_outside_brackets(text) if text.startswith(", ", n)]
    parts = [text[a:b].removeprefix(", ") for a, b in zip([0, *places], [*places, len(text)])]
    return [*parts[:-1], parts[-1].rstrip(", ")]


def _split_assignment(line: str) -> list[str]:
    """An assignment to several names as several assignments, as few as fit the width. The line itself if one name needs the old
    value of another, or if it is no such assignment."""
    code = line.lstrip()
    if not re.match(r"\w+(?:, \w+)+ = ", code):
        return [line]
    statement = ast.parse(code).body[0]
    if not isinstance(statement, ast.Assign) or not isinstance(value := statement.value, ast.Tuple):
        return [line]
    names, values = code.partition(" = ")[0].split(", "), [ast.get_source_segment(code, one) or "" for one in value.elts]
    read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if len(names) != len(values) or not read.isdisjoint(names):
        return [line]
    indent = len(line) - len(code)
    return [line[:indent] + one for one in format_assignments(zip(names, values), indent)]


def break_imports(lines: Iterable[str]) -> Iterator[str]:
    """Import lines, with those that are too long split into several."""
    for line in lines:
        head, _, names = line.partition(" import ")
        while len(line) > WIDTH:
            at = line.rindex(", ", 0, WIDTH)
            yield line[:at]
            line = f"{head} import {line[at + 2 :]}"
        yield line
