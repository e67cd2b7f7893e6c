"""ops/matmul/zipped.py: operands of fp8 products in an order that needs no shuffle."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store, warpgroup, zeros, zipped
from tiles import bf16, fp8e4m3, fp32, layout, ring, rt, st, tensor
from tiles.testing import blank

ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def test_the_order():
    assert list(layout.zipped(np.arange(32))) == ORDER + [16 + k for k in ORDER]


@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (32, 96)])
def test_zipped(run, sample, rows, cols):
    T = rt(rows, cols, fp32)

    @cuda.jit
    def body(x, y):
        from_memory = load(x, T, (0, 0))
        store(y, zipped(from_memory * 100.0), (0, 0))

    x, y = sample((rows, cols)), blank((rows, cols), fp8e4m3)
    run(body, x, y)
    want = fp8e4m3.round(100 * x).astype(fp8e4m3.np)[:, layout.zipped(np.arange(cols))]
    assert (y.view(np.uint8) == want.view(np.uint8)).all()


SHAPES = [(32, 64), (96, 64), (224, 128), (128, 256), (192, 192)]


@pytest.mark.parametrize(("keys", "cols"), SHAPES)
def test_transpose_zipped(run, sample, keys, cols):
    """Every panel width of both tiles, several panels, and a number of matrices that no batch divides."""
    S, T = st(keys, cols, fp8e4m3), st(cols, keys, fp8e4m3)
    smem = tiles.shared(x=ring(S, 1), y=T)

    @cuda.jit
    def body(x, y):
        a, turned = smem.open()
        a.fill(0, x, (0, 0))
        warpgroup.transpose_zipped(turned, a.wait(0))
        warpgroup.tma_store(y, (0, 0), turned)
        warpgroup.store_wait()

    x, y = sample((keys, cols), fp8e4m3), blank((cols, keys), fp8e4m3)
    run(body, tensor(x, S), tensor(y, T), warps=4, shared=smem)
    want = x[layout.zipped(np.arange(keys))].T
    assert (y.view(np.uint8) == want.view(np.uint8)).all()


def test_a_product_of_both(run, sample):
    """o + P V, as in attention."""
    V, T, P, O = st(64, 64, fp8e4m3), st(64, 64, fp8e4m3), rt(16, 64, fp32), rt(16, 64, fp32)
    smem = tiles.shared(v=ring(V, 1), turned=T)

    @cuda.jit
    def body(p, v, o):
        a, turned = smem.open()
        a.fill(0, v, (0, 0))
        warpgroup.transpose_zipped(turned, a.wait(0))
        warpgroup.sync()
        product = warpgroup.mma_ABt(zeros(O), zipped(warpgroup.load(p, P, (0, 0))), turned)
        warpgroup.store(o, warpgroup.wait(product), (0, 0))

    p, v, o = np.abs(sample((64, 64))), sample((64, 64), fp8e4m3), blank((64, 64))
    run(body, p, tensor(v, V), o, warps=4, shared=smem)
    want = fp8e4m3.round(p).astype(np.float64) @ v.astype(np.float64)
    np.testing.assert_allclose(o, want, atol=0.02)


@pytest.mark.parametrize("tile", [rt(16, 16, fp32), rt(16, 32, bf16), rt(32, 32, fp32, "col")], ids=str)
def test_what_cannot_be_zipped(run, tile):
    @cuda.jit
    def body():
        zipped(zeros(tile))

    with pytest.raises(TypeError, match="zipped: takes an fp32 tile in row layout, of a multiple of 32 columns"):
        run(body)


def test_what_cannot_be_transposed(run):
    smem = tiles.shared(x=st(32, 64, fp8e4m3), y=st(64, 64, fp8e4m3))

    @cuda.jit
    def body():
        x, y = smem.open()
        warpgroup.transpose_zipped(y, x)

    with pytest.raises(TypeError, match=r"transpose_zipped: takes st\(n, keys\) and st\(keys, n\) of fp8e4m3"):
        run(body, warps=4, shared=smem)
