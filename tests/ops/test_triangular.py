"""ops/triangular.py: inverses of small triangular tiles; and store_transposed, by which transposed products leave."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close, wide

import tiles
from ops import inverse_unit_lower, load, store, warpgroup
from tiles import bf16, fp16, fp32, rt, st
from tiles.interpreter import interpret

BLOCK, ROWS = rt(16, 16, fp32), rt(16, 64, fp32)


@cuda.jit
def invert(x, y):
    store(y, inverse_unit_lower(load(x, BLOCK, (0, 0))), (0, 0))


def test_inverse_unit_lower(run, sample):
    """(I + L)^-1, whatever stands on and above the diagonal."""
    x, y = 0.3 * sample((16, 16)), blank((16, 16))
    x[np.triu_indices(16)] = np.nan
    run(invert, x, y)
    close(y, np.linalg.inv(np.eye(16) + np.tril(np.nan_to_num(wide(x)), -1)), atol=1e-5)


def test_inverse_of_all_ones(run):
    """Whose powers are as large as binomials, and whose inverse has nothing but 1 and -1: it is exact."""
    x, y = np.ones((16, 16), np.float32), blank((16, 16))
    run(invert, x, y)
    assert (y == np.eye(16) - np.eye(16, k=-1)).all()


def test_inverse_of_a_block_that_grows(run):
    """Entries up to 2^14: the relative error stays that of a few roundings."""
    x, y = np.full((16, 16), -1, np.float32), blank((16, 16))
    run(invert, x, y)
    close(y, np.linalg.inv(np.eye(16) - np.tril(np.ones((16, 16)), -1)), ulp=1)


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_own_block(run, sample, dtype):
    T = rt(16, 64, dtype)

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.own_block(warpgroup.load(x, T, (0, 0))), (0, 0))

    x, y = sample((64, 64), dtype), blank((64, 16), dtype)
    run(body, x, y, warps=4)
    assert (y == np.concatenate([x[k : k + 16, k : k + 16] for k in range(0, 64, 16)])).all()


@pytest.mark.parametrize(("rows", "dtype"), [(64, bf16), (32, fp16), (128, bf16)])
def test_store_transposed(run, sample, rows, dtype):
    S, T = st(rows, 64, dtype), rt(16, rows, fp32)
    smem = tiles.shared(x=S)

    @cuda.jit
    def body(x, y):
        (tile,) = smem.open()
        warpgroup.store_transposed(tile, warpgroup.load(x, T, (0, 0)))
        warpgroup.sync()
        store(y, load(tile, rt(rows, 64, dtype)), (0, 0))

    x, y = sample((64, rows)), blank((rows, 64), dtype)
    run(body, x, y, warps=4, shared=smem)
    assert (y == x.T.astype(dtype.np)).all()


def test_columns_are_read_when_all_warps_have_stored_theirs():
    """The interpreter knows whose columns lie where, swizzle or not."""
    S, T = st(64, 64, bf16), rt(16, 64, fp32)
    smem = tiles.shared(x=S)

    @cuda.jit
    def too_early(x, y):
        (tile,) = smem.open()
        warpgroup.store_transposed(tile, warpgroup.load(x, T, (0, 0)))
        store(y, load(tile, rt(64, 64, bf16)), (0, 0))

    with pytest.raises(tiles.Hazard, match="reads shared tile 'x'"):
        interpret(too_early, (1, 1, 1), 128, [np.zeros((64, 64), np.float32), blank((64, 64))], smem)


def test_rules(run):
    @cuda.jit
    def wide_tile(x):
        inverse_unit_lower(load(x, ROWS, (0, 0)))

    @cuda.jit
    def narrow_tile(x):
        warpgroup.own_block(load(x, BLOCK, (0, 0)))

    x = np.zeros((64, 64), np.float32)
    with pytest.raises(TypeError, match=r"inverse_unit_lower: takes rt\(16, 16, fp32\), got rt\(16, 64, fp32\)"):
        run(wide_tile, x)
    with pytest.raises(TypeError, match=r"own_block: takes rt\(16, 64\) in row layout, got rt\(16, 16, fp32\)"):
        run(narrow_tile, x, warps=4)
