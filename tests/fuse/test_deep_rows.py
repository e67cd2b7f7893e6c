"""Row maps of arrays with leading axes that are no rows of the whole definition; halves of intermediates."""

import numpy as np
import pytest
from references import compare

import fuse
from fuse import operators
from tiles import bf16


def sample(*shapes, seed=0):
    """Arrays of normal numbers in bf16, one for each shape."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(bf16.np) for shape in shapes]


def rms(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


@fuse.kernel
def transposed(x, g, cos, sin):
    return operators.rotary.definition(rms(x, g), cos, sin)


@fuse.kernel
def normed(x, g, y):
    """y lacks the batch, so leading axes are not rows."""
    return fuse.concatenate([a * b for a, b in zip(fuse.halves(fuse.softmax(rms(x, g))), fuse.halves(y))])


@pytest.mark.parametrize(
    ("shape", "positions"), [((2, 3, 19, 48), (19, 24)), ((19, 48), (19, 24)), ((2, 19, 3, 256), (19, 1, 128))]
)
def test_a_norm_ahead_of_rotary_embedding(shape, positions):
    """One kernel does both; a half that takes several tiles is read for the norm first."""
    arrays = sample(shape, shape[-1:], positions, positions)
    text = transposed.source(*arrays)
    assert text.count("@cuda.jit") == 1 and "row_sum(" in text and len(text.splitlines()) < 60
    assert text.count("for col in range(0, width, TILE.cols)") == (2 if shape[-1] > 128 else 0)
    compare(transposed, arrays, transposed.run(*arrays))
    proof = transposed.proof(*arrays)
    assert proof.holds, proof


@pytest.mark.parametrize("columns", [96, 240])
def test_sums_one_after_the_other(columns):
    """The second sum depends on the first."""

    @fuse.kernel
    def twice(x, g):
        first, second = fuse.halves(rms(rms(x, g), g))
        return fuse.concatenate([second - first, first * 2.0])

    arrays = sample((19, columns), (columns,))
    text = twice.source(*arrays)
    assert text.count("@cuda.jit") == 1 and text.count("for col in") == (3 if columns > 128 else 0)
    compare(twice, arrays, twice.run(*arrays))
    assert twice.proof(*arrays).holds


def test_rows_too_wide_for_a_tile():
    """The norm is then a kernel of its own, on the matrix of all rows."""
    arrays = sample((2, 3, 5, 272), (272,), (5, 136), (5, 136))
    text = transposed.source(*arrays)
    assert text.count("@cuda.jit") == 2 and "x.reshape(-1, x.shape[3])" in text
    compare(transposed, arrays, transposed.run(*arrays))
    proof = transposed.proof(*arrays)
    assert proof.holds, proof


def test_maxima_are_no_sums_of_halves():
    arrays = sample((2, 3, 5, 48), (48,), (3, 5, 48))
    assert normed.source(*arrays).count("@cuda.jit") == 2
    compare(normed, arrays, normed.run(*arrays))


def test_what_lies_apart_runs_by_parts():
    """Rows with gaps between them are not viewed as a matrix."""
    x, g, cos, sin = sample((2, 5, 3, 272), (272,), (5, 136), (5, 136))
    with pytest.warns(RuntimeWarning, match="needs a copy"):
        actual = transposed.run(x.swapaxes(1, 2), g, cos, sin)
    expected = transposed(x.swapaxes(1, 2).copy(), g, cos, sin).astype(float)
    assert np.allclose(actual.astype(float), expected, atol=0.05, rtol=0.05)
