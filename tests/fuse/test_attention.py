"""Leading axes, batches and heads, and attention on them."""

import warnings

import numpy as np
import pytest
from references import compare

import fuse
from fuse import operators
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
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


# ---- attention -------------------------------------------------------------------------------------------------------
def rms(x, g, eps=1e-5):
    return x * fuse.rsqrt(fuse.mean(x * x) + eps) * g


@fuse.kernel
def attend(q, k, v, scale=0.25):
    return fuse.attention(q, k, v, scale)


@fuse.kernel
def causal(q, k, v):
    return fuse.softmax(fuse.causal(q * 0.25 @ fuse.transpose(k))) @ v


@fuse.kernel
def normed(q, k, v, gq, gk, eps=1e-5):
    return fuse.attention(rms(q, gq, eps), rms(k, gk, eps), v, q.shape[-1] ** -0.5)


@fuse.kernel
def normed_keys(q, k, v, gk):
    return fuse.attention(q, rms(k, gk), v, 0.25)


CASES = {
    operators.mla_attention: [(2, 5, 16), (9, 40), (2, 16, 40), (2, 24, 40)],
    operators.qk_norm_attention: [(2, 2, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16), (16,), (16,)],
    attend: [(2, 2, 5, 16), (2, 2, 9, 16), (2, 2, 9, 24)],
    causal: [(3, 5, 16), (3, 9, 16), (3, 9, 24)],
    normed: [(1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), (16,), (16,)],
    normed_keys: [(5, 16), (9, 16), (9, 16), (16,)],
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.name)
def test_attention(kernel):
    """One call of attention.forward, which gives what the definition says."""
    arrays = sample(*CASES[kernel])
    text = kernel.source(*arrays)
    products = 2 if kernel is operators.mla_attention else 0
    assert "attention.forward(" in text and text.count("@cuda.jit") == products
    got = kernel.run(*arrays)
    compare(kernel, arrays, got)
    said, got = kernel(*arrays).astype(np.float32), got.astype(np.float32)
    assert np.abs(said - got).max() <= 0.02 * np.abs(said).max()
