"""ops/memory/transposed.py: 16 columns of a shared tile as a warp's 16 rows, and the reverse."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store, subtile, viewed, warpgroup
from tiles import Hazard, bf16, fp16, fp32, ring, rt, st, tensor
from tiles.interpreter import interpret
from tiles.testing import blank


@pytest.mark.parametrize(("rows", "dtype"), [(16, bf16), (64, bf16), (128, fp16), (32, fp32)])
def test_load_transposed(run, sample, rows, dtype):
    """TMA loads the second tile into the slot from which the first one was read."""
    S, T = st(rows, 64, dtype), rt(16, rows, dtype)
    smem = tiles.shared(x=ring(S, 1))

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(2):
                a.fill(j, x, (j, 0))
        else:
            for j in range(2):
                turned = warpgroup.load_transposed(a.wait(j), T)
                a.release(j)
                warpgroup.store(y, turned, (j, 0, 0), 1, 2)

    x, y = sample((2 * rows, 64), dtype), blank((2, 64, rows), dtype)
    run(body, tensor(x, S), y, warps=8, shared=smem)
    assert (y == x.reshape(2, rows, 64).swapaxes(1, 2)).all()


@pytest.mark.parametrize(("rows", "dtype"), [(64, bf16), (32, fp16), (128, bf16), (64, fp32)])
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


def test_a_warp_reads_its_own_columns_at_once(run, sample):
    """A warp reads the columns that it has stored itself without a barrier, and no other warp's."""
    smem, T = tiles.shared(x=st(64, 64, bf16)), rt(16, 64, bf16)

    @cuda.jit
    def body(x, y):
        (tile,) = smem.open()
        warpgroup.store_transposed(tile, warpgroup.load(x, T, (0, 0)))
        cuda.syncwarp()
        warpgroup.store(y, warpgroup.load_transposed(tile, T), (0, 0))

    x, y = sample((64, 64), bf16), blank((64, 64), bf16)
    run(body, x, y, warps=4, shared=smem)
    assert (y == x).all()


def test_columns_are_read_when_all_warps_have_stored_theirs():
    """The interpreter knows which warp stored which columns, with any swizzle."""
    S, T = st(64, 64, bf16), rt(16, 64, fp32)
    smem = tiles.shared(x=S)

    @cuda.jit
    def too_early(x, y):
        (tile,) = smem.open()
        warpgroup.store_transposed(tile, warpgroup.load(x, T, (0, 0)))
        store(y, load(tile, rt(64, 64, bf16)), (0, 0))

    with pytest.raises(Hazard, match="reads shared tile 'x'"):
        interpret(too_early, (1, 1, 1), 128, [np.zeros((64, 64), np.float32), blank((64, 64))], smem)


def test_a_part_with_all_rows_of_its_panel_is_viewed_as_several_panels(run, sample):
    """A panel of 128 rows of 2 bytes as two of 64 rows in fp32, one after the other, beside another panel that stays."""
    S, T, B = st(64, 64, fp32), rt(16, 64, fp32), rt(16, 64, bf16)
    smem = tiles.shared(x=st(128, 128, bf16))

    @cuda.jit
    def body(x, kept, y, other):
        (tile,) = smem.open()
        warpgroup.store(subtile(tile, 64, 1, 64, 0), warpgroup.load(kept, B, (0, 0)))
        part = viewed(subtile(tile, 128, 0, 64, 1), S)
        warpgroup.store_transposed(part, warpgroup.load(x, T, (0, 0)))
        warpgroup.sync()
        warpgroup.store(y, warpgroup.load(part, T), (0, 0))
        warpgroup.store(other, warpgroup.load(subtile(tile, 64, 1, 64, 0), B), (0, 0))

    x, kept, y, other = sample((64, 64)), sample((64, 64), bf16), blank((64, 64)), blank((64, 64), bf16)
    run(body, x, kept, y, other, warps=4, shared=smem)
    assert (y == x.T).all() and (other == kept).all()
