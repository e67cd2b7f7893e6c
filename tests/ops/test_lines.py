"""ops/memory/lines.py: rows that the lanes of a warp have run by run."""

import re

import numpy as np
import pytest
from numba import cuda

import ops
from ops import load, sigmoid, store, tile_sum, zeros
from tiles import bf16, fp16, fp32, rt
from tiles.interpreter import Hazard
from tiles.testing import EPS, blank, close, meaning, pairs, ptx, wide


@pytest.mark.parametrize(("cols", "dtype", "aligned"), pairs([64, 128, 256], [bf16, fp16, fp32], [True, False, None]), ids=str)
def test_rows_of_an_array(run, sample, cols, dtype, aligned):
    """Lines that end inside the array, or outside it; rows outside it give 0, and are not stored."""
    aligned = aligned if cols * dtype.itemsize <= 512 else False
    L = rt(1, cols, dtype, "line")

    @cuda.jit
    def body(x, y, sums):
        for t in range(-1, 4):
            line = load(x, L, (1, t, 64), 1, 2, aligned)
            store(y, line, (0, t, 64), 1, 2, aligned)
            if 0 <= t < 3:
                store(sums, fp32(line) + zeros(rt(1, cols, fp32, "line")), (t, 0))

    x, y, sums = sample((2, 3, 144), dtype), blank((1, 2, 144), dtype), blank((3, cols))
    run(body, x, y, sums)
    expected = np.zeros((3, cols))
    expected[:, : min(cols, 80)] = wide(x)[1, :, 64 : 64 + cols]
    close(sums, expected)
    close(y[0, :, 64 : 64 + cols], expected[:2, :80][:, : min(cols, 80)])
    assert np.isnan(wide(y)[..., :64]).all()


def test_columns_along_another_axis(run, sample):
    """Element by element: what lies along the first axis, from any dtype."""
    L = rt(1, 64, fp32, "line")

    @cuda.jit
    def body(x, y):
        store(y, load(x, L, (3, 1), 1, 0, False) * 2.0, (0, -2), 0, 1, False)

    x, y = sample((40, 2), bf16), blank((1, 30))
    run(body, x, y)
    close(y[0], 2 * wide(x)[5:35, 1])


def test_maps_and_the_sum_of_a_line(run, sample):
    L = rt(1, 128, fp32, "line")

    @cuda.jit
    def body(x, y, total):
        line = load(x, L, (0, 0))
        y_line = bf16(sigmoid(line) * line)
        store(y, y_line, (0, 0), aligned=True)
        total[0] = tile_sum(line)

    x, y, total = sample((1, 128)), blank((1, 128), bf16), blank(1)
    run(body, x, y, total)
    X = wide(x)
    close(y, X / (1 + np.exp(-X)), ulp=0.51, atol=1e-6)
    close(total, X.sum(), atol=np.abs(X).sum() * EPS[fp32] * 4)


def test_a_broken_promise():
    L = rt(1, 64, bf16, "line")

    @cuda.jit
    def body(x, y):
        store(y, load(x, L, (0, 0), aligned=True), (0, 0), aligned=True)

    x = np.zeros((4, 72), bf16.np)
    for wrong in x[:, 1:65], x[::-1], np.zeros((4, 65), bf16.np)[:, :64]:
        with pytest.raises(Hazard, match="aligned load: "):
            meaning(body, wrong, x.copy())


LINE, OTHER = rt(1, 64, bf16, "line"), rt(16, 64, bf16)


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize(("spec", "dtype", "words"), [
    (rt(1, 64, fp32, "line"), bf16, "load: aligned=True takes lines of the array's dtype of which a lane has 4, 8, 16 bytes"),
    (rt(1, 192, bf16, "line"), bf16, "load: aligned=True takes lines of the array's dtype of which a lane has 4, 8, 16 bytes"),
])  # fmt: skip
def test_what_goes_at_once(backend, spec, dtype, words):
    @cuda.jit
    def body(x, y):
        store(y, load(x, spec, (0, 0), aligned=True), (0, 0))

    with pytest.raises(TypeError, match=re.escape(words)):
        backend(body, blank((1, 256), dtype), blank((1, 256), spec.dtype))


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("name", ["row_sum", "col_max", "lane_sum"])
def test_no_vectors(backend, name):
    reduce = getattr(ops, name)

    @cuda.jit
    def body(x, y):
        store(y, reduce(load(x, LINE, (0, 0))), (0,))

    with pytest.raises(TypeError, match="is a line, which has no vectors"):
        backend(body, blank((1, 64), bf16), blank(64))
