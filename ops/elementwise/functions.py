"""Functions of one tile, vector or number, element by element: a row of the table each, and `map` for a function of one's own.

Where the GPU approximates, the docstring says how well: in units in the last place (ulp) of fp32. NaN gives NaN, but for relu.
"""

import builtins
import math

import numpy as np

from tiles.compiling.builder import f32, scalar_signature
from tiles.numba_names import TypingError, types
from tiles.op import OPS, lowers, number, op
from tiles.types import rt, rv, st, sv
from tiles.values import FUNCTION

from .arithmetic import FAST, broadcast, elementwise, fmax, lower_map, map_rule, plain

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
GELU_CUBIC, GELU_SLOPE = 0.044715, math.sqrt(2 / math.pi)


def _ptx(instruction):
    return lambda b, x: b.asm(f32, f"{instruction} $0, $1;", "=f,f", x, effect=False)


def _times(b, x, factor):
    return b.fmul(x, f32(factor) if isinstance(factor, float) else factor, flags=FAST)


def _plus(b, x, y):
    return b.fadd(x, f32(y) if isinstance(y, float) else y, flags=FAST)


_exp2, _log2 = _ptx("ex2.approx.ftz.f32"), _ptx("lg2.approx.ftz.f32")
_reciprocal, _tanh = _ptx("rcp.approx.ftz.f32"), _ptx("tanh.approx.f32")


def _without_subnormals(y):
    """y, but 0 for subnormal numbers of fp32, which ex2.approx.ftz does not return."""
    return y * (y >= np.finfo(np.float32).tiny)


@op
def exp2(x):
    """2 ** x, 0 below 2 ** -126; on the GPU ex2.approx, 2 ulp."""
    return _without_subnormals(np.exp2(plain(x)))


@op
def exp(x):
    """e ** x, as exp2(x * log2(e)), so 0 below 2 ** -126: 2 + 1.2 |x| ulp on the GPU."""
    return _without_subnormals(np.exp(plain(x)))


@op
def log2(x):
    """Base-2 logarithm; log2(0) = -inf, of less NaN. On the GPU lg2.approx, wrong by 2 ** -22 (2 ulp away from 1)."""
    return np.log2(plain(x))


@op
def log(x):
    """Natural logarithm, as log2(x) * ln(2); log(0) = -inf, of less NaN. On the GPU wrong by 2 ** -22 (3 ulp away from 1)."""
    return np.log(plain(x))


@op
def abs(x):
    """The absolute value of each element, |x|."""
    return np.abs(plain(x))


@op
def relu(x):
    """max(x, 0); as in `maximum`, NaN loses: relu(NaN) = 0."""
    return np.fmax(plain(x), np.float32(0))


@op
def sqrt(x):
    """Square root, of less than 0 NaN; on the GPU sqrt.approx, 1 ulp."""
    return np.sqrt(plain(x))


@op
def rsqrt(x):
    """1 / sqrt(x); rsqrt(0) = inf, of less NaN. On the GPU rsqrt.approx, 2 ulp."""
    return np.reciprocal(np.sqrt(plain(x)))


@op
def reciprocal(x):
    """1 / x; on the GPU rcp.approx, 1 ulp, and 0 for |x| > 2 ** 126."""
    return np.reciprocal(plain(x))


@op
def tanh(x):
    """Hyperbolic tangent; on the GPU tanh.approx, a relative error of 2 ** -11: enough for bf16 and fp16, not for fp32."""
    return np.tanh(plain(x))


@op
def sigmoid(x):
    """1 / (1 + exp(-x)): 4 + 1.2 |x| ulp on the GPU."""
    return np.reciprocal(1 + np.exp(-plain(x)))


@op
def silu(x):
    """x * sigmoid(x) = x / (1 + exp(-x)), also called swish: 5 + 1.2 |x| ulp on the GPU; silu(-inf) is NaN."""
    return plain(x) * np.reciprocal(1 + np.exp(-plain(x)))


@op
def softplus(x):
    """log(1 + exp(x)), which is never below x or 0: wrong by 2 ** -22 + 2 ulp on the GPU."""
    return np.logaddexp(np.float32(0), plain(x))


@op
def gelu(x):
    """x / 2 * (1 + erf(x / sqrt(2))), the exact form: wrong by |x| 2 ** -22 on the GPU; gelu(-inf) is NaN. Some 20
    instructions an element; gelu_tanh takes 7."""
    return plain(x) / 2 * (1 + np.vectorize(math.erf, otypes=[np.float32])(plain(x) * np.float32(math.sqrt(0.5))))


@op
def gelu_tanh(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))), the tanh form: wrong by |x| 2 ** -11 on the GPU, which is
    tanh.approx's error; from gelu it differs by up to 5e-4. gelu_tanh(-inf) is NaN."""
    x = plain(x)
    return x / 2 * (1 + np.tanh(np.float32(GELU_SLOPE) * (x + np.float32(GELU_CUBIC) * x * x * x)))


def _emit_sigmoid(b, x):
    return _reciprocal(b, _plus(b, _exp2(b, _times(b, x, -LOG2_E)), 1.0))


def _emit_softplus(b, x):
    zero = f32(0.0)
    small = _exp2(b, _times(b, b.llvm("llvm.nvvm.fabs.f", x), -LOG2_E))  # no overflow, and 1 + small is at most 2
    return _plus(b, fmax(b, x, zero), _times(b, _log2(b, _plus(b, small, 1.0)), LN_2))


def _emit_gelu(b, x):
    half = _times(b, x, 0.5)
    return _plus(b, half, _times(b, half, b.llvm("__nv_erff", _times(b, x, math.sqrt(0.5)))))


def _emit_gelu_tanh(b, x):
    half, slope = _times(b, x, 0.5), _plus(b, _times(b, _times(b, x, x), GELU_SLOPE * GELU_CUBIC), GELU_SLOPE)
    return _plus(b, half, _times(b, half, _tanh(b, _times(b, x, slope))))


FUNCTIONS = {
    exp2: _exp2,
    exp: lambda b, x: _exp2(b, _times(b, x, LOG2_E)),
    log2: _log2,
    log: lambda b, x: _times(b, _log2(b, x), LN_2),
    abs: lambda b, x: b.llvm("llvm.nvvm.fabs.f", x),
    relu: lambda b, x: fmax(b, x, f32(0.0)),
    sqrt: _ptx("sqrt.approx.ftz.f32"),
    rsqrt: _ptx("rsqrt.approx.ftz.f32"),
    reciprocal: _reciprocal,
    tanh: _tanh,
    sigmoid: _emit_sigmoid,
    silu: lambda b, x: _times(b, x, _emit_sigmoid(b, x)),
    softplus: _emit_softplus,
    gelu: _emit_gelu,
    gelu_tanh: _emit_gelu_tanh,
}
for _op_function, _emit in FUNCTIONS.items():
    elementwise(_op_function, keeps_integers=_op_function in (abs, relu))(map_rule(_op_function.__name__, _emit))
lowers(builtins.abs, OPS[abs].meaning)(
    lambda x: map_rule("abs", FUNCTIONS[abs])(x) if isinstance(x, (rt, rv, st, sv)) else None
)


# ---- a function of one's own ---------------------------------------------------------------------------------------
@op
def map(x, function, y=None, z=None):
    """function(e) for each element e of a tile or vector, as fp32; or function(e, f), function(e, f, g) with the elements of y
    and z at its place. y and z are tiles, vectors or numbers, as in `fma`. `function`: of numbers, one that kernels can
    call, such as a plain Python function under `@tiles.inlined`. It may capture what is known at compile time; pass a number
    that comes later as y: map(tile, leaky, slope). Numba takes a literal like 0.5 for float64, and computes what it touches
    in float64; np.float32(0.5) does not."""
    operands = np.broadcast_arrays(*[plain(v) for v in (x, y, z) if v is not None])
    return np.array([function(*e) for e in zip(*(array.flat for array in operands))], np.float32).reshape(operands[0].shape)


@lowers(map)
def _(x, function, y, z):
    if not isinstance(x, (rt, rv)) or getattr(x, "partial", False):
        raise TypeError(f"map: takes a tile or a whole vector, got {x}")
    if y is None and z is not None:
        raise TypeError(f"map: has a z, {z}, and no y")
    operands = [v for v in (x, y, z) if v is not None]
    out = broadcast("map", *operands)
    check_function("map", function, len(operands))

    def lower(b, value, python_function, *arguments):
        emit = lower_map(out, lambda b, *e: b.apply(function, python_function, *e), *operands)
        return emit(b, value, *arguments[: len(operands) - 1])

    return out, lower


def check_function(name, function, count):
    """TypeError if an op's argument is no function of so many numbers that returns one."""
    if function is not FUNCTION and not isinstance(function, types.Callable):
        raise TypeError(f"{name}: takes a function of numbers (a Python function under @tiles.inlined), got {function}")
    if isinstance(function, types.Callable):
        try:
            result = scalar_signature(function, count).return_type
        except TypingError as error:
            raise TypeError(f"{name}: the function does not take {count} numbers: {error}") from None
        if not number(result):
            raise TypeError(f"{name}: the function must return a number, got {result}")
