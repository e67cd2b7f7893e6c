"""ops/memory/global_vectorized.py: accesses of 16 bytes a lane, by a warp and by four. (Broken promises: test_promises.py.)"""

import numpy as np
import pytest
from numba import cuda

from ops import load, store, warpgroup
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, rt
from tiles.compiling import sass
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter
from tiles.testing import blank, guarded, pairs

COLS = 16, 48, *range(32, 257, 32)
HALVES, DTYPES = [bf16, fp16], [bf16, fp16, fp32]


def placed(shape, at, tile, dtype=fp32):
    """The contents of a blank array of this shape after a 2-d tile was stored to it at `at`, as fp32."""
    out = blank(shape, dtype).astype(np.float32)
    rows, cols = (np.arange(size) + start for size, start in zip(tile.shape, at, strict=True))
    r, c = (rows >= 0) & (rows < shape[0]), (cols >= 0) & (cols < shape[1])
    out[np.ix_(rows[r], cols[c])] = tile[np.ix_(r, c)]
    return out


def same(outputs, want):
    return np.array_equal(outputs.astype(np.float32), want, equal_nan=True)


@pytest.mark.parametrize(("cols", "tile_dtype", "dtype"), pairs(COLS, [bf16, fp16, fp32], [*HALVES, *HALVES[::-1]]))
def test_every_width_at_every_edge(run, sample, cols, tile_dtype, dtype):
    """Rows and columns cross every edge of the array; each 8 columns are inside or outside."""
    shape = (21, cols + 24)
    places = [(0, 0), (0, 24), (5, 8), (9, 40), (-3, -8), (-16, 0), (20, cols), (2, -16), (0, cols + 16), (100, 0), (0, -cols)]
    T, n = rt(16, cols, tile_dtype), len(places)

    @cuda.jit
    def body(x, at, y):
        tile = load(x, T, (0, 0))
        for i in range(n):
            store(y, tile, (i, at[i, 0], at[i, 1]), aligned=True)

    x, (y, check) = sample((16, cols), tile_dtype), guarded((n, *shape), dtype, aligned=True)
    run(body, x, np.array(places, np.int32), y)
    check()
    for i, at in enumerate(places):
        assert same(y[i], placed(shape, at, x.astype(np.float32).astype(dtype.np).astype(np.float32))), f"store at {at}"


def test_fp32_comes_by_four_columns(run, sample):
    """Tiles of 16, 32, 48, ... columns cross every edge; a bf16 tile is stored as fp32, too."""
    shape, places = (37, 60), [(0, 0), (3, 4), (-7, -4), (30, 52), (-16, 0), (0, 56), (100, 8)]
    T, H, n = rt(16, 48, fp32), rt(32, 16, bf16), len(places)

    @cuda.jit
    def body(x, h, at, y, z):
        for i in range(n):
            store(y, load(x, T, (0, 0)), (i, at[i, 0], at[i, 1]), aligned=True)
            store(z, load(h, H, (0, 0)), (i, at[i, 0], at[i, 1]), aligned=True)

    x, h = sample((16, 48)), sample((32, 16), bf16)
    (y, check), (z, check_z) = (guarded((n, *shape), fp32, aligned=True) for _ in range(2))
    run(body, x, h, np.array(places, np.int32), y, z)
    check()
    check_z()
    for i, at in enumerate(places):
        assert same(y[i], placed(shape, at, x)) and same(z[i], placed(shape, at, h.astype(np.float32))), f"store at {at}"


@pytest.mark.parametrize(
    ("cols", "dtype", "tile_dtype"), pairs([32, 64, 96, 128], [fp8e4m3, int8, fp8e5m2], [fp8e4m3, fp8e5m2, int8, int8])
)
def test_bytes_come_by_sixteen_columns(run, sample, cols, dtype, tile_dtype):
    """Tiles are loaded from an array of one dtype of a byte and stored to one of another, at every edge."""
    shape, places = (37, cols + 48), [(0, 0), (3, 16), (-7, -16), (30, 48), (-32, 0), (0, cols), (100, 32)]
    T, n = rt(32, cols, tile_dtype), len(places)

    @cuda.jit
    def body(x, at, y, z):
        for i in range(n):
            tile = load(x, T, (at[i, 0], at[i, 1]), aligned=True)
            store(y, tile, (i, 0, 0), aligned=True)
            store(z, tile, (i, at[i, 0], at[i, 1]), aligned=True)

    (x, _), (y, check_y), (z, check_z) = (
        guarded(shape, tile_dtype, aligned=True),
        guarded((n, 32, cols), dtype, aligned=True),
        guarded((n, *shape), dtype, aligned=True),
    )
    x[...] = sample(shape, tile_dtype)
    run(body, x, np.array(places, np.int32), y, z)
    check_y()
    check_z()
    for i, at in enumerate(places):
        tile = np.nan_to_num(placed((32, cols), (-at[0], -at[1]), x.astype(np.float32)), nan=0)
        tile = dtype.round(tile).astype(np.float32)
        assert same(y[i], tile) and same(z[i], placed(shape, at, tile, dtype)), f"at {at}"


@pytest.mark.parametrize(("cols", "tile_dtype", "dtype"), pairs(COLS, [bf16, fp16, fp32], [*HALVES, *HALVES[::-1]]))
def test_stores_of_pairs(run, sample, cols, tile_dtype, dtype):
    """Columns are stored in pairs, to rows that begin 4 bytes past a multiple of 8, or 2 past a multiple of 4."""
    shape, places = (21, cols + 22), [(0, 0), (0, 22), (5, 6), (-3, -2), (-16, 0), (20, cols), (0, cols + 20), (100, 0)]
    T, n = rt(16, cols, tile_dtype), len(places)

    @cuda.jit
    def body(x, at, y, z):
        tile = load(x, T, (0, 0))
        for i in range(n):
            store(y, tile, (i, at[i, 0], at[i, 1]), aligned=4)
            store(z, tile, (i, at[i, 0], at[i, 1]), aligned=2)

    x, pairs, single = (sample((16, cols), tile_dtype), *(np.zeros((n, 21, cols + size), dtype.np) for size in (26, 25)))
    y, z = pairs[..., 2:-2], single[..., 1:-2]
    y[...] = z[...] = np.nan
    run(body, x, np.array(places, np.int32), y, z)
    for edge in (pairs[..., :2], pairs[..., -2:], single[..., :1], single[..., -2:]):
        assert not edge.any(), "memory around the array was written"
    for i, at in enumerate(places):
        want = placed(shape, at, x.astype(np.float32).astype(dtype.np).astype(np.float32))
        assert same(y[i], want) and same(z[i], want), f"store at {at}"


@pytest.mark.parametrize(("cols", "tile_dtype", "dtype"), pairs(COLS, DTYPES, [*DTYPES, bf16]))
def test_loads_at_every_edge(run, sample, cols, tile_dtype, dtype):
    """Elements outside the array are 0, as for any load."""
    shape = (21, cols + 24)
    places = [(0, 0), (0, 24), (5, 8), (-3, -8), (-16, 0), (20, cols), (2, -16), (0, cols + 16), (100, 0), (0, -cols)]
    T, n = rt(16, cols, tile_dtype), len(places)

    @cuda.jit
    def body(x, at, y):
        for i in range(n):
            store(y, load(x, T, (at[i, 0], at[i, 1]), aligned=True), (i, 0, 0))

    (x, check), y = guarded(shape, dtype, aligned=True), blank((n, 16, cols), tile_dtype)
    x[...] = sample(shape, dtype)
    run(body, x, np.array(places, np.int32), y)
    check()
    for i, at in enumerate(places):
        want = np.nan_to_num(placed((16, cols), (-at[0], -at[1]), x.astype(np.float32)), nan=0).astype(tile_dtype.np)
        assert same(y[i], want.astype(np.float32)), f"load at {at}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_loads_by_four_warps_along_any_axis(run, sample, dtype):
    T = rt(16, 64, dtype)

    @cuda.jit
    def body(x, y):
        warpgroup.store(y, warpgroup.load(x, T, (1, 3, 2, 0), 1, 3, True), (0, 0))

    (x, check), y = guarded((2, 80, 3, 64), dtype, (2, 0, 1, 3), 2, aligned=True), blank((64, 64), dtype)
    x[...] = sample(x.shape, dtype)
    run(body, x, y, warps=4)
    check()
    assert same(y, x[1, 3:67, 2].astype(np.float32))


@pytest.mark.parametrize(("rows", "cols", "dtype"), pairs([16, 32], [64, 32, 96, 128], HALVES))
def test_by_four_warps(run, sample, rows, cols, dtype):
    T, H = rt(rows, cols, fp32), rt(rows, cols, dtype)
    places = [(0, 0), (7, 16), (-rows, 8), (rows + 5, cols - 24), (-2 * rows - 1, -8)]
    n, shape = len(places), (4 * rows + 3, cols + 8)

    @cuda.jit
    def body(x, at, y, z):
        tile = warpgroup.load(x, T, (0, 0))
        for i in range(n):
            warpgroup.store(y, tile, (i, at[i, 0], at[i, 1]), aligned=True)
        warpgroup.store(z, H_of(tile), (0, 0), -2, -1, True)

    H_of = dtype

    x, (y, check), (z, check_z) = (
        sample((4 * rows, cols)),
        guarded((n, *shape), dtype, aligned=True),
        guarded((4 * rows, cols), dtype, aligned=True),
    )
    run(body, x, np.array(places, np.int32), y, z, warps=4)
    check()
    check_z()
    rounded = x.astype(dtype.np).astype(np.float32)
    assert (z == rounded).all()
    for i, at in enumerate(places):
        assert same(y[i], placed(shape, at, rounded)), f"store at {at}"


@pytest.mark.parametrize(("order", "step", "dtype"), pairs([(0, 1, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)], [1, 2], HALVES))
def test_strided_axes(run, sample, order, step, dtype):
    """(B, S, H, D) as in attention, and transposed; rows along any axis, every `step`-th element of the others."""
    T = rt(16, 64, dtype)

    @cuda.jit
    def body(x, y):
        store(y, load(x, T, (0, 0)), (1, 3, 2, 0), rows=1, cols=3, aligned=True)
        store(y, load(x, T, (0, 0)), (-1, 0, 0, 8), rows=0, aligned=True)

    x, (y, check) = sample((16, 64), dtype), guarded((2, 30, 3, 40), dtype, order, step, aligned=True)
    run(body, x, y)
    check()
    want = np.full((2, 30, 3, 40), np.nan, np.float32)
    want[1, 3:19, 2] = x[:, :40]
    want[:2, 0, 0, 8:] = x[1:3, :32]
    assert same(y, want)


def test_an_axis_of_one_may_have_any_stride(run, sample):
    """No step is taken along it, so its stride does not matter."""
    T = rt(16, 32, bf16)

    @cuda.jit
    def body(x, y):
        store(y, load(x, T, (0, 0)), (0, 0, 0), aligned=True)

    x, (flat, check) = sample((16, 32), bf16), guarded((16, 32), bf16, aligned=True)
    y = np.lib.stride_tricks.as_strided(flat, (1, 16, 32), (6, *flat.strides))
    run(body, x, y)
    check()
    assert (flat == x).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 7, -3, 40])
def test_vectors(run, sample, start, dtype):
    """Vectors of adjacent elements at any address, with zeros outside the array; by one warp, and by four along rows."""
    T = rt(32, 48, fp32)

    @cuda.jit
    def body(x, y, z, w):
        store(y, load(x, T.col_vec, (1, start), aligned=True), (0,))
        store(z, load(x, T.row_vec, (2, start), aligned=True), (0,))
        warpgroup.store(w, warpgroup.load(x, T.col_vec, (0, start), aligned=True), (0,))

    x, y, z, w = sample((3, 61), dtype), blank(32), blank(48), blank(128)
    run(body, x, y, z, w, warps=4)
    for outputs, row in ((y, 1), (z, 2), (w, 0)):
        want = np.zeros(3 + 61 + 168, np.float32)
        want[3:64] = x[row]
        assert same(outputs, want[3 + start :][: len(outputs)])


def test_one_instruction_for_eight_columns():
    """A lane stores 16 bytes at a time, not 2: 8 instructions for 16 x 128 instead of 64."""
    T = rt(16, 128, fp32)

    @cuda.jit
    def body(x, y):
        store(y, load(x, T, (0, 0)), (0, 0), aligned=True)

    x, y = np.zeros((16, 128), np.float32), np.zeros((16, 128), bf16.np)
    actual = compile_kernel(body, [parameter("x", x).type, parameter("y", y).type], "sm_90a")
    stores = [i.opcode for i in sass.listing(actual.cubin) if i.mnemonic == "STG"]
    assert len(stores) == 8 and all(".128" in opcode for opcode in stores)


def test_a_copy_in_fp32_moves_16_bytes_an_instruction():
    """All loads are issued before the first store."""
    T = rt(32, 32, fp32)

    @cuda.jit
    def body(x, y):
        store(y, load(x, T, (0, 0), aligned=True), (0, 0), aligned=True)

    x = np.zeros((32, 32), np.float32)
    actual = compile_kernel(body, [parameter("x", x).type, parameter("y", x).type], "sm_90a")
    moves = [i.opcode for i in sass.listing(actual.cubin) if i.mnemonic in ("LDG", "STG")]
    assert len(moves) == 16 and all(".128" in opcode for opcode in moves)
    assert [opcode[:3] for opcode in moves] == ["LDG"] * 8 + ["STG"] * 8
