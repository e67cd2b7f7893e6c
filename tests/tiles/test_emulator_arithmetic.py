"""tiles/emulator/arithmetic.py: every instruction on edges and random numbers, against Python's integers and
NumPy's float64."""

import inspect
import math
import operator
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulated import assemble, each_thread, execute, written

from tiles.emulator import arithmetic, table
from tiles.emulator.table import TYPES

WARPS = 4
COUNT = 32 * WARPS
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 65519.0, 3.4e38, 447.0, 2.0**31]
CASES = {}  # opcode: (kind of the result, kinds of the operands, reference, units in the last place, what inputs are kept to)


def case(opcode, result, operands, reference, ulp=0, keep=None):
    """The instruction's operands, columns of COUNT numbers, give what `reference` makes of them."""
    CASES[opcode] = result, operands.split(), reference, ulp, keep


def by_integers(kind, function):
    """Number by number, in Python's integers, cut off to the kind's bits."""
    raw = np.dtype(f"u{np.dtype(TYPES[kind]).itemsize}")
    cut = (1 << 8 * raw.itemsize) - 1
    return lambda *columns: np.array([function(*map(int, c)) & cut for c in zip(*columns)], raw).view(TYPES[kind])


def toward_zero(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGERS = {"add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "min": min, "max": max}
LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
EQUAL = {"eq": operator.eq, "ne": operator.ne}
ORDER = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def short(_, n):
    """Shifts of up to 70 bits."""
    np.minimum(n, 70, out=n)


def nonzero(*columns):
    columns[-1][columns[-1] == 0] = 3
    if columns[-1].dtype.kind == "i":
        columns[-1][columns[-1] == -1] = 7  # the least number has no opposite


def extreme(how):
    """Of two numbers the less, or the greater; -0 is less than 0, and a NaN is nothing."""

    def function(x, y):
        first = np.where(x == y, np.signbit(x), x < y) == (how == "min")
        return np.where(np.isnan(y) | (first & ~np.isnan(x)), x, y)

    return function


# ---- integers ------------------------------------------------------------------------------------------------------
for bits in (16, 32, 64):
    for sign in "us":
        kind = f"{sign}{bits}"
        for name, function in INTEGERS.items():
            case(f"{name}.{kind}", kind, f"{kind} {kind}", by_integers(kind, function))
        case(f"mad.lo.{kind}", kind, f"{kind} {kind} {kind}", by_integers(kind, lambda x, y, z: x * y + z))
        case(f"div.{kind}", kind, f"{kind} {kind}", by_integers(kind, toward_zero), keep=nonzero)
        case(f"rem.{kind}", kind, f"{kind} {kind}", by_integers(kind, lambda x, y: x - y * toward_zero(x, y)), keep=nonzero)
        case(f"shr.{kind}", kind, f"{kind} u32", by_integers(kind, lambda x, n: x >> n), keep=short)
        for how, function in (EQUAL | ORDER).items():
            case(f"setp.{how}.{kind}", "pred", f"{kind} {kind}", function)
        case(f"selp.{kind}", kind, f"{kind} {kind} pred", lambda x, y, p: np.where(p, x, y))
    kind = f"b{bits}"
    for name, function in LOGIC.items():
        case(f"{name}.{kind}", kind, f"{kind} {kind}", by_integers(kind, function))
    case(f"not.{kind}", kind, kind, by_integers(kind, lambda x: ~x))
    case(f"shl.{kind}", kind, f"{kind} u32", by_integers(kind, lambda x, n: x << n), keep=short)
    case(f"neg.s{bits}", f"s{bits}", f"s{bits}", by_integers(f"s{bits}", operator.neg))
    case(f"abs.s{bits}", f"s{bits}", f"s{bits}", by_integers(f"s{bits}", abs))
for name, function in LOGIC.items():
    case(f"{name}.pred", "pred", "pred pred", function)
    case(f"setp.lt.{name}.s32", "pred", "s32 s32 pred", lambda x, y, p, function=function: function(x < y, p))
case("not.pred", "pred", "pred", lambda p: ~p)
for how, function in {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}.items():
    case(f"setp.{how}.u32", "pred", "u32 u32", function)
for sign in "us":
    for bits, wider in ((16, 32), (32, 64)):
        case(f"mul.wide.{sign}{bits}", f"{sign}{wider}", f"{sign}{bits} " * 2, by_integers(f"{sign}{wider}", operator.mul))
    for bits in (32, 64):
        kind = f"{sign}{bits}"
        case(f"mul.hi.{kind}", kind, f"{kind} {kind}", by_integers(kind, lambda x, y, n=bits: x * y >> n))
    wide = by_integers(f"{sign}64", lambda x, y, z: x * y + z)
    case(f"mad.wide.{sign}32", f"{sign}64", f"{sign}32 {sign}32 {sign}64", wide)


def fields(*columns):
    columns[-1][:] %= 33
    columns[-2][:] %= 32


def insert(x, y, start, length):
    mask = (1 << length) - 1 << start
    return y & ~mask | x << start & mask


def permute(x, y, select):
    both = (x | y << 32).to_bytes(8, "little")
    chosen = [(both[n & 7], n & 8) for n in (select >> 4 * k & 15 for k in range(4))]
    return int.from_bytes([(0xFF if byte >> 7 else 0) if sign else byte for byte, sign in chosen], "little")


case("bfi.b32", "b32", "b32 b32 u32 u32", by_integers("b32", insert), keep=fields)
case("bfe.u32", "u32", "u32 u32 u32", by_integers("u32", lambda x, start, length: x >> start & (1 << length) - 1), keep=fields)
case("popc.b32", "u32", "b32", by_integers("u32", int.bit_count))
case("clz.b32", "u32", "b32", by_integers("u32", lambda x: 32 - x.bit_length()))
case("prmt.b32", "b32", "b32 b32 b32", by_integers("b32", permute))


# ---- floating point ------------------------------------------------------------------------------------------------
def wide_to(kind, function):
    """The function computes in float64, and its result is rounded to `kind`."""
    return lambda *columns: function(*(c.astype(np.float64) for c in columns)).astype(TYPES[kind])


def flush(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def flushed(function):
    return lambda *columns: flush(wide_to("f32", function)(*map(flush, columns))).astype(np.float32)


def exactly(x, y, z):
    """x * y + z, rounded once."""

    def one(x, y, z):
        if not all(map(math.isfinite, (x, y, z))):
            return x * y + z
        try:
            return float(Fraction(x) * Fraction(y) + Fraction(z))
        except OverflowError:
            return math.copysign(math.inf, Fraction(x) * Fraction(y) + Fraction(z))

    return np.array([one(*map(float, c)) for c in zip(x, y, z)])


def halves(kind, function):
    """The same for both numbers of this kind in registers of 32 bits."""

    def both(*columns):
        numbers = (c.view(TYPES[kind]).astype(np.float64) for c in columns)
        return function(*numbers).astype(TYPES[kind]).view(np.uint32)

    return both


def moderate(x):
    """No angle that is all integer."""
    x[np.abs(x) > 1e30] = 0.25


def finite(*columns):
    """Of pairs of 2-byte numbers."""
    for x in columns:
        x &= 0x6FFF_6FFF


def cancelling(x, y, z):
    """What rounding a product leaves."""
    with np.errstate(all="ignore"):
        z[::4] = -(x * y)[::4]


PLAIN = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
for name, function in PLAIN.items():
    for kind in ("f32", "f64"):
        case(f"{name}.{kind}", kind, f"{kind} {kind}", wide_to(kind, function))
        case(f"{name}.rn.{kind}", kind, f"{kind} {kind}", wide_to(kind, function))
    case(f"{name}.ftz.f32", "f32", "f32 f32", flushed(function))
for kind in ("f32", "f64"):
    case(f"div.rn.{kind}", kind, f"{kind} {kind}", wide_to(kind, np.divide))
    for name, function in {"min": extreme("min"), "max": extreme("max")}.items():
        case(f"{name}.{kind}", kind, f"{kind} {kind}", wide_to(kind, function))
    case(f"neg.{kind}", kind, kind, operator.neg)
    case(f"abs.{kind}", kind, kind, np.abs)
    case(f"sqrt.rn.{kind}", kind, kind, wide_to(kind, np.sqrt))
    case(f"rcp.rn.{kind}", kind, kind, wide_to(kind, np.reciprocal))
    case(f"selp.{kind}", kind, f"{kind} {kind} pred", lambda x, y, p: np.where(p, x, y))
    case(f"fma.rn.{kind}", kind, f"{kind} {kind} {kind}", wide_to(kind, exactly), keep=cancelling)
    unordered = lambda x, y: np.isnan(x) | np.isnan(y)
    for how, function in (EQUAL | ORDER).items():
        case(f"setp.{how}.{kind}", "pred", f"{kind} {kind}", lambda x, y, f=function: f(x, y) & ~unordered(x, y))
        case(f"setp.{how}u.{kind}", "pred", f"{kind} {kind}", lambda x, y, f=function: f(x, y) | unordered(x, y))
    case(f"setp.num.{kind}", "pred", f"{kind} {kind}", lambda x, y: ~unordered(x, y))
    case(f"setp.nan.{kind}", "pred", f"{kind} {kind}", unordered)
case("fma.rn.ftz.f32", "f32", "f32 f32 f32", flushed(exactly))
case("min.ftz.f32", "f32", "f32 f32", flushed(extreme("min")))
case("max.ftz.f32", "f32", "f32 f32", flushed(extreme("max")))
case("abs.ftz.f32", "f32", "f32", flushed(np.abs))
case("neg.ftz.f32", "f32", "f32", flushed(np.negative))
case("div.rn.ftz.f32", "f32", "f32 f32", flushed(np.divide))
case("div.full.ftz.f32", "f32", "f32 f32", flushed(np.divide), 2)
case("setp.gt.ftz.f32", "pred", "f32 f32", flushed(np.greater))
case("div.full.f32", "f32", "f32 f32", wide_to("f32", np.divide), 2)
case("copysign.f32", "f32", "f32 f32", lambda x, y: np.copysign(y, x))
case("rcp.approx.ftz.f64", "f64", "f64", np.reciprocal, 2**33)
case("tanh.approx.f32", "f32", "f32", wide_to("f32", np.tanh), 2**12)
APPROXIMATE = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos}
APPROXIMATE["rsqrt"] = lambda x: 1 / np.sqrt(x)
for name, function in APPROXIMATE.items():
    case(f"{name}.approx.ftz.f32", "f32", "f32", flushed(function), 4, keep=moderate)
for kind in ("bf16", "f16"):
    case(f"fma.rn.{kind}x2", "b32", "b32 b32 b32", halves(kind, exactly), keep=finite)


# ---- conversions ---------------------------------------------------------------------------------------------------
def saturated(kind, rounded):
    """An integer nearby, the least or the greatest one; of NaN 0, or of 64 bits the first bit alone."""
    ends = np.iinfo(TYPES[kind])

    def one(x):
        if math.isnan(x):
            return 0 if ends.bits < 64 else 1 << 63
        return max(ends.min, min(ends.max, rounded(x) if math.isfinite(x) else int(math.copysign(2.0**80, x))))

    return lambda column: by_integers(kind, int)([one(float(x)) for x in column])


ROUND = {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}
for names in ("s32 s8", "s8 s32", "u8 u16", "u16 u32", "s32 s64", "u32 u64", "u64 u32"):
    source, target = names.split()
    case(f"cvt.{target}.{source}", target, source, by_integers(target, int))
for source in ("s32", "u32", "s64", "u64"):
    for target in ("f32", "f64"):
        case(f"cvt.rn.{target}.{source}", target, source, lambda x, to=target: x.astype(TYPES[to]))
for source, target in [("f32", "f16"), ("f32", "bf16"), ("f64", "f32")]:
    case(f"cvt.rn.{target}.{source}", target, source, lambda x, to=target: x.astype(TYPES[to]))
for source, target in [("f16", "f32"), ("bf16", "f32"), ("f32", "f64")]:
    case(f"cvt.{target}.{source}", target, source, lambda x, to=target: x.astype(TYPES[to]))
for how, rounded in ROUND.items():
    for source, target in [("f32", "s32"), ("f32", "u32"), ("f32", "s64"), ("f64", "u64"), ("f64", "s32"), ("f32", "u16")]:
        case(f"cvt.{how}.{target}.{source}", target, source, saturated(target, rounded))
    near = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[how]
    case(f"cvt.{how}.f32.f32", "f32", "f32", near)


def paired(kind, raw, before=lambda x: x):
    """Two numbers in one register, the second one in its low half."""
    return lambda high, low: np.stack([before(low), before(high)], 1).astype(TYPES[kind]).view(raw)[:, 0]


def to_tf32(x):
    """Ten bits of mantissa, a tie away from zero."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x1000 & 0xFFFFE000).astype(np.uint32)
    return np.where(np.isfinite(x), rounded, x.view(np.uint32))


for kind in ("bf16", "f16"):
    case(f"cvt.rn.{kind}x2.f32", "b32", "f32 f32", paired(kind, np.uint32))
for kind in ("e4m3", "e5m2"):
    end = float(ml_dtypes.finfo(TYPES[kind]).max)
    case(f"cvt.rn.satfinite.{kind}x2.f32", "b16", "f32 f32", paired(kind, np.uint16, lambda x, end=end: np.clip(x, -end, end)))
    case(f"cvt.rn.f16x2.{kind}x2", "b32", "b16", lambda x, k=kind: x.view(TYPES[k]).astype(np.float16).view(np.uint32))
case("cvt.rna.tf32.f32", "b32", "f32", to_tf32)
case("sub.rn.f16x2", "b32", "b32 b32", halves("f16", np.subtract), keep=finite)


def packed(high, low, rest):
    """Two integers as bytes, in the lower half of the result; the lower half of the rest in the upper one."""
    high, low = (np.clip(x, -128, 127).astype(np.uint32) & 255 for x in (high, low))
    return rest << 16 | high << 8 | low


def near_bytes(high, low, rest):
    """Half of the numbers are near the range of bytes."""
    for x in (high, low):
        x[::2] = x[::2] % 400 - 200


case("cvt.pack.sat.s8.s32.b32", "b32", "s32 s32 b32", packed, keep=near_bytes)


# ---- the tests -----------------------------------------------------------------------------------------------------
def column(kind, rng):
    """COUNT numbers of a kind: what is special about it, then random ones."""
    dtype = np.dtype(TYPES[kind])
    if kind == "pred":
        return rng.random(COUNT) < 0.5
    if dtype.kind in "iu":
        out = np.frombuffer(rng.bytes(COUNT * dtype.itemsize), dtype).copy()
        out[::3] >>= rng.integers(0, 8 * dtype.itemsize, len(out[::3])).astype(dtype)
        ends = np.iinfo(dtype)
        edges = [0, 1, 2, 31, 32, ends.max, ends.min, ends.max - 1]
        out[rng.permutation(COUNT)[:16]] = edges * 2
        return out
    out = rng.standard_normal(COUNT) * np.exp2(rng.integers(-12, 12, COUNT))
    out[rng.permutation(COUNT)[: 2 * len(EDGES)]] = EDGES * 2
    with np.errstate(over="ignore"):
        return out.astype(dtype)


def body(opcode):
    """PTX that computes out = opcode(a0, a1, ...), a number a thread; out is the last array."""
    result, operands, *_ = CASES[opcode]
    lines = []
    for k, kind in enumerate([*operands, result]):
        bits = 8 * np.dtype(TYPES[kind]).itemsize
        lines += [f".reg .b64 p{k};", f"mad.wide.u32 p{k}, %t, {bits // 8}, %a{k};", f".reg .b{max(bits, 16)} x{k};"]
        if k < len(operands):
            lines.append(f"ld.global.{kind if kind[1:] == '8' else 'u8' if kind == 'pred' else f'b{bits}'} x{k}, [p{k}];")
        if kind == "pred":
            lines += [f".reg .pred q{k};"] + [f"setp.ne.u16 q{k}, x{k}, 0;"] * (k < len(operands))
    k, names = len(operands), [f"{'q' if kind == 'pred' else 'x'}{k}" for k, kind in enumerate([*operands, result])]
    lines.append(f"{opcode} {', '.join([names[-1], *names[:-1]])};")
    if result == "pred":
        lines.append(f"selp.u16 x{k}, 1, 0, q{k};")
    lines.append(f"st.global.b{8 * np.dtype(TYPES[result]).itemsize} [p{k}], x{k};")
    return "{\n" + "\n".join(lines) + "\n}"


def bits_of(x):
    """The numbers' bits, NaN's all the same."""
    raw = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").copy()
    if x.dtype.kind not in "iub":
        raw[np.isnan(x.astype(np.float64))] = 0x7F
    return raw


@pytest.mark.parametrize("opcode", CASES)
def test_instruction(opcode):
    result, operands, reference, ulp, keep = CASES[opcode]
    columns = [column(kind, np.random.default_rng(seed)) for seed, kind in enumerate(operands)]
    if keep:
        keep(*columns)
    out = np.zeros(COUNT, TYPES[result])
    execute(body(opcode), *columns, out, warps=WARPS)
    with np.errstate(all="ignore"):
        want = np.asarray(reference(*columns)).astype(out.dtype)
    wrong = bits_of(out) != bits_of(want)
    if ulp:
        with np.errstate(all="ignore"):
            wrong &= ~(np.abs(out - want) <= ulp * np.spacing(np.abs(want)))
    mismatches = [(*(c[k] for c in columns), out[k], want[k]) for k in np.flatnonzero(wrong)]
    assert not mismatches, f"{len(mismatches)} wrong; operands, got, want: {mismatches[:3]}"


@pytest.mark.parametrize(("with_", "p", "q"), [("", "x < y", "x >= y"), (".and", "x < y and c", "x >= y and c")])
def test_a_comparison_of_two_results(with_, p, q):
    """p|q: the comparison, and its contrary, each with the third operand."""
    actual = [np.zeros(32, np.uint32) for _ in "pq"]
    operands = "p|q, %t, 9" + ", c" * bool(with_)
    execute(
        each_thread(np.uint32, 0, 1)
        + f""".reg .pred p, q, c; .reg .b32 x, y; and.b32 x, %t, 1; setp.ne.u32 c, x, 0;
        setp.lt{with_}.u32 {operands}; selp.u32 x, 1, 0, p; selp.u32 y, 1, 0, q;
        st.global.b32 [%p0], x; st.global.b32 [%p1], y; setp.eq.u32 p|_, x, y;""",
        *actual,
    )
    for outputs, want in zip(actual, (p, q)):
        assert outputs.tolist() == [int(eval(want, {"x": t, "y": 9, "c": t & 1})) for t in range(32)]


def test_these_are_instructions():
    """ptxas assembles the instructions of all cases."""
    kinds = max(len(operands) for _, operands, *_ in CASES.values()) + 1
    assemble(written("\n".join(map(body, CASES)), *[1] * kinds))


def test_every_pattern_of_arithmetic_is_tested():
    """Nobody but arithmetic.py declares pure instructions. (Other instructions: test_emulator.py.)"""
    patterns = re.findall(r'^@pure\(\s*r"([^"]+)"', inspect.getsource(arithmetic), re.MULTILINE)
    assert not [pattern for pattern in patterns if not any(re.fullmatch(pattern, opcode) for opcode in CASES)]
    assert {pattern for pattern, _ in table.TABLE} >= set(map(re.compile, patterns)) and len(patterns) > 40


def test_ties_of_tf32_go_away_from_zero():
    """The edges and random numbers of other tests contain no ties."""
    x, out = np.full(COUNT, 1 + 2**-11, np.float32), np.zeros(COUNT, np.uint32)
    x[::2] *= -1
    execute(body("cvt.rna.tf32.f32"), x, out, warps=WARPS)
    assert (out.view(np.float32) == np.copysign(1 + 2**-10, x)).all()
