"""ops/elementwise/masks.py, and warpgroup.causal: every position of the edge, from nothing kept to nothing masked."""

import numpy as np
import pytest
from numba import cuda

import ops
from ops import causal, load, right_fill, store, warpgroup
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, pairs

SHAPES = [(16, 32), (32, 16), (16, 16), (48, 32)]
FILLS = [-np.inf, 0.0, 7.5]


def edges(size):
    """Positions of an edge along `size` elements: everywhere once, outside, and far outside."""
    return [*range(-2, size + 3), -(10**6), 10**6, -(2**31) + 200, 2**31 - 200]


MASKS = {  # what stays, of rows r and columns c
    "right_fill": lambda r, c, n: c < n,
    "left_fill": lambda r, c, n: c >= n,
    "lower_fill": lambda r, c, n: r < n,
    "upper_fill": lambda r, c, n: r >= n,
    "tril": lambda r, c, n: c <= r + n,
    "triu": lambda r, c, n: c >= r + n,
}
NAMES = list(MASKS)


@pytest.mark.parametrize(
    ("names", "shape", "dtype", "fill", "side"),
    pairs([NAMES[:2], NAMES[2:4], NAMES[4:]], [*SHAPES, (16, 16), (32, 48)], [fp32, bf16, fp16], FILLS, ["row", "col"]),
)
def test_every_mask(run, sample, names, shape, dtype, fill, side):
    T, at = rt(*shape, dtype, side), edges(sum(shape))
    first, second = (getattr(ops, name) for name in names)
    if "tril" in names:
        at = [max(i - shape[0], -(2**31) + 200) for i in at]
    n = len(at)

    @cuda.jit
    def body(x, at, out, other):
        a = load(x, T, (0, 0))
        for i in range(n):
            store(out, first(a, at[i], fill), (i, 0, 0), 1, 2)
            store(other, second(a, at[i], fill), (i, 0, 0), 1, 2)

    x, out, other = sample(shape, dtype), blank((n, *shape), dtype), blank((n, *shape), dtype)
    run(body, x, np.array(at, np.int32), out, other)
    row, col = np.indices(shape)
    for name, actual in zip(names, (out, other), strict=True):
        for i, bound in enumerate(at):
            assert (actual[i] == np.where(MASKS[name](row, col, bound), x, dtype.np.type(fill))).all(), f"{name}, {bound=}"


@pytest.mark.parametrize("names", [["lower_fill", "upper_fill"], ["tril", "triu"]], ids=" ".join)
def test_every_mask_counts_rows_through_the_warpgroup(run, sample, names):
    """Masks and bounds of rows and columns, of a warp and of a warpgroup."""
    T, at = rt(16, 32, fp32), [-3, 0, 5, 16, 17, 31, 40, 63, 64, 90]
    first, second = (getattr(warpgroup, name) for name in names)
    n = len(at)

    @cuda.jit
    def body(x, at, out, other, ragged, warp_fill):
        a = warpgroup.load(x, T, (0, 0))
        for i in range(n):
            warpgroup.store(out, first(a, at[i], 0.0), (i, 0, 0))
            warpgroup.store(other, second(a, at[i], 0.0), (i, 0, 0))
            warpgroup.store(ragged, warpgroup.outside_fill(a, at[i], 32 - at[i] // 4, -1.0), (i, 0, 0))
            warpgroup.store(warp_fill, ops.outside_fill(a, at[i], 20, -1.0), (i, 0, 0))

    x, outs = sample((64, 32)), [blank((n, 64, 32)) for _ in range(4)]
    run(body, x, np.array(at, np.int32), *outs, warps=4)
    row, col = np.indices(x.shape)
    for i, bound in enumerate(at):
        for name, actual in zip(names, outs[:2], strict=True):
            assert (actual[i] == np.where(MASKS[name](row, col, bound), x, 0)).all(), f"{name}, {bound=}"
        assert (outs[2][i] == np.where((row < bound) & (col < 32 - bound // 4), x, -1)).all(), f"{bound=}"
        assert (outs[3][i] == np.where((row % 16 < bound) & (col < 20), x, -1)).all(), f"{bound=}"


@pytest.mark.parametrize(("shape", "dtype", "fill"), pairs(SHAPES, [fp32, fp16, bf16], FILLS[::-1]))
def test_causal(run, sample, shape, dtype, fill):
    T, diagonals = rt(*shape, dtype), [max(d - shape[0], -(2**31) + 200) for d in edges(shape[0] + shape[1])]
    n = len(diagonals)

    @cuda.jit
    def body(x, at, out):
        a = load(x, T, (0, 0))
        for i in range(n):
            store(out, causal(a, at[i], fill), (i, 0, 0), 1, 2)

    x, out = sample(shape, dtype), blank((n, *shape), dtype)
    run(body, x, np.array(diagonals, np.int32), out)
    row, col = np.indices(shape)
    for actual, diagonal in zip(out, diagonals, strict=True):
        assert (actual == np.where(col <= row + diagonal, x, dtype.np.type(fill))).all(), f"{diagonal=}"


@pytest.mark.parametrize(("rows", "cols"), [(16, 64), (32, 48)])
def test_causal_counts_rows_through_the_warpgroup(run, sample, rows, cols):
    T, diagonals = rt(rows, cols, fp32), [d - 4 * rows for d in edges(4 * rows + cols)[::3] if abs(d) <= 10**6]
    n = len(diagonals)

    @cuda.jit
    def body(x, at, out):
        a = warpgroup.load(x, T, (0, 0))
        for i in range(n):
            warpgroup.store(out, warpgroup.causal(a, at[i], -np.inf), (i, 0, 0))

    x, out = sample((4 * rows, cols)), blank((n, 4 * rows, cols))
    run(body, x, np.array(diagonals, np.int32), out, warps=4)
    row, col = np.indices(x.shape)
    for actual, diagonal in zip(out, diagonals, strict=True):
        assert (actual == np.where(col <= row + diagonal, x, -np.inf)).all(), f"{diagonal=}"


def test_nan_under_the_mask_disappears(run):
    """Masked scores may come from keys that do not exist."""
    T = rt(16, 32, fp32)

    @cuda.jit
    def body(x, out):
        store(out, right_fill(load(x, T, (0, 0)), 9, -1.0), (0, 0))
        store(out, causal(load(x, T, (0, 0)), -20, -1.0), (16, 0))

    x = np.full((16, 32), np.nan, np.float32)
    x[:, :9] = 3
    out = blank((32, 32))
    run(body, x, out)
    assert (out[:16] == np.where(np.arange(32) < 9, 3, -1)).all() and (out[16:] == -1).all()
