"""ops/matmul/unzipped.py: products of 16-bit tiles in registers and tiles of fp8 or int8 in shared memory."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import (
    commit_group,
    copy_async,
    load,
    mma_AB_unzipped,
    mma_ABt,
    mma_ABt_unzipped,
    rezipped,
    store,
    unzipped,
    viewed,
    wait_group,
    zeros,
)
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, rt, st
from tiles.testing import blank, meaning, ptx

ORDER = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_the_order_and_back(run, sample, dtype):
    T = rt(32, 32, dtype)

    @cuda.jit
    def body(x, there, back):
        tile = unzipped(load(x, T, (0, 0)))
        store(there, tile, (0, 0))
        store(back, rezipped(tile), (0, 0))

    x, there, back = sample((32, 32), dtype), blank((32, 32), dtype), blank((32, 32), dtype)
    run(body, x, there, back)
    assert (there == x[:, ORDER + [16 + k for k in ORDER]]).all() and (back == x).all()


@pytest.mark.parametrize(
    ("source", "to"), [(int8, bf16), (int8, fp16), (fp8e4m3, bf16), (fp8e4m3, fp16), (fp8e5m2, bf16)], ids=str
)
def test_bytes_are_unzipped_as_they_are_converted(run, sample, source, to):
    """So that a product of both is the one of tiles with columns in their own order."""
    W, X, Y = rt(32, 64, source), rt(16, 64, to), rt(16, 32, fp32)

    @cuda.jit
    def body(x, w, there, y):
        weights = unzipped(load(w, W, (0, 0)), to)
        store(there, weights, (0, 0))
        store(y, mma_ABt(zeros(Y), unzipped(load(x, X, (0, 0))), weights), (0, 0))

    x, w, there, y = sample((16, 64), to), sample((32, 64), source), blank((32, 64), to), blank((16, 32))
    run(body, x, w, there, y)
    order = np.concatenate([np.array(ORDER) + 16 * k for k in range(4)])
    exact = w.astype(np.float64)
    assert (there.astype(np.float64) == exact[:, order]).all()
    np.testing.assert_allclose(y, x.astype(np.float64) @ exact.T, atol=1e-5 * np.abs(exact).sum(1).max())


def test_what_cannot_be_unzipped():
    smem = tiles.shared(t=st(16, 64, fp16))

    def kernel(spec, dtype):
        @cuda.jit
        def body():
            unzipped(zeros(spec), dtype) if dtype is not None else unzipped(zeros(spec))

        return body

    for spec, dtype in (
        (rt(16, 64, int8), None),
        (rt(16, 64, bf16), fp16),
        (rt(16, 64, int8), fp32),
        (rt(64, 16, int8, "col"), bf16),
    ):
        with pytest.raises(TypeError, match="unzipped: takes a tile in row layout: of fp8 or int8 with a dtype"):
            ptx(kernel(spec, dtype), shared=smem)


def test_what_is_no_view():
    smem = tiles.shared(t=st(16, 128, fp16))

    def kernel(spec):
        @cuda.jit
        def body():
            (t,) = smem.open()
            viewed(t, spec)

        return body

    for spec in st(16, 128, fp8e4m3), st(24, 64, fp16):
        with pytest.raises(TypeError, match="viewed: takes a type of as many rows, as many bytes long"):
            ptx(kernel(spec), shared=smem)


@pytest.mark.parametrize(
    ("rows", "keys", "dim", "dtype"),
    [(16, 16, 64, fp8e4m3), (32, 32, 128, int8), (16, 32, 96, fp8e5m2), (16, 32, 96, int8)],
    ids=str,
)
def test_products(run, sample, rows, keys, dim, dtype):
    """Q K^T and P V, as in attention."""
    Q, S, P, O, KEYS = (
        rt(rows, dim, fp16),
        rt(rows, keys, fp32),
        rt(rows, keys, fp16),
        rt(rows, dim, fp32),
        st(keys, dim, dtype),
    )
    smem = tiles.shared(k=KEYS)

    @cuda.jit
    def body(q, k, p, s, o):
        (keys,) = smem.open()
        copy_async(keys, k, (0, 0))
        commit_group()
        wait_group()
        store(s, mma_ABt_unzipped(zeros(S), unzipped(load(q, Q, (0, 0))), keys), (0, 0))
        store(o, rezipped(mma_AB_unzipped(zeros(O), load(p, P, (0, 0)), keys)), (0, 0))

    q, k, p = sample((rows, dim), fp16), sample((keys, dim), dtype), sample((rows, keys), fp16)
    s, o = blank((rows, keys)), blank((rows, dim))
    run(body, q, k, p, s, o, shared=smem)
    exact = [x.astype(np.float64) for x in (q, k, p)]
    atol = 1e-3 * np.abs(exact[1]).max()
    np.testing.assert_allclose(s, exact[0] @ exact[1].T, atol=atol)
    np.testing.assert_allclose(o, exact[2] @ exact[1], atol=atol)


ACC, LEFT, RIGHT = rt(16, 64, fp32), rt(16, 64, fp16), st(64, 64, fp8e4m3)
WRONG = {  # of three operands that fit, one is replaced
    "acc's rows": (rt(32, 64, fp32), LEFT, RIGHT),
    "acc's dtype": (rt(16, 64, bf16), LEFT, RIGHT),
    "a's dtype": (ACC, rt(16, 64, bf16), RIGHT),
    "a's layout": (ACC, rt(16, 64, fp16, "col"), RIGHT),
    "b's dtype": (ACC, LEFT, st(64, 64, fp16)),
    "b's place": (ACC, LEFT, rt(64, 64, bf16)),
    "b's rows": (ACC, LEFT, st(32, 64, fp8e4m3)),
    "b's columns": (ACC, LEFT, st(64, 32, fp8e4m3)),
}


@pytest.mark.parametrize("product", [mma_ABt_unzipped, mma_AB_unzipped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_multiplied(product, wrong):
    acc, left, right = WRONG[wrong]
    smem = tiles.shared(k=right if isinstance(right, st) else RIGHT)

    @cuda.jit
    def body():
        product(zeros(acc), zeros(left), smem.open()[0] if isinstance(right, st) else zeros(right))

    with pytest.raises(TypeError, match=rf"{product.__name__}: takes acc rt\(m, n, fp32\), a of fp16"):
        meaning(body, shared=smem)
