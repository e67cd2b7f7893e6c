r"""How an instruction gets its meaning: a table from opcodes to what they do, which modules of this package fill.

    @pure(r"abs\.(f32|f64)", "{1}", "{1}")                 # the result's type, the operands' types
    def _(match, x):
        return np.abs(x)

    @means(r"bar\.warp\.sync")                             # all else: a function of the warp and the instruction
    def _(match, w, at):
        w.converged("bar.warp.sync")
        w.join_lanes()

A pattern must match the whole opcode. A register is 32 numbers, its bits unsigned; `operand` reads one, or a literal, as of a
type.
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
TABLE: list[tuple[re.Pattern, Callable]] = []  # (opcode, function of the match and an instruction that gives what runs it)
Run = Callable  # of a warp


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
    """The function below, of (match, warp, instruction), is what opcodes of this pattern do."""

    def declare(function):
        _declare(pattern, lambda match, at: lambda w: function(match, w, at))
        return function

    return declare


def pure(pattern, result, *operands):
    """The function below, of the match and an array an operand, computes the first operand of such opcodes from the others.
    result, operands: their types, in which {1} stands for a group of the pattern. A function that gives two arrays
    serves `p|q`, too."""

    def declare(function):
        known = {}  # opcode: the function of its operands, and their types

        def build(match, at):
            if at.opcode not in known:
                types = [TYPES[name.format(match[0], *match.groups())] for name in (result, *operands)]
                known[at.opcode] = functools.partial(function, match), *types
            function_, to, *types = known[at.opcode]
            return _computes(function_, to, types, at)

        _declare(pattern, build)
        return function

    return declare


def meaning(at: PtxInstruction) -> Run:
    """The function of the warp that executes an instruction. NotImplementedError, which names the instruction: it is not in the
    table."""
    row = _find(at.opcode)
    if row is None:
        raise NotImplementedError(
            f"PTX line {at.number}: no meaning for {at.opcode}: `{at.text}`; tiles.emulator.table says how one is added"
        )
    build, match = row
    return build(match, at)


def operand(source, kind):
    """A function from a warp to an operand's 32 numbers of a type: a register's lowest bytes, or a literal."""
    size, unsigned = _bits_of(kind)
    if isinstance(source, Reg):
        if size != source.width:
            return lambda w: w.get(source).astype(unsigned).view(kind)
        slot, kind = source.slot, np.dtype(kind)
        is_raw = kind == unsigned and size > 1  # as registers hold them

        def get(w):
            value = w.r[slot]
            if value.__class__ is not np.ndarray:
                value = w.get(source)  # a Hazard
            return value if is_raw else value.view(kind)

        return get
    if isinstance(source, Imm):
        value = _literal_in_all_lanes(source.text, kind)
        return lambda w: value
    raise NotImplementedError(f"an operand {source}")


@functools.cache
def _bits_of(kind):
    """The bytes of a type's numbers, and the unsigned type of as many bits."""
    kind = np.dtype(kind)
    return kind.itemsize, np.dtype(f"u{kind.itemsize}")


@functools.lru_cache(4096)
def _literal_in_all_lanes(text, kind):
    """A literal, in all lanes."""
    value = np.full(LANES, literal(text, kind))
    value.setflags(write=False)
    return value


def literal(text, kind):
    """A number as PTX writes it."""
    size = np.dtype(kind).itemsize
    if text[:2].lower() in ("0f", "0d"):
        bits = 4 if text[1] in "fF" else 8
        return np.array(int(text[2:], 16), f"u{bits}").view(f"f{bits}").astype(kind)
    if kind is np.bool_:
        return np.bool_(int(text))
    return np.array(int(text.rstrip("U"), 0) % 2 ** (8 * size), f"u{size}").view(kind)


def into(w, reg, value):
    """Write 32 numbers to a register, widened by their sign."""
    if value.dtype.itemsize != reg.width:
        value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{reg.width}")
    w.set(reg, value.view(f"u{reg.width}"))


def _computes(function, to, types, at):
    target, *sources = at.operands
    gets = [operand(source, kind) for source, kind in zip(sources, types, strict=True)]
    unsigned, to = _bits_of(to)[1], np.dtype(to)
    raw = to if to.kind in "iu" else unsigned

    fits = isinstance(target, Reg) and raw.itemsize == target.width
    first, second = (*gets, None, None)[:2]
    count = len(gets)

    def run(w):
        if count == 2:  # most
            value = function(first(w), second(w))
        else:
            value = function(*[get(w) for get in gets])
        if value.__class__ is tuple:
            value = value[0]
        if value.dtype is not to:
            value = value.astype(to, copy=False)
        if not fits:
            into(w, target, value.view(raw))
        elif w.full:
            w.r[target.slot] = value.view(unsigned)
        else:
            w.set(target, value.view(unsigned))

    def run_two(w):
        values = function(*[get(w) for get in gets])
        for reg, value in zip(target, values, strict=True):
            if isinstance(reg, Reg):  # not `_`
                into(w, reg, value.astype(to, copy=False).view(raw))

    return run_two if isinstance(target, list) else run
