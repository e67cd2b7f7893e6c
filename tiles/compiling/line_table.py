"""Which Python an instruction comes from: the table of lines that kernels are compiled with for inspection.

An op's instructions are told as those of a function of its name that is inlined where the op is called, and so are an
@inlined helper's. PTX and the disassembler give that back as a chain: the op, the helper's line, the kernel's line.
"""

import contextlib
import linecache
import os
import re
import zlib
from typing import NamedTuple

_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:, function_name [^,]+, inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_SASS = re.compile(r'\s*//## File "([^"]*)", line (\d+)')

APART = 1 << 20  # lines of ops come after any file's


def is_op(file: str, line: int) -> bool:
    """Does this line stand for an op? As in Python, what lies in no file is in <>; a notebook's cell is, too."""
    return line >= APART and os.path.basename(file).startswith("<")


def python_file(file: str) -> str:
    """The name under which Python knows a file's lines: that of a cell, "<ipython-input-3-...>", has got a folder before it."""
    name = os.path.basename(file)
    return name if name.startswith("<") else file


class SourcePlace(NamedTuple):
    """Where an instruction comes from. lines: (file, number) of the line of Python, then of the line that calls it, and so on
    up to the kernel's. op: the name of the op that is called there, or ""."""

    lines: tuple[tuple[str, int], ...] = ()
    op: str = ""

    @classmethod
    def from_chain(cls, chain):
        """The place for a chain of (file, line), the innermost first."""
        python = [at for at in chain if not is_op(*at)]
        ops = [file for file, _ in chain[: chain.index(python[0])]] if python else []
        return cls(tuple((python_file(file), line) for file, line in python), os.path.basename(ops[-1])[1:-1] if ops else "")

    @property
    def source(self) -> str:
        """The line of Python; "" if its file is not there."""
        return linecache.getline(*self.lines[0]).strip() if self.lines else ""

    def __str__(self):
        if not self.lines:
            return "?"
        file, line = self.lines[0]
        return f"{self.op and f'{self.op} in '}{os.path.basename(file)}:{line} `{self.source}`"


@contextlib.contextmanager
def from_op(builder, op):
    """What is built inside comes from this op, says the table of lines, if there is one."""
    where = builder.debug_metadata
    if where:
        add, at = builder.module.add_debug_info, dict(where.operands)
        line, unit = _number(op.name, at["line"]), dict(at["scope"].operands)["unit"]
        file = add("DIFile", {"directory": "", "filename": f"<{op.name}>"})
        kind = add("DISubroutineType", {"types": builder.module.add_metadata([])})
        facts = {"name": op.name, "linkageName": op.name, "scope": file, "file": file, "line": line, "unit": unit}
        scope = add("DISubprogram", {**facts, "type": kind, "isDefinition": True}, is_distinct=True)
        builder.debug_metadata = add("DILocation", {"line": line, "column": 1, "scope": scope, "inlinedAt": where})
    try:
        yield
    finally:
        builder.debug_metadata = where


def _number(op, line):
    """The line that an op is told to have where it is called in this line: another for each, for ptxas overlooks that the
    function changes if the line's number does not."""
    return APART + zlib.crc32(f"{op} {line}".encode()) % APART


def of_ptx(text: str) -> list[SourcePlace]:
    """The place of each line of a PTX module."""
    files = dict(_FILE.findall(text))
    chains: dict[tuple, tuple] = {}
    rows, place = [], SourcePlace()
    for line in text.splitlines():
        loc = _LOC.match(line)
        if loc and loc[2] != "0":
            at = files.get(loc[1], "?"), int(loc[2])
            caller = loc[3] and (files.get(loc[3], "?"), int(loc[4]))
            chains[at] = (at, *(chains.get(caller, (caller,)) if caller else ()))
            place = SourcePlace.from_chain(chains[at])
        rows.append(place)
    return rows


def of_sass(text: str) -> list[SourcePlace]:
    """The place of each line of nvdisasm's text."""
    rows, chain, place = [], [], SourcePlace()
    for line in text.splitlines():
        at = _SASS.match(line)
        if at:
            chain.append((at[1], int(at[2])))
        elif chain:
            place, chain = SourcePlace.from_chain(chain), []
        rows.append(place)
    return rows
