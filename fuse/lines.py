"""Lines of generated text, and where those that are too long break: where `ruff format` breaks them, in WIDTH columns.

    target = call(a, b)          target = call(         target = call(        target = (
                                     a, b                   a,                    first * second
                                 )                          b,                    + third
                                                        )                     )

So what is printed stays as it is where somebody keeps it, and formats it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 120
BINDS = [" + ", " - "], [" * ", " / ", " // ", " @ "]  # where an expression is cut, first where operators bind the least


def assigned(values: Iterable[tuple[str, str]], indent: int = 4) -> list[str]:
    """Lines of code that assign these (name, expression), in order. One line assigns several names where it has room, if none
    of its expressions needs a name that it assigns."""
    lines = list[list[tuple[str, str]]]()
    for name, made in values:
        before = lines[-1] if lines else []
        alone = not before or any(re.search(rf"(?<![\w.]){one}\b", made) for one, _ in before)
        if alone or sum(len(one) + len(its) + 4 for one, its in [*before, (name, made)]) - 1 > WIDTH - indent:
            lines.append([])
        lines[-1].append((name, made))
    return [f"{', '.join(one for one, _ in line)} = {', '.join(its for _, its in line)}" for line in lines]


def broken(lines: Sequence[str]) -> Iterator[str]:
    """The lines of code, those that are too long broken into several. What is inside brackets goes on in the next line."""
    whole = ""
    for line in lines:
        further = line.lstrip()
        whole = line if not whole else (whole.rstrip(", ") if further[0] in ")]}" else whole) + further
        if _depth(whole.partition("  # ")[0]) > 0:
            whole += "" if whole.endswith("(") else " "
        else:
            yield from _broken(whole)
            whole = ""


def _broken(line: str) -> list[str]:
    """A line of code as several lines, if it is too long."""
    code, apart, comment = line.partition("  # ")
    indent = len(code) - len(code.lstrip())
    if len(line) <= WIDTH or not code.strip():
        return [line]
    if apart:
        return [f"{' ' * indent}# {comment}", *_broken(code)]
    if len(several := _apart(code)) > 1:
        return [part for one in several for part in _broken(one)]
    target, equals, value = code.strip().partition(" = ")
    if not equals or _depth(target):
        target, value = "", code.strip()
    head = target + equals if target else ""
    if len(several := cut_at_commas(value)) > 1 and head:
        lines = [part for one in several for part in _laid(one, indent + 4, ",")]
        return [f"{' ' * indent}{head}(", *lines, " " * indent + ")"]
    if head and (len(_operands(value)) > 1 or len(head) + indent + value.index("(") >= WIDTH or value.endswith("()")):
        return [f"{' ' * indent}{head}(", *_laid(value, indent + 4, ""), " " * indent + ")"]
    tail = ":" if value.endswith(":") else ""
    return _laid(value.removesuffix(":"), indent, tail, head)


def _laid(text: str, indent: int, tail: str, head: str = "") -> list[str]:
    """The lines of an expression that is in brackets or is a call: one line if it fits, otherwise several, cut at operators or
    inside the call's brackets. head, tail: what stands before and behind it."""
    pad = " " * indent
    if len(whole := pad + head + text + tail) <= WIDTH:
        return [whole]
    operands = _operands(text) if not head else [text]
    if len(operands) > 1:
        parts = [_laid(part, indent, tail * (n == len(operands) - 1)) for n, part in enumerate(operands)]
        return [line for part in parts for line in part]
    start = _last_bracket(text)
    if start < 0:
        return [whole]
    inside = text[start + 1 : -1]
    called = text[start] == "(" and re.search(r"[\w)\]]$", text[:start])  # else brackets are around one operand
    if len(inside) + indent + 4 <= WIDTH or not called:
        within = _laid(inside, indent + 4, "")
    else:
        within = [line for one in cut_at_commas(inside) for line in _laid(one, indent + 4, ",")]
    return [pad + head + text[: start + 1], *within, f"{pad}{text[-1]}{tail}"]


def _depth(text: str) -> int:
    """How many brackets are open at the end of the text."""
    return sum(text.count(one) for one in "([{") - sum(text.count(one) for one in ")]}")


def _outside(text: str) -> Iterator[int]:
    """The places in the text that are not inside brackets."""
    depth = 0
    for n, one in enumerate(text):
        depth -= one in ")]}"
        if not depth:
            yield n
        depth += one in "([{"


def _operands(text: str) -> list[str]:
    """The operands of the weakest operators in an expression, each with the operator in front of it; the whole expression if
    it has no operators."""
    outside = {*_outside(text)}
    for operators in BINDS:
        places = [n for n in sorted(outside) if any(text.startswith(one, n) for one in operators)]
        if places:
            return [text[a:b].strip() for a, b in zip([0, *places], [*places, len(text)])]
    return [text]


def _last_bracket(text: str) -> int:
    """The place of the bracket that the text's last character closes; -1 if it closes none."""
    if text[-1] not in ")]":
        return -1
    return max(n for n in _outside(text) if text[n] in "([")


def cut_at_commas(text: str) -> list[str]:
    """The arguments of a call, from their text."""
    places = [n for n in _outside(text) if text.startswith(", ", n)]
    parts = [text[a:b].removeprefix(", ") for a, b in zip([0, *places], [*places, len(text)])]
    return [*parts[:-1], parts[-1].rstrip(", ")]


def _apart(line: str) -> list[str]:
    """An assignment to several names as several assignments, as few as fit the width. The line itself if one name needs the
    old value of another, or if it is no such assignment."""
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
    return [line[:indent] + one for one in assigned(zip(names, values), indent)]


def imports(lines: Iterable[str]) -> Iterator[str]:
    """Import lines, those that are too long as several."""
    for line in lines:
        head, _, names = line.partition(" import ")
        while len(line) > WIDTH:
            at = line.rindex(", ", 0, WIDTH)
            yield line[:at]
            line = f"{head} import {line[at + 2 :]}"
        yield line
