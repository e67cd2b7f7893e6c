"""tiles/static.py: who is equal, what that costs, and that nothing is kept of what was dropped."""

import functools
import os
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from keys import key
from numba import cuda

import tiles
from ops import exp, load, map, maximum, store
from tiles import fp32, inlined, rt, static
from tiles.compiling import compiler
from tiles.launching.arguments import parameter

static_module = sys.modules[static.__module__]
ROOT = Path(__file__).parents[2]
T = rt(16, 32, fp32)
ARRAY = parameter("x", np.zeros((16, 32), np.float32)).type
SLOPE = 0.5


@static
class Score:
    """A function and a number."""

    function: object
    number: object = 1

    @inlined
    def apply(self, t):
        return self.function(t)


def bent(t):
    return maximum(t, 0.0)


def closing_over(value):
    return lambda t: t * value


EQUAL = {
    "two lines": (Score(lambda t: exp(t) * 2.0), Score(lambda t: exp(t) * 2.0)),
    "a loop": tuple(Score(lambda t: exp(t)) for _ in range(2)),
    "closed over": (Score(closing_over(2.0)), Score(closing_over(2.0))),
    "static objects in cells": (Score(closing_over(Score(bent))), Score(closing_over(Score(bent)))),
    "nested": (Score(Score(bent)), Score(Score(bent))),
}
DIFFERENT = {
    "a constant": (Score(lambda t: exp(t) * 2.0), Score(lambda t: exp(t) * 3.0)),
    "an op": (Score(lambda t: exp(t)), Score(lambda t: maximum(t, 0.0))),
    "what is closed over": (Score(closing_over(2.0)), Score(closing_over(3.0))),
    "the sign of a zero": (Score(closing_over(0.0)), Score(closing_over(-0.0))),
    "a type": (Score(closing_over(1)), Score(closing_over(1.0))),
    "a flag": (Score(bent, True), Score(bent, 1)),
    "a field": (Score(bent, 1), Score(bent, 2)),
    "a field of a field": (Score(Score(bent, 1)), Score(Score(bent, 2))),
    "a tile": (Score(bent, rt(16, 16, fp32)), Score(bent, T)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal(case):
    a, b = EQUAL[case]
    assert a == b and hash(a) == hash(b) and a is not b


@pytest.mark.parametrize("case", DIFFERENT)
def test_different(case):
    a, b = DIFFERENT[case]
    assert a != b


def test_a_global_that_changed(monkeypatch):
    """As in a notebook: the same line runs again, after the line that it depends on."""
    objects = []
    for slope in (0.5, 0.25, 0.5):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        objects.append(Score(lambda t: t * SLOPE))
        hash(objects[-1])
    assert objects[0] == objects[2] != objects[1]


def test_a_class_s_code(module):
    source = """
        from tiles import inlined, static
        @static
        class Scale:
            by: float = 1.0
            @inlined
            def apply(self, t):
                return t * self.by
            def host(self):
                return 1
    """
    scale = lambda old="", new="": module(source.replace(old, new) if old else source, "subject").Scale()
    assert scale() == scale() == scale("return 1", "return 2")  # what kernels do not call
    assert scale() != scale("t * self", "t + self")
    assert scale() != scale("= 1.0", "= 2.0")


def test_what_cannot_be_digested_is_itself():
    unknown = object()
    a, b = (Score(lambda t: unknown) for _ in range(2))
    assert a == a != b
    assert len({a, b}) == 2


def make(score):
    @cuda.jit
    def kernel(x, y):
        store(y, score.apply(load(x, T, (0, 0))), (0, 0))

    return kernel


def test_an_equal_lambda_finds_the_kernel(monkeypatch):
    """In this process, through a factory that is cached; and on disk, whose key is the same."""
    factory, compiled, real = functools.cache(make), [], compiler.compile_kernel
    monkeypatch.setattr(compiler, "compile_kernel", lambda *a: compiled.append(a) or real(*a))
    machine_code = functools.cache(lambda kernel: compiler.compile_kernel(kernel, (ARRAY, ARRAY), "sm_90a"))
    for number in (2.0, 2.0, 3.0):
        machine_code(factory(Score(lambda t: t * number)))
    assert len(compiled) == 2
    keys = [key(make(Score(lambda t: t * number))) for number in (2.0, 2.0, 3.0)]
    assert keys[0] == keys[1] != keys[2] and None not in keys


def test_another_process_finds_it_on_disk(module, tmp_path, capsys):
    source = """
        from numba import cuda
        from numba.cuda import types
        from ops import load, store
        from tiles import fp32, inlined, rt, static
        from tiles.compiling import digest
        import sys
        T = rt(16, 32, fp32)
        @static
        class Score:
            function: object
            @inlined
            def apply(self, t):
                return self.function(t)
        def make(score):
            @cuda.jit
            def kernel(x, y):
                store(y, score.apply(load(x, T, (0, 0))), (0, 0))
            return kernel
        array = types.Array(types.float32, 2, "A")
        for k in (2.0, 2.0, 3.0):
            print(digest.key(make(Score(lambda t: t * k)), (array, array), "sm_90a"))
    """
    module(source, "subject")
    actual = [capsys.readouterr().out.split()]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # of texts, another one than here
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run = subprocess.run([sys.executable, "-c", "import subject"], capture_output=True, text=True, env=env, timeout=100)
    assert run.returncode == 0, run.stderr
    actual.append(run.stdout.split())
    assert actual[0] == actual[1] and actual[0][0] == actual[0][1] != actual[0][2] and "None" not in actual[0]


def test_asking_is_cheap():
    """A fresh object with a fresh lambda of code that was seen before: no digest is made."""
    table = {Score(closing_over(2.0)): 1}
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            assert table[Score(closing_over(2.0))] == 1
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 100e-6, f"{best * 1e6:.1f} us"  # 10 us on a quiet machine


def test_factories_leak_nothing(collect):
    """A kernel, its closures, static objects and their functions are freed once nobody has them, in both backends."""

    def factory(number):
        function = lambda t: t * number
        score = Score(function)

        @inlined
        def element(e):
            return e * 2.0

        @inlined
        def helper(t):
            return score.apply(map(t, element))

        @cuda.jit
        def kernel(x, y):
            store(y, helper(load(x, T, (0, 0))), (0, 0))

        compiler.compile_kernel(kernel, (ARRAY, ARRAY), "sm_90a")
        x = np.ones((16, 32), np.float32)
        tiles.launch(kernel, 1, 32)(x, y := np.zeros_like(x))
        assert (y == 2 * number).all()
        return [weakref.ref(result) for result in (function, score, element, helper, kernel)]

    result = factory(3.0) + factory(4.0)
    collect()
    assert [ref() for ref in result] == [None] * len(result)


def test_what_is_freed_is_compiled_anew(collect):
    """Numba's names of compiled functions are addresses, which come again."""
    codes = set()
    for _ in range(3):
        for number in (2.0, 3.0):
            actual = compiler.compile_kernel(make(Score(closing_over(number))), (ARRAY, ARRAY), "sm_90a")
            codes.add((number, actual.registers, len(actual.cubin)))
            collect()
    assert len(codes) == 2


def test_digests_of_the_latest_are_kept(monkeypatch):
    """As many as are remembered: of those that were asked for last, also if they are older."""
    result = []
    monkeypatch.setattr(static_module, "Digest", lambda real=static_module.Digest: result.append(1) or real())
    monkeypatch.setattr(Score, "__digests__", OrderedDict())
    monkeypatch.setattr(static_module, "REMEMBERED", 2)
    for number, count in (1, 1), (2, 2), (1, 2), (3, 3), (3, 3), (1, 3), (2, 4):
        hash(Score(bent, number))
        assert len(result) == count and len(Score.__digests__) <= 2, number


def test_a_digest_that_another_thread_lets_go(monkeypatch):
    """The table of digests is full, and what is asked for was the oldest: others may forget it between two looks."""

    class Forgetful(OrderedDict):
        def __contains__(self, mark):
            actual = super().__contains__(mark)
            self.clear()
            return actual

        def get(self, mark, otherwise=None):
            actual = super().get(mark, otherwise)
            self.clear()
            return actual

    monkeypatch.setattr(Score, "__digests__", Forgetful())
    assert Score(bent, 1) == Score(bent, 1) != Score(bent, 2)
    monkeypatch.setattr(Score, "__digests__", OrderedDict())
    monkeypatch.setattr(static_module, "REMEMBERED", 0)
    assert Score(bent, 3) == Score(bent, 3) and not Score.__digests__
