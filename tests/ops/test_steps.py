"""ops/matmul/steps.py: products along k of tiles from rings; warpgroup.send by several shared tiles in turn."""

import numpy as np
import pytest
from numba import cuda

from ops import subtile, warpgroup
from tiles import Hazard, bf16, ring, rt, shared, st, tensor
from tiles.interpreter import interpret
from tiles.testing import blank

STEPS, PRODUCER, ROWS = 5, 2, warpgroup.ROWS
X, S, PART = st(128, 64, bf16), st(64, 16, bf16), rt(16, 16, bf16)


def multiplying(form):
    """A kernel, y = x @ w or x @ w.T by two consumers, its tile of w, and its shared memory."""
    W = st(64, 32, bf16) if form == "AB" else st(32, 64, bf16)
    readers = PRODUCER * warpgroup.WARPGROUP
    smem = shared(x=ring(X, 2, readers), w=ring(W, 2, readers))
    first, step, turned = getattr(warpgroup, f"mm_{form}"), getattr(warpgroup, f"step_{form}"), form == "ABt"

    @cuda.jit
    def body(gX, gW, y):
        x, w = smem.open()
        wg = warpgroup.id()
        if wg == PRODUCER:
            for i in range(STEPS):
                x.fill(i, gX, (0, i))
                w.fill(i, gW, (0, i) if turned else (i, 0))
        else:
            acc = first(subtile(x.wait(0), ROWS, wg), w.wait(0))
            for i in range(1, STEPS):
                acc = step(acc, x, w, i, wg)
            warpgroup.store(y, warpgroup.finish(acc, x, w, STEPS - 1), (ROWS * wg, 0))

    return body, W, smem


@pytest.mark.parametrize("form", ["AB", "ABt"])
def test_a_product_through_rings(run, sample, form):
    body, W, smem = multiplying(form)
    x, w, y = sample((128, 64 * STEPS), bf16), sample((64 * STEPS, 32), bf16), blank((128, 32))
    lying = np.ascontiguousarray(w.T) if form == "ABt" else w
    run(body, tensor(x, X), tensor(lying, W), y, warps=4 * (PRODUCER + 1), shared=smem)
    np.testing.assert_allclose(y, x.astype(float) @ w.astype(float), rtol=1e-5, atol=1e-4)


def sending(newer):
    """A kernel that sends by three shared tiles in turn, and its shared memory."""
    smem = shared(a=S, b=S, c=S)

    @cuda.jit
    def body(x, y):
        a, b, c = smem.open()
        value = warpgroup.load(x, PART, (0, 0))
        for i in range(3):
            warpgroup.send(y, (i, 0), a, value, newer=newer)
            warpgroup.send(y, (i, 1), b, value, newer=newer)
            warpgroup.send(y, (i, 2), c, value, newer=newer)
        warpgroup.store_wait()

    return body, smem


@pytest.mark.parametrize("newer", [0, 2])
def test_what_is_sent_by_tiles_in_turn(run, sample, newer):
    body, smem = sending(newer)
    x, y = sample((64, 16), bf16), blank((192, 48), bf16)
    run(body, x, tensor(y, S), warps=4, shared=smem)
    assert (y == np.tile(x, (3, 3))).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_tile_is_written_too_soon(seed):
    """The store waits only for the previous one, while three are in flight."""
    body, smem = sending(3)
    with pytest.raises(Hazard, match="nothing orders this after the TMA store"):
        interpret(body, (1, 1, 1), 128, [np.zeros((64, 16), bf16.np), tensor(np.zeros((192, 48), bf16.np), S)], smem, seed)
