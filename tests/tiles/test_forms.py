"""tiles/forms.py: where elements lie among each other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples import bytes_of, windows
from tiles.forms import contiguous, overlaps_itself

from tiles.frameworks import describe


def test_extent():
    flipped = describe(np.zeros((2, 16), np.float16)[::-1], "x")  # with signed strides, first to last is 0 bytes
    assert (flipped.strides, flipped.form.extent) == ((-32, 2), 64)
    assert describe(np.zeros((2, 0, 3)), "x").form.extent == 0


def test_contiguous():
    assert contiguous((2, 3, 4), 2) == (24, 8, 2) and contiguous((5,), 4) == (4,) and contiguous((), 2) == ()


@given(windows())
def test_overlaps_itself_never_misses(x):
    collides = len(set(bytes_of(x))) < len(bytes_of(x))
    assert overlaps_itself(describe(x, "x").form) or not collides


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4))
def test_no_view_of_a_plain_array_overlaps_itself(order, shape):
    assert not overlaps_itself(describe(np.zeros(shape)[::2, ::-1].transpose(order), "x").form)
