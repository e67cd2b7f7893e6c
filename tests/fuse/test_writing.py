"""Terms as text mean what the terms mean."""

import numpy as np
import pytest

import fuse
from fuse import module
from fuse.evaluate import InNumPy, evaluate
from fuse.trace import Shape, traced
from fuse.writing import equations, expression

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
    given = {name: rng.uniform(0.5, 2, (4, 4)) for name in "xyw"}
    found = traced(definition, tuple("xyw"), tuple(Shape((4, 4), "float32") for _ in range(3)))
    (want,) = evaluate(found.roots, given, InNumPy(np.float64))
    words = {"exp": np.exp, "maximum": np.maximum}
    assert np.allclose(eval(expression(found.roots[0]), words, given), want)
    exec(equations({"y": found.roots[0]}, {}), words, given)
    assert np.allclose(given["y"], want)


def test_assignments_that_share_a_line():
    """In order; one that needs another is in a later line, an attribute of its name is none of it."""
    values = [("rows", "3"), ("cols", "w.rows"), ("tall", "rows + cols"), ("steps", "f(tall)")]
    assert module.assigned(values) == ["rows, cols = 3, w.rows", "tall = rows + cols", "steps = f(tall)"]
    assert module.assigned([("a", "x" * 60), ("b", "y" * 60), ("c", "1")]) == [f"a = {'x' * 60}", f"b, c = {'y' * 60}, 1"]


def test_lines_that_are_too_long():
    """An assignment to several names becomes several, unless one needs what another had."""
    first, second = "f(" + "x" * 60 + ")", "g(" + "y" * 60 + ")"
    assert module._folded(f"    a, b = {first}, {second}") == [f"    a = {first}", f"    b = {second}"]
    assert module._folded(f"    a, b = {first}, {second.replace('y', 'a', 1)}  # and so on")[0] == "    # and so on"
    assert module._folded(f"    a, b = f(b, {'x' * 60}), g(a, {'y' * 60})")[0].startswith("    (a, b) = ")
