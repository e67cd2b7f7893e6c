"""Rings that warps write: claimed, stored, published, read by ordinary loads and by mmas, and what is wrong in their use."""

import numpy as np
import pytest
from broken import SEEDS, Cases, check
from numba import cuda

import tiles
from ops import load, store, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st, sv, tensor
from tiles.compiling.compiler import compile_kernel
from tiles.compiling.sass import instructions
from tiles.interpreter import interpret
from tiles.launching.arguments import parameter

S, V = st(64, 64, bf16), sv(64, fp32)
R, IN = rt(16, 64, fp32), rt(16, 64, bf16)
PLAN = shared(x=ring(S, 2, readers=4, writers=4), v=ring(V, 3, readers=4, writers=1))
TILES = 7


@cuda.jit
def handed_on(source, out):
    """Warpgroup 0 stores tiles and, of their first rows, vectors; warpgroup 1 adds x @ x and the vector."""
    x, v = PLAN.open()
    if warpgroup.id() == 0:
        for j in range(TILES):
            part = warpgroup.load(source, IN, (j, 0, 0))
            warpgroup.store(x.claim(j), part)
            x.publish(j)
            if cuda.threadIdx.x < 32:
                store(v.claim(j), load(source, R.row_vec, (j, 0, 0)))
                v.publish(j)
    else:
        for j in range(TILES):
            tile = x.wait(j)
            product = warpgroup.wait(warpgroup.mma_AB(zeros(R), tile, tile))
            first = load(v.wait(j), R.row_vec)
            x.release(j)
            v.release(j)
            warpgroup.store(out, product + first, (j, 0, 0))


def numbers():
    return np.random.default_rng(3).standard_normal((TILES, 64, 64), np.float32).astype(bf16.np)


def wanted(x):
    x = x.astype(np.float64)
    return x @ x + x[:, :1]


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_what_warps_hand_on(seed):
    x, out = numbers(), np.full((TILES, 64, 64), np.nan, np.float32)
    interpret(handed_on, (1, 1, 1), 256, [x, out], PLAN, seed)
    np.testing.assert_allclose(out, wanted(x), atol=1e-4)


@cuda.jit
def written_in_turn(source, out):
    """Two warps store every other vector each, in a ring of three; another warpgroup reads them."""
    _, v = PLAN.open()
    if warpgroup.id() == 0:
        for j in range(cuda.threadIdx.x // 32, TILES if cuda.threadIdx.x < 64 else 0, 2):
            store(v.claim(j), load(source, R.row_vec, (j, 0, 0)))
            v.publish(j)
    else:
        for j in range(TILES):
            first = load(v.wait(j), R.row_vec)
            v.release(j)
            store(out, first, (j, 0, 0))


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_a_tile_of_one_writer_may_be_any_warps(seed):
    """A warp that comes early waits until another one's tile has been read."""
    x, out = numbers(), np.full((TILES, 1, 64), np.nan, np.float32)
    interpret(written_in_turn, (1, 1, 1), 256, [x, out], PLAN, seed)
    np.testing.assert_array_equal(out, x[:, :1].astype(np.float32))


@pytest.mark.gpu
def test_what_warps_hand_on_the_card():
    x, out = numbers(), np.full((TILES, 64, 64), np.nan, np.float32)
    on_device = cuda.to_device(x.view(np.uint16)), cuda.to_device(out)
    source = cuda.cudadrv.devicearray.DeviceNDArray(x.shape, x.strides, x.dtype, gpu_data=on_device[0].gpu_data)
    tiles.launch(handed_on, 1, 256, shared=PLAN)(source, on_device[1])
    np.testing.assert_allclose(on_device[1].copy_to_host(), wanted(x), atol=1e-4)


def test_only_what_tma_writes_again_is_fenced():
    def fences(writers):
        plan = shared(v=ring(sv(64, fp32), 2, readers=1, writers=writers))

        @cuda.jit
        def read(out):
            (v,) = plan.open()
            first = load(v.wait(0), R.row_vec)
            v.release(0)
            store(out, first, (0,))

        code = compile_kernel(read, [parameter("out", np.zeros(64, np.float32)).type], "sm_90a")
        return instructions(code.cubin)["FENCE"]

    assert fences(writers=1) < fences(writers=0)


def test_rules():
    with pytest.raises(ValueError, match="ring: writers must be 0"):
        ring(S, 2, writers=-1)
    assert "4 writers" in str(ring(S, 2, writers=4))


@pytest.mark.parametrize(
    "op, message", [("fill", "warps write this ring"), ("claim", "TMA writes this ring"), ("publish", "TMA writes")]
)
def test_a_ring_is_written_one_way(op, message):
    plan = shared(x=ring(S, 2, writers=4 if op == "fill" else 0))

    @cuda.jit
    def fill(source):
        (x,) = plan.open()
        x.fill(0, source, (0, 0))

    @cuda.jit
    def claim(source):
        (x,) = plan.open()
        x.claim(0)

    @cuda.jit
    def publish(source):
        (x,) = plan.open()
        x.publish(0)

    source = tensor(numbers(), S, 1)
    with pytest.raises(TypeError, match=message):
        interpret({"fill": fill, "claim": claim, "publish": publish}[op], (1, 1, 1), 128, [source], plan)


# ---- broken kernels ------------------------------------------------------------------------------------------------
broken = Cases()
ONE = shared(x=ring(S, 2, readers=4, writers=4))


@broken("phase", "claims tile 2 of ring 'x', and has not published tile 0", range(4), ONE)
def claimed_before_the_last_was_published():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(3):
            warpgroup.store(x.claim(j), zeros(R))  # guilty
    else:
        warpgroup.load(x.wait(0), R)


@broken("phase", "publishes tile 1 of ring 'x', which it has not claimed", range(4), ONE)
def published_unclaimed():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        warpgroup.store(x.claim(0), zeros(R))
        x.publish(1)  # guilty
    else:
        warpgroup.load(x.wait(0), R)


@broken("phase", "claims tile 2 of ring 'x', and the next tile for slot 0 is number 0", range(4), ONE)
def a_tile_left_out():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        x.claim(2)  # guilty
    else:
        warpgroup.load(x.wait(0), R)


LINES = shared(v=ring(V, 2, readers=4, writers=1))


@broken("phase", "claims tile 0 of ring 'v', and the next tile for slot 0 is number 2|the slot for tile 0", range(2), LINES)
def claimed_by_two_warps():
    (v,) = LINES.open()
    if cuda.threadIdx.x < 64:
        store(v.claim(0), zeros(R.row_vec))  # guilty
        v.publish(0)
    elif warpgroup.id() == 1:
        load(v.wait(0), R.row_vec)
        v.release(0)


@broken({"race", "released"}, "tile 0 of ring 'x'", range(8), ONE)
def stored_after_it_was_published():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        tile = x.claim(0)
        x.publish(0)
        warpgroup.store(tile, zeros(R))  # guilty
    else:
        warpgroup.load(x.wait(0), R)  # guilty
        x.release(0)  # guilty


@broken("released", "tile 2 of ring 'x', and nothing orders this after the last release of tile 0", range(4), ONE)
def read_before_it_was_stored():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        for j in range(3):
            tile = x.claim(j)
            if j == 2:
                warpgroup.load(tile, R)  # guilty
            warpgroup.store(tile, zeros(R))
            x.publish(j)
    else:
        for j in range(3):
            warpgroup.load(x.wait(j), R)
            x.release(j)


@broken("deadlock", "3 of 4 writers have published it", range(4, 8), ONE)
def a_writer_that_publishes_nothing():
    (x,) = ONE.open()
    if warpgroup.id() == 0:
        warpgroup.store(x.claim(0), zeros(R))
        if cuda.threadIdx.x >= 32:
            x.publish(0)
    else:
        warpgroup.load(x.wait(0), R)  # guilty


@broken.sweep
def test_broken(case, seed):
    check(case, seed)
