"""tiles/static.py: static objects mean the same in the interpreter and through Numba, whatever they hold and however they are
reached; what is decided when the kernel is compiled costs nothing."""

import dataclasses

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import exp, load, maximum, relu, store
from tiles import fp32, inlined, ring, rt, shared, st, static
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter

T = rt(16, 32, fp32)


def compiled(kernel, arch, arrays=2):
    array = parameter("x", np.zeros((16, 32), np.float32)).type
    actual = compile_kernel(kernel, (array,) * arrays, arch)
    assert (actual.spill_bytes, actual.local_bytes, actual.warnings) == (0, 0, [])
    return actual


def agrees(kernel, reference):
    """The interpreter's result is the reference in float64; sm_80 and sm_90a compile."""
    x = np.random.default_rng(5).uniform(0.1, 2, (16, 32)).astype(np.float32)
    y = np.full_like(x, np.nan)
    tiles.launch(kernel, 1, 32)(x, y)
    np.testing.assert_allclose(y, reference(x.astype(np.float64)), rtol=1e-5)
    for arch in ("sm_80", "sm_90a"):
        compiled(kernel, arch)


def make(epilogue):
    """A kernel that closes over a static object: y = epilogue.apply(x)."""

    @cuda.jit
    def kernel(x, y):
        store(y, epilogue.apply(load(x, T, (0, 0))), (0, 0))

    return kernel


# ---- fields and branches -----------------------------------------------------------------------------------------------
@static
class Affine:
    """y = scale x + bias, then perhaps an activation."""

    scale: float = 2.0
    bias: int = 0
    kind: str | None = None
    wanted: bool = True
    powers: tuple = (1, 2.5)

    @inlined
    def apply(self, t):
        if not self.wanted:
            return t
        t = t * self.scale
        if self.bias != 0 and self.wanted:
            t = t + float(self.bias)
        if self.kind is None:
            return t
        elif self.kind == "relu":
            t = relu(t)
        elif self.kind in ("exp", "exponential"):
            t = exp(t)
        else:
            t = no_such_name(t)  # noqa: F821  # not even typed, unless the kind is another
        return t + self.powers[1] if self.powers[0] > 0 else t - no_such_name  # noqa: F821


CASES = {
    "defaults": (Affine(), lambda x: 2 * x),
    "not wanted": (Affine(wanted=False), lambda x: x),
    "an integer": (Affine(bias=-1, kind="relu"), lambda x: np.maximum(2 * x - 1, 0) + 2.5),
    "a name of two": (Affine(0.5, kind="exponential"), lambda x: np.exp(0.5 * x) + 2.5),
}


@pytest.mark.parametrize("case", CASES)
def test_branches_on_fields(case):
    agrees(make(CASES[case][0]), CASES[case][1])


def test_a_branch_that_is_taken_is_typed():
    kernel = make(Affine(kind="another"))
    with pytest.raises(Exception, match="no_such_name"):
        compiled(kernel, "sm_90a")
    with pytest.raises(Exception, match="no_such_name"):
        tiles.launch(kernel, 1, 32)(np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32))


@pytest.mark.parametrize("nested", [False, True])
def test_branches_of_the_kernel_itself(nested):
    @static
    class Outer:
        inner: Affine

    affine = Affine(kind="relu")
    outer = Outer(affine)

    @cuda.jit
    def kernel(x, y):
        t = load(x, T, (0, 0))
        if nested and outer.inner.kind != "relu":
            t = no_such_name(t)  # noqa: F821
        if affine.kind == "relu":
            store(y, t, (0, 0))
        else:
            no_such_name(t)  # noqa: F821

    agrees(kernel, lambda x: x)


def test_floats_are_single():
    """0.1 in fp32, times a number in fp32: the product is fp32 in both backends."""

    @static
    class Tenth:
        value: float = 0.1

        @inlined
        def apply(self, t):
            return t * (self.value * self.value)

    kernel = make(Tenth())
    x, y = np.ones((16, 32), np.float32), np.zeros((16, 32), np.float32)
    tiles.launch(kernel, 1, 32)(x, y)
    assert (y == np.float32(0.1) * np.float32(0.1)).all()
    assert b"f64" not in compiled(kernel, "sm_90a").cubin


# ---- methods, bases, nesting, functions ----------------------------------------------------------------------------------
@static
class AddOne:
    """A base: what others override."""

    @inlined
    def apply(self, t):
        return self.score(t) + self.bias()

    @inlined
    def score(self, t):
        return t

    @inlined
    def bias(self):
        return 1.0


class Squared(AddOne):
    """Static, as its base is."""

    factor: float = 3.0

    @inlined
    def score(self, t):
        return t * t * self.factor


@static
class Chain:
    """`first` is applied, then `second`."""

    first: object
    second: object

    @property
    def twice(self):
        return 2 * isinstance(self.first, AddOne)

    @inlined
    def apply(self, t):
        return self.second.apply(self.first.apply(t)) * float(self.twice)


def test_methods_call_each_other_and_are_overridden():
    agrees(make(AddOne()), lambda x: x + 1)
    agrees(make(Squared()), lambda x: 3 * x * x + 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Squared().factor = 2.0


def test_objects_hold_objects():
    agrees(make(Chain(Squared(2.0), Chain(AddOne(), Affine()))), lambda x: 2 * (2 * (2 * (2 * x * x + 2))))


@static
class Calls:
    """Whose score is a function."""

    score: object
    more: tuple = ()

    @inlined
    def apply(self, t):
        return self.score(t)


def test_functions_in_fields():
    shift = 0.5

    def bent(t):
        return maximum(t, shift)

    agrees(make(Calls(lambda t: t * shift)), lambda x: x / 2)
    agrees(make(Calls(bent)), lambda x: np.maximum(x, 0.5))
    agrees(make(Calls(exp)), np.exp)
    agrees(make(Calls(inlined(lambda t: exp(t)))), np.exp)


def test_arguments_and_factories():
    """Passed to a helper, and built where the kernel is made."""

    @inlined
    def helper(what, t, times):
        if what.wanted:
            for _ in range(times):
                t = what.apply(t)
        return t

    def factory(scale):
        affine = Affine(scale)

        @cuda.jit
        def kernel(x, y):
            store(y, helper(affine, load(x, T, (0, 0)), 3), (0, 0))

        return kernel

    agrees(factory(0.5), lambda x: x / 8)
    agrees(factory(3.0), lambda x: x * 27)


def test_plans_and_rings_in_fields():
    """A plan that a method opens, and what it gives passed on to another."""
    plan = shared(a=ring(st(16, 32, fp32), 2, 1, writers=1))

    @static
    class Through:
        plan: shared
        tile: rt
        steps: tuple

        @inlined
        def turn(self, a, t, j):
            store(a.claim(j), t)
            a.publish(j)
            actual = load(a.wait(j), self.tile)
            a.release(j)
            return actual

        @inlined
        def run(self, x, y):
            (a,) = self.plan.open()
            t = load(x, self.tile, (0, 0))
            for j in range(self.steps[0]):
                t = self.turn(a, t, j) * self.steps[1]
            store(y, t, (0, 0))

    through = Through(plan, T, (3, 0.5))

    @cuda.jit
    def kernel(x, y):
        through.run(x, y)

    x, y = np.ones((16, 32), np.float32), np.zeros((16, 32), np.float32)
    tiles.launch(kernel, 1, 32, shared=plan)(x, y)
    assert (y == 0.125).all()
    compiled(kernel, "sm_90a")


# ---- mistakes --------------------------------------------------------------------------------------------------------------
@static
class Mistaken:
    """Its helper is for the host."""

    def helper(self, t):
        return t

    @inlined
    def apply(self, t):
        return self.helper(t)


def test_plain_methods_are_refused_in_the_same_words():
    kernel, words = make(Mistaken()), "Mistaken.helper is a plain Python function, which a kernel cannot call: decorate it with"
    with pytest.raises(TypeError, match=words):
        tiles.launch(kernel, 1, 32)(np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32))
    with pytest.raises(TypeError, match=words):
        compiled(kernel, "sm_90a")


def test_fields_that_kernels_cannot_read():
    kernel = make(Chain(AddOne(), [1]))
    words = r"Chain.second: kernels read None, numbers, .* got \[1\]"
    with pytest.raises(TypeError, match=words):
        tiles.launch(kernel, 1, 32)(np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32))
    with pytest.raises(TypeError, match=words):
        compiled(kernel, "sm_90a")


def test_fields_are_named_like_anything():
    @static
    class Spec:
        spec: float = 2.0
        value: float = 3.0
        seen: bool = True

        @inlined
        def apply(self, t):
            return t * self.spec if self.seen else t * self.value

    agrees(make(Spec()), lambda x: 2 * x)


def test_super_is_refused():
    class Derived(AddOne):
        @inlined
        def score(self, t):
            return super().score(t)

    kernel = make(Derived())
    with pytest.raises(Exception, match="super"):
        tiles.launch(kernel, 1, 32)(np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32))
    with pytest.raises(Exception, match="super"):
        compiled(kernel, "sm_90a")
