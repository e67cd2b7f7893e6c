"""ops/memory/lane_order.py: tiles that are added to global memory in the order in which their lanes hold them."""

import numpy as np
import pytest
from banks import ways
from numba import cuda

import tiles
from ops import add_fragment, load, load_fragment, store, store_wait, tma_add, warpgroup, zeros
from tiles import Hazard, bf16, fp32, ring, rt, st, tensor
from tiles.testing import blank, meaning, ptx


@pytest.mark.parametrize(("shape", "together"), [((16, 16), 1), ((16, 64), 1), ((32, 48), 1), ((16, 64), 4)])
def test_what_was_added_comes_back(run, sample, shape, together):
    """Two warps add twice each to the second of three tiles; the others stay unchanged."""
    T, size = rt(*shape, fp32), shape[0] * shape[1]

    @cuda.jit
    def add(x, sums):
        add_fragment(sums, load(x, T, (0, 0)), (1, 0), together)
        add_fragment(sums, load(x, T, (0, 0)), (1, 0), together)

    @cuda.jit
    def take(sums, y):
        store(y, load_fragment(sums, T, (1, 0), together), (0, 0))

    x, sums, y = np.round(sample(shape) * 4), np.zeros((3, size), np.float32), blank(shape)
    run(add, x, sums, warps=2)
    assert not sums[0].any() and not sums[2].any()
    assert (np.sort(sums[1]) == np.sort(4 * x.ravel())).all()
    run(take, sums, y)
    assert (y == 4 * x).all()


@pytest.mark.parametrize("cols", [16, 64, 80])
def test_by_way_of_a_shared_tile(run, sample, cols):
    """TMA adds four warps' tiles twice, and they are loaded again; lanes have no bank conflicts."""
    T, S = rt(16, cols, fp32), st(2 * cols, 32, fp32)
    smem = tiles.shared(part=ring(S, 1, 1, 4))

    @cuda.jit
    def add(x, sums):
        (part,) = smem.open()
        if warpgroup.id() == 0:
            for j in range(2):
                warpgroup.store_fragment(part.claim(j), warpgroup.load(x, T, (0, 0)))
                part.publish(j)
        elif warpgroup.rank() == 0:
            for j in range(2):
                tma_add(sums, (1,), part.wait(j))
                store_wait()
                part.release(j)

    @cuda.jit
    def take(sums, y):
        for w in range(4):
            store(y, load_fragment(sums, T, (2 * cols + w * cols // 2, 0), 4), (16 * w, 0))

    x, sums, y = np.round(sample((64, cols)) * 4), np.zeros((6 * cols, 32), np.float32), blank((64, cols))
    run(add, x, tensor(sums, S), warps=8, shared=smem)
    assert not sums[: 2 * cols].any() and not sums[4 * cols :].any()
    run(take, sums, y)
    assert (y == 2 * x).all()
    counts = ptx(add, x, tensor(sums, S), warps=8, shared=smem, arch="sm_90a")
    assert ways(counts, "st.shared.v4") == {1}


def test_what_is_refused():
    T = rt(16, 16, fp32)

    @cuda.jit
    def outside(sums):
        add_fragment(sums, load_fragment(sums, T, (0, 0)), (0, 1))

    with pytest.raises(Hazard, match="out of range"):
        meaning(outside, np.zeros((1, 256), np.float32))
    with pytest.raises(Hazard, match="C-ordered"):
        meaning(outside, np.zeros((2, 512), np.float32)[:, ::2])


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("adds", [False, True])
def test_four_together_lie_at_multiples_of_16_bytes(backend, adds):
    T = rt(16, 16, fp32)

    @cuda.jit
    def add_four(sums, first):
        add_fragment(sums, zeros(T), (first,), 4)

    @cuda.jit
    def load_four(sums, y, first):
        store(y, load_fragment(sums, T, (first,), 4), (0, 0))

    sums, y = np.zeros(512, np.float32), np.zeros((16, 16), np.float32)
    kernel, arrays = (add_four, (sums,)) if adds else (load_four, (sums, y))
    backend(kernel, *arrays, 4)
    with pytest.raises(Hazard, match="no multiple") as actual:
        backend(kernel, *arrays, 6)
    assert actual.value.kind == "bounds"

    @cuda.jit
    def rounded(sums):
        add_fragment(sums, bf16(load_fragment(sums, T, (0, 0))), (0, 0))

    with pytest.raises(TypeError, match="add_fragment: takes a register tile of fp32"):
        meaning(rounded, np.zeros((1, 256), np.float32))

    @cuda.jit
    def pairs(sums):
        add_fragment(sums, load_fragment(sums, T, (0, 0)), (0, 0), 2)

    with pytest.raises(TypeError, match="add_fragment: 1 or 4 of a lane's elements"):
        meaning(pairs, np.zeros((1, 256), np.float32))
