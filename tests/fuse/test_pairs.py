"""Products of many rows by pairs of blocks, which read tiles of weights once."""

from dataclasses import replace

import numpy as np
import pytest
from operator_cases import normal
from references import compare

import fuse
from fuse import operators
from fuse.planning.cost import H200
from fuse.templates.products.many_rows import LONE, choose_schedule

SHAPES = {  # of each operator's arguments; of turned ones the weights lie as torch has them
    "gated_mlp": ((200, 72), (72, 136), (72, 136)),
    "gated_mlp, turned": ((200, 72), (72, 136), (72, 136)),
    "lora_linear": ((200, 136), (136, 264), (136, 16), (16, 264)),
    "lora_linear, turned": ((200, 136), (136, 264), (136, 16), (16, 264)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_results(case, monkeypatch):
    """Two blocks, the second with fewer rows; each loads one of two weights for both, or half of one."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: replace(H200, processors=1))
    monkeypatch.setenv("TILES_CHECK", "0")
    name, _, transposed = case.partition(", ")
    arrays = [normal(*shape) for shape in SHAPES[case]]
    arrays = [np.ascontiguousarray(x.T).T if transposed and n else x for n, x in enumerate(arrays)]
    kernel = fuse.kernel(getattr(operators, name).definition)
    assert "BLOCKS = 2, 2, 4, 8, " in kernel.source(*arrays)
    compare(kernel, arrays, kernel.run(*arrays))


def test_when():
    """Pairs are used for several waves with hardly a block without a peer, and not for softmax partials."""
    assert choose_schedule(32, 6144, 1, 132).blocks == 2 and choose_schedule(4, 6144, 1, 132).blocks == 1
    assert choose_schedule(LONE - 1, 6144, 1, 132).blocks == 1 and choose_schedule(LONE + 1, 6144, 1, 132).blocks == 2
    assert choose_schedule(32, 6144, 1, 132, pairs=False).blocks == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gated_mlp", "gated_mlp_down"])
def test_on_the_card(name):
    """Several waves, the last block without a peer; and gradients with three results of one kernel."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    rows = 128 * (LONE + 1) - 60
    shapes = [(rows, 72), (72, 1000), (72, 1000), (1000, 72)][: 4 if name == "gated_mlp_down" else 3]
    kernel, arrays = fuse.kernel(getattr(operators, name).definition), [normal(*shape) for shape in shapes]
    dy = normal(rows, 72 if name == "gated_mlp_down" else 1000)
    actual, of_gradient = kernel(*map(to_torch, arrays)), kernel.gradient(*map(to_torch, (*arrays, dy)))
    torch.cuda.synchronize()
    compare(kernel, arrays, to_numpy(actual))
    for mine, expected in zip(of_gradient, kernel.gradient(*arrays, dy)):
        assert (
            np.abs(to_numpy(mine).astype(float) - expected.astype(float)).max() < 2**-5 * np.abs(expected.astype(float)).max()
        )
