"""Tiles without operands: constants, and the indices of rows and columns."""

import numpy as np

from tiles.compiling.numba_types import StaticType
from tiles.dtypes import bf16, fp16, fp32
from tiles.op import lowers, number, op
from tiles.types import rt, rv

EXACT = {fp32: 2**24, fp16: 2**11, bf16: 2**8}  # up to here a dtype holds every integer


@lowers(rt, rt)
def _(rows: int, cols: int, dtype, layout):
    """A tile type may be made in the kernel itself, of compile-time values: `zeros(rt(16, 64, fp32))`."""
    try:
        return StaticType(rt(rows, cols, dtype, layout)), lambda b, *_: None
    except ValueError as error:
        raise TypeError(str(error)) from None


def _check(name, shape):
    if not isinstance(shape, (rt, rv)):
        raise TypeError(f"{name}: shape must be a register tile or vector type such as rt(16, 64, fp32), got {shape}")


def _filled(name, shape, element):
    """The rule and lowering of a tile whose elements are all `element(b, *values)`."""
    _check(name, shape)
    return shape, lambda b, _, *values: b.from_elements(shape, [element(b, *values)] * shape.elements)


def _not_partial(name, shape):
    if getattr(shape, "partial", False):
        raise TypeError(f"{name}: {shape}: a partial sum can only start from zeros")


@op
def full(shape, value):
    """A register tile or vector of type `shape` with `value` in every element."""
    return np.full(shape.shape, value, np.float32)


@lowers(full)
def _(shape: type, value):
    rule = _filled("full", shape, lambda b, v: b.real(v))
    _not_partial("full", shape)
    if not number(value):
        raise TypeError(f"full: value must be a number, got {value}")
    return rule


@op
def zeros(shape):
    """A register tile or vector of type `shape`, all 0."""
    return np.zeros(shape.shape, np.float32)


@op
def ones(shape):
    """A register tile or vector of type `shape`, all 1."""
    return np.ones(shape.shape, np.float32)


@op
def pos_infty(shape):
    """A register tile or vector of type `shape`, all +infinity: where a running minimum starts."""
    return np.full(shape.shape, np.inf, np.float32)


@op
def neg_infty(shape):
    """A register tile or vector of type `shape`, all -infinity: where a running maximum starts."""
    return np.full(shape.shape, -np.inf, np.float32)


def _constant(op_function, value):
    @lowers(op_function)
    def _(shape: type):
        if value:
            _not_partial(op_function.__name__, shape)
        return _filled(op_function.__name__, shape, lambda b: b.real(value))


for _op_function, _value in {zeros: 0, ones: 1, pos_infty: np.inf, neg_infty: -np.inf}.items():
    _constant(_op_function, _value)


# ---- indices -------------------------------------------------------------------------------------------------------
def lane_first(b, spec, axis):
    """The row (axis 0) or column (1) of this lane's first element of a tile or vector. Its other elements are as far from
    that as lane 0's are from lane 0's first."""
    if spec.layout == "line":
        return b.mul(b.lane(), b.u32(spec.elements)) if axis else b.u32(0)
    if (axis == 0) == (spec.layout == "row"):
        return b.lshr(b.lane(), b.u32(2))
    return b.mul(b.and_(b.lane(), b.u32(3)), b.u32(2))


def index_array(shape, axis, first=0):
    """The NumPy meaning of row_index (axis 0) and col_index (1)."""
    return np.indices(shape.shape, np.float32)[axis] + np.float32(first)


def index_rule(name, shape, axis, first=None):
    """The rule and lowering of a tile of row numbers (axis 0) or column numbers (1), counted from `first(b)`."""
    _check(name, shape)
    _not_partial(name, shape)
    vector = ("col_vec", "row_vec")[axis]
    if isinstance(shape, rv) and shape.axis != vector:
        raise TypeError(f"{name}: takes a tile type or a {vector} type, got {shape}")
    if shape.dtype not in EXACT:
        raise TypeError(f"{name}: tiles of {shape.dtype} are only for products: convert fp32, got {shape}")
    count = shape.shape[axis] * (1 if first is None else 4)
    if count > EXACT[shape.dtype]:
        raise TypeError(f"{name}: {shape.dtype} holds integers up to {EXACT[shape.dtype]} only, got {shape}; convert fp32")

    def lower(b, _):
        start = lane_first(b, shape, axis)
        start = b.real(start if first is None else b.add(start, first(b)))
        coordinates = [shape.element(0, i) for i in range(shape.elements)]
        numbers = [at[axis] if isinstance(shape, rt) else at for at in coordinates]
        return b.from_elements(shape, [b.fadd(start, b.real(int(n))) for n in numbers])

    return shape, lower


@op
def row_index(shape):
    """A tile of type `shape` whose elements are the numbers of their rows; or a col_vec: 0, 1, 2, ..."""
    return index_array(shape, 0)


@lowers(row_index)
def _(shape: type):
    return index_rule("row_index", shape, 0)


@op
def col_index(shape):
    """A tile of type `shape` whose elements are the numbers of their columns; or a row_vec: 0, 1, 2, ..."""
    return index_array(shape, 1)


@lowers(col_index)
def _(shape: type):
    return index_rule("col_index", shape, 1)
