"""Arithmetic instructions of PTX (PTX ISA, "Integer Arithmetic" to "Data Movement and Conversion Instructions")."""

import operator
from fractions import Fraction

import ml_dtypes
import numpy as np

from .table import TYPES, pure

LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
COMPARE |= {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
LEAST, ZERO = np.float32(2**-126), np.float32(0)


def flush(x):
    """x, with 0 in place of subnormal numbers, those below 2 ** -126: what .ftz does to operands and results."""
    small = np.abs(x) < LEAST
    return np.where(small, np.copysign(ZERO, x), x) if np.count_nonzero(small) else x


def _flushed(function):
    return lambda _, *operands: flush(function(*map(flush, operands)))


# ---- integers ------------------------------------------------------------------------------------------------------
@pure(r"(add|sub|mul\.lo)\.([sub](?:16|32|64))", "{2}", "{2}", "{2}")
def _(match, x, y):
    return BINARY[match[1][:3]](x, y)


@pure(r"mul\.wide\.([su])(16|32)", "{1}64", "{1}{2}", "{1}{2}")
def _(match, x, y):
    return x.astype(TYPES[match[1] + "64"]) * y


@pure(r"mul\.hi\.([su])32", "{1}32", "{1}32", "{1}32")
def _(match, x, y):
    return (x.astype(TYPES[match[1] + "64"]) * y >> 32).astype(x.dtype)


@pure(r"mul\.hi\.([su])64", "{1}64", "{1}64", "{1}64")
def _(_, x, y):
    return np.array([int(a) * int(b) >> 64 for a, b in zip(x, y)], x.dtype)


@pure(r"mad\.lo\.([su](?:16|32|64))", "{1}", "{1}", "{1}", "{1}")
def _(_, x, y, z):
    return x * y + z


@pure(r"mad\.wide\.([su])32", "{1}64", "{1}32", "{1}32", "{1}64")
def _(match, x, y, z):
    return x.astype(TYPES[match[1] + "64"]) * y + z


@pure(r"(div|rem)\.([su](?:16|32|64))", "{2}", "{2}", "{2}")
def _(match, x, y):
    rest = np.fmod(x, y)  # has the sign of x, as in C
    return (x - rest) // y if match[1] == "div" else rest


@pure(r"(min|max)\.([su](?:16|32|64))", "{2}", "{2}", "{2}")
def _(match, x, y):
    return (np.minimum if match[1] == "min" else np.maximum)(x, y)


@pure(r"(neg|abs)\.(s(?:16|32|64))", "{2}", "{2}")
def _(match, x):
    return -x if match[1] == "neg" else np.abs(x)


@pure(r"(and|or|xor)\.(b(?:16|32|64)|pred)", "{2}", "{2}", "{2}")
def _(match, x, y):
    return LOGIC[match[1]](x, y)


@pure(r"not\.(b(?:16|32|64)|pred)", "{1}", "{1}")
def _(_, x):
    return ~x


@pure(r"shl\.(b(?:16|32|64))", "{1}", "{1}", "u32")
def _(_, x, n):
    return np.where(n < 8 * x.itemsize, x << np.minimum(n, 8 * x.itemsize - 1).astype(x.dtype), x.dtype.type(0))


@pure(r"shr\.([sub](?:16|32|64))", "{1}", "{1}", "u32")
def _(_, x, n):
    end = 8 * x.itemsize - 1
    shifted = x >> np.minimum(n, end).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(n <= end, shifted, x.dtype.type(0))


@pure(r"bfi\.b32", "b32", "b32", "b32", "u32", "u32")
def _(_, x, y, start, length):
    mask = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1) << start.astype(np.uint64)
    return (y & ~mask | x.astype(np.uint64) << start.astype(np.uint64) & mask) & np.uint64(2**32 - 1)


@pure(r"bfe\.u32", "u32", "u32", "u32", "u32")
def _(_, x, start, length):
    return x.astype(np.uint64) >> start.astype(np.uint64) & (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)


@pure(r"popc\.b32", "u32", "b32")
def _(_, x):
    return np.bitwise_count(x)


@pure(r"clz\.b32", "u32", "b32")
def _(_, x):
    return 31 - np.floor(np.log2(np.maximum(x, 0.5))).astype(np.int32)


@pure(r"prmt\.b32", "b32", "b32", "b32", "b32")
def _(_, x, y, select):
    """Each of four selectors picks one of the eight bytes; if the selector's fourth bit is set, the byte's sign, eight
    times."""
    both = np.stack([x, y], 1).view(np.uint8)
    select = np.stack([select >> np.uint32(4 * k) & 15 for k in range(4)], 1).astype(np.int64)
    chosen = np.take_along_axis(both, select & 7, 1)
    chosen = np.where(select & 8, np.where(chosen & 0x80, 0xFF, 0), chosen).astype(np.uint8)
    return chosen.view(np.uint32)[:, 0]


# ---- floating point ------------------------------------------------------------------------------------------------
@pure(r"(add|sub|mul)(?:\.rn)?\.(f32|f64)", "{2}", "{2}", "{2}")
def _(match, x, y):
    return BINARY[match[1]](x, y)


@pure(r"(add|sub|mul)(?:\.rn)?\.ftz\.f32", "f32", "f32", "f32")
def _(match, x, y):
    return flush(BINARY[match[1]](flush(x), flush(y)))


@pure(r"fma\.rn(\.ftz)?\.f32", "f32", "f32", "f32", "f32")
def _(match, x, y, z):
    if match[1]:
        x, y, z = flush(x), flush(y), flush(z)
    fused = (x.astype(np.float64) * y + z).astype(np.float32)
    return flush(fused) if match[1] else fused


@pure(r"fma\.rn\.f64", "f64", "f64", "f64", "f64")
def _(_, x, y, z):
    """x y + z is rounded once. float64 cannot hold the exact product, so fractions compute it."""
    plain = x * y + z
    for k in np.flatnonzero(np.isfinite(plain)):
        if exact := Fraction(x[k]) * Fraction(y[k]) + Fraction(z[k]):
            plain[k] = float(exact)
    return plain


@pure(r"fma\.rn\.(bf16|f16)x2", "b32", "b32", "b32", "b32")
def _(match, *registers):
    x, y, z = (r[:, None].view(TYPES[match[1]]).astype(np.float64) for r in registers)
    return (x * y + z).astype(TYPES[match[1]]).view(np.uint32)[:, 0]


@pure(r"sub\.rn\.f16x2", "b32", "b32", "b32")
def _(_, x, y):
    return (x[:, None].view(np.float16) - y[:, None].view(np.float16)).view(np.uint32)[:, 0]


@pure(r"div(?:\.(?:rn|full|approx))?(\.ftz)?\.(f32|f64)", "{2}", "{2}", "{2}")
def _(match, x, y):
    return flush(flush(x) / flush(y)) if match[1] else x / y


EXTREMA = {("min", False): np.fmin, ("max", False): np.fmax, ("min", True): np.minimum, ("max", True): np.maximum}


@pure(r"(min|max)(\.ftz)?(\.NaN)?\.(f32|f64)", "{4}", "{4}", "{4}")
def _(match, x, y):
    """-0 is less than 0. Of a number and a NaN the result is the number, or with .NaN the NaN."""
    if match[2]:
        x, y = flush(x), flush(y)
    first = np.signbit(x) == (match[1] == "min")  # of two zeros
    return np.where(x == y, np.where(first, x, y), EXTREMA[match[1], bool(match[3])](x, y))


@pure(r"(neg|abs)(\.ftz)?\.(f32|f64)", "{3}", "{3}")
def _(match, x):
    x = flush(x) if match[2] else x
    return -x if match[1] == "neg" else np.abs(x)


APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "sin": np.sin,
    "cos": np.cos,
}


@pure(r"(ex2|lg2|rcp|sqrt|rsqrt|sin|cos)\.(?:approx|rn)(\.ftz)?\.f32", "f32", "f32")
def _(match, x):
    return flush(APPROXIMATE[match[1]](flush(x))) if match[2] else APPROXIMATE[match[1]](x)


@pure(r"(sqrt|rcp)\.rn\.f64", "f64", "f64")
def _(match, x):
    return APPROXIMATE[match[1]](x)


@pure(r"rcp\.approx\.ftz\.f64", "f64", "f64")
def _(_, x):
    """1 / x of the upper 32 bits of x, of which the upper 32 bits are returned."""
    upper = lambda x: (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return upper(np.reciprocal(upper(x)))


@pure(r"tanh\.approx\.f32", "f32", "f32")
def _(_, x):
    return np.tanh(x * np.float32(1 + 2**-12))


@pure(r"copysign\.f32", "f32", "f32", "f32")
def _(_, x, y):
    return np.copysign(y, x)


# ---- comparisons ---------------------------------------------------------------------------------------------------
def _compare(comparison, x, y):
    """An ordered comparison is false if one of the two is NaN; one that ends in u is true then."""
    if comparison in ("num", "nan"):
        return (np.isnan(x) | np.isnan(y)) ^ (comparison == "num")
    unordered = comparison[-1] == "u" and len(comparison) == 3
    result = COMPARE[comparison[:2]](x, y)
    if x.dtype.kind == "f":
        has_nan = np.isnan(x) | np.isnan(y)
        result = result | has_nan if unordered else result & ~has_nan
    return result


@pure(r"setp\.(\w+)(\.ftz)?\.([sub](?:16|32|64)|f16|f32|f64)", "pred", "{3}", "{3}")
def _(match, x, y):
    """Two results for p|q: the comparison, and its negation."""
    flag = _compare(match[1], *map(flush, (x, y))) if match[2] else _compare(match[1], x, y)
    return flag, ~flag


@pure(r"setp\.(\w+)\.(and|or|xor)(\.ftz)?\.([sub](?:16|32|64)|f16|f32|f64)", "pred", "{4}", "{4}", "pred")
def _(match, x, y, p):
    """Two results for p|q: from the comparison, and from its negation."""
    flag = _compare(match[1], *map(flush, (x, y))) if match[3] else _compare(match[1], x, y)
    return LOGIC[match[2]](flag, p), LOGIC[match[2]](~flag, p)


@pure(r"selp\.([sub](?:16|32|64)|f32|f64)", "{1}", "{1}", "{1}", "pred")
def _(_, x, y, p):
    return np.where(p, x, y)


# ---- conversions ---------------------------------------------------------------------------------------------------
@pure(r"cvt\.([sub](?:8|16|32|64))\.([sub](?:8|16|32|64))", "{1}", "{2}")
def _(match, x):
    return x.astype(TYPES[match[1]])


@pure(r"cvt\.rn\.(f32|f64|f16|bf16)\.([su](?:8|16|32|64))", "{1}", "{2}")
def _(match, x):
    return x.astype(TYPES[match[1]])


@pure(r"cvt(?:\.rn)?(?:\.ftz)?\.(f16|bf16|f32|f64)\.(f16|bf16|f32|f64)", "{1}", "{2}")
def _(match, x):
    return x.astype(TYPES[match[1]])


ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@pure(r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.([su](?:16|32|64))\.(f16|bf16|f32|f64)", "{2}", "{3}")
def _(match, x):
    """Integers too large for the type saturate. NaN becomes 0, or 1 << 63 as an integer of 64 bits."""
    integer, near = TYPES[match[2]], ROUND[match[1]](x.astype(np.float64))
    ends = np.iinfo(integer)
    inside = (near >= ends.min) & (near < 2.0 * (ends.max // 2 + 1))
    end = np.where(near < 0, integer(ends.min), integer(ends.max))
    of_nan = np.array(1 << 63, np.uint64).astype(integer) if ends.bits == 64 else 0
    return np.where(inside, np.where(inside, near, 0).astype(integer), np.where(np.isnan(near), of_nan, end))


@pure(r"cvt\.(rni|rzi|rmi|rpi)(?:\.ftz)?\.(f32)\.f32", "f32", "f32")
def _(match, x):
    return ROUND[match[1]](x)


@pure(r"cvt\.rn\.(bf16|f16)x2\.f32", "b32", "f32", "f32")
def _(match, high, low):
    return np.stack([low, high], 1).astype(TYPES[match[1]]).view(np.uint32)[:, 0]


@pure(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32", "b16", "f32", "f32")
def _(match, high, low):
    end = np.float32(ml_dtypes.finfo(TYPES[match[1]]).max)
    return np.clip(np.stack([low, high], 1), -end, end).astype(TYPES[match[1]]).view(np.uint16)[:, 0]


@pure(r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2", "b32", "b16")
def _(match, x):
    return x[:, None].view(TYPES[match[1]]).astype(np.float16).view(np.uint32)[:, 0]


@pure(r"cvt\.pack\.sat\.s8\.s32\.b32", "b32", "s32", "s32", "b32")
def _(_, high, low, rest):
    """The two integers, saturated to bytes, in the lower half of the result; in its upper half the lower half of `rest`."""
    pair = np.clip(np.stack([low, high], 1), -128, 127).astype(np.int8).view(np.uint16)[:, 0].astype(np.uint32)
    return pair | rest << np.uint32(16)


@pure(r"cvt\.rna\.tf32\.f32", "b32", "f32")
def _(_, x):
    """fp32 rounded to the ten bits of tf32's mantissa, ties away from zero."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    scale = np.exp2(np.minimum(11, exponent + 136.0))
    rounded = np.copysign(np.floor(np.abs(mantissa) * scale + 0.5), mantissa) / scale
    return np.where(np.isfinite(x), np.ldexp(rounded, exponent), x).astype(np.float32).view(np.uint32)
