"""ops/memory/held.py: tiles that are added to global memory as their lanes hold them."""

import numpy as np
import pytest
from numba import cuda

from ops import add_held, load, load_held, store
from tiles import Hazard, bf16, fp32, rt
from tiles.testing import blank, meaning


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (32, 48)])
def test_what_was_added_comes_back(run, sample, shape):
    """By two warps, twice each, to the second of three places; what lies around it stays."""
    T, size = rt(*shape, fp32), shape[0] * shape[1]

    @cuda.jit
    def add(x, sums):
        add_held(sums, load(x, T, (0, 0)), (1, 0))
        add_held(sums, load(x, T, (0, 0)), (1, 0))

    @cuda.jit
    def take(sums, y):
        store(y, load_held(sums, T, (1, 0)), (0, 0))

    x, sums, y = np.round(sample(shape) * 4), np.zeros((3, size), np.float32), blank(shape)
    run(add, x, sums, warps=2)
    assert not sums[0].any() and not sums[2].any()
    assert (np.sort(sums[1]) == np.sort(4 * x.ravel())).all()
    run(take, sums, y)
    assert (y == 4 * x).all()


def test_what_is_refused():
    T = rt(16, 16, fp32)

    @cuda.jit
    def outside(sums):
        add_held(sums, load_held(sums, T, (0, 0)), (0, 1))

    with pytest.raises(Hazard, match="out of range"):
        meaning(outside, np.zeros((1, 256), np.float32))
    with pytest.raises(Hazard, match="C-ordered"):
        meaning(outside, np.zeros((2, 512), np.float32)[:, ::2])

    @cuda.jit
    def rounded(sums):
        add_held(sums, bf16(load_held(sums, T, (0, 0))), (0, 0))

    with pytest.raises(TypeError, match="add_held: takes a register tile of fp32"):
        meaning(rounded, np.zeros((1, 256), np.float32))
