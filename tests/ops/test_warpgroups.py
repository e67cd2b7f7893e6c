"""ops/tails.py: rows that are not there are zero, and the others as they were."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank

import tiles
from ops import warpgroup
from tiles import bf16, fp16, fp32, ring, rt, st, tensor

FIRST = pytest.mark.parametrize("first", [-1, 0, 5, 63, 64, 90])


def zeroed(run, sample, first, cols, dtype, groups):
    S, T = st(64, cols, dtype), rt(16, cols, dtype)
    smem = tiles.shared(x=ring(S, 1, readers=4 * groups))

    @cuda.jit
    def body(x, y, first):
        (a,) = smem.open()
        if warpgroup.id() == 0:
            a.fill(0, x, (0, 0))
        tile = a.wait(0)
        warpgroup.zero_rows(tile, first, groups)
        warpgroup.store(y, warpgroup.load(tile, T), (0, 0))

    x, y = sample((64, cols), dtype), blank((64, cols), dtype)
    x[max(first, 0) :] = np.nan
    run(body, tensor(x, S), y, np.int32(first), warps=4 * groups, shared=smem)
    x[max(first, 0) :] = 0
    assert (y == x).all()


@FIRST
@pytest.mark.parametrize(("cols", "dtype"), [(64, bf16), (128, fp16), (16, bf16), (64, fp32)])
def test_zero_rows(run, sample, first, cols, dtype):
    zeroed(run, sample, first, cols, dtype, 1)


@FIRST
def test_zero_rows_of_two_warpgroups(run_apart, sample, first):
    zeroed(run_apart, sample, first, 128, bf16, 2)
