"""Arrays of a program's call must not share memory with what it writes: refused exactly where they do."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiles.calls.plan import Plan
from tiles.calls.program import program
from tiles.calls.schema import Schema

ROWS = Schema("rows", "x (seqlen, head_dim) tile\ny (seqlen, head_dim) tile\nout (seqlen, head_dim) tile output")


@program(ROWS)
def rows(problem):
    """Nothing is done to tiles, whose rows may lie in any order."""
    return Plan([])


@given(st.data())
def test_arrays_lie_apart_by_the_byte(data):
    """A call is refused exactly where NumPy says that elements are shared, whichever way they lie."""
    memory = np.zeros((24, 25), np.float16)

    def window():
        step = data.draw(st.sampled_from([1, 2, 3, -1, -2, -3]))
        top, left = (data.draw(st.integers(0, 12)) for _ in range(2))
        return memory[top : top + 12, left : left + 4][::step][:4]

    x, y, out = window(), window(), window()
    refused = contextlib.nullcontext()
    if np.shares_memory(out, x) or np.shares_memory(out, y):
        refused = pytest.raises(ValueError, match="out: must not overlap")
    for _ in range(2):
        with refused:
            assert rows(0, (x, y, out), ()) is out


@pytest.mark.parametrize("start", [16, 17, 31, 33, 47, 48])
def test_one_element_is_enough(start):
    """On either side of an array of 16 elements that begins with the 32nd."""
    flat = np.zeros(64, np.float16)
    x, out = (flat[at : at + 16].reshape(4, 4) for at in (32, start))
    with pytest.raises(ValueError, match="overlap") if 16 < start < 48 else contextlib.nullcontext():
        rows(0, (x, np.zeros_like(x), out), ())
