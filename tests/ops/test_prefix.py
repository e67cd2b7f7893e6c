"""ops/prefix.py, ops/turned.py and ops/extent.py: running sums, parts that lie across, arrays that end earlier."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, wide

import tiles
from ops import clip, cumsum, load, store, warpgroup
from tiles import bf16, fp16, fp32, ring, rt, st, tensor


@pytest.mark.parametrize("length", [16, 64, 128])
def test_cumsum(run, sample, length):
    V = rt(16, length, fp32).row_vec

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, V, (0,))), (0,))

    x, y = sample(length), blank(length)
    run(body, x, y)
    close(y, np.cumsum(wide(x)), atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (32, 48)])
def test_cumsum_down_columns(run, sample, shape):
    T = rt(*shape, fp32, "col")

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, T, (0, 0))), (0, 0))

    x, y = sample(shape), blank(shape)
    run(body, x, y)
    close(y, np.cumsum(wide(x), axis=0), atol=1e-5)


def test_own_rows(run, sample):
    V = rt(16, 64, fp32).row_vec

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.own_rows(load(x, V, (0,))), (0,))

    x, y = sample(64), blank(64)
    run(body, x, y, warps=4)
    assert (y == x).all()


@pytest.mark.parametrize(("rows", "dtype"), [(16, bf16), (64, bf16), (128, fp16)])
def test_load_transposed(run, sample, rows, dtype):
    S, T = st(rows, 64, dtype), rt(16, rows, dtype)
    smem = tiles.shared(x=ring(S, 1))

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        a.fill(0, x, (0, 0))
        warpgroup.store(y, warpgroup.load_transposed(a.wait(0), T), (0, 0))

    x, y = sample((rows, 64), dtype), blank((64, rows), dtype)
    run(body, tensor(x, S), y, warps=4, shared=smem)
    assert (y == x.T).all()


@pytest.mark.parametrize("end", [0, 1, 17, 32, 99, -3])
def test_clip(run, sample, end):
    T = rt(32, 16, fp32)

    @cuda.jit
    def body(x, y, seen, end):
        store(y, load(clip(x, 0, end), T, (0, 0)), (0, 0))
        store(clip(seen, 0, end), load(x, T, (0, 0)), (0, 0))

    x, y, seen = sample((32, 16)), blank((32, 16)), blank((32, 16))
    run(body, x, y, seen, np.int32(end))
    inside = np.arange(32)[:, None] < end
    assert (y == np.where(inside, x, 0)).all()
    assert (seen[: max(end, 0)] == x[: max(end, 0)]).all() and np.isnan(seen[max(end, 0) :]).all()


def test_tiles_that_begin_at_any_row(run, sample):
    """`unit` rows at a time: a chunk of a sequence in an array of many."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=ring(S, 1))

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        a.fill(0, x, (7, 0))
        warpgroup.store(y, warpgroup.load(a.wait(0), T), (0, 0))

    x, y = sample((100, 64), bf16), blank((64, 64), bf16)
    run(body, tensor(x, S, unit=1), y, warps=4, shared=smem)
    assert (y == x[7:71]).all()
