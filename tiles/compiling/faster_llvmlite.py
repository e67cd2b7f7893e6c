"""llvmlite's instructions made and printed by one function each, without what most of them have no use for. While
tiles/compiling/compiler.py compiles, the functions of REPLACEMENTS stand in the place of llvmlite's. The text of a module stays
the same, letter by letter, but for long structs, which get names.

A kernel has some 20,000 instructions. Two in five take the registers of a tile, a struct, apart or put them together, and each
would write the struct out: that was five sixths of the text, and NVVM took three times as long."""

import functools
import itertools
import re

from llvmlite.ir import instructions, types, values

_STRUCT = re.compile(r"\{(?:float|i32)(?:, (?:float|i32)){7,}\}")
_NAME = re.compile(r'%"\d+ (?:float|i32)[^"]*"')
_structs: dict[str, str] = {}  # {a name that _struct_name has given: the struct}


@functools.cache
def _struct_name(struct):
    """The name of a long struct: {float, float, ..., i32} -> %"16 float, 1 i32"."""
    parts = itertools.groupby(struct[1:-1].split(", "))
    name = f'%"{", ".join(f"{len(list(run))} {part}" for part, run in parts)}"'
    _structs[name] = struct
    return name


def name_structs(text):
    """LLVM's text of a module, with names for long structs, which are defined behind its first paragraph."""
    text = _STRUCT.sub(lambda match: _struct_name(match[0]), text)
    head, gap, functions = text.partition("\n\n")
    definitions = [f"{name} = type {_structs[name]}" for name in dict.fromkeys(_NAME.findall(text))]
    return "\n".join([head, *definitions]) + gap + functions


@functools.cache
def _named(text):
    """A type's text, with names for long structs."""
    return _STRUCT.sub(lambda match: _struct_name(match[0]), text)


def _typed(value):
    """A value with its type, as operands are printed."""
    return f"{_named(str(value.type))} {value.get_reference()}"


# ---- how instructions are made -----------------------------------------------------------------------------------------------
def _init_instruction(self, parent, typ, opname, operands, name="", flags=()):
    """Instruction.__init__: gives the instruction a name that is unique in its function, and the text by which others refer to
    it. llvmlite gets here through three more functions, and makes that text later."""
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
    """ExtractValue.__init__: a member of a struct or an array."""
    typ = agg.type
    try:
        for i in indices:
            typ = typ.elements[i]
    except (AttributeError, IndexError):
        raise TypeError(f"cannot index at {list(indices)!r} in {agg.type}") from None
    _init_instruction(self, parent, typ, "extractvalue", [agg], name)
    self.aggregate, self.indices = agg, indices


def _init_insert(self, parent, agg, elem, indices, name=""):
    """InsertValue.__init__: a struct or an array with another member."""
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


# ---- how they are printed ----------------------------------------------------------------------------------------------------
def _print_operation(x):
    left, right = x.operands
    flags = "".join([f" {flag}" for flag in x.flags])
    return f"{x.get_reference()} = {x.opname}{flags} {_named(str(x.type))} {left.get_reference()}, {right.get_reference()}"


def _print_comparison(x):
    left, right = x.operands
    flags = "".join([f" {flag}" for flag in x.flags])
    return f"{x.get_reference()} = {x.opname}{flags} {x.op} {_typed(left)}, {right.get_reference()}"


def _print_extract(x):
    return f"{x.get_reference()} = extractvalue {_typed(x.aggregate)}, {', '.join(map(str, x.indices))}"


def _print_insert(x):
    return f"{x.get_reference()} = insertvalue {_typed(x.aggregate)}, {_typed(x.value)}, {', '.join(map(str, x.indices))}"


def _print_load(x):
    (pointer,), align = x.operands, "" if x.align is None else f", align {x.align}"
    return f"{x.get_reference()} = load {_named(str(x.type))}, {_typed(pointer)}{align}"


def _print_store(x):
    (value, pointer), align = x.operands, "" if x.align is None else f", align {x.align}"
    return f"store {_typed(value)}, {_typed(pointer)}{align}"


def _print_cast(x):
    return f"{x.get_reference()} = {x.opname} {_typed(x.operands[0])} to {_named(str(x.type))}"


PRINTERS = {  # {class: what prints an instruction of it that has no metadata}
    instructions.CompareInstr: _print_comparison,
    instructions.ICMPInstr: _print_comparison,
    instructions.FCMPInstr: _print_comparison,
    instructions.ExtractValue: _print_extract,
    instructions.InsertValue: _print_insert,
    instructions.LoadInstr: _print_load,
    instructions.StoreInstr: _print_store,
    instructions.CastInstr: _print_cast,
}


def _print_instruction(x):
    """An instruction as one line of LLVM's text; llvmlite prints what no function here does."""
    if x.metadata:
        return str(x)
    write = PRINTERS.get(type(x))
    if write is None and type(x) is instructions.Instruction and len(x.operands) == 2:
        write = _print_operation
    return write(x) if write else str(x)


def _describe_block(self, buffer):
    """Block.descr: appends the lines of a block of instructions."""
    buffer.append(f"{self._format_name()}:\n")
    buffer += [f"  {_print_instruction(x)}\n" for x in self.instructions]


def _differ(self, other):
    """Type.__ne__: types are mostly the same object."""
    return self is not other and not self.__eq__(other)


REPLACEMENTS = [  # (owner, name, what stands in its place)
    (instructions.Instruction, "__init__", _init_instruction),
    (instructions.ExtractValue, "__init__", _init_extract),
    (instructions.InsertValue, "__init__", _init_insert),
    (values.Block, "descr", _describe_block),
    (types.Type, "__ne__", _differ),
]
