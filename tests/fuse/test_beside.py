"""Several results: products of one left factor, side by side in one kernel, or kernels of their own."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200
from fuse.planning.proof import prove

FUNCTIONS = {  # and how many kernels there are, of few rows and of many, where there is wgmma
    "three": (lambda x, q, k, v: (x @ q, x @ k, x @ v), (1, 1)),
    "a prologue": (lambda x, q, k, v: ((x * 2.0) @ q, (x * 2.0) @ k), (1, 2)),
    "others": (lambda x, q, k, v: (x @ q, fuse.silu(x @ k), fuse.relu(x)), (3, 3)),
}


@pytest.mark.parametrize(("rows", "card"), [(3, H200), (70, H200), (70, A100)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name, rows, card, monkeypatch):
    """No result's columns are a multiple of a tile's."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    definition, (few, many) = FUNCTIONS[name]
    kernel, arrays = fuse.kernel(definition), (normal(rows, 72), normal(72, 136), normal(72, 40), normal(72, 264))
    compare(kernel, arrays, kernel.run(*arrays))
    if card is H200:
        assert kernel.source(*arrays).count("@cuda.jit") == (few if rows < 64 else many)


def test_weights_that_lie_otherwise(monkeypatch):
    """Weights of two layouts are multiplied by two kernels."""
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, w = fuse.kernel(lambda x, k, v: (x @ k, x @ v)), np.asfortranarray(normal(72, 40))
    for weights, kernels in (((w, w * 2), 1), ((w, normal(72, 40)), 2)):
        arrays = normal(70, 72), *weights
        assert kernel.source(*arrays).count("@cuda.jit") == kernels
        compare(kernel, arrays, kernel.run(*arrays))


def test_proof():
    kernel, arrays = fuse.kernel(FUNCTIONS["three"][0]), (normal(70, 72), normal(72, 136), normal(72, 40), normal(72, 264))
    actual = kernel.trace(arrays)
    proof = prove(kernel.name, actual, candidates(actual, H200)[0])
    assert proof.holds, proof
