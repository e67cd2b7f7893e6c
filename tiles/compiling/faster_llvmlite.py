"""llvmlite with less to do: its instructions are made and printed without what most of them have no use for. While
tiles/compiling/compiler.py compiles, these stand in its place. The text of a module stays the same, letter by letter, but for
long structs, which have names.

A kernel has some 20,000 instructions, and two in five take a tile apart into registers or put it together. Otherwise the
struct of a tile would be written out in each of them: that was five sixths of the text, and NVVM took three times as long."""

import functools
import itertools
import re

from llvmlite.ir import instructions, values

_STRUCT = re.compile(r"\{(?:float|i32)(?:, (?:float|i32)){7,}\}")
_NAME = re.compile(r'%"\d+ (?:float|i32)[^"]*"')
_structs: dict[str, str] = {}  # name: struct


@functools.cache
def _name_of(struct):
    """A long struct's name: {float, float, ..., i32} -> %"16 float, 1 i32"."""
    parts = itertools.groupby(struct[1:-1].split(", "))
    name = f'%"{", ".join(f"{len(list(run))} {part}" for part, run in parts)}"'
    _structs[name] = struct
    return name


def name_structs(text):
    """LLVM's text of a module, with names for long structs."""
    text = _STRUCT.sub(lambda match: _name_of(match[0]), text)
    head, gap, functions = text.partition("\n\n")
    return (
        "\n".join([head, *(f"{name} = type {_structs[name]}" for name in dict.fromkeys(_NAME.findall(text)))]) + gap + functions
    )


@functools.cache
def _short(text):
    """A type's text, with names for long structs."""
    return _STRUCT.sub(lambda match: _name_of(match[0]), text)


def _typed(value):
    """A value with its type, as operands are printed."""
    return f"{_short(str(value.type))} {value.get_reference()}"


def _init_instruction(self, parent, typ, opname, operands, name="", flags=()):
    """An instruction with a name of its own, and that name as others refer to it. llvmlite comes here through three more
    functions, and asks for the reference's text later."""
    scope = parent.scope
    used = scope._useset
    if (unique := name) in used:
        counts = scope._basenamemap
        while unique in used:
            counts[name] = number = counts[name] + 1
            unique = f"{name}.{number}"
    used.add(unique)
    self.parent, self.type, self._name = parent, typ, unique
    if '"' not in unique and "\\" not in unique:
        self._StringReferenceCaching__cached_refstr = f'%"{unique}"'
    self.opname, self.operands, self.flags, self.metadata = opname, operands, [*flags], {}


def _init_extract(self, parent, agg, indices, name=""):
    """A part of a struct or an array."""
    typ = agg.type
    try:
        for i in indices:
            typ = typ.elements[i]
    except (AttributeError, IndexError):
        raise TypeError(f"cannot index at {list(indices)!r} in {agg.type}") from None
    _init_instruction(self, parent, typ, "extractvalue", [agg], name)
    self.aggregate, self.indices = agg, indices


def _init_insert(self, parent, agg, elem, indices, name=""):
    """A struct or an array with another part."""
    typ = agg.type
    try:
        for i in indices:
            typ = typ.elements[i]
    except (AttributeError, IndexError):
        raise TypeError(f"cannot index at {list(indices)!r} in {agg.type}") from None
    if elem.type is not typ and elem.type != typ:
        raise TypeError(f"cannot insert {elem.type} at {list(indices)!r} in {agg.type}")
    _init_instruction(self, parent, agg.type, "insertvalue", [agg, elem], name)
    self.aggregate, self.value, self.indices = agg, elem, indices


def _operation(x):
    left, right = x.operands
    flags = "".join([f" {flag}" for flag in x.flags])
    return f"{x.get_reference()} = {x.opname}{flags} {_short(str(x.type))} {left.get_reference()}, {right.get_reference()}"


def _comparison(x):
    left, right = x.operands
    flags = "".join([f" {flag}" for flag in x.flags])
    return f"{x.get_reference()} = {x.opname}{flags} {x.op} {_typed(left)}, {right.get_reference()}"


def _extract(x):
    return f"{x.get_reference()} = extractvalue {_typed(x.aggregate)}, {', '.join(map(str, x.indices))}"


def _insert(x):
    return f"{x.get_reference()} = insertvalue {_typed(x.aggregate)}, {_typed(x.value)}, {', '.join(map(str, x.indices))}"


def _load(x):
    (pointer,), align = x.operands, "" if x.align is None else f", align {x.align}"
    return f"{x.get_reference()} = load {_short(str(x.type))}, {_typed(pointer)}{align}"


def _store(x):
    (value, pointer), align = x.operands, "" if x.align is None else f", align {x.align}"
    return f"store {_typed(value)}, {_typed(pointer)}{align}"


def _cast(x):
    return f"{x.get_reference()} = {x.opname} {_typed(x.operands[0])} to {_short(str(x.type))}"


TEXTS = {  # how an instruction of a class is printed, unless it has metadata
    instructions.CompareInstr: _comparison,
    instructions.ICMPInstr: _comparison,
    instructions.FCMPInstr: _comparison,
    instructions.ExtractValue: _extract,
    instructions.InsertValue: _insert,
    instructions.LoadInstr: _load,
    instructions.StoreInstr: _store,
    instructions.CastInstr: _cast,
}


def _text(x):
    """An instruction is one line of LLVM's text."""
    if x.metadata:
        return str(x)
    write = TEXTS.get(type(x))
    if write is None and type(x) is instructions.Instruction and len(x.operands) == 2:
        write = _operation
    return write(x) if write else str(x)


def _describe_block(self, buffer):
    buffer.append(f"{self._format_name()}:\n")
    buffer += [f"  {_text(x)}\n" for x in self.instructions]


INSTEAD = [  # (owner, name, what stands there)
    (instructions.Instruction, "__init__", _init_instruction),
    (instructions.ExtractValue, "__init__", _init_extract),
    (instructions.InsertValue, "__init__", _init_insert),
    (values.Block, "descr", _describe_block),
]
