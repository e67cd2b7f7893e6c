"""Comparisons, and choosing by them.

    where(less(x, 0.0), x * slope, x)

A comparison gives 1 where it holds and 0 where it does not, as fp32: so maximum is `or`, * is `and`, row_sum counts. Where
`where` takes them at once, no 1 or 0 is made. A comparison with NaN does not hold, but for not_equal.
"""

from dataclasses import replace

import numpy as np
from llvmlite import ir

from tiles.builder import f32
from tiles.dtypes import fp32
from tiles.op import lowers, op
from tiles.types import rt, rv

from .arithmetic import broadcast, lower_map, of_numbers, plain


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


COMPARISONS = {less: "<", less_equal: "<=", greater: ">", greater_equal: ">=", equal: "==", not_equal: "!="}
ONE, ZERO = ir.Constant(f32, 1.0), ir.Constant(f32, 0.0)


def _comparison(name, sign):
    def emit(b, x, y):
        compare = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
        return b.select(compare(sign, x, y), ONE, ZERO)

    def rule(x, y):
        out = broadcast(name, x, y)
        if out is None:
            return of_numbers(name, emit, (x, y))
        out = replace(out, dtype=fp32)
        return out, lower_map(out, emit, x, y)

    return rule


for _face, _sign in COMPARISONS.items():
    lowers(_face)(_comparison(_face.__name__, _sign))


@op
def where(mask, x, y):
    """x where mask is not 0, else y. mask: what a comparison gives, or any fp32 tile or vector; x, y: tiles, vectors, numbers.
    The other of the two is not looked at: its NaN does no harm."""
    return np.where(mask.array != 0, plain(x), plain(y))


@lowers(where)
def _(mask, x, y):
    if not (isinstance(mask, (rt, rv)) and mask.dtype is fp32):
        raise TypeError(f"where: the mask must be an fp32 tile or vector, such as less(x, y), got {mask}")
    dtype = next((s.dtype for s in (x, y) if isinstance(s, (rt, rv))), fp32)
    out = broadcast("where", replace(mask, dtype=dtype), x, y)
    return out, lower_map(out, lambda b, m, p, q: b.select(b.fcmp_unordered("!=", m, ZERO), p, q), mask, x, y)
