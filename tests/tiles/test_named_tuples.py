"""tiles/compiling/named_tuples.py: named tuples of tiles are values, in both backends, and cost nothing."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import cuda
from numpy import int32

import tiles
from ops import exp2, full, load, maximum, row_max, row_sum, store, warpgroup, zeros
from tiles import bf16, fp32, inlined, rt, shared, st, static
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.sass import listing
from tiles.launching.arguments import parameter

T = rt(16, 64, fp32)


class RowState(NamedTuple):
    """o / l is the softmax so far; m the running maximum."""

    o: Any
    m: Any
    l: Any

    @inlined
    def absorb(self, s):
        """With a block of scores, whose values are the scores."""
        m = maximum(self.m, row_max(s))
        alpha, p = exp2(self.m - m), exp2(s - m)
        return RowState(self.o * alpha + p * s, m, self.l * alpha + row_sum(p))

    def host(self):
        """A method that is not for kernels."""


@static
class Online:
    """The same as methods of a static object."""

    low: float = -1e30

    @inlined
    def start(self):
        return RowState(zeros(T), full(T.col_vec, self.low), zeros(T.col_vec))

    @inlined
    def absorb(self, state, s):
        return state.absorb(s)

    @inlined
    def finish(self, state):
        return state.o / state.l


online = Online()


@cuda.jit
def by_value(x, y, n):
    state = online.start()
    for i in range(n):
        state = online.absorb(state, load(x, T, (16 * i, 0), aligned=True))
    store(y, online.finish(state), (0, 0), aligned=True)


@inlined
def absorb(o, m_old, l, s):
    m = maximum(m_old, row_max(s))
    alpha, p = exp2(m_old - m), exp2(s - m)
    return o * alpha + p * s, m, l * alpha + row_sum(p)


@cuda.jit
def by_hand(x, y, n):
    o, m, l = zeros(T), full(T.col_vec, -1e30), zeros(T.col_vec)
    for i in range(n):
        o, m, l = absorb(o, m, l, load(x, T, (16 * i, 0), aligned=True))
    store(y, o / l, (0, 0), aligned=True)


def run(kernel, blocks=3, width=64):
    x = np.random.default_rng(7).standard_normal((16 * blocks, width), np.float32)
    y = np.full((16, width), np.nan, np.float32)
    tiles.launch(kernel, 1, 32)(x, y, blocks)
    return x, y


def code(kernel, arch="sm_90a"):
    array = parameter("x", np.zeros((16, 64), np.float32)).type
    actual = compile_kernel(kernel, (array, array, parameter("n", 3).type), arch)
    assert (actual.spill_bytes, actual.local_bytes, actual.warnings) == (0, 0, [])
    return actual


def test_a_value_through_a_loop():
    x, y = run(by_value)
    s = x.astype(np.float64).reshape(3, 16, 64)
    p = np.exp2(s - s.max(axis=(0, 2), keepdims=True))
    np.testing.assert_allclose(y, (p * s).sum(0) / p.sum(axis=(0, 2))[:, None], rtol=2e-4, atol=1e-5)
    assert (y == run(by_hand)[1]).all()


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.release), "sm_90a"])
def test_it_is_free(arch):
    """Of one way to load and store: beside a second, for what is not aligned, ptxas' registers are those of its scheduling."""
    values, hand = code(by_value, arch), code(by_hand, arch)
    assert values.registers == hand.registers
    assert len(listing(values.cubin)) <= len(listing(hand.cubin))


def test_replace():
    @cuda.jit
    def kernel(x, y, n):
        state = RowState(load(x, T, (0, 0)), full(T.col_vec, 1.0), 2)
        state = state._replace(l=full(T.col_vec, 3.0), o=state.o * 2.0)
        store(y, state.o + state.m * state.l, (0, 0))

    x, y = run(kernel, 1)
    np.testing.assert_allclose(y, 2 * x + 3, rtol=1e-6)
    code(kernel)


def test_fields_join_as_variables_do():
    """Pending tiles are carried, and a loop's number is as wide as all that it is given, as without a value around them."""
    smem = shared(a=st(64, 64, bf16), b=st(64, 64, bf16))

    class Sum(NamedTuple):
        o: Any
        count: Any

    @cuda.jit
    def kernel(y, n):
        a, b = smem.open()
        state = Sum(warpgroup.mm_AB(a, b), int32(0))
        for i in range(n):
            state = Sum(warpgroup.mma_AB(state.o, a, b), state.count + i)  # 64 bits
        store(y, warpgroup.wait(state.o) * float(state.count), (0, 0))

    array = parameter("y", np.zeros((64, 64), np.float32)).type
    actual = compile_kernel(kernel, (array, parameter("n", 3).type), "sm_90a")
    assert (actual.local_bytes, actual.warnings) == (0, [])


def test_mistakes_are_named():
    @cuda.jit
    def plain(x, y, n):
        RowState(0, 0, 0).host()

    @cuda.jit
    def unknown(x, y, n):
        RowState(0, 0, 0)._replace(k=1)

    words = "RowState.host is a plain Python function, which a kernel cannot call: decorate it with @tiles.inlined"
    with pytest.raises(TypeError, match=words):
        code(plain)
    with pytest.raises(TypeError, match=words):
        run(plain)
    with pytest.raises(TypeError, match="_replace takes fields of RowState, got k"):
        code(unknown)
    with pytest.raises(TypeError, match="_replace takes fields of RowState, got k"):
        run(unknown)
