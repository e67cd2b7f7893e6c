"""ops/shape/slicing.py: parts of a register tile, and tiles concatenated from them."""

import re

import numpy as np
import pytest
from numba import cuda

from ops import columns, hstack, load, rows, store, vstack, zeros
from tiles import bf16, fp8e4m3, fp16, fp32, rt
from tiles.testing import blank, meaning, pairs, ptx

T = rt(16, 96, fp32)
SHAPES, COUNTS = [(16, 16), (32, 96), (16, 128), (48, 64)], [16, 48, 64, 32]
DTYPES, SIDES = [fp32, bf16, fp16], ["row", "row", "col", "col"]


@pytest.mark.parametrize(("shape", "count", "dtype", "side"), pairs(SHAPES, COUNTS, DTYPES, SIDES))
def test_columns(run, sample, shape, count, dtype, side):
    """Every part of a tile is put back in its place."""
    W, last = rt(*shape, dtype, side), shape[1] // count - 1

    @cuda.jit
    def body(x, first, end):
        tile = load(x, W, (0, 0))
        store(first, columns(tile, count, 0), (0, 0))
        store(end, columns(tile, count, last), (0, 0))

    x = sample(shape, dtype)
    first, end = blank((shape[0], count), dtype), blank((shape[0], count), dtype)
    run(body, x, first, end)
    np.testing.assert_array_equal(first, x[:, :count])
    np.testing.assert_array_equal(end, x[:, -count:])


@pytest.mark.parametrize(("shape", "count", "dtype", "side"), pairs([s[::-1] for s in SHAPES], COUNTS, DTYPES, SIDES[1:]))
def test_rows(run, sample, shape, count, dtype, side):
    W, last = rt(*shape, dtype, side), shape[0] // count - 1

    @cuda.jit
    def body(x, first, end):
        tile = load(x, W, (0, 0))
        store(first, rows(tile, count, 0), (0, 0))
        store(end, rows(tile, count, last), (0, 0))

    x = sample(shape, dtype)
    first, end = blank((count, shape[1]), dtype), blank((count, shape[1]), dtype)
    run(body, x, first, end)
    np.testing.assert_array_equal(first, x[:count])
    np.testing.assert_array_equal(end, x[-count:])


@pytest.mark.parametrize(("dtype", "side"), pairs(DTYPES, ["row", "col"]))
def test_stacks(run, sample, dtype, side):
    """Tiles beside and below each other; parts concatenated again are the whole."""
    A, B, C = rt(32, 16, dtype, side), rt(32, 48, dtype, side), rt(16, 48, dtype, side)

    @cuda.jit
    def body(x, y, beside, below, again):
        a, b, c = load(x, A, (0, 0)), load(x, B, (0, 16)), load(y, C, (0, 0))
        store(beside, hstack(a, b), (0, 0))
        store(below, vstack(b, c), (0, 0))
        both = vstack(c, b)
        store(again, hstack(columns(both, 16, 2), hstack(columns(both, 16, 0), columns(both, 16, 1))), (0, 0))

    x, y = sample((32, 64), dtype), sample((16, 48), dtype)
    beside, below, again = (blank(shape, dtype) for shape in ((32, 64), (48, 48), (48, 48)))
    run(body, x, y, beside, below, again)
    np.testing.assert_array_equal(beside, x)
    np.testing.assert_array_equal(below, np.concatenate([x[:, 16:], y]))
    np.testing.assert_array_equal(again, np.roll(np.concatenate([y, x[:, 16:]]), 16, axis=1))


@pytest.mark.parametrize(("dtype", "side"), pairs(DTYPES + [fp8e4m3], ["row", "col"]))
def test_vectors(run, sample, dtype, side):
    """Parts of vectors match those of the tile."""
    W = rt(48, 64, fp32, side)

    @cuda.jit
    def body(x, row, col, right, lower, again):
        r, c = load(row, W.row_vec, (0,)), load(col, W.col_vec, (0,))
        store(right, columns(load(x, W, (0, 0)), 32, 1) + columns(r, 32, 1), (0, 0))
        store(lower, rows(load(x, W, (0, 0)), 16, 2) * rows(c, 16, 2), (0, 0))
        store(again, hstack(columns(r, 32, 1), columns(r, 32, 0)), (0, 0))
        store(again, dtype(vstack(rows(c, 16, 1), vstack(rows(c, 16, 2), rows(c, 16, 0)))), (1, 0))

    x, row, col = sample((48, 64)), sample(64, dtype).astype(np.float32), sample(48)
    right, lower, again = blank((48, 32)), blank((16, 64)), np.zeros((2, 64), np.float32)
    run(body, x, row, col, right, lower, again)
    assert (right == x[:, 32:] + row[32:]).all() and (lower == x[32:] * col[32:, None]).all()
    assert (again[0] == np.roll(row, 32)).all()
    assert (again[1, :48] == np.roll(dtype.round(col).astype(np.float32), -16)).all()


def test_operands_of_products(run, sample):
    """fp8 tiles are split, too: by base tiles of 32 along the contracted axis."""
    W, V = rt(32, 64, fp8e4m3), rt(64, 32, fp8e4m3, "col")

    @cuda.jit
    def body(x, y, right, lower, swapped):
        a, b = load(x, W, (0, 0)), load(y, V, (0, 0))
        store(right, columns(a, 32, 1), (0, 0))
        store(lower, rows(b, 32, 1), (0, 0))
        store(swapped, vstack(rows(a, 16, 1), hstack(columns(rows(a, 16, 0), 32, 1), columns(rows(a, 16, 0), 32, 0))), (0, 0))

    x, y = sample((32, 64)).astype(fp8e4m3.np), sample((64, 32)).astype(fp8e4m3.np)
    right, lower, swapped = (np.zeros(shape, fp8e4m3.np) for shape in ((32, 32), (32, 32), (32, 64)))
    run(body, x, y, right, lower, swapped)
    wide = [np.asarray(a, np.float32) for a in (x, y, right, lower, swapped)]
    assert (wide[2] == wide[0][:, 32:]).all() and (wide[3] == wide[1][32:]).all()
    assert (wide[4] == np.concatenate([wide[0][16:], np.roll(wide[0][:16], 32, axis=1)])).all()


# ---- mistakes ------------------------------------------------------------------------------------------------------
def too_narrow(x):
    columns(zeros(T), 8, 0)


def no_divisor(x):
    columns(zeros(T), 64, 0)


def too_narrow_for_fp8(x):
    columns(fp8e4m3(zeros(T)), 16, 0)


def beyond(x):
    columns(zeros(T), 48, 2)


def too_many_rows(x):
    rows(zeros(T), 32, 0)


def a_vector(x):
    columns(zeros(T.col_vec), 16, 0)


def vectors_of_other_tiles(x):
    hstack(zeros(T.row_vec), zeros(rt(16, 96, fp32, "col").row_vec))


def other_rows(x):
    hstack(zeros(T), zeros(rt(32, 16, fp32)))


def other_columns(x):
    vstack(zeros(T), zeros(rt(16, 16, fp32)))


def other_dtype(x):
    vstack(zeros(T), zeros(rt(16, 96, bf16)))


def other_layout(x):
    hstack(zeros(T), zeros(rt(16, 96, fp32, "col")))


def a_number(x):
    hstack(zeros(T), 1.0)


SIZE = "columns: count must be a multiple of 16 that divides 96, and index one of those parts, got "
STACK = "stack: takes two register tiles of as many {}, one dtype and layout, or two such {}_vecs, got rt(16, 96, fp32) and "
MISTAKES = {
    too_narrow: SIZE + "8 and 0",
    too_narrow_for_fp8: SIZE.replace("16", "32") + "16 and 0",
    no_divisor: SIZE + "64 and 0",
    beyond: SIZE + "48 and 2",
    too_many_rows: "rows: count must be a multiple of 16 that divides 16, and index one of those parts, got 32 and 0",
    a_vector: "columns: takes a register tile or a row_vec, got col_vec(16, fp32)",
    vectors_of_other_tiles: "hstack: takes two register tiles of as many rows, one dtype and layout, or two such row_vecs, got",
    other_rows: "h" + STACK.format("rows", "row") + "rt(32, 16, fp32)",
    other_columns: "v" + STACK.format("columns", "col") + "rt(16, 16, fp32)",
    other_dtype: "v" + STACK.format("columns", "col") + "rt(16, 96, bf16)",
    other_layout: "h" + STACK.format("rows", "row") + "rt(16, 96, fp32, col)",
    a_number: "h" + STACK.format("rows", "row") + "float",
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    with pytest.raises(TypeError, match=f"^{re.escape(MISTAKES[mistake])}"):
        backend(cuda.jit(mistake), np.zeros((16, 16), np.float32))


def known_too_late(x):
    for k in range(2):
        columns(zeros(T), 48, k + x.shape[0])


def test_index_is_known_when_compiled():
    with pytest.raises(TypeError, match="columns: index must be known when the kernel is compiled"):
        ptx(cuda.jit(known_too_late), np.zeros((16, 16), np.float32))
