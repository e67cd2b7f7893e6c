r"""A table from opcodes to the functions that execute them, which modules of this package fill.

    @pure(r"abs\.(f32|f64)", "{1}", "{1}")                 # the result's type, the operands' types
    def _(match, x):
        return np.abs(x)

    @means(r"bar\.warp\.sync")                             # not arithmetic: a function of the warp and the instruction
    def _(match, w, instr):
        w.converged("bar.warp.sync")
        w.join_lanes()

A pattern must match the whole opcode. A register is an array of 32 unsigned integers, its bits in each lane; `operand` reads a
register or a literal as numbers of a type.
"""

import functools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from ..layout import LANES
from .text import Imm, PtxInstruction, Reg

TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
    "tf32": np.float32,
}
TYPES |= {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TYPES |= {
    f"{sign}{bits}": getattr(np, f"{'int' if sign == 's' else 'uint'}{bits}") for sign in "sub" for bits in (8, 16, 32, 64)
}
TABLE: list[tuple[re.Pattern, Callable]] = []  # (pattern of opcodes, function of its match and an instruction: its Run)
Run = Callable  # a function of the warp that executes an instruction


@functools.cache
def _find(opcode):
    for pattern, build in TABLE:
        if match := pattern.fullmatch(opcode):
            return build, match
    return None


def _declare(pattern, build):
    TABLE.append((re.compile(pattern), build))
    _find.cache_clear()


def means(pattern):
    """Decorator: opcodes of this pattern are executed by a function of (match, warp, instruction)."""

    def declare(function):
        _declare(pattern, lambda match, instr: lambda w: function(match, w, instr))
        return function

    return declare


def pure(pattern, result, *operands):
    """Decorator: a function of the match and of an array for each source operand computes the destination of such opcodes.
    result, operands: the types of the destination and of the sources, in which {1} stands for a group of the pattern. A
    function that returns two arrays serves the destination `p|q`, too."""

    def declare(function):
        known = {}  # opcode: (the function of its operands, the destination's type, the sources' types)

        def build(match, instr):
            if instr.opcode not in known:
                types = [TYPES[name.format(match[0], *match.groups())] for name in (result, *operands)]
                known[instr.opcode] = functools.partial(function, match), *types
            function_, to, *types = known[instr.opcode]
            return _compile_pure(function_, to, types, instr)

        _declare(pattern, build)
        return function

    return declare


def meaning(instr: PtxInstruction) -> Run:
    """The function of a warp that executes an instruction. NotImplementedError: the table has no pattern for its opcode."""
    row = _find(instr.opcode)
    if row is None:
        raise NotImplementedError(
            f"PTX line {instr.number}: no meaning for {instr.opcode}: `{instr.text}`; "
            "tiles.emulator.table says how one is added"
        )
    build, match = row
    return build(match, instr)


def operand(source, dtype):
    """A function of a warp that returns an operand's 32 numbers of a type: a register's lowest bytes, or a literal."""
    size, unsigned = _bits_of(dtype)
    if isinstance(source, Reg):
        if size != source.width:
            return lambda w: w.get(source).astype(unsigned).view(dtype)
        slot, dtype = source.slot, np.dtype(dtype)
        is_raw = dtype == unsigned and size > 1  # as registers hold them

        def get(w):
            value = w.r[slot]
            if value.__class__ is not np.ndarray:
                value = w.get(source)  # a Hazard
            return value if is_raw else value.view(dtype)

        return get
    if isinstance(source, Imm):
        value = _literal_in_all_lanes(source.text, dtype)
        return lambda w: value
    raise NotImplementedError(f"an operand {source}")


@functools.cache
def _bits_of(dtype):
    """(the bytes of a number of a type, the unsigned integer type of the same size)."""
    dtype = np.dtype(dtype)
    return dtype.itemsize, np.dtype(f"u{dtype.itemsize}")


@functools.lru_cache(4096)
def _literal_in_all_lanes(text, dtype):
    """A literal as an array of 32 equal numbers, which nobody may write to."""
    value = np.full(LANES, literal(text, dtype))
    value.setflags(write=False)
    return value


def literal(text, dtype):
    """The number that a literal of PTX, such as 0f3F800000, stands for."""
    size = np.dtype(dtype).itemsize
    if text[:2].lower() in ("0f", "0d"):
        bits = 4 if text[1] in "fF" else 8
        return np.array(int(text[2:], 16), f"u{bits}").view(f"f{bits}").astype(dtype)
    if dtype is np.bool_:
        return np.bool_(int(text))
    return np.array(int(text.rstrip("U"), 0) % 2 ** (8 * size), f"u{size}").view(dtype)


def write_register(w, reg, value):
    """Write 32 numbers to a register; if it is wider, integers are extended, signed ones by their sign."""
    if value.dtype.itemsize != reg.width:
        value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{reg.width}")
    w.set(reg, value.view(f"u{reg.width}"))


def _compile_pure(function, dtype, types, instr):
    target, *sources = instr.operands
    gets = [operand(source, kind) for source, kind in zip(sources, types, strict=True)]
    unsigned, dtype = _bits_of(dtype)[1], np.dtype(dtype)
    integer_type = dtype if dtype.kind in "iu" else unsigned

    same_width = isinstance(target, Reg) and integer_type.itemsize == target.width
    first, second = (*gets, None, None)[:2]
    count = len(gets)

    def run(w):
        if count == 2:  # most
            value = function(first(w), second(w))
        else:
            value = function(*[get(w) for get in gets])
        if value.__class__ is tuple:
            value = value[0]
        if value.dtype is not dtype:
            value = value.astype(dtype, copy=False)
        if not same_width:
            write_register(w, target, value.view(integer_type))
        elif w.full:
            w.r[target.slot] = value.view(unsigned)
        else:
            w.set(target, value.view(unsigned))

    def run_two(w):
        values = function(*[get(w) for get in gets])
        for reg, value in zip(target, values, strict=True):
            if isinstance(reg, Reg):  # not `_`
                write_register(w, reg, value.astype(dtype, copy=False).view(integer_type))

    return run_two if isinstance(target, list) else run
