"""ops/memory/unordered.py: tiles whose columns may be in any order."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, load_pages, load_unordered, look_up, row_sum, store, store_unordered, store_widened, subtile
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, rt, st
from tiles.testing import blank, meaning, ptx

FORMS = [  # (shape, held, dtype, first): of each three of these all combinations; first: by 16 bytes, or word by word
    ((16, 32), fp32, fp32, 0), ((16, 32), fp32, bf16, 1), ((16, 32), fp16, fp32, 1), ((16, 32), fp16, bf16, 0),
    ((32, 64), fp32, fp32, 1), ((32, 64), fp32, bf16, 0), ((32, 64), fp16, fp32, 0), ((32, 64), fp16, bf16, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape, array_dtype, dtype, first", FORMS, ids=str)
def test_maps_and_sums_of_rows(run, sample, shape, array_dtype, dtype, first):
    """Tiles of `dtype` from arrays of `array_dtype`, one of which ends inside the tile."""
    T = rt(*shape, dtype)

    @cuda.jit
    def kernel(x, y, z, sums):
        one, other = load_unordered(x, T, (0, first)), load_unordered(y, T, (0, first))
        store_unordered(z, fp32(one) - fp32(other), (0, first))
        store(sums, row_sum(fp32(one)), (0, 0), cols=0)

    x, y = (
        np.round(sample((shape[0], shape[1] + 1)) * 4).astype(array_dtype.np),
        np.round(sample((9, shape[1] + 8)) * 4).astype(array_dtype.np),
    )
    z, sums = blank((shape[0], shape[1] + first), array_dtype), blank((shape[0], 1))
    run(kernel, x if first else np.ascontiguousarray(x[:, :-1]), y, z, sums)
    expected = x[:, first:][:, : shape[1]].astype(np.float32)
    assert (sums[:, 0] == expected.sum(1)).all()
    expected[:9] -= y[:, first : first + shape[1]].astype(np.float32)
    assert (z[:, first:] == expected).all()


@pytest.mark.parametrize("array_dtype, dtype", [(fp32, fp32), (bf16, fp32), (fp32, fp16)], ids=str)
def test_element_by_element(run, sample, array_dtype, dtype):
    """From arrays of any dtype, along any axes, in the order of arrays of 16 bits; rows before the first are 0."""
    T = rt(16, 64, dtype)

    @cuda.jit
    def kernel(x, weights, bias, y, z, last):
        tile = fp32(load_unordered(x, T, (0, 0)))
        taps = fp32(load_unordered(weights, T, (0, -13), rows=1, cols=0, aligned=False))
        row = fp32(load_unordered(bias, T.row_vec, (0, 1), cols=0, aligned=False))
        store_unordered(y, tile + row + taps, (0, 0), aligned=True)
        store_unordered(z, taps, (0, -13), rows=1, cols=0, aligned=False)
        store_unordered(last, row, (0, 0), aligned=False)

    x, weights, bias = (np.round(sample(shape) * 4) for shape in ((16, 64), (60, 3), (64, 2)))
    x, weights, bias = x.astype(bf16.np), weights.astype(array_dtype.np), bias.astype(array_dtype.np)
    y, z, last = blank((16, 64), bf16), blank((60, 3), array_dtype), blank((1, 61), array_dtype)
    run(kernel, x, weights, bias, y, z, last)
    expected = x.astype(np.float32) + bias[:, 1].astype(np.float32)
    expected[13:, :60] += weights.T.astype(np.float32)
    assert (y == expected.astype(bf16.np)).all() and (z == weights).all() and (last[0] == bias[:61, 1]).all()


@pytest.mark.parametrize(
    "array_dtype, dtype, first", [(bf16, fp32, 0), (fp16, fp32, 1), (fp32, fp32, 0), (bf16, bf16, 0)], ids=str
)
def test_vectors_along_columns(run, sample, array_dtype, dtype, first):
    """Vectors have the column order of tiles; the array ends inside the vector."""
    T = rt(16, 96, dtype)

    @cuda.jit
    def kernel(x, y, z):
        product = fp32(load_unordered(x, T, (0, first))) * fp32(load_unordered(y, T.row_vec, (1, first)))
        store_unordered(z, product, (0, first))

    x, y = (np.round(sample(shape) * 4).astype(array_dtype.np) for shape in ((16, 97), (2, 88)))
    z = blank((16, 97), array_dtype)
    run(kernel, x[:, :96].copy() if not first else x, y, z)
    width = y.shape[1] - first
    expected = x[:, first : first + width].astype(np.float32) * y[1, first:].astype(np.float32)
    assert (z[:, first : first + width] == expected.astype(array_dtype.np)).all() and (z[:, y.shape[1] : first + 96] == 0).all()


@pytest.mark.parametrize(
    ("first", "rows", "dtype"),
    [(0, 16, fp8e4m3), (0, 9, int8), (1, 16, fp8e4m3)],
    ids=["eight bytes", "fewer rows", "byte by byte"],
)
def test_to_bytes(run, sample, first, rows, dtype):
    """16-bit tiles are rounded and stored as fp8 or int8, saturated to the greatest number."""
    T = rt(16, 64, bf16)

    @cuda.jit
    def kernel(x, y):
        store_unordered(y, fp32(load_unordered(x, T, (0, 0))) * 100.0, (0, first))

    x, y = sample((16, 64)).astype(bf16.np), blank((rows, 64), dtype)
    run(kernel, x, y)
    expected = dtype.round(x.astype(np.float32) * np.float32(100))
    assert (y[:, first:] == expected[:rows, : 64 - first]).all() and np.isnan(y[:, :first].astype(np.float32)).all()


def test_order_is_not_the_arrays(sample):
    """The interpreter shows the order to a kernel that uses plain `store`."""
    T = rt(16, 32, fp32)

    @cuda.jit
    def kernel(x, y):
        store(y, load_unordered(x, T, (0, 0)), (0, 0))

    x, y = sample((16, 32)).astype(fp16.np), blank((16, 32))
    meaning(kernel, x, y)
    assert (y != x).any() and (np.sort(y) == np.sort(x)).all()


def test_what_is_refused():
    narrow = rt(16, 16, bf16)

    @cuda.jit
    def kernel(x):
        store_unordered(x, load_unordered(x, narrow, (0, 0)), (0, 0))

    @cuda.jit
    def of_rows(x):
        load_unordered(x, rt(32, 32, bf16).col_vec, (0, 0))

    @cuda.jit
    def promised(x):
        load_unordered(x, rt(32, 32, bf16).row_vec, (0, 0), aligned=True)

    tiles_only = "load_unordered: takes tiles in row layout of a multiple of 32 columns"
    for wrong, words in (kernel, tiles_only), (of_rows, tiles_only), (promised, "`aligned` is a promise about tiles"):
        with pytest.raises(TypeError, match=words):
            meaning(wrong, np.zeros((16, 16), bf16.np))


@pytest.mark.parametrize(
    ("dtype", "to"), [(fp8e4m3, bf16), (fp8e5m2, bf16), (int8, bf16), (fp8e4m3, fp16), (int8, fp16)], ids=str
)
def test_bytes_become_16_bits_on_their_way_to_shared_memory(run, sample, dtype, to):
    """From an array, and from pages; rows past the end are 0, and their pages are not looked up."""
    HELD, WIDE, PART, LAST, SIZE = rt(16, 128, dtype), rt(16, 128, to), st(16, 128, dtype, 64), 27, 3
    smem = tiles.shared(first=st(8, 64, to), t=st(32, 128, to))

    @cuda.jit
    def body(x, pool, pages, out):
        _, t = smem.open()
        store_widened(subtile(t, 16, 0), load_unordered(x, HELD, (1, 4, 0), aligned=True))
        actual = look_up(PART, pages, SIZE, (1, 16), LAST)
        store_widened(subtile(t, 16, 1), load_pages(pool, HELD, actual, (16, 2, 0), LAST))
        cuda.syncwarp()
        store(out, load(subtile(t, 16, 0), WIDE), (0, 0))
        store(out, load(subtile(t, 16, 1), WIDE), (16, 0))

    x, pool, out = sample((2, 18, 128), dtype), sample((11, SIZE, 3, 128), dtype), blank((32, 128), to)
    pages = np.full((2, 11), -(2**20), np.int32)
    pages[1, : -(-LAST // SIZE)] = np.random.default_rng(1).permutation(11)[: -(-LAST // SIZE)]
    run(body, x, pool, pages, out, shared=smem)
    expected = np.zeros((32, 128), np.float32)
    expected[:14] = x[1, 4:]
    for row in range(16, LAST):
        expected[row] = pool[pages[1, row // SIZE], row % SIZE, 2]
    assert (out == expected.astype(to.np)).all()


def test_what_widening_refuses():
    smem, HELD, ROWS, PART = tiles.shared(t=st(32, 64, fp16)), rt(16, 64, fp8e4m3), rt(32, 64, fp8e4m3), st(32, 64, fp8e4m3, 64)

    @cuda.jit
    def more_rows(x):
        store_widened(smem.open()[0], load_unordered(x, ROWS, (0, 0)))

    @cuda.jit
    def other_rows(x):
        load_pages(x, HELD, look_up(PART, None, 4, (0, 0), 5), (0, 0), 5)

    for kernel, words in (more_rows, "store_widened: takes st"), (other_rows, "load_pages: takes what look_up has found"):
        with pytest.raises(TypeError, match=words):
            ptx(kernel, np.zeros((32, 64) if kernel is more_rows else (32, 4, 64), fp8e4m3.np), shared=smem)
