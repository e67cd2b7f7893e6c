"""ops/memory/load_store.py: tiles and vectors to and from global arrays and shared tiles, by one warp and by four."""

import itertools

import numpy as np
import pytest
from banks import ways
from cut_tiles import DTYPES, PLACES, WIDTHS, cut
from numba import cuda

import tiles
from ops import load, store, truncate, warpgroup, zeros
from tiles import Hazard, bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, rt, st
from tiles.testing import blank, guarded, meaning, pairs, ptx

# ---- global arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "order", "step", "side"),
    pairs([*DTYPES, fp8e4m3, fp8e5m2, int8], [(0, 1), (1, 0)], [1, 1, 2, 3], ["row", "col", "row", "row", "col"] * 2),
    ids=lambda v: str(v).replace(" ", ""),
)
def test_tiles_ragged_on_every_side(run, sample, dtype, order, step, side):
    high = 16 if dtype.itemsize > 1 else 32
    T, shape, n = rt(high, 32, dtype, side), (37, 45), len(PLACES)

    @cuda.jit
    def body(x, at, back, y):
        for i in range(n):
            tile = load(x, T, (at[i, 0], at[i, 1]))
            store(back, tile, (i, 0, 0))
            store(y, tile, (i, at[i, 0], at[i, 1]))

    x, _ = guarded(shape, dtype, order, step)
    x[...] = sample(shape, dtype)
    y, check = guarded((n, *shape), dtype, (0, *(a + 1 for a in order)), step)
    back = blank((n, high, 32), dtype)
    run(body, x, np.array(PLACES, np.int32), back, y)
    check()
    for i, at in enumerate(PLACES):
        assert (back[i] == cut(x, at, (high, 32))).all(), f"load at {at}"
        written = cut(np.ones(shape, bool), at, (high, 32))
        mask = np.zeros(shape, bool)
        rows, cols = (slice(max(a, 0), max(a + size, 0)) for a, size in zip(at, (high, 32), strict=True))
        mask[rows, cols] = True
        assert mask.sum() == written.sum()
        outside, unwritten = (a.astype(np.float32) for a in (y[i][~mask], blank((~mask).sum(), dtype)))
        assert (y[i][mask] == x[mask]).all() and np.array_equal(outside, unwritten, equal_nan=True), f"store at {at}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_two_axes_in_any_order(run, sample, dtype):
    T = rt(32, 16, dtype)

    @cuda.jit
    def body(x, a, b, c, d):
        store(a, load(x, T, (0, 2, 0, 1), 0, 2), (0, 0))
        store(b, load(x, T, (0, 2, 0, 1), rows=2, cols=0), (0, 0))
        store(c, load(x, T, (3, 1, 0, 0), cols=-2, rows=-1), (0, 0))
        store(d, load(x, T, (3, 1, 0, 0)), (0, 1, 0), 2, 0)

    x = sample((40, 3, 36, 33), dtype)
    a, b, c = (blank((32, 16), dtype) for _ in range(3))
    d = blank((16, 2, 32), dtype)
    run(body, x, a, b, c, d)
    assert (a == x[:32, 2, :16, 1]).all()
    assert (b == x[:16, 2, :32, 1].T).all()
    assert (c == x[3, 1, :16, :32].T).all()
    assert (d[:, 1] == x[3, 1, :32, :16].T).all() and np.isnan(d[:, 0].astype(np.float32)).all()


@pytest.mark.parametrize(("dtype", "step", "side"), pairs(DTYPES, [1, 2], ["row", "col", "row", "col"]))
def test_vectors(run, sample, dtype, step, side):
    T, starts = rt(32, 48, dtype, side), [0, 7, -9, 50, 90, -200]
    n = len(starts)

    @cuda.jit
    def body(x, at, cols, rows, y):
        for i in range(n):
            col, row = load(x, T.col_vec, (at[i],)), load(x, T.row_vec, (at[i],))
            store(cols, col, (i, 0))
            store(rows, row, (i, 0))
            store(y, col, (i, 0, at[i]))
            store(y, row, (i, at[i], 1), cols=1)

    x = sample(61, dtype)
    y, check = guarded((n, 61, 61), dtype, step=step)
    cols, rows = blank((n, 32), dtype), blank((n, 48), dtype)
    run(body, x, np.array(starts, np.int32), cols, rows, y)
    check()
    for i, start in enumerate(starts):
        assert (cols[i] == cut(x[None], (0, start), (1, 32))).all()
        assert (rows[i] == cut(x[None], (0, start), (1, 48))).all()
        want = np.full((61, 61), np.nan, np.float32)
        index = np.arange(61)
        inside = (index >= start) & (index < start + 32)
        want[0, inside] = x[inside]
        inside = (index >= start) & (index < start + 48)
        want[inside, 1] = x[inside]
        assert np.array_equal(y[i].astype(np.float32), want, equal_nan=True)


def test_the_array_and_the_tile_may_differ_in_dtype(run, sample):
    T, col = rt(16, 16, fp32), rt(16, 16, fp16).col_vec

    @cuda.jit
    def body(x, h, wide, narrow):
        store(wide, load(h, T, (0, 0)), (0, 0))
        store(narrow, load(x, T, (0, 0)), (0, 0))
        store(narrow, load(x, col, (0, 0)), (16, 0))

    x, h = sample((16, 16)), sample((16, 16), bf16)
    wide, narrow = blank((16, 16)), blank((17, 16), fp16)
    run(body, x, h, wide, narrow)
    assert (wide == h.astype(np.float32)).all()
    assert (narrow[:16] == x.astype(np.float16)).all() and (narrow[16] == x[0].astype(np.float16)).all()


def test_indices_are_64_bits_wide(run):
    """An index past 2 ** 31 is outside the array; truncated to 32 bits it would be inside."""
    T, far = rt(16, 16, fp32), (1 << 32) + 4

    @cuda.jit
    def body(x, out):
        store(out, load(x, T, (far, 0)), (0, 0))
        store(x, load(x, T, (0, 0)) + 1.0, (far, 0))
        store(x, load(x, T.col_vec, (0, 0)) + 1.0, (0, far))

    x, out = np.ones((32, 16), np.float32), blank((16, 16))
    run(body, x, out)
    assert (out == 0).all() and (x == 1).all()


def test_four_warps_one_below_the_other(run, sample):
    A, B = rt(16, 32, fp32), rt(32, 16, fp32)

    @cuda.jit
    def body(x, y, across, c, r):
        warpgroup.store(y, warpgroup.load(x, A, (2, 1)), (3, 5))
        warpgroup.store(across, warpgroup.load(x, B, (0, 0)), (0, 0), 1, 0)
        warpgroup.store(c, warpgroup.load(x, B.col_vec, (0, 3), cols=0), (1,))
        warpgroup.store(r, warpgroup.load(x, A.row_vec, (5, 0)), (0,))

    x = sample((61, 33))
    (y, check), (across, check_across), (c, check_c) = guarded((64, 40)), guarded((16, 70)), guarded((50,))
    r = blank(32)
    run(body, x, y, across, c, r, warps=4)
    for check_one in (check, check_across, check_c):
        check_one()
    assert (y[3:62, 5:37] == cut(x, (2, 1), (59, 32))).all() and (y[62:, 5:37] == 0).all()
    assert np.isnan(y[:3]).all() and np.isnan(y[:, :5]).all() and np.isnan(y[:, 37:]).all()
    assert (across[:, :61] == x[:, :16].T).all() and (across[:, 61:] == 0).all()
    assert np.isnan(c[0]) and (c[1:] == x[:49, 3]).all()
    assert (r == x[5, :32]).all()


# ---- shared tiles --------------------------------------------------------------------------------------------------
SHARED = pairs(WIDTHS, [fp32, bf16, fp16, bf16], [(16, 64), (32, 64), (48, 64)], ["row", "col", "col", "row"])


@pytest.mark.parametrize(("width", "dtype", "shape", "side"), SHARED)
def test_shared_and_back(run, sample, width, dtype, shape, side):
    """Through a shared tile by one warp, out again as another dtype: the same layout whoever reads it."""
    S, T, other = st(*shape, dtype, width), rt(*shape, dtype, side), rt(*shape, fp16 if dtype is fp32 else fp32, side)
    smem = tiles.shared(a=S, b=S)

    @cuda.jit
    def body(x, same, converted):
        a, b = smem.open()
        store(a, load(x, T, (0, 0)))
        cuda.syncthreads()
        tile = load(a, T)
        store(same, tile, (0, 0))
        store(b, load(a, other))
        cuda.syncthreads()
        store(converted, load(b, T), (0, 0))

    x = sample(shape, dtype)
    same, converted = blank(shape, dtype), blank(shape, dtype)
    run(body, x, same, converted, shared=smem)
    assert (same == x).all()
    assert (converted == (x.astype(np.float16) if dtype is fp32 else x).astype(dtype.np)).all()


@pytest.mark.parametrize(("width", "dtype"), pairs(WIDTHS, [*DTYPES, bf16]))
def test_both_layouts_see_the_same_tile(run, sample, width, dtype):
    """A tile is stored in one layout and loaded in the other: ldmatrix with .trans and without."""
    S, R, C = st(32, 64, dtype, width), rt(32, 64, dtype), rt(32, 64, dtype, "col")
    smem = tiles.shared(a=S, b=S)

    @cuda.jit
    def body(x, by_col, by_row):
        a, b = smem.open()
        store(a, load(x, R, (0, 0)))
        store(b, load(x, C, (0, 0)))
        cuda.syncthreads()
        store(by_col, load(a, C), (0, 0))
        store(by_row, load(b, R), (0, 0))

    x, by_col, by_row = sample(S.shape, dtype), blank(S.shape, dtype), blank(S.shape, dtype)
    run(body, x, by_col, by_row, shared=smem)
    assert (by_col == x).all() and (by_row == x).all()


@pytest.mark.parametrize("side", ["row", "col"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_there_is_no_stmatrix(sample, dtype, side):
    """On sm_80, plain stores give the same."""
    S, T = st(32, 64, dtype), rt(32, 64, dtype, side)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        store(a, load(x, T, (0, 0)))
        cuda.syncthreads()
        store(out, load(a, T), (0, 0))

    x, out = sample(S.shape, dtype), blank(S.shape, dtype)
    counts = ptx(body, x, out, shared=smem, arch="sm_80")
    assert (out == x).all() and ways(counts, "st.shared") and not ways(counts, "stmatrix")


@pytest.mark.parametrize(("width", "dtype", "rows"), pairs(WIDTHS, [bf16, fp32, fp16], [16, 32, 16, 16]))
def test_shared_by_four_warps(run, sample, width, dtype, rows):
    S, T = st(4 * rows, 64, dtype, width), rt(rows, 64, dtype)
    smem = tiles.shared(first=st(8, 64, dtype, width), tile=S)

    @cuda.jit
    def body(x, out):
        _, a = smem.open()
        warpgroup.store(a, warpgroup.load(x, T, (0, 0)))
        warpgroup.sync()
        warpgroup.store(out, warpgroup.load(a, T), (0, 0))

    x, out = sample((4 * rows, 64), dtype), blank((4 * rows, 64), dtype)
    run(body, x, out, warps=4, shared=smem)
    assert (out == x).all()


@pytest.mark.parametrize(("width", "dtype"), pairs(WIDTHS, DTYPES))
def test_one_warp_reads_what_four_wrote(run, sample, width, dtype):
    """Both scopes see the same tile, so the layout does not depend on who stores."""
    S = st(64, 32 if dtype is fp32 else 64, dtype, width)
    smem = tiles.shared(tile=S)
    quarter, whole = rt(16, S.cols, dtype), rt(64, S.cols, dtype)

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        warpgroup.store(a, warpgroup.load(x, quarter, (0, 0)))
        warpgroup.sync()
        store(out, load(a, whole), (0, 0))

    x, out = sample(S.shape, dtype), blank(S.shape, dtype)
    run(body, x, out, warps=4, shared=smem)
    assert (out == x).all()


SIDES = [(fp32, "row"), (fp32, "col"), (bf16, "row"), (fp16, "col"), (fp8e4m3, "row"), (fp8e5m2, "col"), (int8, "row")]


SWIZZLED = [  # CI has every other one: of each side two widths and one in turn
    pytest.param((side, width), ("sm_90a", "sm_80")[n // 2 % 2], marks=[pytest.mark.release] * (n % 2))
    for n, (side, width) in enumerate(itertools.product(SIDES, WIDTHS))
]


@pytest.mark.parametrize(("case", "arch"), SWIZZLED, ids=str)
def test_no_bank_conflicts(sample, case, arch):
    """The kernel's addresses, counted bank by bank: the lanes that the banks serve at once (8 of ldmatrix, 16 of fp32 pairs,
    all of words) touch each bank once."""
    (dtype, side), width = case
    rows = 32 if (dtype.itemsize, side) == (1, "col") else 16  # swizzles repeat every 8
    S, T = st(rows, 128, dtype, width), rt(rows, 128, dtype, side)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, y):
        (a,) = smem.open()
        store(a, load(x, T, (0, 0)))
        cuda.syncwarp()
        store(y, load(a, T), (0, 0))

    x, y = sample(S.shape, dtype), blank(S.shape, dtype)
    counts = ptx(body, x, y, shared=smem, arch=arch)
    assert (y == x).all() and ways(counts) == {1}


@pytest.mark.parametrize("end", [0, 1, 17, 32, 99, -3])
def test_clip(run, sample, end):
    T = rt(32, 16, fp32)

    @cuda.jit
    def body(x, y, seen, end):
        store(y, load(truncate(x, 0, end), T, (0, 0)), (0, 0))
        store(truncate(seen, 0, end), load(x, T, (0, 0)), (0, 0))

    x, y, seen = sample((32, 16)), blank((32, 16)), blank((32, 16))
    run(body, x, y, seen, np.int32(end))
    inside = np.arange(32)[:, None] < end
    assert (y == np.where(inside, x, 0)).all()
    assert (seen[: max(end, 0)] == x[: max(end, 0)]).all() and np.isnan(seen[max(end, 0) :]).all()


@pytest.mark.parametrize("batch", [-1, 2])
@pytest.mark.parametrize("stores", [False, True])
def test_an_index_beside_the_array(batch, stores):
    """Rows and columns may be outside the array, other axes may not."""
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, n):
        if stores:
            store(x, zeros(T), (n, 0, 0))
        else:
            load(x, T, (n, 0, 0))

    with pytest.raises(Hazard, match=r"index \(.*\) is out of range for an array of shape \(2, 16, 16\)"):
        meaning(body, np.zeros((2, 16, 16), np.float32), batch)
