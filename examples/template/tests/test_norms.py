import numpy as np
import pytest
from my_kernels import rms_norm

from tiles import bf16, fp16
from tiles.testing import assert_close, broken, guarded, meaning, pairs, wide


def formula(x, g, eps):
    """The RMS norm in the dtype of the inputs: in float64 the reference, in others, rounded after each step, the yardstick."""
    return g * x / np.sqrt(np.mean(x * x, axis=1, keepdims=True, dtype=x.dtype) + x.dtype.type(eps))


@pytest.mark.parametrize(("dtype", "shape"), pairs([bf16, fp16], [(16, 64), (17, 61), (1, 130)]))
def test_rms_norm(run, sample, dtype, shape):
    x, g, (y, check) = sample(shape, dtype), sample(shape[1], dtype), guarded(shape, dtype)
    run(rms_norm, x, g, y, eps=0.1)
    check()
    assert_close(y, formula(wide(x), wide(g), 0.1), formula(x, g, 0.1))


def test_shapes_must_fit(sample):
    x = sample((4, 8))
    with pytest.raises(ValueError, match=r"got \(4, 8\), \(4,\) and \(4, 8\)"):
        rms_norm(x, sample(4), x)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("squares / cols", "squares / T.cols"),
        ("cols + eps", "cols - eps"),
        (" * load(g, T.row_vec, (col,))", ""),
        ("squares = squares + row_sum", "squares = row_sum"),
        ("-(-x.shape[0] // T.rows)", "max(x.shape[0] // T.rows, 1)"),
    ],
)
def test_a_fault_is_noticed(sample, old, new):
    with broken("my_kernels.norms", old, new):
        test_rms_norm(meaning, sample, bf16, (17, 130))
