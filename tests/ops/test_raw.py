"""ops/raw.py: the instructions without guards, used as they must be."""

import pytest
from numba import cuda

import tiles
from ops import load, raw, store, subtile, warpgroup
from tiles import barrier, bf16, fp16, fp32, rt, st, tensor
from tiles.testing import blank, pairs


@pytest.mark.parametrize(("dtype", "width"), pairs([bf16, fp32, fp16], [128, 64, 32]))
def test_a_copy_made_of_raw_ops(run, sample, dtype, width):
    """One warp loads by TMA through a bare barrier, twice; a warpgroup doubles; one warp stores by TMA."""
    S, T, N = st(64, 64, dtype, width), rt(16, 64, dtype), 64 * 64 * dtype.itemsize
    smem = tiles.shared(x=S, full=barrier(1))

    @cuda.jit
    def body(x, y):
        tile, full = smem.open()
        for i in range(3):
            if cuda.threadIdx.x < 32:
                raw.expect(full, N)
                raw.tma_load(tile, x, (i, 0), full)
            raw.wait(full, i + 1)
            doubled = warpgroup.load(tile, T) * 2.0
            raw.named_sync(3, 128)
            warpgroup.store(tile, doubled)
            raw.fence_async()
            raw.named_sync(3, 128)
            if cuda.threadIdx.x < 32:
                raw.tma_store(y, (i, 0), tile)
                raw.store_wait()
            raw.named_sync(3, 128)

    x, y = sample((192, 64), dtype), blank((192, 64), dtype)
    run(body, tensor(x, S), tensor(y, S), warps=4, shared=smem)
    assert (y == x * dtype.np.type(2)).all()


def test_copies_of_parts(run, sample):
    """The panels of a part have the stride of the whole tile's."""
    S, PART = st(128, 128, bf16), st(64, 128, bf16)
    smem = tiles.shared(x=S, full=barrier(1))

    @cuda.jit
    def body(x, y):
        tile, full = smem.open()
        if cuda.threadIdx.x < 32:
            raw.expect(full, S.nbytes)
            for i in range(2):
                raw.tma_load(subtile(tile, 64, i), x, (1 - i, 0), full)
            raw.wait(full, 1)
            for i in range(2):
                raw.tma_store(y, (i, 0), subtile(tile, 64, i))
            raw.store_wait()

    x, y = sample((128, 128), bf16), blank((128, 128), bf16)
    run(body, tensor(x, PART), tensor(y, PART), shared=smem)
    assert (y[:64] == x[64:]).all() and (y[64:] == x[:64]).all()


def test_arrive_and_named_arrive(run, sample):
    """A barrier counts two warps' arrivals, and at a named barrier one side only arrives while the other waits."""
    T = rt(16, 16, fp32)
    smem = tiles.shared(x=st(16, 16, fp32), ready=barrier(2), gone=barrier(1))

    @cuda.jit
    def body(x, y):
        tile, ready, gone = smem.open()
        warp = cuda.threadIdx.x // 32
        if warp < 2:
            if warp == 0:
                store(tile, load(x, T, (0, 0)))
            cuda.syncwarp()  # one lane arrives for all
            raw.arrive(ready)
            raw.wait(gone, 1)
            raw.named_sync(2, 96)
        else:
            raw.wait(ready, 1)
            store(y, load(tile, T), (0, 0))
            raw.named_arrive(2, 96)
            raw.arrive(gone)

    x, y = sample((16, 16)), blank((16, 16))
    run(body, x, y, warps=3, shared=smem)
    assert (y == x).all()
