"""ops/columns.py: parts of a register tile."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, code, meaning, pairs

from ops import columns, load, store, zeros
from tiles import bf16, fp16, fp32, rt

T = rt(16, 96, fp32)


@pytest.mark.parametrize(
    ("shape", "count", "dtype"), pairs([(16, 16), (32, 96), (16, 128), (48, 64)], [16, 48, 64, 32], [fp32, bf16, fp16])
)
def test_columns(run, sample, shape, count, dtype):
    """Every part of a tile, in its place again."""
    W, last = rt(*shape, dtype), shape[1] // count - 1

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


def too_narrow(x):
    columns(zeros(T), 8, 0)


def no_divisor(x):
    columns(zeros(T), 64, 0)


def beyond(x):
    columns(zeros(T), 48, 2)


def a_vector(x):
    columns(zeros(T.col_vec), 16, 0)


def known_too_late(x):
    for k in range(2):
        columns(zeros(T), 48, k + x.shape[0])


SIZE = "columns: count must be a multiple of 16 that divides 96, and index one of those parts, got "
MISTAKES = {
    too_narrow: SIZE + "8 and 0",
    no_divisor: SIZE + "64 and 0",
    beyond: SIZE + "48 and 2",
    a_vector: "columns: takes a register tile in row layout, got col_vec(16, fp32)",
}


@pytest.mark.parametrize("backend", [meaning, code], ids=["meaning", "code"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(mistake), np.zeros((16, 16), np.float32))
    assert str(error.value).startswith(MISTAKES[mistake])


def test_index_is_known_when_compiled():
    with pytest.raises(TypeError, match="columns: index must be known when the kernel is compiled"):
        code(cuda.jit(known_too_late), np.zeros((16, 16), np.float32))
