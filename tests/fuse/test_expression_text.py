"""Terms written as text evaluate to the terms' values."""

import numpy as np
import pytest

import fuse
from fuse.language.evaluate import NumPyArithmetic, evaluate
from fuse.language.expression_text import equations, expression
from fuse.language.trace import Shape, trace_definition

DEFINITIONS = [
    lambda x, y, w: x - (y - w),
    lambda x, y, w: x - y - w,
    lambda x, y, w: x / (y * w),
    lambda x, y, w: x / y * w,
    lambda x, y, w: x * (y / w),
    lambda x, y, w: (x + y) * w,
    lambda x, y, w: x @ w + y,
    lambda x, y, w: x @ (w * y),
    lambda x, y, w: x * (y @ w),
    lambda x, y, w: (x @ y) @ w,
    lambda x, y, w: x @ (y @ w),
    lambda x, y, w: -(x + y) * -w,
    lambda x, y, w: (x * y).T @ (x + w),
    lambda x, y, w: fuse.maximum(x - y, w) - fuse.exp(x - (y + w)),
]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=range(len(DEFINITIONS)))
def test_parentheses(definition):
    rng = np.random.default_rng(0)
    inputs = {name: rng.uniform(0.5, 2, (4, 4)) for name in "xyw"}
    actual = trace_definition(definition, tuple("xyw"), tuple(Shape((4, 4), "float32") for _ in range(3)))
    (want,) = evaluate(actual.roots, inputs, NumPyArithmetic(np.float64))
    words = {"exp": np.exp, "maximum": np.maximum}
    assert np.allclose(eval(expression(actual.roots[0]), words, inputs), want)
    exec(equations({"y": actual.roots[0]}, {}), words, inputs)
    assert np.allclose(inputs["y"], want)
