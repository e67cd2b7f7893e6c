"""Generated text breaks long lines as ruff format does, and each operator's text is short."""

import ast
import subprocess
import sys

import pytest

from fuse import inspect, operators
from fuse.planning.candidates import candidates
from fuse.planning.cost import card_of
from fuse.planning.generated_module import generate_module
from fuse.writing.lines import WIDTH, break_imports, break_lines, cut_at_commas, format_assignments

A, B, C = (letter * 55 for letter in "abc")
LINES = {  # a line that is too long, and what becomes of it
    f"x = f({A}, {B}, 1)": ["x = f(", f"    {A}, {B}, 1", ")"],
    f"    f({A}, {B}, {C})": ["    f(", f"        {A},", f"        {B},", f"        {C},", "    )"],
    f"x = {A} * {B} + {C}": ["x = (", f"    {A} * {B}", f"    + {C}", ")"],
    f"x = g(1, ({A} + {B} * f(c, 2)))": [
        "x = g(",
        "    1,",
        "    (",
        f"        {A}",
        f"        + {B} * f(c, 2)",
        "    ),",
        ")",
    ],
    f"{A}, {B}, d = f()": [f"{A}, {B}, d = (", "    f()", ")"],
    f"{A}, {B} = {C}, 1": [f"{A} = {C}", f"{B} = 1"],
    f"a, b = f(b, {A}), g(a, {B}, 123)": ["a, b = (", f"    f(b, {A}),", f"    g(a, {B}, 123),", ")"],
    f"def f({A}, {B}, d):": ["def f(", f"    {A}, {B}, d", "):"],
    f"x = f({A}, {B})  # so": ["# so", f"x = f({A}, {B})"],
}


def formatted(text):
    """The text as ruff formats it; the test is skipped where there is no ruff."""
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_lines_that_are_too_long(line):
    """Broken lines parse to the same code, and ruff leaves them as they are."""
    actual = list(break_lines([line]))
    assert actual == LINES[line]
    text, more = "\n".join(actual), "\n    pass" * line.endswith(":")
    if line.count(" = ") == text.count(" = "):
        assert ast.dump(ast.parse((text + more).strip())) == ast.dump(ast.parse((line + more).strip()))
    text = f"if x:\n{text}\n" if line.startswith(" ") else f"{text}{more}\n"
    assert formatted(text) == text


def test_what_goes_on_in_the_next_line():
    lines = ["x = f(", "    a,", "    b,", ")", "y = [1,", "2]"]
    assert list(break_lines(lines)) == ["x = f(a, b)", "y = [1, 2]"]
    assert cut_at_commas("a, f(b, c), d=(1, 2),") == ["a", "f(b, c)", "d=(1, 2)"]
    assert list(break_imports([f"from x import {A}, b, {C}"])) == [f"from x import {A}, b", f"from x import {C}"]


def test_assignments_that_share_a_line():
    """In order; one that reads another's name is in a later line, and an attribute of that name does not count."""
    values = [("rows", "3"), ("cols", "w.rows"), ("tall", "rows + cols"), ("steps", "f(tall)")]
    assert format_assignments(values) == ["rows, cols = 3, w.rows", "tall = rows + cols", "steps = f(tall)"]
    assert format_assignments([("a", "x" * 60), ("b", "y" * 60), ("c", "1")]) == [f"a = {'x' * 60}", f"b, c = {'y' * 60}, 1"]


CASES = [(arch, case) for arch in ("sm_90a", "sm_80") for case in inspect.cases((), arch) if case.rows in (1, 4096)]


@pytest.mark.parametrize("name", operators.__all__)
def test_operators_take_81_lines(name):
    """A kernel with its imports and its launch has at most 81 lines, at lengths of models, few rows and many; some gradients of
    gated MLPs take a few more."""
    texts = []
    for arch, case in CASES:
        if case.name != name:
            continue
        actual = case.operator._trace(inspect.shapes(case))
        if plans := candidates(actual, card_of(arch)):
            text = generate_module(case.name, actual, plans[0]).text
            lines, kernels = len(text.splitlines()), max(1, text.count("@cuda.jit"))
            assert lines <= (84 if case.gradient and "gelu" in name else 81) * kernels, f"{arch} {case}: {lines} lines"
            texts.append(text)
    assert texts
    for text in dict.fromkeys(texts):
        assert formatted(text) == text
