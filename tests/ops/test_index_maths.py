"""Maths on the numbers of rows and columns: comparisons by operators, & | ~, // and %, abs, arrays read by vectors."""

import numpy as np
import pytest
from numba import cuda

import ops
import tiles
from ops import col_index, load, row_index, store, where
from tiles import bf16, fp32, rt
from tiles.testing import blank, meaning, ptx

T = rt(16, 64, fp32)
ROWS, COLS = np.arange(16)[:, None], np.arange(64)[None]


def test_comparisons_and_logic(run, sample):
    """Operators compare tiles, vectors and numbers on either side; booleans may be operands."""

    @cuda.jit
    def body(x, y, n):
        t, i, j = load(x, T, (0, 0)), row_index(T.col_vec), col_index(T.row_vec)
        near = (j >= i - 3) & (j <= i + n) | (j < 4.0) & ~(i == 5)
        store(y, where(near & (n > 2) & (t != 0.0) | (t < -1), t, 0.0), (0, 0))

    x, y = sample((16, 64)), blank((16, 64))
    run(body, x, y, 7)
    near = (COLS >= ROWS - 3) & (COLS <= ROWS + 7) | (COLS < 4) & ~(ROWS == 5)
    assert (y == np.where(near | (x < -1), x, 0)).all()


@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_row_vector_and_a_column_vector_give_a_tile(run, layout):
    S = rt(32, 48, fp32, layout)

    @cuda.jit
    def body(y):
        store(y, abs(row_index(S.col_vec) * 2.0 - col_index(S.row_vec)), (0, 0))

    y = blank((32, 48))
    run(body, y)
    assert (y == abs(2 * np.arange(32)[:, None] - np.arange(48))).all()


@pytest.mark.parametrize("divisor", [1, 3, 7, 64, 100, 4097.0])
def test_floor_division(run, divisor):
    """Exact for integers up to 2 ** 24, on both sides of 0, by constants and by run-time numbers."""

    @cuda.jit
    def body(x, by_constant, left, by_number, rest, n):
        t = load(x, T, (0, 0))
        store(by_constant, t // divisor, (0, 0))
        store(left, t % divisor, (0, 0))
        store(by_number, t // n, (0, 0))
        store(rest, t % n, (0, 0))

    near = int(divisor) * np.array([0, 1, 2, 3, 1000, 4095, (2**24 - 2) // int(divisor)])[:, None] + np.array([-1, 0, 1])
    x = np.resize(np.concatenate([near.ravel(), -near.ravel()]), (16, 64)).astype(np.float32)
    outs = [blank((16, 64)) for _ in range(4)]
    run(body, x, *outs, float(divisor))
    wholes = x.astype(np.int64)
    for quotient, rest in (outs[:2], outs[2:]):
        assert (quotient == wholes // int(divisor)).all() and (rest == wholes % int(divisor)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.int8, np.uint8, np.int16, np.bool_, np.float32, bf16.np])
def test_gather(run, dtype):
    """Vectors and tiles of indices, with integers among them, gather at any strides; elements outside are 0."""

    @cuda.jit
    def body(docs, table, rows, cols, tiles, head):
        i, j = row_index(T.col_vec) - 2.0, col_index(T.row_vec)
        store(rows, docs[i], (0,))
        store(cols, docs[j], (0,))
        store(tiles, table[head, i, j], (0, 0))

    docs = (np.arange(100) % 50 - (0 if np.dtype(dtype).kind in "ub" else 20)).astype(dtype)[::2]
    table = (np.arange(2 * 12 * 60) % 97).reshape(2, 60, 12).astype(dtype).transpose(0, 2, 1)
    rows, cols, tiles = blank(16), blank(64), blank((16, 64))
    run(body, docs, table, rows, cols, tiles, 1)
    want = np.zeros((18, 64))
    want[2:14, :60] = table[1].astype(np.float64)
    assert (rows == np.r_[0, 0, docs[:14].astype(np.float32)]).all()
    assert (cols == np.r_[docs.astype(np.float32), np.zeros(14)]).all() and (tiles == want[:16]).all()


def test_ops_of_numpy_arrays():
    """Outside kernels the maps take arrays: a mask or score in Python has one source for both."""
    x = np.linspace(-2, 2, 9)
    assert np.allclose(ops.exp2(x), 2**x) and (ops.where(x > 0, x, -1.0) == np.where(x > 0, x, -1)).all()
    assert (ops.maximum(x, 0.5) == np.maximum(x, 0.5)).all() and np.allclose(ops.tanh(x[:, None]), np.tanh(x[:, None]))


WRONG = {
    "three": (lambda a, i: a[0, i], r"an index must have 1 parts for an array of 1 axes"),
    "bf16": (lambda a, i: a[bf16(i)], r"indices are whole numbers in fp32, got col_vec\(16, bf16\)"),
    "tile": (lambda a, i: i[0], r"a tile cannot be indexed: "),
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("case", WRONG)
def test_refuses(backend, case):
    use, words = tiles.inlined(WRONG[case][0]), WRONG[case][1]

    @cuda.jit
    def body(a):
        use(a, row_index(T.col_vec))

    with pytest.raises(TypeError, match=words):
        backend(body, np.zeros(4, np.float32))
