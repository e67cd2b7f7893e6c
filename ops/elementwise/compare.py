"""Comparisons, and choosing by them.

    where((x < 0.0) & ~(x == y), x * slope, x)

A comparison, `x < y` or less(x, y), gives 1 where it holds and 0 where it does not, as fp32: row_sum counts. `&`, `|` and `~`
take anything but 0 for true. Where `where` takes them at once, no 1 or 0 is made. A comparison with NaN does not hold, but for
!=.
"""

import operator
from dataclasses import replace

import numpy as np

from tiles.compiling.builder import Builder, f32
from tiles.dtypes import fp32
from tiles.numba_names import types
from tiles.op import OPS, lowers, number, op
from tiles.types import rt, rv

from .arithmetic import broadcast, elementwise, lower_map, of_numbers, plain


@op
def less(x, y):
    """1 where x < y, else 0, in fp32."""
    return np.less(plain(x), plain(y))


@op
def less_equal(x, y):
    """1 where x <= y, else 0, in fp32."""
    return np.less_equal(plain(x), plain(y))


@op
def greater(x, y):
    """1 where x > y, else 0, in fp32."""
    return np.greater(plain(x), plain(y))


@op
def greater_equal(x, y):
    """1 where x >= y, else 0, in fp32."""
    return np.greater_equal(plain(x), plain(y))


@op
def equal(x, y):
    """1 where x = y, else 0, in fp32."""
    return np.equal(plain(x), plain(y))


@op
def not_equal(x, y):
    """1 where x and y differ or are NaN, else 0, in fp32."""
    return np.not_equal(plain(x), plain(y))


COMPARISONS = {  # {function or operator: (the operator for tiles, LLVM's name)}
    less: (operator.lt, "<"),
    less_equal: (operator.le, "<="),
    greater: (operator.gt, ">"),
    greater_equal: (operator.ge, ">="),
    equal: (operator.eq, "=="),
    not_equal: (operator.ne, "!="),
}
ONE, ZERO = f32(1.0), f32(0.0)


def _holds(b, x):
    """Is an element's truth value, a float register, not 0?"""
    return b.fcmp_unordered("!=", x, ZERO)


def _comparison(name, sign, is_operator):
    def emit(b, x, y):
        compare = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
        return b.select(compare(sign, x, y), ONE, ZERO)

    def rule(x, y):
        out = broadcast(name, x, y)
        if out is None:
            return None if is_operator else of_numbers(name, emit, (x, y))
        out = replace(out, dtype=fp32)
        return out, lower_map(out, emit, x, y)

    return rule


for _op_function, (_operator, _sign) in COMPARISONS.items():
    elementwise(_op_function)(_comparison(_op_function.__name__, _sign, False))
    lowers(_operator, OPS[_op_function].meaning)(_comparison(_op_function.__name__, _sign, True))


# ---- logic ---------------------------------------------------------------------------------------------------------
def _logical(name, emit, *operands):
    """The type and lowering of an operator between masks; between numbers it is Numba's, not ours."""
    out = broadcast(name, *[types.float32 if x == types.boolean else x for x in operands])
    if out is None:
        return None
    out = replace(out, dtype=fp32)
    return out, lower_map(out, lambda b, *e: b.select(emit(b, *[_holds(b, x) for x in e]), ONE, ZERO), *operands)


lowers(operator.and_, lambda x, y: (plain(x) != 0) & (plain(y) != 0))(lambda x, y: _logical("and", Builder.and_, x, y))
lowers(operator.or_, lambda x, y: (plain(x) != 0) | (plain(y) != 0))(lambda x, y: _logical("or", Builder.or_, x, y))
lowers(operator.invert, lambda x: plain(x) == 0)(lambda x: _logical("not", Builder.not_, x))


@op
def where(mask, x, y):
    """x where mask is not 0, else y. mask: what a comparison gives, any fp32 tile or vector, or a number; x, y: tiles, vectors,
    numbers. The other of the two is not looked at: its NaN does no harm."""
    return np.where(plain(mask) != 0, plain(x), plain(y))


def _where(b, mask, x, y):
    return b.select(_holds(b, mask), x, y)


@elementwise(where, keeps_integers=True)
def _(mask, x, y):
    dtype = next((s.dtype for s in (x, y) if isinstance(s, (rt, rv))), fp32)
    if isinstance(mask, (rt, rv)) and mask.dtype is fp32:
        out = broadcast("where", replace(mask, dtype=dtype), x, y)
    elif mask == types.boolean or number(mask):
        mask = types.float32
        out = broadcast("where", x, y)
    else:
        raise TypeError(f"where: the mask must be an fp32 tile or vector, such as x < y, or a number, got {mask}")
    return (out, lower_map(out, _where, mask, x, y)) if out else of_numbers("where", _where, (mask, x, y))
