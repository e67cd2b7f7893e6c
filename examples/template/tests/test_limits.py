import numpy as np
import pytest
from my_kernels import clamp
from numba import cuda

from ops import load, store
from tiles import bf16, fp16, fp32, rt
from tiles.testing import blank, broken, close, meaning, pairs, ptx, wide


@pytest.mark.parametrize(("dtype", "rows", "cols"), pairs([fp32, bf16, fp16], [16, 32], [16, 64]))
def test_clamp(run, sample, dtype, rows, cols):
    T = rt(rows, cols, dtype)

    @cuda.jit
    def body(x, y, low, high):
        store(y, clamp(load(x, T, (0, 0)), low, high), (0, 0))

    x, y = sample((rows, cols), dtype), blank((rows, cols), dtype)
    x[0, :3] = np.inf, -np.inf, np.nan
    run(body, x, y, -0.5, 0.75)
    close(y, np.fmin(np.fmax(wide(x), -0.5), 0.75))


@pytest.mark.parametrize("run", [meaning, ptx])
def test_other_arguments_are_refused(run):
    @cuda.jit
    def body(x):
        clamp(0.0, 1.0, 2.0)

    with pytest.raises(TypeError, match="clamp: takes a register tile and two numbers, got float"):
        run(body, blank(1))


@pytest.mark.parametrize(
    ("run", "old", "new"),
    [
        (meaning, "np.fmax(tile.array, low)", "tile.array"),
        (ptx, "fmin(b, fmax(b, e, least), most)", "fmax(b, e, least)"),
    ],
)
def test_a_fault_is_noticed(run, sample, old, new):
    with broken("my_kernels.limits", old, new):
        test_clamp(run, sample, fp32, 16, 16)
