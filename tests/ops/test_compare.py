"""ops/elementwise/compare.py: comparisons give 0 and 1, `where` chooses by them."""

import operator

import numpy as np
import pytest
from numba import cuda

import ops
from ops import full, load, maximum, row_sum, store, where
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, close, pairs, wide

SIGNS = {
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
NAMES = list(SIGNS)


@pytest.mark.parametrize(
    ("names", "shape", "dtype", "side"),
    pairs([NAMES[:3], NAMES[3:]], [(16, 16), (32, 48), (16, 32)], [fp32, bf16, fp16], ["row", "col"]),
)
def test_comparisons(run, sample, names, shape, dtype, side):
    """Tiles are compared with tiles, vectors of either kind and numbers; equal numbers, NaN and infinities occur."""
    T = rt(*shape, dtype, side)
    f, g, h = (getattr(ops, name) for name in names)

    @cuda.jit
    def body(x, y, c, r, n, tiles, cols, rows, vectors):
        a, b, col, row = load(x, T, (0, 0)), load(y, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        store(tiles, f(a, b), (0, 0, 0), 1, 2)
        store(tiles, g(a, b), (1, 0, 0), 1, 2)
        store(tiles, h(a, b), (2, 0, 0), 1, 2)
        store(cols, f(a, col), (0, 0))
        store(rows, g(row, a), (0, 0))
        store(vectors, h(row, n) + f(n, 1), (0,))

    x, y, c, r = sample(shape, dtype), sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    y[1::2], r[::2] = x[1::2], 0.5
    x[0, :8] = np.nan, 1, np.nan, np.inf, np.inf, -np.inf, 0.0, -0.0
    y[0, :8] = np.nan, np.nan, 2, np.inf, -np.inf, np.inf, -0.0, 0.0
    c[1] = x[1, 1]
    tiles, cols, rows, vectors = blank((3, *shape)), blank(shape), blank(shape), blank(shape[1])
    run(body, x, y, c, r, 0.5, tiles, cols, rows, vectors)
    F, G, H = (SIGNS[name] for name in names)
    X, Y = wide(x), wide(y)
    for actual, want in zip(tiles, (F(X, Y), G(X, Y), H(X, Y)), strict=True):
        assert (actual == want).all()
    assert (cols == F(X, wide(c)[:, None])).all() and (rows == G(wide(r), X)).all()
    assert (vectors == H(wide(r), 0.5).astype(int) + int(F(0.5, 1))).all()


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 16), (32, 48)], [fp32, bf16], ["col", "row"]))
def test_where(run, sample, shape, dtype, side):
    """Masks of tiles and vectors choose from tiles, vectors and numbers; elements that are not chosen may be NaN."""
    T = rt(*shape, dtype, side)

    @cuda.jit
    def body(x, y, c, r, tiles, picked, vectors, counts):
        a, b, col, row = load(x, T, (0, 0)), load(y, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        low = ops.less(a, b)
        store(tiles, where(low, a, b), (0, 0, 0), 1, 2)
        store(tiles, where(ops.greater(a, 0.0), a, -1.0), (1, 0, 0), 1, 2)
        store(tiles, where(maximum(low, ops.less(b, 0.0)), row, col), (2, 0, 0), 1, 2)
        store(picked, where(ops.less(col, 0.0), 1.5, a), (0, 0))
        store(vectors, where(ops.less(row, full(T.row_vec, 0.25)), row, 0.0), (0,))
        store(counts, where(low, 1.0, 0.0), (0, 0))

    x, y, c, r = sample(shape, dtype), sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    x[3, ::2] = np.nan
    tiles, picked, vectors, counts = blank((3, *shape), dtype), blank(shape, dtype), blank(shape[1], dtype), blank(shape)
    run(body, x, y, c, r, tiles, picked, vectors, counts)
    C = c[:, None]
    with np.errstate(invalid="ignore"):
        low, positive = x < y, x > 0
    wants = [np.where(low, x, y), np.where(positive, x, dtype.np.type(-1)), np.where(low | (y < 0), r[None, :], C)]
    for actual, want in zip(tiles, wants, strict=True):
        close(actual, want)
    close(picked, np.where(C < 0, dtype.np.type(1.5), x))
    close(vectors, np.where(r < 0.25, r, dtype.np.type(0)))
    assert (counts == low).all()


def test_ones_are_counted(run, sample):
    T = rt(32, 16, fp32)

    @cuda.jit
    def body(x, out):
        store(out, row_sum(ops.greater(load(x, T, (0, 0)), 0)), (0,))

    x, out = sample((32, 16)), blank(32)
    run(body, x, out)
    assert (out == (x > 0).sum(axis=1)).all()


def test_a_mask_is_what_is_not_0(run):
    """Negative numbers and NaN count as true."""
    V = rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(mask, out):
        m = load(mask, V, (0,))
        store(out, where(m, 1.0, 2.0), (0, 0))
        store(out, where(-m, 1.0, 2.0), (1, 0))
        if ops.tile_any(m):
            store(out, m, (2, 0))

    mask, out = np.zeros(16, np.float32), blank((3, 16))
    mask[3], mask[5] = np.nan, -0.5
    run(body, mask, out)
    assert (out[:2] == np.where(mask != 0, 1, 2)).all() and out[2, 5] == -0.5
    only, none = np.zeros(16, np.float32), blank((3, 16))
    only[3] = np.nan
    run(body, only, none)
    assert (none[:2] == np.where(only != 0, 1, 2)).all() and none[2, 5] == 0


def test_and_or_not(run):
    """Each pair of masks and numbers gives 1 or 0."""
    V = rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(x, y, out):
        a, b = load(x, V, (0,)), load(y, V, (0,))
        store(out, a & b, (0, 0))
        store(out, a | b, (1, 0))
        store(out, ~a, (2, 0))

    some = np.array([0.0, 1.0, -0.5, np.nan], np.float32)
    x, y, out = np.repeat(some, 4), np.tile(some, 4), blank((3, 16))
    run(body, x, y, out)
    assert (out == [(x != 0) & (y != 0), (x != 0) | (y != 0), x == 0]).all()
