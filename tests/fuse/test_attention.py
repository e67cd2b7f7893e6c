"""Leading axes, batches and heads, and attention on them."""

import numpy as np
import pytest
from references import compare

import fuse
from tiles import bf16


def sample(*shapes, seed=0):
    """Arrays of bf16."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(bf16.np) for shape in shapes]


GRAM = fuse.kernel(lambda x: x @ fuse.transpose(x))
MEANS = fuse.kernel(lambda x, y: x + y * 2.0)


@pytest.mark.parametrize("run", [GRAM, GRAM.run])
def test_leading_axes_that_are_no_rows(run):
    """As rows, all would be multiplied with all."""
    (x,) = sample((2, 6, 40))
    with np.testing.suppress_warnings() as seen:
        seen.filter(RuntimeWarning)
        got = run(x)
    wide = x.astype(np.float64)
    assert got.shape == (2, 6, 6) and np.allclose(got.astype(np.float64), wide @ wide.swapaxes(1, 2), atol=0.5)


def test_what_has_no_kernel_says_why():
    (x,) = sample((2, 6, 40))
    with pytest.warns(RuntimeWarning, match=r"no template computes .*\(2, 6, 40\)"):
        GRAM.run(x)


def test_leading_axes_that_do_not_fit():
    """(12, 40) is no (2, 6, 40), though they have as many rows."""
    with pytest.raises(ValueError, match="do not broadcast"):
        MEANS(*sample((2, 6, 40), (12, 40)))
    with pytest.raises(TypeError, match=r"fuse.transpose swaps the last two"):
        fuse.kernel(lambda x: x @ x.T)(*sample((2, 6, 40)))


def test_some_of_the_leading_axes():
    """(6, 40) broadcasts along the batch."""
    x, y = sample((2, 6, 40), (6, 40))
    assert np.allclose(MEANS(x, y).astype(np.float32), (x + y * 2).astype(np.float32), atol=0.1)
