"""Fused kernels as compiled for Hopper, run on the CPU: each template once."""

import numpy as np
import pytest

import fuse
import fuse.operators as operators
import tiles
from fuse.writing import module_text
from tiles import bf16
from tiles.testing import ptx

from references import compare  # isort: skip


def matrix(*shape):
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / shape[0] ** 0.25).astype(bf16.np)


SEED, TARGETS = (1,), (3,)
INTEGERS = {SEED: np.array([2**40 + 3]), TARGETS: np.array([-1, 1, 0])}
CASES = {
    "few rows, sums, a vector": (operators.rms_norm_linear, (5, 72), (72,), (72, 40)),
    "few rows, a narrow product": (operators.lora_linear, (3, 72), (72, 40), (72, 8), (8, 40)),
    "few rows of a batch": (operators.expert_linear, (2, 5, 72), (2, 72, 40)),
    "many rows, two products": (operators.gated_mlp, (70, 72), (72, 40), (72, 40)),
    "many rows, one step more; few columns": (operators.lora_linear, (66, 72), (72, 40), (72, 8), (8, 40)),
    "many rows, folded": (operators.linear_cross_entropy, (3, 72), (72, 136), TARGETS),
    "few rows, of which each has its own": (
        operators.lora_linear_by_index,
        (3, 72),
        (72, 40),
        (2, 16, 72),
        (2, 16, 40),
        TARGETS,
    ),
    "rows in registers": (operators.residual_rms_norm, (3, 264), (3, 264), (264,)),
    "rows in registers, some dropped": (operators.dropout_residual_layer_norm, *[(3, 136)] * 2, (136,), (136,), SEED),
    "rows folded, to fp8": (operators.residual_rms_norm_quantise, (2, 1088), (2, 1088), (1088,)),
    "rows folded": (operators.normalised_step, (2, 1088), (2, 1088), (1088,)),
    "rows folded, to a number": (fuse.kernel(lambda x: (fuse.max(x), fuse.mean(x))), (3, 1088)),
    "rows in registers, of which one element is picked": (
        fuse.kernel(lambda x, index: fuse.log(fuse.sum(fuse.exp(x))) - fuse.pick(x, index)),
        (3, 136),
        TARGETS,
    ),
    "rows read again": (fuse.kernel(lambda x: fuse.softmax(x)), (2, 2056)),
    "rows of a warp": (operators.residual_rms_norm, (70, 96), (70, 96), (96,)),
    "rows of a warp, of which one element is picked": (
        fuse.kernel(lambda x, index: fuse.log(fuse.sum(fuse.exp(x))) - fuse.pick(x, index)),
        (3, 64),
        TARGETS,
    ),
    "rows of a block, read again": (fuse.kernel(lambda x, g: fuse.softmax(x * g)), (2, 16416), (16416,)),
    "rows of a block, of which one element is picked": (
        fuse.kernel(lambda x, index: fuse.max(x) - fuse.pick(x, index)),
        (3, 16416),
        TARGETS,
    ),
    "in pieces, with vectors and a number a row": (fuse.kernel(lambda x, c, g: x * c + g), (3, 1024), (3, 1), (1024,)),
}


# others of the same template, or of its parts
AGAIN = {
    "few rows, a narrow product",
    "many rows, one step more; few columns",
    "rows in registers",
    "rows folded",
    "rows read again",
    "rows of a block, of which one element is picked",
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.release] * (name in AGAIN)) for name in CASES])
def test_as_compiled(case):
    kernel, *shapes = CASES[case]
    arrays = [matrix(*shape) if shape not in INTEGERS else INTEGERS[shape] for shape in shapes]
    compare(kernel, arrays, ptx(kernel.run, *arrays))


@pytest.mark.release
def test_sums_over_rows():
    """The partial sums of blocks, and their total, agree with the interpreter's."""
    gradient, vector = operators.residual_layer_norm.gradient, matrix(512)
    arrays = matrix(3, 512), matrix(3, 512), vector, vector, matrix(3, 512), matrix(3, 512)
    for actual, want in zip(ptx(gradient.run, *arrays), gradient.run(*arrays), strict=True):
        assert np.abs(actual.astype(float) - want.astype(float)).max() <= 2**-7 * np.abs(want.astype(float)).max()


def test_parts_of_keys_are_joined():
    kernel = fuse.kernel(lambda q, k, v: fuse.attention(q, k, v, 0.125))
    source = kernel.source(*[np.zeros(shape, bf16.np) for shape in ((2, 20, 40), (2, 1024, 40), (2, 1024, 24))])
    join = module_text.load(source, "join").fused
    rng = np.random.default_rng(0)
    parts, lse = rng.standard_normal((3, 2, 20, 24)).astype(np.float32), rng.standard_normal((3, 2, 20)).astype(np.float32)
    y = np.zeros((2, 20, 24), bf16.np)
    ptx(tiles.launch(join, (2, 2), 32), parts, lse, y)
    weights = np.exp(lse)[..., None]
    assert np.abs(y.astype(float) - (parts * weights).sum(0) / weights.sum(0)).max() < 2**-6
