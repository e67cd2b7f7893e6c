"""Instructions with the lines of Python that they come from, and the functions that these lines stand in."""

import linecache
import re
import tokenize
from contextlib import suppress
from inspect import getblock
from textwrap import dedent
from typing import NamedTuple

from ..compiling import line_table, sass
from ..compiling.line_table import SourcePlace


class SassLine(NamedTuple):
    """An instruction, as text, and where it comes from."""

    text: str
    place: SourcePlace


class Source(NamedTuple):
    """A function that a kernel is made of: its file, the number of its first line, its lines."""

    file: str
    first: int
    lines: tuple[str, ...]


def mnemonic(text: str) -> str:
    """The mnemonic of an instruction's text: LDS for `@!P0 LDS.64 R2, [R4]`."""
    return text[text.startswith("@") and text.index(" ") + 1 :].split(" ", 1)[0].split(".", 1)[0]


def of_cubin(cubin: bytes) -> tuple[SassLine, ...]:
    """The instructions and labels of a cubin."""
    lines, labels = [], {at: name for name, at in sass.labels(cubin).items()}
    for at, one in enumerate(sass.listing(cubin)):
        if at in labels:
            lines.append(SassLine(f"{labels[at]}:", one.place))
        lines.append(SassLine(str(one), one.place))
    return tuple(lines)


def of_ptx(text: str, name: str) -> tuple[SassLine, ...]:
    """The instructions and labels of a PTX kernel; its parameters by their numbers."""
    depth, lines = 0, []  # of braces: inline assembly has its own
    for line, place in zip(text.splitlines(), line_table.of_ptx(text)):
        line = " ".join(line.replace(f"{name}_param_", "param_").split())
        if line.startswith("//"):
            continue
        after = depth + line.count("{") - line.count("}")
        if depth and not after:
            break
        if depth and line and not line.startswith((".loc", ".reg", ".pragma")):
            lines.append(SassLine(line, place))
        depth = after
    return tuple(lines)


def function_at(file: str, line: int) -> Source:
    """The function that a line stands in; if the file is not there, the line."""
    text = linecache.getlines(file)
    if not 0 < line <= len(text):
        return Source(file, line, ("",))
    first, depth = line - 1, _depth(text[line - 1])
    begins = re.compile(r"\s*(async\s+)?def\b|.*\blambda\b")
    while first and not (begins.match(text[first]) and (_depth(text[first]) < depth or first == line - 1)):
        first -= 1
    while first and text[first - 1].lstrip().startswith("@"):
        first -= 1
    block: list[str] = []
    with suppress(SyntaxError, tokenize.TokenError):
        block = getblock(text[first:])
    if first + len(block) < line:  # it stands in no function that we can find
        first, block = line - 1, text[line - 1 : line]
    return Source(file, first + 1, tuple(dedent("".join(block)).splitlines()))


def _depth(text):
    return len(text) - len(text.lstrip())
