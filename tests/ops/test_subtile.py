"""ops/shape/subtile.py: parts of shared tiles are loaded, stored, multiplied and copied by TMA as tiles of their own."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store, subtile, warpgroup, zeros
from tiles import Hazard, bf16, fp16, fp32, ring, rt, st, sv, tensor
from tiles.interpreter import interpret
from tiles.testing import EPS, blank, close, meaning, pairs, ptx, wide

WIDTHS = [128, 64, 32]
WHOLES = pairs(WIDTHS, [bf16, fp16, fp32, bf16], [32, 16, 32], [64, 96, 32, 64])  # width, dtype, rows of a warp's part, columns


def test_of_types():
    S = st(192, 128, bf16)
    part = st(64, 128, bf16, parent_rows=192)
    assert str(part) == "st(64, 128, bf16) of 192 rows" and part != st(64, 128, bf16)
    assert part.unsliced == st(64, 128, bf16) and S.unsliced == S == st(192, 128, bf16, parent_rows=192)
    assert part.panel_bytes == S.panel_bytes == 192 * 128 and part.nbytes == 64 * 256
    rows = np.arange(64)
    for k in range(3):
        assert (part.offsets() + 64 * k * S.width == S.offsets(rows + 64 * k)).all()
    for parent_rows in (32, 68):
        with pytest.raises(
            ValueError, match=f"st: parent_rows must be a multiple of 8 and at least the 64 rows, got {parent_rows}"
        ):
            st(64, 128, bf16, parent_rows=parent_rows)


@pytest.mark.parametrize(("width", "dtype", "rows", "cols"), WHOLES)
def test_by_one_warp(run, sample, width, dtype, rows, cols):
    """A tile is written part by part and read whole, written whole and read part by part in reverse; also a part of a part."""
    n, last = 3, rows // 16 - 1
    S, T, ALL, SLICE = st(n * rows, cols, dtype, width), rt(rows, cols, dtype), rt(n * rows, cols, dtype), rt(16, cols, dtype)
    smem = tiles.shared(first=st(8, 32, bf16), a=S, b=S)

    @cuda.jit
    def body(x, whole, parts, nested):
        _, a, b = smem.open()
        for k in range(n):
            store(subtile(a, rows, k), load(x, T, (k * rows, 0)))
        store(b, load(x, ALL, (0, 0)))
        cuda.syncthreads()
        store(whole, load(a, ALL), (0, 0))
        for k in range(n):
            store(parts, load(subtile(b, rows, n - 1 - k), T), (k * rows, 0))
            store(nested, load(subtile(subtile(b, rows, k), 16, last), SLICE), (k, 0, 0))

    x = sample(S.shape, dtype)
    whole, parts, nested = blank(S.shape, dtype), blank(S.shape, dtype), blank((n, 16, cols), dtype)
    run(body, x, whole, parts, nested, shared=smem)
    assert (whole == x).all()
    assert (parts.reshape(n, rows, cols) == x.reshape(n, rows, cols)[::-1]).all()
    assert (nested == x.reshape(n, rows, cols)[:, -16:]).all()


@pytest.mark.parametrize(("width", "dtype"), pairs(WIDTHS, [bf16, fp16]))
def test_by_columns(run, sample, width, dtype):
    """K^T V of 128 columns of K, 64 at a time, for some rows of each: parts in both directions; stored and loaded as such."""
    S, T = st(128, 128, dtype, width), rt(16, 64, dtype)
    smem = tiles.shared(k=ring(S, 1), v=ring(S, 1), x=S)

    @cuda.jit
    def body(gk, gv, x, product, quarter):
        k, v, place = smem.open()
        k.fill(0, gk, (0, 0))
        v.fill(0, gv, (0, 0))
        for half in range(2):
            keys, values = subtile(k.wait(0), 64, 1, 64, half), subtile(v.wait(0), 64, 1, 64, 1)
            warpgroup.store(product, warpgroup.wait(warpgroup.mm_AtB(keys, values)), (64 * half, 0))
        warpgroup.store(subtile(place, 64, 0, 64, 1), warpgroup.load(x, T, (0, 0)))
        warpgroup.store(quarter, warpgroup.load(subtile(place, 64, 0, 64, 1), T), (0, 0))

    k, v, x = sample(S.shape, dtype), sample(S.shape, dtype), sample((64, 64), dtype)
    product, quarter = blank((128, 64)), blank((64, 64), dtype)
    run(body, tensor(k, S), tensor(v, S), x, product, quarter, warps=4, shared=smem)
    K, V = wide(k)[64:], wide(v)[64:, 64:]
    close(product, K.T @ V, atol=np.abs(K.T) @ np.abs(V) * EPS[fp32] * 8)
    assert (quarter == x).all()


@pytest.mark.parametrize(("width", "dtype"), pairs(WIDTHS, [bf16, fp32, fp16]))
def test_by_four_warps_and_tma(run, sample, width, dtype):
    """Filled whole by TMA, each part loaded and stored by four warps, and copied out by TMA: to a tensor of its type, and to
    one of such tiles by themselves."""
    S, T = st(128, 128, dtype, width), rt(16, 128, dtype)
    PART, ALONE = st(64, 128, dtype, width, parent_rows=128), st(64, 128, dtype, width)
    smem = tiles.shared(x=ring(S, 1), y=S)

    @cuda.jit
    def body(x, y, z):
        a, b = smem.open()
        a.fill(0, x, (0, 0))
        filled = a.wait(0)
        for k in range(2):
            warpgroup.store(subtile(b, 64, k), warpgroup.load(subtile(filled, 64, 1 - k), T))
        warpgroup.tma_store(y, (0, 0), subtile(b, 64, 1))
        warpgroup.tma_store(z, (1, 0), subtile(b, 64, 0))
        warpgroup.store_wait()

    x, y, z = sample(S.shape, dtype), blank((64, 128), dtype), blank((100, 120), dtype)
    run(body, tensor(x, S), tensor(y, PART), tensor(z, ALONE), warps=4, shared=smem)
    assert (y == x[:64]).all()
    assert (z[64:] == x[64:100, :120]).all() and np.isnan(wide(z[:64])).all()


PRODUCTS = pairs(WIDTHS, [64, 32, 128], [64, 64, 32], [128, 64, 64], [bf16, fp16])


@pytest.mark.parametrize(("width", "left", "n", "k", "dtype"), PRODUCTS)
def test_products(run, sample, width, left, n, k, dtype):
    """Parts of both operands: a @ b.T, and acc + p @ c with rows of c along the contracted axis."""
    A, B, C = st(192, k, dtype, left), st(2 * n, k, dtype, width), st(3 * 64, n, dtype, width)
    P, O = rt(16, 64, dtype), rt(16, n, fp32)
    smem = tiles.shared(a=ring(A, 1), b=ring(B, 1), c=ring(C, 1))

    @cuda.jit
    def body(gA, gB, gC, gP, first, second, third):
        a, b, c = smem.open()
        a.fill(0, gA, (0, 0))
        b.fill(0, gB, (0, 0))
        c.fill(0, gC, (0, 0))
        left = subtile(a.wait(0), 64, 2)
        right = subtile(b.wait(0), n, 1)
        warpgroup.store(first, warpgroup.wait(warpgroup.mm_ABt(left, right)), (0, 0))
        values = subtile(c.wait(0), 64, 1)
        p = warpgroup.load(gP, P, (0, 0))
        warpgroup.store(second, warpgroup.wait(warpgroup.mma_AB(zeros(O), p, values)), (0, 0))
        nested = subtile(subtile(b.wait(0), k, 0), k, 0)
        warpgroup.store(third, warpgroup.wait(warpgroup.mm_AB(subtile(left, 64, 0), nested)), (0, 0))

    a, b, c, p = sample(A.shape, dtype), sample(B.shape, dtype), sample(C.shape, dtype), sample((64, 64), dtype)
    first, second, third = blank((64, n)), blank((64, n)), blank((64, k))
    run(body, tensor(a, A), tensor(b, B), tensor(c, C), p, first, second, third, warps=4, shared=smem)
    for actual, x, y in ((first, a[128:], b[n:].T), (second, p, c[64:128]), (third, a[128:], b[:k])):
        close(actual, wide(x) @ wide(y), atol=(np.abs(wide(x)) @ np.abs(wide(y))) * EPS[fp32] * 8)


def test_each_consumer_takes_its_part(run, sample):
    """What attention does: the part is a run-time number, that of the warpgroup; all release the whole."""
    S, T = st(128, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=ring(S, 2, readers=8))

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        wg = warpgroup.id()
        if wg == 2:
            for j in range(4):
                a.fill(j, x, (j, 0))
        else:
            for j in range(4):
                warpgroup.store(y, warpgroup.load(subtile(a.wait(j), 64, wg), T), (128 * j + 64 * wg, 0))
                a.release(j)

    x, y = sample((512, 64), bf16), blank((512, 64), bf16)
    run(body, tensor(x, S), y, warps=12, shared=smem)
    assert (y == x).all()


# ---- what the interpreter sees of parts ----------------------------------------------------------------------------
S, T, HALF = st(64, 128, bf16), rt(16, 128, bf16), rt(32, 128, bf16)
SMEM = tiles.shared(a=S)
RING = tiles.shared(x=ring(S, 1, readers=8))


def stopped(kernel, *args, warps, shared):
    """The Hazard that several schedules all raise."""
    for seed in (None, 1, 2, 3):
        with pytest.raises(Hazard) as caught:
            interpret(cuda.jit(kernel), (1, 1, 1), 32 * warps, args, shared, seed)
    return caught.value


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_disjoint_parts_do_not_race(seed):
    def kernel():
        (a,) = SMEM.open()
        mine = subtile(a, 32, cuda.threadIdx.x // 32)
        for _ in range(3):
            store(mine, load_zeros())
            load(mine, HALF)

    @tiles.inlined
    def load_zeros():
        return zeros(HALF)

    interpret(cuda.jit(kernel), (1, 1, 1), 64, [], SMEM, seed)


def test_overlapping_parts_race():
    def kernel():
        (a,) = SMEM.open()
        warp = cuda.threadIdx.x // 32
        if warp == 0:
            store(subtile(a, 32, 1), zeros(HALF))
        else:
            store(subtile(a, 16, 3), zeros(T))

    hazard = stopped(kernel, warps=2, shared=SMEM)
    assert hazard.kind == "race" and "rows 48 to 63 of shared tile 'a'" in hazard.cause + str(hazard)
    assert "rows 32 to 63 of shared tile 'a'" in str(hazard)


def test_a_part_nobody_wrote():
    def kernel():
        (a,) = SMEM.open()
        store(subtile(a, 32, 0), zeros(HALF))
        load(subtile(a, 16, 2), T)

    hazard = stopped(kernel, warps=1, shared=SMEM)
    assert hazard.kind == "never written" and "rows 32 to 47 of shared tile 'a'" in hazard.cause


def test_a_part_of_what_was_released():
    def kernel(x):
        (r,) = RING.open()
        if warpgroup.id() == 0:
            r.fill(0, x, (0, 0))
        else:
            part = subtile(r.wait(0), 16, cuda.threadIdx.x // 32 % 4)
            r.release(0)
            load(part, T)

    x = tensor(np.zeros((64, 128), bf16.np), S)
    hazard = stopped(kernel, x, warps=8, shared=RING)
    assert hazard.kind == "released"


def test_columns_that_an_mma_reads():
    """Other columns may be written meanwhile; those that the mma reads may not."""
    S, T = st(64, 128, bf16), rt(16, 64, bf16)
    plan = tiles.shared(a=S)

    def kernel_of(part):
        def kernel():
            (a,) = plan.open()
            for half in range(2):
                warpgroup.store(subtile(a, 64, 0, 64, half), zeros(T))
            warpgroup.sync()
            keys = subtile(a, 64, 0, 64, 0)
            state = warpgroup.mm_AtB(keys, keys)
            warpgroup.store(subtile(a, 64, 0, 64, part), zeros(T))
            warpgroup.wait(state)

        return kernel

    interpret(cuda.jit(kernel_of(1)), (1, 1, 1), 128, (), plan)
    hazard = stopped(kernel_of(0), warps=4, shared=plan)
    assert hazard.kind == "race" and "rows 0 to 63, columns 0 to 63 of shared tile 'a'" in hazard.cause


def test_parts_that_are_not_there():
    for index in (-1, 4):

        def kernel():
            (a,) = SMEM.open()
            subtile(a, 16, index)

        hazard = stopped(kernel, warps=1, shared=SMEM)
        assert hazard.kind == "bounds" and f"subtile {index} of 16 rows lies outside st(64, 128, bf16)" in hazard.cause


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_mistakes(backend):
    def of_registers(x):
        subtile(zeros(T), 16, 0)

    def at_a_fraction(x):
        (a,) = SMEM.open()
        subtile(a, 16, 0.5)

    def of_rows_that_do_not_divide(x):
        (a,) = SMEM.open()
        subtile(a, 24, 0)

    def of_part_of_a_panel(x):
        (a,) = SMEM.open()
        subtile(a, 16, 0, 32, 1)

    def of_fewer_than_a_swizzle(x):
        (a,) = SMEM.open()
        subtile(a, 4, 0)

    def loaded_as_the_whole(x):
        (a,) = SMEM.open()
        warpgroup.load(subtile(a, 32, 0), T)

    for kernel, words in {
        of_registers: "subtile: takes a shared tile, its rows and an integer, got rt(16, 128, bf16) and ",
        at_a_fraction: "subtile: takes a shared tile, its rows and an integer, got st(64, 128, bf16) and float",
        of_rows_that_do_not_divide: "subtile: rows must be a multiple of 8 that divides 64, got 24",
        of_fewer_than_a_swizzle: "subtile: rows must be a multiple of 8 that divides 64, got 4",
        of_part_of_a_panel: "subtile: cols must be a multiple of the 64 columns of a panel, up to 128, got 32",
        loaded_as_the_whole: "warpgroup.load: st(32, 128, bf16) of 64 rows does not hold 4 x rt(16, 128, bf16)",
    }.items():
        with pytest.raises(TypeError) as error:
            backend(cuda.jit(kernel), np.zeros(1, np.float32), warps=4, shared=SMEM)
        assert str(error.value).startswith(words)


def test_parts_of_a_shared_vector(run, sample):
    V, T = sv(64, fp32), rt(16, 16, fp32).row_vec
    smem = tiles.shared(x=V)

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        for i in range(4):
            store(subtile(a, 16, i), load(x, T, (16 * i,)))
        cuda.syncwarp()
        for i in range(4):
            store(y, load(subtile(a, 16, 3 - i), T), (16 * i,))

    x, y = sample(64), blank(64)
    run(body, x, y, shared=smem)
    assert (y == x.reshape(4, 16)[::-1].ravel()).all()


@pytest.mark.parametrize("index", [-1, 4])
def test_a_part_that_a_vector_has_not(index):
    smem = tiles.shared(x=sv(64, fp32))

    @cuda.jit
    def body(i):
        subtile(smem.open()[0], 16, i)

    with pytest.raises(Hazard, match=rf"subtile {index} of 16 elements lies outside sv\(64, fp32\)"):
        meaning(body, index, shared=smem)
