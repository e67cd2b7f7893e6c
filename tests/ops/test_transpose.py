"""ops/shape/transpose.py: tiles and vectors transposed inside the warp."""

import numpy as np
import pytest
from numba import cuda

from ops import load, store, swap_layout, transpose, turned
from tiles import bf16, fp8e5m2, fp16, fp32, rt, tf32
from tiles.testing import blank, pairs, wide


@pytest.mark.parametrize(
    ("shape", "dtype", "side"),
    pairs([(16, 16), (32, 16), (16, 48), (64, 32)], [fp32, bf16, fp16], ["row", "row", "col", "col", "row"]),
)
def test_transpose(run, sample, shape, dtype, side):
    T = rt(*shape, dtype, side)

    @cuda.jit
    def body(x, c, r, turned, back, row, col, same):
        a, columns, rows = load(x, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        store(turned, transpose(a), (0, 0))
        store(back, transpose(transpose(a) + transpose(columns)), (0, 0))
        store(row, transpose(columns), (0,))
        store(col, transpose(rows), (0,))
        store(same, transpose(transpose(rows)), (0,))

    x, c, r = sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    turned, back, row, col, same = (blank(s, dtype) for s in (shape[::-1], shape, shape[0], shape[1], shape[1]))
    run(body, x, c, r, turned, back, row, col, same)
    assert (turned == x.T).all()
    assert (back == (x.astype(np.float32) + c.astype(np.float32)[:, None]).astype(dtype.np)).all()
    assert (row == c).all() and (col == r).all() and (same == r).all()


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 48), (32, 16), (32, 32)], [fp32, bf16, fp16], ["row", "col"]))
def test_swap_layout(run, sample, shape, dtype, side):
    """A tile in the other layout goes with vectors in the other layout; its transpose is the same registers."""
    T, O = rt(*shape, dtype, side), rt(*shape, dtype, "col" if side == "row" else "row")

    @cuda.jit
    def body(x, c, r, swapped, back, summed):
        a, col, row = load(x, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        b = swap_layout(a)
        store(swapped, b, (0, 0))
        store(back, swap_layout(b), (0, 0))
        store(summed, load(x, O, (0, 0)) + (swap_layout(col) + b + swap_layout(row)) - b, (0, 0))

    x, c, r = sample(shape, dtype), np.ones(shape[0], dtype.np), np.full(shape[1], 2, dtype.np)
    x = np.round(x.astype(np.float32) * 4).astype(dtype.np)  # small integers: every sum is exact
    swapped, back, summed = (blank(shape, dtype) for _ in range(3))
    run(body, x, c, r, swapped, back, summed)
    assert (swapped == x).all() and (back == x).all() and (summed == (x.astype(np.float32) + 3).astype(dtype.np)).all()


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 48), (32, 16), (32, 32)], [fp32, bf16, fp16], ["row", "col"]))
def test_turned_is_the_transpose_in_the_other_layout(run, sample, shape, dtype, side):
    T, other = rt(*shape, dtype, side), "col" if side == "row" else "row"
    O = rt(*shape[::-1], dtype, other)

    @cuda.jit
    def body(x, c, out, summed, back):
        a, columns = load(x, T, (0, 0)), load(c, T.col_vec, (0,))
        store(out, turned(a), (0, 0))
        store(summed, load(out, O, (0, 0)) + turned(columns), (0, 0))
        store(back, turned(turned(a)), (0, 0))

    x, c = np.round(sample(shape, dtype).astype(np.float32) * 4).astype(dtype.np), np.full(shape[0], 2, dtype.np)
    out, summed, back = blank(shape[::-1], dtype), blank(shape[::-1], dtype), blank(shape, dtype)
    run(body, x, c, out, summed, back)
    assert (out == x.T).all() and (back == x).all() and (summed == (x.T.astype(np.float32) + 2).astype(dtype.np)).all()


def test_operands_of_products(run, sample):
    """tf32 tiles transpose as fp32 ones; vectors of any dtype do, too."""
    T, V = rt(32, 16, tf32), rt(32, 64, fp8e5m2).row_vec

    @cuda.jit
    def body(x, v, turned, swapped, vector):
        store(turned, transpose(load(x, T, (0, 0))), (0, 0))
        store(swapped, swap_layout(load(x, T, (0, 0))), (0, 0))
        store(vector, swap_layout(transpose(load(v, V, (0,)))), (0,))

    x, v = sample((32, 16), tf32), sample(64, fp8e5m2)
    turned, swapped, vector = blank((16, 32)), blank((32, 16)), blank(64, fp8e5m2)
    run(body, x, v, turned, swapped, vector)
    assert (turned == x.T).all() and (swapped == x).all() and (wide(vector) == wide(v)).all()
