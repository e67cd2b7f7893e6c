"""ops/shape/diagonal.py: a warp's block of a tile whose rows are shared by a warpgroup."""

import numpy as np
import pytest
from numba import cuda
from numpy import float32

from ops import load, warpgroup, zeros
from tiles import bf16, fp32, rt
from tiles.testing import blank


def test_warp_rows(run, sample):
    V = rt(16, 64, fp32).row_vec

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.warp_rows(load(x, V, (0,))), (0,))

    x, y = sample(64), blank(64)
    run(body, x, y, warps=4)
    assert (y == x).all()


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_diagonal_block(run, sample, dtype):
    T = rt(16, 64, dtype)

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.diagonal_block(warpgroup.load(x, T, (0, 0))), (0, 0))

    x, y = sample((64, 64), dtype), blank((64, 16), dtype)
    run(body, x, y, warps=4)
    assert (y == np.concatenate([x[k : k + 16, k : k + 16] for k in range(0, 64, 16)])).all()


@pytest.mark.parametrize("cols", [64, 16])
def test_diagonal(run, sample, cols):
    """Of the warpgroup's tile, or of the block that each warp has to itself."""
    T = rt(16, cols, fp32)

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.diagonal(warpgroup.load(x, T, (0, 0))), (0,))

    x, y = sample((64, cols)), blank(64)
    run(body, x, y, warps=4)
    assert (y == x[np.arange(64), np.arange(64) % cols]).all()


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_on_diagonal(run, sample, dtype):
    T = rt(16, 16, dtype)

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.on_diagonal(warpgroup.load(x, T, (0, 0))), (0, 0))

    x, y = sample((64, 16), dtype), blank((64, 64), dtype)
    run(body, x, y, warps=4)
    blocks = y.reshape(4, 16, 4, 16).transpose(0, 2, 1, 3)
    assert (blocks[range(4), range(4)] == x.reshape(4, 16, 16)).all()
    assert not np.asarray(blocks, np.float32)[~np.eye(4, dtype=bool)].any()


def test_rank(run):
    @cuda.jit
    def body(y):
        warpgroup.store(y, zeros(rt(16, 16, fp32)) + float32(warpgroup.rank()), (64 * warpgroup.id(), 0))

    y = blank((128, 16))
    run(body, y, warps=8)
    assert (y == np.arange(128)[:, None] // 16 % 4).all()


def test_what_is_no_block_on_the_diagonal(run):
    @cuda.jit
    def body(x):
        warpgroup.on_diagonal(warpgroup.load(x, rt(16, 64, fp32), (0, 0)))

    with pytest.raises(TypeError, match=r"on_diagonal: takes rt\(16, 16\) in row layout, got rt\(16, 64, fp32\)"):
        run(body, np.zeros((64, 64), np.float32), warps=4)


def test_diagonal_block_of_one_warp_is_refused(run):
    @cuda.jit
    def body(x):
        warpgroup.diagonal_block(load(x, rt(16, 16, fp32), (0, 0)))

    with pytest.raises(TypeError, match=r"diagonal_block: takes rt\(16, 64\) in row layout, got rt\(16, 16, fp32\)"):
        run(body, np.zeros((16, 16), np.float32), warps=4)
