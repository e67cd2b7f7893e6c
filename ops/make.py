"""Tiles from nothing."""

import numpy as np

from tiles.op import lowers, number, op
from tiles.types import rt, rv


def _filled(name, shape, element):
    """The rule and lowering of a tile whose elements are all `element(b, *values)`."""
    if not isinstance(shape, (rt, rv)):
        raise TypeError(f"{name}: shape must be a register tile or vector type such as rt(16, 64, fp32), got {shape}")
    return shape, lambda b, _, *values: b.from_elements(shape, [element(b, *values)] * shape.elements)


@op
def full(shape, value):
    """A register tile or vector of type `shape` with `value` in every element."""
    return np.full(shape.shape, value, np.float32)


@lowers(full)
def _(shape: type, value):
    rule = _filled("full", shape, lambda b, v: b.real(v))
    if getattr(shape, "partial", False):
        raise TypeError(f"full: {shape}: a partial sum can only start from zeros")
    if not number(value):
        raise TypeError(f"full: value must be a number, got {value}")
    return rule


@op
def zeros(shape):
    """A register tile or vector of type `shape`, all 0."""
    return np.zeros(shape.shape, np.float32)


@lowers(zeros)
def _(shape: type):
    return _filled("zeros", shape, lambda b: b.real(0))
