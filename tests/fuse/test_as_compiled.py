"""Fused kernels as they are compiled for Hopper, on the CPU: each template once."""

import numpy as np
import pytest

import fuse
import fuse.operators as operators
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
    "rows folded, to fp8": (operators.residual_rms_norm_quantise, (2, 1040), (2, 1040), (1040,)),
    "rows folded": (operators.normalised_step, (2, 1040), (2, 1040), (1040,)),
    "rows folded, to a number": (fuse.kernel(lambda x: (fuse.max(x), fuse.mean(x))), (3, 1040)),
    "rows in registers, of which one element is picked": (
        fuse.kernel(lambda x, index: fuse.log(fuse.sum(fuse.exp(x))) - fuse.pick(x, index)),
        (3, 136),
        TARGETS,
    ),
    "rows read again": (fuse.kernel(lambda x: fuse.softmax(x)), (2, 2056)),
}


@pytest.mark.parametrize("case", CASES)
def test_as_compiled(case):
    kernel, *shapes = CASES[case]
    arrays = [matrix(*shape) if shape not in INTEGERS else INTEGERS[shape] for shape in shapes]
    compare(kernel, arrays, ptx(kernel.run, *arrays))
