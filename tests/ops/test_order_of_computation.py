"""ops/elementwise/order_of_computation.py: a tile that is computed before what follows."""

import numpy as np
import pytest
from numba import cuda

from ops import compute_now, load, store
from tiles import bf16, fp32, rt
from tiles.testing import blank


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_compute_now(run, sample, dtype):
    """Tiles and vectors are what they were."""
    W, VEC = rt(16, 32, dtype), rt(16, 32, fp32).row_vec

    @cuda.jit
    def body(x, factors, out):
        store(out, fp32(compute_now(load(x, W, (0, 0)))) * compute_now(load(factors, VEC, (0,))), (0, 0))

    x, factors, out = sample((16, 32), dtype), sample(32), blank((16, 32))
    run(body, x, factors, out)
    assert (out == x.astype(np.float32) * factors).all()
