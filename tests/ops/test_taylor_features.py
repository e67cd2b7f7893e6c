"""ops/for_attention/taylor_features.py: features whose products are the Taylor series of exp, to the second order."""

import numpy as np
import pytest
from numba import cuda

from ops import load, store, taylor, taylor_gradients
from ops.for_attention.taylor_features import FEATURES
from tiles import bf16, fp16, fp32, rt
from tiles.testing import EPS, blank, close, wide


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_taylor(run, sample, dtype):
    """Every feature is one rounded product; the features of two rows multiply to 1 + x + x ** 2 / 2."""
    X = rt(16, 16, dtype)

    @cuda.jit
    def body(x, y, queries, keys):
        store(queries, taylor(load(x, X, (0, 0)), 1.0), (0, 0))
        store(keys, taylor(load(y, X, (0, 0)), 0.5), (0, 0))

    x, y = sample((16, 16), dtype), sample((16, 16), dtype)
    queries, keys = blank((16, FEATURES), dtype), blank((16, FEATURES), dtype)
    run(body, x, y, queries, keys)
    for features, inputs, squares in ((queries, wide(x), 1), (keys, wide(y), 0.5)):
        want = np.concatenate([inputs * np.roll(inputs, -d, axis=1) for d in range(9)] + [inputs], axis=1)
        want[:, :16] *= squares
        want[:, 136:144] = np.eye(8)[0]
        close(features, want, ulp=0.5)
    s = wide(x) @ wide(y).T
    size = 1 + np.abs(wide(x)) @ np.abs(wide(y)).T + (np.abs(wide(x)) @ np.abs(wide(y)).T) ** 2 / 2
    assert (np.abs(wide(queries) @ wide(keys).T - (1 + s + s**2 / 2)) <= EPS[dtype] * size).all()


@pytest.mark.parametrize(("dtype", "squares"), [(bf16, 1.0), (fp16, 0.5)])
def test_taylor_gradients(run, sample, dtype, squares):
    """The derivative of sum(df * taylor(x)), but for the 1 and what is no feature."""

    @cuda.jit
    def body(x, df, dx):
        gradients = load(df, rt(16, FEATURES, dtype), (0, 0))
        store(dx, taylor_gradients(gradients, load(x, rt(16, 16, dtype), (0, 0)), squares), (0, 0))

    x, df, dx = sample((16, 16), dtype), sample((16, FEATURES), dtype), blank((16, 16), fp32)
    run(body, x, df, dx)
    rows, gradients = wide(x), wide(df)
    want, size = gradients[:, 144:].copy(), np.abs(gradients[:, 144:])
    for d in range(9):
        for i in range(16 if d < 8 else 8):
            factor = squares if d == 0 else 1
            for one, other in ((i, (i + d) % 16), ((i + d) % 16, i)):
                want[:, one] += factor * gradients[:, 16 * d + i] * rows[:, other]
                size[:, one] += np.abs(factor * gradients[:, 16 * d + i] * rows[:, other])
    assert (np.abs(wide(dx) - want) <= 20 * EPS[fp32] * size).all()


@pytest.mark.parametrize("bad", [rt(16, 16, fp32), rt(16, 32, bf16), rt(16, 16, bf16, "col")])
def test_what_it_takes(bad):
    from tiles.op import OPS

    with pytest.raises(TypeError, match=r"taylor: takes a 2-byte rt\(16, 16\) in row layout and a number, got"):
        OPS[taylor].type(bad, 1.0)
