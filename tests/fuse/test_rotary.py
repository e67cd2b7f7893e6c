"""Rotary embedding: maps of halves of rows, and what broadcasts along heads."""

import numpy as np
import pytest

import fuse
from fuse import operators
from tiles import bf16

SHAPES = {  # of x, and of cos and sin
    "rows": ((19, 48), (19, 24)),
    "more_rows": ((2, 9, 48), (2, 9, 24)),
    "heads_lead": ((2, 3, 70, 136), (70, 68)),
    "heads_follow": ((2, 19, 3, 48), (19, 1, 24)),
    "one_position": ((2, 3, 1, 48), (1, 24)),
}


def sample(*shapes):
    """Arrays of bf16."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(bf16.np) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
def test_rotary(name):
    x, cos = SHAPES[name]
    arrays = sample(x, cos, cos)
    got = operators.rotary.run(*arrays)
    x, cos, sin = (a.astype(np.float64) for a in arrays)
    a, b = np.split(x, 2, -1)
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    assert got.shape == want.shape and np.abs(got.astype(np.float64) - want).max() <= 2**-8 * np.abs(want).max()
    assert np.abs(operators.rotary(*arrays).astype(np.float64) - want).max() <= 2**-8 * np.abs(want).max()


@pytest.mark.parametrize("name", ["rows", "heads_lead", "heads_follow"])
def test_proof(name):
    x, cos = SHAPES[name]
    proof = operators.rotary.proof(*sample(x, cos, cos))
    assert proof.holds, proof


def test_one_half():
    """A gate that comes beside what it gates."""
    gated = fuse.kernel(lambda x: fuse.silu(fuse.halves(x)[0]) * fuse.halves(x)[1])
    arrays = sample((19, 80))
    text = gated.source(*arrays)
    assert text.count("@cuda.jit") == 1 and len(text.splitlines()) < 40
    proof = gated.proof(*arrays)
    assert proof.holds, proof
    with pytest.warns(RuntimeWarning, match="must have axes of the arguments"):  # who would make it?
        assert gated.run(*arrays).shape == (19, 40)


def test_odd_columns():
    with pytest.raises(ValueError, match="even number of columns"):
        operators.rotary(*sample((4, 7), (4, 3), (4, 3)))
