"""ops/warpgroup.py: TMA stores and barriers. (Products: test_wgmma.py.)"""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, raw, row_sum, store, warpgroup, zeros
from tiles import bf16, fp16, fp32, ring, rt, st, tensor
from tiles.testing import EPS, blank, close, gpu, guarded, meaning, pairs, ptx, wide

TMA = pairs([bf16, fp32, fp16, bf16], [128, 64, 32], [(37, 72), (64, 64), (130, 8), (9, 200), (70, 4), (1, 136)])


@pytest.mark.parametrize(("dtype", "width", "shape"), [case for case in TMA if case[2][1] * case[0].itemsize % 16 == 0])
def test_tma_load_and_store_ragged(run, sample, dtype, width, shape):
    """Tiles cross every edge: loads give zeros outside, and stores write nothing there. The array's columns are a multiple of
    16 bytes."""
    S, T = st(64, 64, dtype, width), rt(16, 64, dtype)
    smem = tiles.shared(x=ring(S, 2), y=S)
    down, right = -(-shape[0] // 64), -(-shape[1] // 64)

    @cuda.jit
    def body(x, seen, y):
        a, b = smem.open()
        for i in range(down):
            for j in range(right):
                n = i * right + j
                a.fill(n, x, (1, i, j))
                tile = warpgroup.load(a.wait(n), T)
                a.release(n)
                warpgroup.store(seen, tile, (64 * i, 64 * j))
                warpgroup.store(b, tile)
                warpgroup.tma_store(y, (2, i, j), b)
                warpgroup.store_wait()
                warpgroup.sync()

    room = 16 // dtype.itemsize  # a tensor map's strides and address are multiples of 16 bytes
    x = sample((3, *shape), dtype)
    root = np.full((4, shape[0] + 1, shape[1] + 2 * room), 7, dtype.np)
    y, seen = root[:, : shape[0], room:-room], blank((64 * down, 64 * right), dtype)
    run(body, tensor(x, S), seen, tensor(y, S), warps=4, shared=smem)
    assert (seen[: shape[0], : shape[1]] == x[1]).all()
    assert (seen[shape[0] :] == 0).all() and (seen[:, shape[1] :] == 0).all()
    assert (y[2] == x[1]).all()
    y[2] = 7
    assert (root == 7).all(), "memory around the array was written"


RAGGED = pairs([bf16, fp32, fp16], [128, 64, 32], [(37, 70), (64, 61), (130, 10), (9, 199)])


@pytest.mark.parametrize(("dtype", "width", "shape"), RAGGED)
def test_tma_load_of_part_of_a_chunk(run, sample, dtype, width, shape):
    """Columns end inside 16 bytes: the memory after them is not loaded."""
    S, T = st(64, 64, dtype, width), rt(16, 64, dtype)
    smem = tiles.shared(x=ring(S, 2))
    down, right = -(-shape[0] // 64), -(-shape[1] // 64)

    @cuda.jit
    def body(x, seen):
        (a,) = smem.open()
        for i in range(down):
            for j in range(right):
                n = i * right + j
                a.fill(n, x, (1, i, j))
                warpgroup.store(seen, warpgroup.load(a.wait(n), T), (64 * i, 64 * j))
                a.release(n)

    root = np.full((3, shape[0], -(-shape[1] * dtype.itemsize // 16) * 16 // dtype.itemsize), np.nan, dtype.np)
    x, seen = root[:, :, : shape[1]], blank((64 * down, 64 * right), dtype)
    x[...] = sample(x.shape, dtype)
    run(body, tensor(x, S), seen, warps=4, shared=smem)
    assert (seen[: shape[0], : shape[1]] == x[1]).all()
    assert (seen[shape[0] :] == 0).all() and (seen[:, shape[1] :] == 0).all()


@pytest.mark.parametrize("backend", [meaning, ptx, pytest.param(gpu, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "cols"), [(bf16, 70), (fp16, 4), (fp32, 63)])
def test_tma_store_to_part_of_a_chunk_is_refused(backend, dtype, cols):
    """TMA writes 16 bytes at a time, and would overwrite memory after the array's columns."""
    S, T = st(64, 64, dtype), rt(16, 64, dtype)
    smem = tiles.shared(y=S)

    def body(y):
        (b,) = smem.open()
        warpgroup.store(b, zeros(T))
        warpgroup.tma_store(y, (0, 0), b)
        warpgroup.store_wait()

    root = np.full((64, 80), 7, dtype.np)
    words = (
        "tma_store: TMA writes 16 bytes at a time, and would write past columns that are not a multiple of that, the tile's "
    )
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(body), tensor(root[:, :cols], S), warps=4, shared=smem)
    message = str(error.value)
    assert message.startswith(words + "own values up to the next one: gl(st(64, 64")
    assert "use warpgroup.store, or an array with room" in message
    assert (root == 7).all()


def test_a_raw_tma_store_to_part_of_a_chunk():
    """The interpreter stops the unguarded instruction; a GPU would write past the columns."""
    S = st(16, 64, bf16)
    smem = tiles.shared(y=S)

    @cuda.jit
    def body(y):
        (b,) = smem.open()
        store(b, zeros(rt_of_s))
        raw.fence_async()
        raw.tma_store(y, (0, 0), b)
        raw.store_wait()

    rt_of_s = rt(16, 64, bf16)
    with pytest.raises(tiles.Hazard, match="TMA writes 16 bytes at a time, and would write past the columns of gl"):
        meaning(body, tensor(np.zeros((16, 72), bf16.np)[:, :70], S), shared=smem)


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_an_array_is_no_tensor(backend):
    """TMA takes tensors; for a plain array the message gives the call that makes one."""
    S = st(64, 64, bf16)
    smem = tiles.shared(x=ring(S, 1), y=S)

    def filled(x):
        a, _ = smem.open()
        a.fill(0, x, (0, 0))

    def stored(x):
        _, b = smem.open()
        warpgroup.tma_store(x, (0, 0), b)

    def filled_from_a_tile(x):
        a, b = smem.open()
        a.fill(0, b, (0, 0))

    words = "TMA must be told how the array is cut: pass tiles.tensor(array, tile) to the launch, got array(float32, 2d, A)"
    for kernel, message in {
        filled: f"fill: {words}",
        stored: f"tma_store: {words}",
        filled_from_a_tile: "fill: takes a tiles.tensor, got st(64, 64, bf16)",
    }.items():
        with pytest.raises(TypeError) as error:
            backend(cuda.jit(kernel), np.zeros((64, 64), np.float32), warps=4, shared=smem)
        assert str(error.value).startswith(message)


def test_tma_along_any_axes(run, sample):
    """(B, S, H, D) as in attention: rows along axis 1, columns along the last, the others indexed."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=ring(S, 1), y=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        a.fill(0, x, (1, 1, 2))
        warpgroup.store(b, warpgroup.load(a.wait(0), T) * 2.0)
        warpgroup.tma_store(y, (0, 0, 1), b)
        warpgroup.store_wait()

    x, y = sample((2, 100, 3, 72), bf16), blank((1, 50, 2, 64), bf16)
    run(body, tensor(x, S, rows=1), tensor(y, S, rows=1), warps=4, shared=smem)
    want = np.zeros((50, 64), np.float32)
    want[:36] = 2 * x[1, 64:100, 2, :64].astype(np.float32)
    assert (y[0, :, 1] == want).all() and np.isnan(y[0, :, 0].astype(np.float32)).all()


def test_producer_and_consumer(run, sample):
    """A producer warpgroup fills a ring, two consumers with more registers sum its tiles' rows."""
    S, T, count = st(64, 64, bf16), rt(16, 64, fp32), 7
    smem = tiles.shared(x=ring(S, 3, readers=8))

    @cuda.jit(launch_bounds=(384, 1))
    def body(x, out):
        (a,) = smem.open()
        wg = warpgroup.id()
        if wg == 2:
            warpgroup.release_registers(24)
            for j in range(count):
                a.fill(j, x, (j,))
        else:
            warpgroup.claim_registers(240)
            total = zeros(T.col_vec)
            for j in range(count):
                total += row_sum(warpgroup.load(a.wait(j), T))
                a.release(j)
            warpgroup.store(out, total, (wg, 0))

    x, out = sample((64 * count, 64), bf16), blank((2, 64))
    run(body, tensor(x, S), out, warps=12, shared=smem)
    X = wide(x).reshape(count, 64, 64)
    close(out, [X.sum(axis=(0, 2))] * 2, atol=np.abs(X).sum(axis=(0, 2)) * EPS[fp32] * 8)


def test_two_warpgroups_meet_apart(run, sample):
    """`sync` is each warpgroup's own: they pass through it different numbers of times."""
    S, T, whole = st(64, 64, fp16), rt(16, 64, fp16), rt(64, 64, fp16)
    smem = tiles.shared(a=S, b=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        if warpgroup.id() == 0:
            warpgroup.store(a, warpgroup.load(x, T, (0, 0)))
            warpgroup.sync()
            store_reversed(a, y, 0)
        else:
            for _ in range(3):
                warpgroup.store(b, warpgroup.load(x, T, (64, 0)))
                warpgroup.sync()
            store_reversed(b, y, 64)

    @tiles.inlined
    def store_reversed(tile, y, row):
        if cuda.threadIdx.x % 128 < 32:
            store(y, load(tile, whole), (row, 0))

    x, (y, check) = sample((128, 64), fp16), guarded((128, 64), fp16)
    run(body, x, y, warps=8, shared=smem)
    check()
    assert (y == x).all()
