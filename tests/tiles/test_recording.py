"""tiles/launching/recording.py: calls of programs and launches that become steps of another program."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attention
from tiles import bf16
from tiles.launching.arrays import Operand, c_ordered
from tiles.launching.frameworks import describe
from tiles.launching.recording import record_launches


def operand(place, shape, dtype="bfloat16"):
    return Operand(place, c_ordered(shape, dtype, None))


def run(steps, scratch, arrays):
    """The steps, on NumPy's arrays and on scratch memory."""
    buffers = [*arrays, *(np.empty(shape, np.dtype(dtype)) for shape, dtype in scratch)]
    for step in steps:
        step.run(0, [x.ctypes.data for x in buffers])
    return buffers


def test_a_program_and_its_scratch_memory():
    """Keys are normalised into scratch memory, and what is left out is there, too: all behind the arrays that there are."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 16)).astype(bf16.np) for n in (5, 9, 9))
    g, y = np.ones(16, bf16.np), np.empty(q.shape, bf16.np)

    def twice(y, q, k, v, g):
        middle = attention.forward(q, k, v, k_norm=g, layout="bhsd")
        attention.forward(middle, k, v, layout="bhsd", out=y)

    places = [operand(n, x.shape) for n, x in enumerate((y, q, k, v, g))]
    steps, scratch = record_launches(twice, *places, places=5)
    assert len(steps) == 3 and sorted(shape for shape, _ in scratch) == [(1, 2, 5, 16), (1, 9, 2, 16)]
    assert all(max(step.sources) < 5 + len(scratch) for step in steps)
    run(steps, scratch, [y, q, k, v, g])
    want = attention.forward(attention.forward(q, k, v, k_norm=g, layout="bhsd"), k, v, layout="bhsd")
    assert (y == want).all()


def test_what_a_recorded_call_refuses():
    q = operand(0, (1, 5, 2, 16))
    with pytest.raises(TypeError, match="stream: must be None"):
        record_launches(lambda q: attention.forward(q, q, q, stream=1), q, places=1)
    with pytest.raises(ValueError, match="multiple of 8"):
        record_launches(lambda q: attention.forward(q, q, q), operand(0, (1, 5, 2, 12)), places=1)
    with pytest.raises(TypeError, match="a call on them is recorded"):
        attention.forward(q, q, q)  # nobody records


@given(
    st.permutations([2, 3, 4]), st.sampled_from([(24,), (6, 4), (4, 6), (2, 12), (2, 3, 4), (3, 8), (1, 24), (2, 1, 3, 2, 2)])
)
def test_reshape(order, shape):
    """As NumPy's, where that copies nothing; what needs a copy is refused."""
    whole = np.arange(24).reshape(2, 3, 4)
    x = whole.transpose([n - 2 for n in order])
    mine = Operand(0, describe(x, "x").form)
    want = x.reshape(shape)
    if np.shares_memory(want, whole):
        actual = mine.reshape(*shape[:-1], -1).form
        assert actual.shape == shape and all(a == b for a, b, n in zip(actual.strides, want.strides, shape) if n > 1)
    else:
        with pytest.raises(ValueError, match="needs a copy"):
            mine.reshape(*shape)
    with pytest.raises(ValueError, match="another number of elements"):
        mine.reshape(5, -1)
