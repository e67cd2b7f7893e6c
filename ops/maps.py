"""Element by element: arithmetic between tiles, vectors and numbers, and functions of one tile.

One row of a table is an op: its face, its NumPy meaning, what it is in LLVM or PTX on fp32. A vector broadcasts along the
axis that its type names. 2-byte elements are computed in fp32 and rounded once.

The GPU's fast units take fp32 numbers below 2 ** -126 for 0, and so do all of these but negation, + - and *.
"""

import operator
from dataclasses import replace

import numpy as np
from llvmlite import ir
from numba.cuda import types

from tiles.op import lowers, number, op
from tiles.plumbing import f32
from tiles.types import rt, rv, st, whole
from tiles.values import Tile

FAST = ("contract",)


def _plain(x):
    """The array of a tile, a number as it is."""
    return x.array.astype(np.float32) if isinstance(x, Tile) else np.float32(x)


def _unary(ptx):
    return lambda b, x: b.asm(f32, f"{ptx} $0, $1;", "=f,f", x, effect=False)


def _scaled(factor, emit):
    return lambda b, x: emit(b, b.fmul(x, ir.Constant(f32, factor), flags=FAST))


# ---- two arguments -------------------------------------------------------------------------------------------------
def _needs_registers(name, *specs):
    for spec in specs:
        if isinstance(spec, st):
            raise TypeError(f"{name}: {spec} lies in shared memory: load(...) it first")


def _broadcast(name, x, y):
    """The type of a map of x and y; None if neither is a tile or vector."""
    _needs_registers(name, x, y)
    given = [s for s in (x, y) if isinstance(s, (rt, rv))]
    if not given:
        return None
    if not all(isinstance(s, (rt, rv)) or number(s) for s in (x, y)):
        raise TypeError(f"{name}: takes tiles, vectors and numbers, got {x} and {y}")
    out = next((s for s in given if isinstance(s, rt)), given[0])
    partners = (out, out.col_vec, out.row_vec) if isinstance(out, rt) else (whole(out),)
    if not all((whole(s) if isinstance(s, rv) else s) in partners for s in given):
        raise TypeError(f"{name}: {x} and {y} do not broadcast: with {out} goes {', '.join(map(str, partners))} or a number")
    return out


def _partial(name, x, y, out):
    """Partial sums may be added to each other and scaled by whole numbers and vectors; nothing else makes sense of them."""
    partial = [isinstance(s, rv) and s.partial for s in (x, y)]
    allowed = {"add": all(partial), "sub": all(partial), "mul": not all(partial), "truediv": not partial[1]}.get(name)
    if any(partial) and (isinstance(out, rt) or not allowed):
        raise TypeError(f"{name}: {x} and {y}: take total(...) of the partial sum first")
    return any(partial)


def _binary(name, emit, ours=True):
    """The rule and lowering of a two-argument map; `ours`: no other meaning of this name exists for two numbers."""

    def rule(x, y):
        out = _broadcast(name, x, y)
        if out is None and ours and number(x) and number(y):
            return types.float32, lambda b, vx, vy: emit(b, b.real(vx), b.real(vy))
        if out is None and ours:
            raise TypeError(f"{name}: takes tiles, vectors and numbers, got {x} and {y}")
        if out is None:
            return None
        partial = _partial(name, x, y, out)
        if isinstance(out, rv):
            out = replace(out, partial=partial)

        def lane(b, spec, value):
            if not isinstance(spec, (rt, rv)):
                return [b.real(value)] * out.elements
            elements = b.elements(spec, value)
            return [elements[k] for k in out.lane_index(spec)] if isinstance(spec, rv) and isinstance(out, rt) else elements

        def lower(b, vx, vy):
            return b.from_elements(out, [emit(b, p, q) for p, q in zip(lane(b, x, vx), lane(b, y, vy), strict=True)])

        return out, lower

    return rule


@op
def maximum(x, y):
    """max(x, y), element by element; a NaN loses against a number."""
    return np.fmax(_plain(x), _plain(y))


@op
def minimum(x, y):
    """min(x, y), element by element; a NaN loses against a number."""
    return np.fmin(_plain(x), _plain(y))


def _add(b, x, y):
    return b.fadd(x, y, flags=FAST)


def _sub(b, x, y):
    return b.fsub(x, y, flags=FAST)


def _mul(b, x, y):
    return b.fmul(x, y, flags=FAST)


def _div(b, x, y):
    """By the reciprocal, which is shared by all elements that divide by the same register: 2 ulp, and 0 for |y| > 2 ** 126."""
    return _mul(b, x, b.asm(f32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", y, effect=False))


def fmax(b, x, y):
    """The greater of two fp32 registers."""
    return b.llvm("llvm.nvvm.fmax.ftz.f", x, y)


def fmin(b, x, y):
    """The lesser of two fp32 registers."""
    return b.llvm("llvm.nvvm.fmin.ftz.f", x, y)


def _meaning(ufunc):
    return lambda x, y: ufunc(_plain(x), _plain(y))


OPERATORS = {
    "add": (np.add, _add),
    "sub": (np.subtract, _sub),
    "mul": (np.multiply, _mul),
    "truediv": (np.divide, _div),
}
for _name, (_ufunc, _emit) in OPERATORS.items():
    for _face in (getattr(operator, _name), getattr(operator, f"i{_name}")):  # `a *= b` makes a new tile
        lowers(_face, _meaning(_ufunc))(_binary(_name, _emit, ours=False))
for _face, _emit in ((maximum, fmax), (minimum, fmin)):
    lowers(_face)(_binary(_face.__name__, _emit))


# ---- one argument --------------------------------------------------------------------------------------------------
def _map(name, emit):
    """The rule and lowering of a one-argument map."""

    def rule(x):
        if isinstance(x, (rt, rv)) and not getattr(x, "partial", False):
            return x, lambda b, v: b.from_elements(x, [emit(b, e) for e in b.elements(x, v)])
        if number(x):
            return types.float32, lambda b, v: emit(b, b.real(v))
        if isinstance(x, rv):
            raise TypeError(f"{name}: {x}: take total(...) of the partial sum first")
        raise TypeError(f"{name}: takes a tile, a vector or a number, got {x}")

    return rule


def _negation(x):
    """The rule of -x, where x is a tile or vector."""
    _needs_registers("neg", x)
    return _negated(x) if isinstance(x, (rt, rv)) else None


_negated = _map("neg", lambda b, x: b.fsub(ir.Constant(f32, -0.0), x))
lowers(operator.neg, lambda x: -_plain(x))(_negation)


@op
def exp2(x):
    """2 ** x; on the GPU ex2.approx, 2 ulp."""
    return np.exp2(_plain(x))


@op
def exp(x):
    """e ** x, as exp2(x * log2(e)): 2 + 1.2 |x| ulp on the GPU."""
    return np.exp(_plain(x))


@op
def log2(x):
    """Base-2 logarithm; log2(0) = -inf, of less NaN. On the GPU lg2.approx, wrong by 2 ** -22 (2 ulp away from 1)."""
    return np.log2(_plain(x))


LOG2_E = 1.4426950408889634
_exp2 = _unary("ex2.approx.ftz.f32")
for _face, _emit in {exp2: _exp2, exp: _scaled(LOG2_E, _exp2), log2: _unary("lg2.approx.ftz.f32")}.items():
    lowers(_face)(_map(_face.__name__, _emit))

__all__ = ["exp", "exp2", "log2", "maximum", "minimum"]
