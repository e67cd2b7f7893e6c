"""Arithmetic between tiles, vectors and numbers. (Functions of one tile: functions.py.)

An operator is one row of a table: its name, its NumPy meaning, its LLVM or PTX on fp32. A vector broadcasts along the axis that
its type names; a col_vec and a row_vec give a tile. 2-byte elements are computed in fp32 and rounded once. Of numbers alone the
result is a number.

The GPU's fast units take fp32 numbers below 2 ** -126 for 0, and so do all of these but negation, + - * and fma.
"""

import math
import operator
from dataclasses import replace

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32
from tiles.dtypes import bf16, fp16
from tiles.numba_names import types
from tiles.op import OPS, lowers, number, op
from tiles.types import finished_type, rt, rv, st, sv
from tiles.values import Tile

FAST = ("contract",)


def plain(x):
    """The array of a tile; a number unchanged."""
    return x.array.astype(np.float32) if isinstance(x, Tile) else np.float32(x)


def elementwise(op_function, keeps_integers=False):
    """`lowers` for an op that goes element by element: outside kernels it takes NumPy arrays, too; keeps_integers: of integers
    it gives integers there."""
    OPS[op_function].of_arrays, OPS[op_function].keeps_integers = True, keeps_integers
    return lowers(op_function)


# ---- rules ---------------------------------------------------------------------------------------------------------
def _listed(specs):
    return f"{', '.join(map(str, specs[:-1]))} and {specs[-1]}"


def _needs_registers(name, *specs):
    for spec in specs:
        if isinstance(spec, (st, sv)):
            raise TypeError(f"{name}: {spec} lies in shared memory: load(...) it first")


def _product(vectors):
    """The type of a map of vectors alone: that of the first, or if some are a value a row and others one a column, a tile."""
    axes = {v.axis: v for v in reversed(vectors)}
    if len(axes) == 1:
        return vectors[0]
    rows, cols = axes["col_vec"], axes["row_vec"]
    return rt(rows.length, cols.length, rows.dtype, rows.layout)


def broadcast(name, *specs):
    """The type of a map of these; None if none of them is a tile or vector."""
    _needs_registers(name, *specs)
    tiles = [s for s in specs if isinstance(s, (rt, rv))]
    if not tiles:
        return None
    if not all(isinstance(s, (rt, rv)) or number(s) for s in specs):
        raise TypeError(f"{name}: takes tiles, vectors and numbers, got {_listed(specs)}")
    out = next((s for s in tiles if isinstance(s, rt)), None) or _product(tiles)
    partners = (out, out.col_vec, out.row_vec) if isinstance(out, rt) else (finished_type(out),)
    if not all((finished_type(s) if isinstance(s, rv) else s) in partners for s in tiles):
        raise TypeError(
            f"{name}: {_listed(specs)} do not broadcast: with {out} goes {', '.join(map(str, partners))} or a number"
        )
    partial = _partial(name, specs, out)
    return replace(out, partial=partial) if isinstance(out, rv) else out


def _partial(name, specs, out):
    """Partial sums may only be added to each other and scaled by numbers and whole vectors."""
    partial = [isinstance(s, rv) and s.partial for s in specs]
    allowed = {"add": all(partial), "sub": all(partial), "mul": not all(partial), "truediv": not partial[-1]}.get(name)
    if any(partial) and (isinstance(out, rt) or not allowed):
        raise TypeError(f"{name}: {_listed(specs)}: take finish_sum(...) of the partial sum first")
    return any(partial)


def lower_map(out, emit, *specs):
    """The lowering of a map that gives the type `out`: `emit(b, *registers)`, element by element."""

    def lane(b, spec, value):
        if not isinstance(spec, (rt, rv)):
            return [b.real(value)] * out.elements
        elements = b.elements(spec, value)
        return [elements[k] for k in out.lane_index(spec)] if isinstance(spec, rv) and isinstance(out, rt) else elements

    def lower(b, *values):
        arguments = [lane(b, spec, value) for spec, value in zip(specs, values, strict=True)]
        return b.from_elements(out, [emit(b, *e) for e in zip(*arguments, strict=True)])

    return lower


def of_numbers(name, emit, specs):
    """The type and lowering of a map of numbers alone."""
    if not all(map(number, specs)):
        raise TypeError(f"{name}: takes tiles, vectors and numbers, got {_listed(specs)}")
    return types.float32, lambda b, *values: emit(b, *map(b.real, values))


def _several(name, emit, *specs):
    """The rule and lowering of a map of several arguments, which may all be numbers."""
    out = broadcast(name, *specs)
    return (out, lower_map(out, emit, *specs)) if out else of_numbers(name, emit, specs)


def _operator(name, emit):
    """The rule of an operator; between two numbers it is Numba's, not ours."""

    def rule(x, y):
        out = broadcast(name, x, y)
        if name == "mul" and isinstance(out, rt) and x == y == out and out.dtype in (bf16, fp16):
            return out, _mul_pairs(out.dtype)
        return (out, lower_map(out, emit, x, y)) if out else None

    return rule


def _mul_pairs(dtype):
    """Products of two tiles of 2-byte elements, two at a time. fp32 holds such a product, so it is rounded once."""

    def lower(b, *values):
        return b.pack([ptx.mul_pair(b, dtype, x, y) for x, y in zip(*map(b.unpack, values), strict=True)])

    return lower


def map_rule(name, emit):
    """The rule and lowering of a map of one argument."""

    def rule(x):
        _needs_registers(name, x)
        if isinstance(x, (rt, rv)) and not getattr(x, "partial", False):
            return x, lambda b, v: b.from_elements(x, [emit(b, e) for e in b.elements(x, v)])
        if number(x):
            return types.float32, lambda b, v: emit(b, b.real(v))
        if isinstance(x, rv):
            raise TypeError(f"{name}: {x}: take finish_sum(...) of the partial sum first")
        raise TypeError(f"{name}: takes a tile, a vector or a number, got {x}")

    return rule


# ---- two and three arguments ---------------------------------------------------------------------------------------
@op
def maximum(x, y):
    """max(x, y), element by element; a NaN loses against a number."""
    return np.fmax(plain(x), plain(y))


@op
def minimum(x, y):
    """min(x, y), element by element; a NaN loses against a number."""
    return np.fmin(plain(x), plain(y))


@op
def fma(x, y, z):
    """x * y + z, element by element, rounded once."""
    return (np.float64(plain(x)) * np.float64(plain(y)) + np.float64(plain(z))).astype(np.float32)


@op
def product(x, y):
    """x * y, element by element, rounded whatever comes next. (From `x * y + z` the compiler makes an fma, which does not round
    the product.) So a * b + c * d is the same number on any machine."""
    return np.multiply(plain(x), plain(y))


def fadd(b, x, y):
    """The sum of two fp32 registers."""
    return b.fadd(x, y, flags=FAST)


def _sub(b, x, y):
    return b.fsub(x, y, flags=FAST)


def fmul(b, x, y):
    """The product of two fp32 registers."""
    return b.fmul(x, y, flags=FAST)


def _div(b, x, y):
    """x / y as x (1 / y); elements that divide by the same register share its reciprocal. 2 ulp, and 0 for |y| > 2 ** 126."""
    return fmul(b, x, b.asm(f32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", y, effect=False))


def _rounded_product(b, x, y):
    return b.asm(f32, "mul.rn.f32 $0, $1, $2;", "=f,f,f", x, y, effect=False)


def _fma(b, x, y, z):
    return b.llvm("llvm.fma.f32", x, y, z)


def fmax(b, x, y):
    """The greater of two fp32 registers."""
    return b.llvm("llvm.nvvm.fmax.ftz.f", x, y)


def fmin(b, x, y):
    """The lesser of two fp32 registers."""
    return b.llvm("llvm.nvvm.fmin.ftz.f", x, y)


def _floor_div(b, x, y):
    """floor(x / y): exact for whole numbers below 2 ** 24. By a power of 2, which is multiplied by, in two instructions."""
    if (divisor := b.constant(y)) and math.frexp(divisor)[0] == 0.5:
        quotient = b.fmul(x, f32(1 / divisor))
    else:
        quotient = b.asm(f32, "div.rn.f32 $0, $1, $2;", "=f,f,f", x, y, effect=False)
    return b.llvm("llvm.floor.f32", quotient)


def _mod(b, x, y):
    return _fma(b, b.fsub(f32(-0.0), y), _floor_div(b, x, y), x)


OPERATORS = {
    "add": (np.add, fadd),
    "sub": (np.subtract, _sub),
    "mul": (np.multiply, fmul),
    "truediv": (np.divide, _div),
    "floordiv": (np.floor_divide, _floor_div),
    "mod": (np.mod, _mod),
}


def _meaning(ufunc):
    return lambda x, y: ufunc(plain(x), plain(y))


for _name, (_ufunc, _emit) in OPERATORS.items():
    for _op_function in (getattr(operator, _name), getattr(operator, f"i{_name}")):  # `a *= b` makes a new tile
        lowers(_op_function, _meaning(_ufunc))(_operator(_name, _emit))


@elementwise(maximum, keeps_integers=True)
def _(x, y):
    return _several("maximum", fmax, x, y)


@elementwise(minimum, keeps_integers=True)
def _(x, y):
    return _several("minimum", fmin, x, y)


@elementwise(product)
def _(x, y):
    return _several("product", _rounded_product, x, y)


@elementwise(fma)
def _(x, y, z):
    return _several("fma", _fma, x, y, z)


def _negation(x):
    """The rule of -x, where x is a tile or vector."""
    _needs_registers("neg", x)
    return _negated(x) if isinstance(x, (rt, rv)) else None


_negated = map_rule("neg", lambda b, x: b.fsub(f32(-0.0), x))
lowers(operator.neg, lambda x: -plain(x))(_negation)
