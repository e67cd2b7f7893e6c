"""Fused functions are copied, pickled and profiled as Python functions are."""

import copy
import cProfile
import functools
import multiprocessing
import pickle
import sys
import types

import numpy as np
import pytest
from operator_cases import normal

import fuse
from fuse import operators


@fuse.kernel
def doubled(x, g):
    """x (M, N), g (N,)."""
    y = x + x
    return y * g


def tripled(x):
    return x * 3.0


by_another_name = fuse.kernel(tripled)
ARRAYS = normal(5, 64), normal(64)


class Holder:
    @fuse.kernel
    def inside(x):
        return fuse.relu(x)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, *(functools.partial(pickle.dumps, protocol=n) for n in range(6))])
def test_a_copy_is_the_function_itself(copied, called):
    """Before the first call and after."""
    function = doubled if called else fuse.kernel(doubled.definition)
    if called:
        function.run(*ARRAYS)
    if isinstance(copied, functools.partial):
        if function is doubled:
            assert pickle.loads(copied(function)) is function
            assert pickle.loads(copied(function.gradient)) is function.gradient
        return
    assert copied(function) is function and copied(function.gradient) is function.gradient
    assert copied([function, {1: function}]) == [function, {1: function}]


def test_what_a_pickle_finds():
    """A function under its definition's name, the definition itself, a method, a part of a gradient."""
    assert pickle.loads(pickle.dumps(Holder.inside)) is Holder.inside
    assert pickle.loads(pickle.dumps(operators.rms_norm_linear)) is operators.rms_norm_linear
    actual = pickle.loads(pickle.dumps(by_another_name))
    assert isinstance(actual, fuse.Fused) and actual.definition is tripled
    part = doubled.gradients.choose(("g",), (0,), 1)
    actual = pickle.loads(pickle.dumps(part))
    x, g = ARRAYS
    assert actual.function is doubled and (actual.run(x, g, x)[0] == part.run(x, g, x)[0]).all()


@pytest.mark.parametrize(
    "function", [fuse.kernel(lambda x: x * 2.0), fuse.kernel(types.FunctionType(tripled.__code__, globals(), "gone"))]
)
def test_what_no_pickle_finds(function):
    words = "is pickled by its name, and test_copies has no .*: define it with def, at the top level of a module"
    for one in (function, function.gradient):
        with pytest.raises(pickle.PicklingError, match=f"^{function.name}: {words}"):
            pickle.dumps(one)
    assert copy.deepcopy(function) is function


def test_another_process():
    """Unpickling works in a process that has imported nothing."""
    x, r, g = normal(3, 64), normal(3, 64), normal(64)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        actual = pool.apply(operators.residual_rms_norm, (x, r, g))
    assert all((a == b).all() for a, b in zip(actual, operators.residual_rms_norm(x, r, g)))


def test_modules_of_torch():
    """A torch module that holds a fused function is copied and saved."""
    torch = pytest.importorskip("torch")

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.g = doubled, torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

        def forward(self, x):
            return self.norm(x, self.g)

    module, x = Norm(), torch.ones(3, 64, dtype=torch.bfloat16)
    module(x).sum().backward()
    copied = copy.deepcopy(module)
    assert copied.norm is doubled and copied.g is not module.g and torch.equal(copied(x), module(x))


# ---- profilers and tracers -------------------------------------------------------------------------------------------
def with_profile(call):
    profile = cProfile.Profile()
    profile.enable()
    try:
        return call(), any("definition" in str(one.code) for one in profile.getstats())
    finally:
        profile.disable()


def with_hook(setter, getter):
    def watched(call):
        called = []

        def hook(frame, event, argument):
            called.append(frame.f_code.co_name)
            return hook

        before = getter()
        setter(hook)
        try:
            actual = call()
            assert getter() is hook
        finally:
            setter(before)
        return actual, "definition" in called

    return watched


WATCHED = {
    "cProfile": with_profile,
    "setprofile": with_hook(sys.setprofile, sys.getprofile),
    "settrace": with_hook(sys.settrace, sys.gettrace),
}


@pytest.mark.parametrize("how", WATCHED)
def test_a_function_is_traced_while_it_is_watched(how):
    """A profiler sees the definition traced and stays active; the text keeps the definition's names."""

    def make():
        def definition(x, g):
            inner = x * fuse.rsqrt(fuse.mean(x * x) + 1e-5)
            return fuse.silu(inner) * inner * g

        return fuse.kernel(definition)

    text, called = WATCHED[how](lambda: make().source(*ARRAYS))
    assert called and text == make().source(*ARRAYS) and "inner = x * rsqrt(" in text


@pytest.mark.gpu
def test_copied_and_profiled_on_the_card():
    """The first call of a form and the next ones."""
    pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    x, g = map(to_torch, ARRAYS)
    kernel = fuse.kernel(doubled.definition)
    actual = [with_profile(lambda: copy.deepcopy(kernel)(x, g))[0] for _ in range(3)]
    assert all((to_numpy(one) == to_numpy(actual[0])).all() for one in actual)


def test_variables_of_a_definition():
    """The local variables when it returns are known: also terms from a generator, another function, and recursion; none after
    an error."""

    def other(x):
        hidden_from_all = x * 2.0
        return hidden_from_all + 1.0

    def definition(x, n=2.0):
        first = x + n
        second, third = (other(first * scale) for scale in (2.0, 3.0))
        first = second * third
        return definition(first, 5.0) if n == 2.0 else first

    actual = fuse.kernel(lambda x: x)  # nothing has a name
    assert actual.trace([ARRAYS[0]]).local_names == ()
    kernel = fuse.kernel(definition)
    local_names = dict(kernel._trace((*kernel._shapes([ARRAYS[0]]),)).local_names)
    assert {*local_names} == {"first", "second", "third", "x"}

    def wrong(x):
        part = x * 2.0
        return part @ part

    for _ in range(2):
        with pytest.raises(ValueError, match="in line .* of test_copies.py: return part @ part"):
            fuse.kernel(wrong)(np.ones((2, 16), np.float32))
