"""A parser of PTX modules: the entry's parameters and registers, and its instructions with labels resolved.

Braces open scopes, in which inline assembly declares registers and labels of its own; `.loc` says which line of Python
an instruction comes from.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..compiling.line_table import is_op, python_file

_TOKEN = re.compile(
    r"\s+|//[^\n]*"
    r"|(?P<loc>\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*)"
    r"|(?P<open>\{)|(?P<close>\})"
    r"|(?P<label>[\w$]+):(?!:)"
    r"|(?P<statement>[^;]+);"
)
_STATEMENT = re.compile(r"(?:@(?P<negated>!?)(?P<guard>[\w%$]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_VARIABLE = re.compile(r"\.(local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_MODULE_VARIABLE = re.compile(
    r"^[ \t]*(?P<extern>\.extern\s+)?(?P<variable>\.shared\s[^;]*);", re.MULTILINE
)  # before the entry
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
BYTES |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8}


class Reg(NamedTuple):
    """A register: its index in a warp's list of registers, and its width in bytes (1 for a predicate)."""

    slot: int
    width: int


class Imm(NamedTuple):
    """An immediate operand, as the text writes it."""

    text: str


class Symbol(NamedTuple):
    """A special register, the name of a variable or of a parameter, or `_`."""

    name: str


class Address(NamedTuple):
    """An address operand, [base + offset], or [base, {coordinates}] with a tensor map at the base."""

    base: Any
    offset: int
    coordinates: tuple = ()


@dataclass
class PtxInstruction:
    """An instruction `@guard opcode operands;`. number: its line in the text of PTX. place: (file, line) of Python. index: its
    index in the program. target: of a branch, the index of the instruction that it jumps to."""

    opcode: str
    operands: list
    guard: Reg | None
    negated: bool
    number: int
    place: tuple[str, int]
    text: str
    index: int
    target: int | None = None


@dataclass
class PtxProgram:
    """A parsed kernel.

    parameters: name -> (offset, bytes) in the parameter block. local: name -> offset in local memory, which has local_bytes.
    shared: name -> offset in the shared memory that the kernel declares, which has shared_bytes. dynamic: names of the dynamic
    shared memory. widths: bytes of each register. runs: the function that executes each instruction, None for branches and
    returns. unguarded: the same, None for instructions with a guard, too. reconvergence_points: for each instruction, where
    lanes that diverge at it reconverge. with_lines: compiles the same kernel with a table of lines, if this text has none."""

    name: str
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    dynamic: set[str] = field(default_factory=set)
    widths: list[int] = field(default_factory=list)
    code: list[PtxInstruction] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    unguarded: list[Any] = field(default_factory=list)
    reconvergence_points: list[int] = field(default_factory=list)
    with_lines: Callable[[], list[PtxInstruction]] | None = None

    @functools.cached_property
    def listing(self):
        """The instructions with their lines of Python, for error messages. A table of lines costs a fifth of the time of
        compiling, so it is made only when something fails."""
        listing = self.with_lines() if self.with_lines else self.code
        same_code = [instr.opcode for instr in listing] == [instr.opcode for instr in self.code]  # which nothing guarantees
        return listing if same_code else self.code


class _Scope:
    """The registers and labels that are declared between a pair of braces. outer: the scope around it."""

    def __init__(self, outer=None):
        self.outer, self.names, self.ranges, self.labels = outer, {}, {}, {}
        self.operands = {}  # text of an operand -> the operand, parsed

    def register(self, program, name):
        """The Reg of that name, or None if no scope around declares it."""
        scope = self
        while scope:
            if name in scope.names:
                return scope.names[name]
            prefix = name.rstrip("0123456789")
            if prefix != name and prefix in scope.ranges:
                return scope.declare(program, name, scope.ranges[prefix])
            scope = scope.outer
        return None

    def declare(self, program, name, width):
        """Declare a register in this scope: a new slot in the warp's list of registers."""
        program.widths.append(width)
        self.operands.clear()
        self.names[name] = reg = Reg(len(program.widths) - 1, width)
        return reg

    def label(self, name):
        """The index of the instruction that follows a label."""
        scope = self
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.outer
        raise ValueError(f"no label {name}")


def read(text: str) -> PtxProgram:
    """Parse a PTX module with one kernel. ValueError: a statement cannot be parsed."""
    files = dict(_FILE.findall(text))
    entry = _ENTRY.search(text)
    if not entry:
        raise ValueError("the text has no kernel")
    program, offset = PtxProgram(entry[1]), 0
    for kind, name, count in _PARAMETER.findall(entry[2]):
        size = BYTES[kind] * int(count or 1)
        offset = -(-offset // min(size, 64)) * min(size, 64)  # a number is aligned to its size, a tensor map to 64 bytes
        program.parameters[name] = offset, size
        offset += size
    for declaration in _MODULE_VARIABLE.finditer(text, 0, entry.start()):
        if declaration["extern"]:
            program.dynamic.update(re.findall(r"([\w$]+)\s*\[\s*\]", declaration["variable"]))
        else:
            _variable(program, declaration["variable"])
    scope, place = _Scope(), ("?", 0)
    jumps: list[tuple[PtxInstruction, _Scope, str]] = []
    number, position = text.count("\n", 0, entry.end()) + 1, entry.end()
    while True:
        token = _TOKEN.match(text, position)
        if not token:
            raise ValueError(f"PTX line {number}: {text[position : position + 60]!r}")
        if token["loc"]:
            file = files.get(token["file"], "?")
            line = int(token["line"])
            place = (python_file(file), line) if line and not is_op(file, line) else place
        elif token["open"]:
            scope = _Scope(scope)
        elif token["close"]:
            if scope.outer is None:
                break
            scope = scope.outer
        elif token["label"]:
            scope.labels[token["label"]] = len(program.code)
        elif token["statement"]:
            _statement(program, scope, token["statement"].strip(), number, place, jumps)
        number, position = number + token[0].count("\n"), token.end()
    for instruction, inside, label in jumps:
        instruction.target = inside.label(label)
    return program


def _statement(program, scope, text, number, place, jumps):
    if text.startswith(".reg"):
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL).groups()
        for name in re.split(r"\s*,\s*", names):
            if counted := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
                scope.ranges[counted[1]] = BYTES[kind]
            else:
                scope.declare(program, name, BYTES[kind])
        return
    if text.startswith("."):
        _variable(program, text)  # or .pragma and its like
        return
    match = _STATEMENT.fullmatch(text)
    guard = match["guard"] and scope.register(program, match["guard"])
    opcode, operands = match["opcode"], match["operands"].strip()
    parsed = PtxInstruction(
        opcode, [], guard, match["negated"] == "!", number, place, " ".join(text.split()), len(program.code)
    )
    if opcode.startswith("bra"):
        jumps.append((parsed, scope, operands))
    else:
        parsed.operands = [_operand(program, scope, part) for part in _split(operands)] if operands else []
    program.code.append(parsed)


def _variable(program, text):
    """Give a variable its offset in local or in shared memory, if the text declares one."""
    if match := _VARIABLE.fullmatch(text.strip()):
        space, align, kind, name, count = match.groups()
        alignment, used_bytes = int(align or BYTES[kind]), getattr(program, f"{space}_bytes")
        offset = -(-used_bytes // alignment) * alignment
        getattr(program, space)[name] = offset
        setattr(program, f"{space}_bytes", offset + BYTES[kind] * int(count or 1))


def _split(text):
    """The texts of the operands, which commas separate that are in no brackets."""
    if "{" not in text:
        return [part.strip() for part in text.split(",")]
    parts, depth, start = [], 0, 0
    for k, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            parts.append(text[start:k])
            start = k + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _operand(program, scope, text):
    operand = scope.operands.get(text)
    if operand is None:
        operand = _read_operand(program, scope, text)
        scope.operands[text] = operand  # only now: reading may have declared a register, which empties the table
    return operand


def _read_operand(program, scope, text):
    if text[0] == "{":
        return [_operand(program, scope, part) for part in _split(text[1:-1])]
    if text[0] == "[":
        base, *rest = _split(text[1:-1])
        coordinates = tuple(_operand(program, scope, rest[0])) if rest else ()
        sign = re.search(r"[+](-?\d+)$", base)
        offset = int(sign[1]) if sign else 0
        return Address(_operand(program, scope, base[: sign.start()] if sign else base), offset, coordinates)
    if "|" in text:
        return [_operand(program, scope, part) for part in text.split("|")]
    if text[0].isdigit() or text[0] == "-":
        return Imm(text)
    return scope.register(program, text) or Symbol(text)
