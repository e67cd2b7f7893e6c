"""Dropout draws the same mask in kernels, in NumPy and in torch, for any layout and width of rows."""

import numpy as np
import pytest
from references import compare

import fuse
from attention import dropout_mask
from fuse import operators
from fuse.language.dropout_mask import keep_mask, keep_mask_in_torch
from tiles import bf16, fp32

SEED = np.array([2**62 + 12345])
DROPPED = fuse.kernel(lambda x, seed, p=0.25: fuse.dropout(x, p, seed) - fuse.mean(x) * 0.0)


@pytest.mark.parametrize("shape", [(1, 8), (35, 264), (2, 9, 130), (3, 1280), (2, 2056)])
def test_what_is_dropped(shape):
    """The dropout of an array of ones is the mask and its factor."""
    ones = np.ones(shape, fp32.np)
    said, actual = fuse.dropout(ones, 0.25, SEED), DROPPED.run(ones, SEED)
    assert actual.shape == shape and (actual == said).all() and set(np.unique(actual)) <= {0, np.float32(1 / 0.75)}
    assert (actual.reshape(-1, shape[-1]) != 0)[:, 5].tolist() == dropout_mask(
        int(SEED[0]), 0.25, 0, 0, np.arange(actual[..., 0].size), 5
    ).tolist()


@pytest.mark.parametrize("columns", [1024, 1040, 1088, 2048])
def test_of_16_bits(columns):
    """16-bit columns are read unordered, and draws follow that order; not where rows are no whole lines."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(bf16.np) for shape in ((19, columns), (19, columns), (columns,), (columns,))]
    operator = operators.dropout_residual_layer_norm
    assert ("unordered=True" in operator.source(*arrays, SEED)) == (columns != 1040)
    compare(operator, (*arrays, SEED % 2**50), operator.run(*arrays, SEED % 2**50))


def test_as_many_as_were_asked_for():
    assert abs((fuse.dropout(np.ones((64, 1024)), 0.1, SEED) == 0).mean() - 0.1) < 0.01
    assert (keep_mask((8, 8), 0.0, 7)).all()


def test_draws_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 21, 40)
    assert (keep_mask_in_torch(x, 0.25, torch.from_numpy(SEED)).numpy() == keep_mask((2, 21, 40), 0.25, int(SEED[0]))).all()


def test_gradient():
    """The gradient has the same mask."""
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 40, dtype=torch.bfloat16, requires_grad=True)
    DROPPED(x, torch.from_numpy(SEED)).sum().backward()
    want = torch.from_numpy(keep_mask((5, 40), 0.25, int(SEED[0])) / 0.75)
    assert (x.grad - want).abs().max() < 0.01


def test_ahead_of_a_product_and_behind_one():
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(bf16.np) for shape in ((19, 40), (40, 24)))
    for definition in (lambda x, w, seed: fuse.dropout(x, 0.5, seed) @ w, lambda x, w, seed: fuse.dropout(x @ w, 0.5, seed)):
        kernel = fuse.kernel(definition)
        compare(kernel, (x, w, SEED % 2**50), kernel.run(x, w, SEED % 2**50))


@pytest.mark.parametrize(
    ("definition", "error", "description"),
    [
        (lambda x, seed: fuse.dropout(x, 1.0, seed), ValueError, "p must be a number, at least 0 and below 1"),
        (lambda x, seed: fuse.dropout(x, 0.5, x), TypeError, "seed must be an argument, an array of one int64"),
        (lambda x, seed: fuse.dropout(fuse.mean(x), 0.5, seed), ValueError, "takes rows and columns"),
        (lambda x, seed: x * seed, TypeError, "seed: dtype must be one of"),
    ],
)
def test_what_is_refused(definition, error, description):
    inputs = np.ones((4, 8), np.float32), SEED
    with pytest.raises(error, match=description):
        fuse.kernel(definition).run(*inputs)


def test_another_seed_is_no_other_kernel():
    """The seed is in memory: a captured call draws anew."""
    x = np.ones((4, 264), bf16.np)
    g, b = x[0], x[0]
    calls = [operators.dropout_residual_layer_norm.run(x, x, g, b, np.array([seed]))[1] for seed in (1, 2, 1)]
    assert (calls[0] == calls[2]).all() and (calls[0] != calls[1]).any()
