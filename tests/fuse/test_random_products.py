"""Random terms with products, prologues and epilogues, for few rows and many, with their proofs.

FUSE_EXAMPLES=100 tries so many; on the GPU (`-m gpu`) too."""

import os
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import compare

import fuse
from tiles import bf16

EXAMPLES = int(os.environ.get("FUSE_EXAMPLES", 6))
UNARY = "tanh", "sigmoid", "silu", "relu", "gelu", "abs"
BOUND = 4.0
PROFILE = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def definitions(draw):
    """A random function of x (m, k), g (k,), w and v (k, n), r (m, n), c (n,) that neither overflows nor cancels much."""
    before = draw(st.lists(st.sampled_from(["scaled", "normed", *UNARY]), max_size=2, unique=True))
    shape = draw(st.sampled_from(["one", "gated", "added", "two results"]))
    behind = draw(st.lists(st.sampled_from(["residual", "bias", "scale of rows", *UNARY]), max_size=3, unique=True))

    def prologue(x, g):
        for name in before:
            if name == "scaled":
                x = x * g
            elif name == "normed":
                x = x * fuse.rsqrt(fuse.mean(x * x) + 1e-3)
            else:
                x = getattr(fuse, name)(x)
        return x

    def epilogue(y, x, r, c):
        for name in behind:
            if name == "residual":
                y = y + r
            elif name == "bias":
                y = fuse.maximum(fuse.minimum(y, BOUND), -BOUND) * c + 1.0
            elif name == "scale of rows":
                y = y * (fuse.max(fuse.abs(x)) + 0.5)
            else:
                y = getattr(fuse, name)(y)
        return y

    def definition(x, g, w, v, r, c):
        u = prologue(x, g)
        if shape == "two results":
            return epilogue(u @ w, x, r, c), u @ v
        y = {"one": lambda: u @ w, "gated": lambda: fuse.silu(u @ w) * (u @ v), "added": lambda: u @ w + x @ v}[shape]()
        return epilogue(y, x, r, c)

    return definition


def sample(rows):
    rng = np.random.default_rng(rows)
    shapes = (rows, 72), (72,), (72, 40), (72, 40), (rows, 40), (40,)
    return [(rng.standard_normal(s) / (s[0] if s[0] != rows else 1) ** (0.5 * (len(s) > 1))).astype(bf16.np) for s in shapes]


@PROFILE
@given(definitions(), st.sampled_from([3, 17, 70]))
def test_random_products(definition, rows):
    """The rewritten term equals the definition, and its kernels in the interpreter compute it, at ragged sizes."""
    os.environ["TILES_CHECK"] = "0"  # test_as_compiled.py has the templates compiled
    try:
        proof = fuse.kernel(definition).proof(*sample(rows))
        assert proof.holds, proof
    finally:
        del os.environ["TILES_CHECK"]


@pytest.mark.gpu
@PROFILE
@given(definitions(), st.sampled_from([3, 17, 70]))
def test_random_products_on_the_card(definition, rows):
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    kernel, arrays = fuse.kernel(definition), sample(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs by parts
        actual = kernel(*map(to_torch, arrays))
    torch.cuda.synchronize()
    compare(kernel, arrays, tuple(map(to_numpy, actual)) if isinstance(actual, tuple) else to_numpy(actual))
