"""The module that a fused function becomes: text that one can read, keep and run, and that is what runs here.

A template says of its kernel a Text: what stands in it line by line. `assemble` makes a module of several; `load` runs it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

WIDTH = 120


@dataclass
class Text:
    """A kernel's lines. globals: assignments of the module. kernel: the body. helpers: functions that it calls. before: lines
    of the launching function, ahead of the launch. grid, threads: of the launch, in terms of the arrays. arguments: the
    kernel's parameters, and what each is given. shared: does it open `smem`? cluster: blocks of a cluster. imports:
    lines. ops, tiles: names that are imported from there."""

    globals: list[str] = field(default_factory=list)
    kernel: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    arguments: list[tuple[str, str]] = field(default_factory=list)
    grid: str = ""
    threads: str = ""
    shared: bool = False
    cluster: str = ""
    imports: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)
    tiles: set[str] = field(default_factory=set)

    def uses(self, ops: str = "", tiles: str = "") -> None:
        """These names, apart by spaces, are to be imported."""
        self.ops |= set(ops.split())
        self.tiles |= set(tiles.split())


def assemble(title: str, name: str, kernels: Sequence[tuple[str, Text]], parameters: Sequence[str]) -> str:
    """The module's text. title: its docstring. name: of what it computes. kernels: the name and the Text of each, in the order
    of their launches. parameters: what is launched with; arrays that are written come last."""
    texts = [text for _, text in kernels]
    imports = sorted(set().union(*(text.imports for text in texts)))
    plain = [line for line in imports if line.startswith("import")]
    others = [line for line in imports if not line.startswith("import")]
    ops, names = (sorted(set().union(*(getattr(text, what) for text in texts))) for what in ("ops", "tiles"))
    head = [*plain, ""] if plain else []
    head += ["from numba import cuda", *others, "", "import tiles"]
    head += [f"from ops import {', '.join(ops)}", f"from tiles import {', '.join(names)}", ""]
    constants, bodies, launches = [], [], []
    for kernel, text in kernels:
        mark = _marks(kernel, text) if len(kernels) > 1 else {}
        constants += [_marked(line, mark) for line in text.globals]
        bodies += [*(["", ""] if text.helpers else []), *(_marked(line, mark) for line in text.helpers)]
        bodies += ["", "", f"@cuda.jit(launch_bounds=({_marked(text.threads, mark)}, 1))"]
        bodies += [f"def {kernel}({', '.join(one for one, _ in text.arguments)}):"]
        bodies += [f"    {_marked(line, mark)}" for line in text.kernel]
        launches += [f"    {_marked(line, mark)}" for line in text.before]
        options = "".join(
            f", {option}={value}"
            for option, value in (("shared", "smem" if text.shared else ""), ("cluster", text.cluster))
            if value
        )
        given = ", ".join(value for _, value in text.arguments)
        launches += ["    " + _marked(f"tiles.launch({kernel}, {text.grid}, {text.threads}{options})({given})", mark)]
    launch = [
        "",
        "",
        f"def launch({', '.join(parameters)}):",
        f'    """{name}, on arrays of any framework; what is last is written."""',
    ]
    end = "\n" if "\n" in title else ""
    lines = [*f'"""{title}{end}"""'.splitlines(), "", *head, *constants, *bodies, *launch, *launches]
    return "\n".join(itertools.chain.from_iterable(_folded(line) for line in lines)) + "\n"


def _marks(kernel: str, text: Text) -> dict[str, str]:
    """What the globals of one of several kernels are called."""
    found = [
        name.strip() for line in text.globals if "=" in line and line[0].isalpha() for name in line.partition("=")[0].split(",")
    ]
    return {name: f"{kernel.upper() if name.isupper() else kernel}_{name}" for name in found}


def _marked(line: str, marks: dict[str, str]) -> str:
    return re.sub(r"(?<![\w.])\w+(?!\w*=(?!=))", lambda match: marks.get(match[0], match[0]), line) if marks else line


def _folded(line: str) -> list[str]:
    """A line that is too long, as several: after a comma or before an operator, inside of parentheses."""
    if len(line) <= WIDTH or "(" not in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    at = max((m.end() for m in re.finditer(r", | (?=[*/+@-] )", line[:WIDTH])), default=0)
    if at <= len(indent) or line[:at].count("(") <= line[:at].count(")"):
        return [line]
    return [line[:at].rstrip(), *_folded(indent + line[at:])]


@functools.lru_cache(1024)
def load(text: str, name: str) -> ModuleType:
    """The module of this text, run. Its lines are found where errors and the interpreter look for them."""
    file = f"<fuse {name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    module = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), vars(module))
    return module


def unused(name: str, taken: Iterable[str]) -> str:
    """The name, or with a number behind it that none of these have."""
    number, found, taken = 1, name, set(taken)
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found
