"""ops/memory/shared_vectors.py: shared vectors to and from registers. (In rings: test_shared_vectors_by_tma.py.)"""

import numpy as np
import pytest
from banks import ways
from numba import cuda

import tiles
from ops import exp, last_element, load, load_row, load_row_of_group, store, tile_max, warpgroup, zeros
from tiles import Hazard, bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, ring, rt, st, sv, tensor, tf32
from tiles.interpreter import interpret
from tiles.testing import blank, meaning, pairs, ptx, wide

DTYPES, AXES, LAYOUTS = [fp32, bf16, fp16, fp8e4m3, fp8e5m2, int8, tf32], ["col_vec", "row_vec"], ["row", "col"]


# ---- registers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "axis", "layout"), [*pairs(DTYPES, AXES, LAYOUTS), *pairs(DTYPES[::-1], AXES, LAYOUTS[::-1])]
)
def test_shared_and_back(run, sample, dtype, axis, layout):
    """Through a shared vector by one warp, out again as another dtype, and from either layout into the other."""
    n, other = 96, fp16 if dtype is fp32 else fp32
    V = getattr(rt(n, n, dtype, layout), axis)
    W, X = getattr(rt(n, n, other, layout), axis), getattr(rt(n, n, dtype, "row" if layout == "col" else "col"), axis)
    smem = tiles.shared(first=sv(16, dtype), a=sv(n, dtype), b=sv(n, dtype))

    @cuda.jit
    def body(x, same, converted, turned):
        _, a, b = smem.open()
        store(a, load(x, V, (0,)))
        cuda.syncthreads()
        store(same, load(a, V), (0,))
        store(turned, load(a, X), (0,))
        store(b, load(a, W))
        cuda.syncthreads()
        store(converted, load(b, V), (0,))

    x = sample(n, dtype)
    same, converted, turned = blank(n, dtype), blank(n, dtype), blank(n, dtype)
    run(body, x, same, converted, turned, shared=smem)
    assert (wide(same) == wide(x)).all() and (wide(turned) == wide(x)).all()
    assert (wide(converted) == wide(x.astype(np.float16) if dtype is fp32 else x)).all()


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16])
def test_a_line(run, sample, dtype):
    """A lane has neighbours of its own: what it stores is a vector, whoever loads it."""
    L, V = rt(1, 128, fp32, "line"), rt(16, 128, fp32).row_vec
    smem = tiles.shared(first=sv(16, dtype), a=sv(128, dtype))

    @cuda.jit
    def body(x, same, vector):
        _, a = smem.open()
        store(a, load(x, L, (0, 0)))
        cuda.syncthreads()
        store(same, load(a, L), (0, 0))
        store(vector, load(a, V), (0,))

    x = sample((1, 128), dtype)
    same, vector = blank((1, 128), dtype), blank(128, dtype)
    run(body, x, same, vector, shared=smem)
    assert (wide(same) == wide(x)).all() and (wide(vector) == wide(x)[0]).all()


@pytest.mark.parametrize(("dtype", "layout"), pairs(DTYPES, LAYOUTS))
def test_four_warps_share_a_col_vec(run, sample, dtype, layout):
    """Each warp has its part of the rows, and all of the columns."""
    T = rt(32, 128, dtype, layout)
    smem = tiles.shared(a=sv(128, dtype))

    @cuda.jit
    def body(x, down, across):
        (a,) = smem.open()
        warpgroup.store(a, warpgroup.load(x, T.col_vec, (0,)))
        cuda.syncthreads()
        warpgroup.store(down, warpgroup.load(a, T.col_vec), (0,))
        warpgroup.store(across, warpgroup.load(a, T.row_vec), (0,))

    x, down, across = sample(128, dtype), blank(128, dtype), blank(128, dtype)
    run(body, x, down, across, warps=4, shared=smem)
    assert (wide(down) == wide(x)).all() and (wide(across) == wide(x)).all()


@pytest.mark.parametrize(("dtype", "axis"), pairs(DTYPES, [*AXES, *AXES[::-1]]))
def test_rounded_on_the_way(run, sample, dtype, axis):
    """To the dtype of the shared vector, of the register vector, or of the array."""
    n, other = 64, fp32 if dtype is fp16 else fp16
    V, W = (getattr(rt(n, n, d), axis) for d in (other, dtype))
    smem = tiles.shared(a=sv(n, dtype), b=sv(n, other))

    @cuda.jit
    def body(x, shared, registers, array):
        a, b = smem.open()
        v = load(x, V, (0,))
        store(a, v)
        store(b, v)
        cuda.syncthreads()
        store(shared, load(a, V), (0,))
        store(registers, load(b, W), (0,))
        store(array, v, (0,))

    x = sample(n, other)
    actual = blank(n), blank(n), blank(n, dtype)
    run(body, x, *actual, shared=smem)
    for outputs in actual:
        assert (wide(outputs) == wide(dtype.round(wide(x).astype(np.float32)))).all()


@pytest.mark.parametrize(("dtype", "axis"), pairs(DTYPES, AXES))
def test_no_bank_conflicts(sample, dtype, axis):
    V = getattr(rt(64, 64, dtype), axis)
    smem = tiles.shared(a=sv(64, dtype))

    @cuda.jit
    def body(x):
        (a,) = smem.open()
        store(a, load(x, V, (0,)))
        cuda.syncwarp()
        store(x, load(a, V), (0,))

    assert ways(ptx(body, sample(64, dtype), shared=smem)) == {1}


@pytest.mark.parametrize(("dtype", "cols"), [(fp32, 32), (fp32, 80), (bf16, 64), (fp16, 144), (fp8e4m3, 96)])
def test_load_row(run, sample, dtype, cols):
    """Every row of a tile, with any panels and swizzle."""
    S, T, V = st(16, cols, dtype), rt(16, cols, dtype), rt(16, cols, fp32).row_vec
    smem = tiles.shared(first=st(8, 32, dtype), tile=S)

    @cuda.jit
    def body(x, y):
        _, tile = smem.open()
        store(tile, load(x, T, (0, 0)))
        cuda.syncthreads()
        for row in range(16):
            store(y, load_row(tile, V, row), (row, 0))

    x, y = sample(S.shape, dtype), blank(S.shape)
    run(body, x, y, shared=smem)
    assert (y == x.astype(np.float32)).all()


@pytest.mark.parametrize(("dtype", "cols"), [(bf16, 128), (fp16, 64), (bf16, 256), (fp32, 64), (fp32, 128)])
def test_load_line(run, sample, dtype, cols):
    """Every row of a tile, with one panel and several, of which a lane has 4 to 16 bytes."""
    S, T, L = st(16, cols, dtype), rt(16, cols, dtype), rt(1, cols, dtype, "line")
    smem = tiles.shared(first=st(8, 32, dtype), tile=S)

    @cuda.jit
    def body(x, y):
        _, tile = smem.open()
        store(tile, load(x, T, (0, 0)))
        cuda.syncthreads()
        for row in range(16):
            store(y, load_row(tile, L, row), (row, 0), aligned=True)

    x, y = sample(S.shape, dtype), blank(S.shape, dtype)
    run(body, x, y, shared=smem)
    assert (y == x).all()


@pytest.mark.parametrize(("dtype", "cols"), [(fp32, 32), (bf16, 64), (fp16, 144)])
@pytest.mark.parametrize(("rows", "size", "row"), [(16, 16, 8), (16, 4, 2), (32, 2, 1), (16, 1, 0), (32, 32, 31), (16, 8, 0)])
def test_load_row_of_group(run, sample, dtype, cols, rows, size, row):
    """With any panels and swizzle; the groups are known when the kernel runs."""
    S, T, F = st(rows, cols, dtype), rt(rows, cols, dtype), rt(rows, cols, fp32)
    smem = tiles.shared(first=st(8, 32, dtype), tile=S)

    @cuda.jit
    def body(x, y, size, row):
        _, tile = smem.open()
        store(tile, load(x, T, (0, 0)))
        cuda.syncthreads()
        store(y, load_row_of_group(tile, F, size, row), (0, 0))

    x, y = sample(S.shape, dtype), blank(S.shape)
    run(body, x, y, size, row, shared=smem)
    assert (y == x.astype(np.float32)[np.arange(rows) // size * size + row]).all()


def test_rows_of_what_tma_brings(run, sample):
    """A tile may be released as soon as its row is loaded."""
    S, V = st(16, 32, fp32), rt(16, 32, fp32).row_vec
    smem = tiles.shared(r=ring(S, 1, readers=1))

    @cuda.jit
    def body(x, y):
        (r,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(3):
                r.fill(j, x, (j, 0))
        elif cuda.threadIdx.x < 32:
            for j in range(3):
                store(y, load_row(r.wait(j), V, 5), (j, 0))
                r.release(j)

    x, y = sample((48, 32)), blank((3, 32))
    run(body, tensor(x, S), y, warps=8, shared=smem)
    assert (y == x[5::16]).all()


def test_a_row_outside_the_tile():
    S, V = st(16, 32, fp32), rt(16, 32, fp32).row_vec
    smem = tiles.shared(tile=S)

    @cuda.jit
    def body(row):
        (tile,) = smem.open()
        load_row(tile, V, row)

    for row in (-1, 16):
        with pytest.raises(Hazard, match=f"row {row} lies outside"):
            interpret(body, (1, 1, 1), 32, [row], smem)


@pytest.mark.parametrize("n", [16, 64])
def test_last(run, sample, n):
    V = rt(16, n, fp32).row_vec
    smem = tiles.shared(first=sv(16, fp32), x=sv(n, fp32))

    @cuda.jit
    def body(x, y):
        _, a = smem.open()
        store(a, load(x, V, (0,)))
        cuda.syncthreads()
        store(y, zeros(V) + last_element(a), (0,))

    x, y = sample(n), blank(n)
    run(body, x, y, shared=smem)
    assert (y == x[-1]).all()


# ---- what the interpreter sees -------------------------------------------------------------------------------------
SMEM, FOUR = tiles.shared(a=sv(64, fp32)), rt(16, 16, fp32).col_vec


def test_warps_that_share_a_vector_do_not_race():
    def kernel():
        (a,) = SMEM.open()
        for _ in range(3):
            warpgroup.store(a, zeros(FOUR))
            warpgroup.load(a, FOUR)

    for seed in (None, 1, 2):
        interpret(cuda.jit(kernel), (1, 1, 1), 128, [], SMEM, seed)


def test_two_writers_race():
    whole = rt(64, 16, fp32).col_vec

    def kernel():
        (a,) = SMEM.open()
        if cuda.threadIdx.x < 32:
            store(a, zeros(whole))
        elif cuda.threadIdx.x < 64:
            load(a, whole)

    for seed in (None, 1, 2):
        with pytest.raises(Hazard, match="(reads|writes) shared tile 'a', (and nothing orders this after|which nobody)"):
            interpret(cuda.jit(kernel), (1, 1, 1), 128, [], SMEM, seed)


# ---- what is refused -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [0, 8, 24, -16, 272, 320])
def test_lengths(length):
    with pytest.raises(ValueError, match=f"length must be a positive multiple of 16 up to 256, or one of 128, got {length}"):
        sv(length, fp32)


ROW, COL, TILE = rt(16, 64, fp32).row_vec, rt(64, 16, fp32).col_vec, rt(16, 64, fp32)
REFUSED = {
    "a tile": (lambda a: store(a, zeros(TILE)), r"store: sv\(64, fp32\) does not take rt\(16, 64, fp32\)"),
    "another length": (lambda a: load(a, FOUR), r"load: sv\(64, fp32\) does not hold col_vec\(16, fp32\)"),
    "four parts": (lambda a: warpgroup.load(a, COL), r"warpgroup.load: sv\(64, fp32\) does not hold 4 x col_vec\(64, fp32\)"),
    "four writers": (lambda a: warpgroup.store(a, zeros(ROW)), r"all 4 warps hold the whole row_vec\(64, fp32\)"),
    "arithmetic": (lambda a: a * 2.0, r"mul: sv\(64, fp32\) lies in shared memory: load\(...\) it first"),
    "a comparison": (lambda a: a > 2.0, r"greater: sv\(64, fp32\) lies in shared memory: load\(...\) it first"),
    "a function": (lambda a: exp(a), r"exp: sv\(64, fp32\) lies in shared memory: load\(...\) it first"),
    "a reduction": (lambda a: tile_max(a), r"tile_max: sv\(64, fp32\) lies in shared memory: load\(...\) it first"),
    "an index": (lambda a: load(a, ROW, (0,)), r"load: `at` is for global arrays; a shared vector is taken whole, got"),
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(backend, case):
    use, words = tiles.inlined(REFUSED[case][0]), REFUSED[case][1]

    def kernel():
        (a,) = SMEM.open()
        use(a)

    with pytest.raises(TypeError, match=words):
        backend(cuda.jit(kernel), warps=4, shared=SMEM)
