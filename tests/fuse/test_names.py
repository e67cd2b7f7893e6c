"""Arguments may be called as what a kernel has of its own."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import module
from fuse.candidates import candidates, chosen
from fuse.cost import H200

NAMES = "acc at band cols columns cuda first load rows run smem steps tiles u width y".split()
FUNCTIONS = {  # of x, of others, and of one that a kernel reads into a variable of its name
    "a map": ("fuse.silu({0}) * fuse.mean({1} * {0}) + {2}", [(5, 64), (5, 64), (64,)]),
    "a wide map": ("{0} * fuse.rsqrt(fuse.mean({0} * {0}) + 1e-3) * {2} + {1}", [(2, 2048), (2, 2048), (2048,)]),
    "few rows": ("fuse.silu(({0} * {1}) @ {2}) * {3}", [(5, 72), (72,), (72, 40), (5, 40)]),
    "many rows": ("fuse.silu({0} @ {1}) * ({0} @ {2}) * {3}", [(70, 72), (72, 40), (72, 40), (40,)]),
    "a narrow product": ("{0} @ {1} + ({0} @ {2}) @ {3}", [(5, 72), (72, 40), (72, 16), (16, 40)]),
    "halves": ("fuse.concatenate([fuse.halves({0})[0] * {1}, fuse.halves({0})[1]])", [(5, 64), (5, 32)]),
}


@pytest.mark.parametrize("card", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_of_all_names(function, card, monkeypatch):
    """The last argument and the first."""
    monkeypatch.setattr("fuse.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    text, shapes = FUNCTIONS[function]
    arrays = [normal(*s) for s in shapes]
    for n, name in enumerate(NAMES):
        words = ["x", "w", "a", "b"][: len(shapes)]
        words[-1 if n % 2 else 0] = name
        kernel = fuse.kernel(eval(f"lambda {', '.join(words)}: {text.format(*words)}", {"fuse": fuse}))
        compare(kernel, arrays, kernel.run(*arrays))


def test_a_name_that_is_free_is_kept():
    kernel = fuse.kernel(lambda x, w, y, hidden: fuse.silu(x @ w) * y + hidden)
    text = kernel.source(*(np.zeros(s, normal(1).dtype) for s in ((70, 72), (72, 40), (70, 40), (70, 40))))
    assert "def launch(x, w, y_2, hidden, z):" in text


def test_what_is_free():
    """A local variable, a global, a keyword, and what is made of a name: the kernel's parameter gAcc, a type ACC."""
    text = """
from ops import load
RING = ring(ARGUMENT0A)
def f(gArgument0a, last_argument1a, me): load(me)
def g(argument1a): pass
"""
    marks = ["argument0a", "argument1a"]
    taken = {"x": "x", "ring": "ring_2", "me": "me", "load": "load"}
    assert [module.free([name, "w"], marks, text)[0] for name in taken] == [*taken.values()]
    assert module.free(["x", "me"], marks, "def f(me, argument1a): pass") == ["x", "me_2"]
    assert module.free(["x", "part"], marks, "def f(last_argument1a, last_part): pass") == ["x", "part_2"]
    assert module.free(["u", "w"], marks, "s = shared(argument0a=1, u=2)") == ["u_2", "w"]


IN_TWO_WAYS = {  # functions of x and w, of which one is read in two ways
    "a residual": (lambda x, w: x + x @ w, (24, 64)),
    "a residual of many rows": (lambda x, w: fuse.relu(x + x @ w), (72, 64)),
    "a weight, turned": (lambda x, w: (x @ w) * (x @ w.T), (24, 64)),
    "a weight of two arrays": (lambda x, w: x @ w + fuse.relu(x) @ w, (24, 64)),
    "both factors": (lambda x, w: (x @ x.T) @ (x @ w), (24, 64)),
}


@pytest.mark.parametrize("card", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("name", IN_TWO_WAYS)
def test_an_array_that_is_read_in_two_ways(name, card):
    """Each way to compute it is a module that Python takes: a kernel's parameters have each a name of their own."""
    definition, shape = IN_TWO_WAYS[name]
    kernel = fuse.kernel(definition)
    found = kernel.trace([normal(*shape), normal(64, 64)])
    for candidate in candidates(found, card):
        compile(chosen(kernel.name, found, candidate).text, name, "exec")


def test_a_residual():
    kernel, arrays = fuse.kernel(IN_TWO_WAYS["a residual"][0]), (normal(3, 64), normal(64, 64))
    compare(kernel, arrays, kernel.run(*arrays))
