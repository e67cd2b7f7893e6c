"""ops/for_attention/taylor_features.py: features whose products are the Taylor series of exp, to the second order."""

import numpy as np
import pytest
from numba import cuda

from ops import load, store, taylor
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


@pytest.mark.parametrize("bad", [rt(16, 16, fp32), rt(16, 32, bf16), rt(16, 16, bf16, "col")])
def test_what_it_takes(bad):
    from tiles.op import OPS

    with pytest.raises(TypeError, match=r"taylor: takes a 2-byte rt\(16, 16\) in row layout and a number, got"):
        OPS[taylor].type(bad, 1.0)
