"""ops/memory/shared_vectors.py: shared vectors in rings, by TMA."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, raw, store, warpgroup
from tiles import barrier, bf16, fp8e4m3, fp8e5m2, fp16, fp32, ring, rt, sv, tensor, tf32
from tiles.testing import blank, pairs, wide

COMPUTED = [fp32, bf16, fp16]
LENGTHS = [(64, 8), (16, 24), (256, 1), (384, 3), (512, 13)]  # of a vector; by how much the array is shorter than its tiles


@pytest.mark.parametrize(("length", "short", "dtype"), [(*n, d) for n, d in pairs(LENGTHS, COMPUTED)])
def test_a_ring_of_vectors(run, sample, length, short, dtype):
    """Vectors go through a ring, are doubled, and stored by TMA: outside the array loads give zero and stores do nothing. TMA
    stores arrays of multiples of 16 bytes only, others are stored from registers."""
    parts, V = 5, rt(16, length, dtype).row_vec
    size = parts * length - short
    by_tma = size * dtype.itemsize % 16 == 0
    smem = tiles.shared(r=ring(sv(length, dtype), 2, readers=1), out=sv(length, dtype), odd=sv(16, fp16))

    @cuda.jit
    def body(x, y, z):
        r, out, _ = smem.open()
        if warpgroup.id() == 1:
            for j in range(parts):
                r.fill(j, x, (j,))
        else:
            for j in range(parts):
                if cuda.threadIdx.x < 32:
                    v = load(r.wait(j), V)
                    r.release(j)
                    store(out, v + v)
                    store(z, v + v, (j * length,))
                if by_tma:
                    warpgroup.tma_store(y, (j,), out)
                    warpgroup.store_wait()
                    warpgroup.sync()

    x, y, z = sample(size, dtype), blank(size + 8, dtype), blank(size, dtype)
    target = tensor(y[:size] if by_tma else np.zeros(parts * length, dtype.np), sv(length, dtype))
    run(body, tensor(x, sv(length, dtype)), target, z, warps=8, shared=smem)
    double = x * dtype.np.type(2)
    assert (z == double).all()
    if by_tma:
        assert (y[:size] == double).all() and np.isnan(y[size:].astype(np.float32)).all()


def test_along_any_axis_of_an_array(run, sample):
    """A vector along the contiguous axis, wherever it stands; the others are indexed one at a time."""
    S, V = sv(32, fp32), rt(32, 16, fp32).col_vec
    smem = tiles.shared(r=ring(S, 3))

    @cuda.jit
    def body(x, y, out):
        (r,) = smem.open()
        r.fill(0, x, (1, 2, 1))
        r.fill(1, y, (1, 1))
        r.fill(2, y, (0, -1, 1))
        for j in range(3):
            if cuda.threadIdx.x < 32:
                store(out, load(r.wait(j), V), (j, 0))

    x, y = sample((2, 4, 56)), sample((2, 4, 60)).transpose(0, 2, 1)
    out = blank((3, 32))
    run(body, tensor(x, S), tensor(y, S, cols=1), out, warps=4, shared=smem)
    want = np.zeros((3, 32), np.float32)
    want[0, :24], want[1, :28] = x[1, 2, 32:], y[1, 32:, 0]
    assert (out == want).all()


@pytest.mark.parametrize("dtype", [fp8e4m3, fp8e5m2, tf32])
def test_tma_brings_and_takes_what_is_only_stored(run, sample, dtype):
    """Bytes are copied; fp32 numbers are rounded to tf32."""
    S, V = sv(64, dtype), rt(16, 64, dtype).row_vec
    smem = tiles.shared(r=ring(S, 1), out=S)

    @cuda.jit
    def body(x, seen, y):
        r, out = smem.open()
        r.fill(0, x, (1,))
        v = load(r.wait(0), V)
        if cuda.threadIdx.x < 32:
            store(out, v)
            store(seen, fp32(v), (0,))
        warpgroup.tma_store(y, (0,), out)
        warpgroup.store_wait()

    x = sample(128, dtype)
    seen, y = blank(64), blank(64, dtype)
    run(body, tensor(x, S), seen, tensor(y, S), warps=4, shared=smem)
    assert (wide(seen) == wide(x[64:])).all() and (wide(y) == wide(x[64:])).all()


def test_raw_copies_of_vectors(run, sample):
    S, V = sv(64, bf16), rt(64, 16, bf16).col_vec
    smem = tiles.shared(x=S, full=barrier(1))

    @cuda.jit
    def body(x, y):
        v, full = smem.open()
        raw.expect(full, S.nbytes)
        raw.tma_load(v, x, (1,), full)
        raw.wait(full, 1)
        twice = load(v, V) * 2.0
        cuda.syncwarp()
        store(v, twice)
        raw.fence_async()
        cuda.syncwarp()
        raw.tma_store(y, (0,), v)
        raw.store_wait()

    x, y = sample(128, bf16), blank(64, bf16)
    run(body, tensor(x, S), tensor(y, S), shared=smem)
    assert (y == x[64:] * bf16.np.type(2)).all()


def test_tensors_of_vectors():
    assert str(tensor(np.zeros((3, 100), np.float32), sv(32, fp32)).spec) == "gl(sv(32, fp32) over axis 1 of 2)"
    with pytest.raises(ValueError, match=r"TMA takes arrays of 1 to 5 axes for sv\(32, fp32\), got shape \(\)"):
        tensor(np.zeros((), np.float32), sv(32, fp32))
