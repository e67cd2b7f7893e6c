"""ops/shape/column.py: a column of a register tile as a vector."""

import numpy as np
import pytest
from numba import cuda

from ops import column, load, store, zeros
from tiles import bf16, fp32, rt
from tiles.testing import blank, meaning, ptx


@pytest.mark.parametrize(("shape", "index"), [((16, 16), 0), ((32, 48), 31), ((16, 64), 38), ((48, 16), 9)])
def test_column(run, sample, shape, index):
    W = rt(*shape, fp32)

    @cuda.jit
    def body(x, y):
        store(y, column(load(x, W, (0, 0)), index), (0,))

    x, y = sample(shape), blank(shape[0])
    run(body, x, y)
    np.testing.assert_array_equal(y, x[:, index])


def of_narrow_elements(x):
    column(zeros(rt(16, 16, bf16)), 0)


def of_columns(x):
    column(zeros(rt(16, 16, fp32, "col")), 0)


def outside(x):
    column(zeros(rt(16, 16, fp32)), 16)


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("mistake", [of_narrow_elements, of_columns, outside])
def test_mistakes(backend, mistake):
    with pytest.raises(
        TypeError, match=r"^column: (takes a tile of 4-byte elements in row layout|index must be from 0 to 15), got "
    ):
        backend(cuda.jit(mistake), np.zeros((16, 16), np.float32))
