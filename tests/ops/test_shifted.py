"""ops/shape/shifted.py: rows across the edge of two tiles."""

import numpy as np
import pytest
from numba import cuda

from ops import load, shift_rows, store
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, meaning


@pytest.mark.parametrize(("dtype", "cols"), [(fp32, 32), (bf16, 32), (fp16, 16)], ids=str)
def test_shift_rows(run, sample, dtype, cols):
    """By every number of rows."""
    T = rt(16, cols, dtype)

    def shifted(by):
        @cuda.jit
        def body(x, y):
            store(y, shift_rows(load(x, T, (0, 0)), load(x, T, (16, 0)), by), (0, 0))

        return body

    x = sample((32, cols), dtype)
    for by in (0, 1, 3, 8, 13, 15, 16):
        y = blank((16, cols), dtype)
        run(shifted(by), x, y)
        np.testing.assert_array_equal(y, x[by : by + 16])


def test_refusals():
    one, other, tall = rt(16, 16, fp32), rt(16, 16, bf16), rt(32, 16, fp32)
    for upper, lower, by, words in (
        (one, other, 1, "takes two tiles of 16 rows"),
        (tall, tall, 1, "takes two tiles of 16 rows"),
        (one, one, 17, "by must be from 0 to 16, got 17"),
    ):

        @cuda.jit
        def body(x):
            store(x, shift_rows(load(x, upper, (0, 0)), load(x, lower, (0, 0)), by), (0, 0))

        with pytest.raises(TypeError, match=f"shift_rows: {words}"):
            meaning(body, np.zeros((32, 32), np.float32))
