"""ops/reductions/reduce.py: reductions along rows and columns, at once or by lanes first, and of a whole tile."""

import re

import numpy as np
import pytest
from numba import cuda

import ops
from ops import finish_sum, full, group_sum, lane_col_sum, lane_moment, lane_sum, load, row_max, row_sum, store
from tiles import bf16, fp16, fp32, rt, shared, st
from tiles.testing import EPS, blank, close, meaning, pairs, ptx, wide

SHAPES = [(16, 16), (32, 16), (16, 48), (48, 32), (16, 256), (64, 32)]
KINDS = {"max": np.max, "min": np.min, "sum": np.sum, "prod": np.prod}


def error_of(kind, X, axis):
    """The fp32 error of a sum, proportional to the sizes of its terms, or of a product, to the result."""
    if kind in ("max", "min"):
        return 0
    size = np.abs(X).sum(axis=axis) if kind == "sum" else np.abs(X.prod(axis=axis)) * X.size
    return size * EPS[fp32] * 4


@pytest.mark.parametrize(
    ("shape", "dtype", "side", "axis"),
    pairs(SHAPES, [fp32, bf16, fp16], ["row", "row", "col", "col"], ["row", "col"]),
)
def test_rows_and_columns(run, sample, shape, dtype, side, axis):
    T = rt(*shape, dtype, side)
    V = T.col_vec if axis == "row" else T.row_vec
    greatest, least, summed, multiplied = (getattr(ops, f"{axis}_{kind}") for kind in KINDS)

    @cuda.jit
    def body(x, v, out, running):
        a, m = load(x, T, (0, 0)), load(v, V, (0,))
        store(out, greatest(a), (0, 0))
        store(out, least(a), (1, 0))
        store(out, summed(a), (2, 0))
        store(out, multiplied(a), (3, 0))
        store(running, greatest(a, m), (0, 0))
        store(running, least(a, m), (1, 0))
        store(running, summed(a, m), (2, 0))
        store(running, multiplied(a, running=m), (3, 0))

    number = 1 if axis == "row" else 0
    x, v = sample(shape, dtype), sample(V.length, dtype)
    if dtype is fp16:
        x[:8] = 1  # products stay in its range
    out, running = blank((4, V.length), dtype), blank((4, V.length), dtype)
    run(body, x, v, out, running)
    X, M = wide(x), wide(v)
    for k, (kind, reference) in enumerate(KINDS.items()):
        want, error = reference(X, axis=number), error_of(kind, X, number)
        with_m = {"max": np.maximum, "min": np.minimum, "sum": np.add, "prod": np.multiply}[kind](want, M)
        rounding = 0 if kind in ("max", "min") else 0.51 if dtype is not fp32 else 1
        close(out[k], want, ulp=rounding, atol=error)
        close(running[k], with_m, ulp=rounding, atol=error * (np.abs(M) if kind == "prod" else 1))


@pytest.mark.parametrize(("shape", "dtype", "side"), pairs([(16, 16), (48, 32), (16, 48)], [fp32, bf16], ["row", "col"]))
def test_a_whole_tile_or_vector_gives_a_number(run, sample, shape, dtype, side):
    T = rt(*shape, dtype, side)
    O = rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(x, c, r, out):
        a, col, row = load(x, T, (0, 0)), load(c, T.col_vec, (0,)), load(r, T.row_vec, (0,))
        store(out, full(O, ops.tile_max(a)), (0, 0))
        store(out, full(O, ops.tile_min(a)), (1, 0))
        store(out, full(O, ops.tile_sum(a)), (2, 0))
        store(out, full(O, ops.tile_prod(col)), (3, 0))
        store(out, full(O, ops.tile_sum(col)), (4, 0))
        store(out, full(O, ops.tile_sum(row)), (5, 0))
        store(out, full(O, ops.tile_max(row)), (6, 0))

    x, c, r = sample(shape, dtype), sample(shape[0], dtype), sample(shape[1], dtype)
    out = blank((7, 16))
    run(body, x, c, r, out)
    X, C, R = wide(x), wide(c), wide(r)
    wants = [X.max(), X.min(), X.sum(), C.prod(), C.sum(), R.sum(), R.max()]
    errors = [0, 0, *(error_of(*inputs, None) for inputs in (("sum", X), ("prod", C), ("sum", C), ("sum", R))), 0]
    for actual, want, error in zip(out, wants, errors, strict=True):
        close(actual, np.full(16, want), atol=error)


@pytest.mark.parametrize(("shape", "dtype"), pairs([(16, 16), (48, 64), (80, 32)], [fp32, bf16, fp16]))
def test_shared_tiles(run, sample, shape, dtype):
    """A shared tile reduces like the same tile in registers: by rows, by columns, whole; with running values."""
    S, T, O = st(*shape, dtype), rt(*shape, dtype), rt(16, shape[1], fp32).row_vec
    plan = shared(s=S)

    @cuda.jit
    def body(x, v, rows, cols, out):
        (s,) = plan.open()
        tile = load(x, T, (0, 0))
        store(s, tile)
        cuda.syncthreads()
        m = load(v, T.col_vec, (0,))
        store(rows, ops.row_max(s), (0, 0))
        store(rows, ops.row_sum(s, m), (1, 0))
        store(cols, ops.col_min(s), (0, 0))
        store(cols, ops.col_sum(s), (1, 0))
        store(cols, ops.col_prod(s, ops.col_max(tile)), (2, 0))
        store(out, full(O, ops.tile_max(s)), (0, 0))
        store(out, full(O, ops.tile_sum(s)), (1, 0))

    x, v = sample(shape, dtype), sample(shape[0], dtype)
    x[2:] *= dtype.np.type(0.5)
    if dtype is fp16:
        x[4:] = 1  # products stay in its range
    rows, cols, out = blank((2, shape[0]), dtype), blank((3, shape[1]), dtype), blank((2, shape[1]))
    run(body, x, v, rows, cols, out, shared=plan)
    X, M, rounding = wide(x), wide(v), 1 if dtype is fp32 else 0.51
    close(rows[0], X.max(axis=1))
    close(rows[1], X.sum(axis=1) + M, ulp=rounding, atol=error_of("sum", X, 1))
    close(cols[0], X.min(axis=0))
    close(cols[1], X.sum(axis=0), ulp=rounding, atol=error_of("sum", X, 0))
    close(cols[2], X.prod(axis=0) * X.max(axis=0), ulp=rounding, atol=error_of("prod", X, 0) * np.abs(X.max(axis=0)))
    close(out[0], np.full(shape[1], X.max()))
    close(out[1], np.full(shape[1], X.sum()), atol=error_of("sum", X, None))


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_shared_tiles_that_registers_cannot_hold(backend):
    plan = shared(s=st(8, 64, bf16))

    @cuda.jit
    def body(out):
        (s,) = plan.open()
        store(out, row_sum(s), (0,))

    words = "row_sum: st(8, 64, bf16) is read into registers: rt: rows and cols must be positive multiples of 16, got 8 x 64"
    with pytest.raises(TypeError, match=re.escape(words)):
        backend(body, blank(64), shared=plan)


@pytest.mark.parametrize("where", ["nowhere", "everywhere", "at the last element", "but at the last element"])
def test_any_and_all_decide_a_branch(run, where):
    """Of tiles, and of vectors in either register layout."""
    T, K = rt(16, 32, fp32), rt(32, 16, fp32, "col")

    @cuda.jit
    def body(x, out):
        mask = ops.greater(load(x, T, (0, 0)), 0.0)
        col, row = load(x, K.col_vec, (15, 0)), load(x, T.row_vec, (15, 0))
        if ops.tile_any(mask):
            store(out, full(T.row_vec, 1.0), (0, 0))
        if ops.tile_all(mask):
            store(out, full(T.row_vec, 1.0), (1, 0))
        if ops.tile_any(ops.not_equal(col, 0.0)):
            store(out, full(T.row_vec, 1.0), (2, 0))
        if ops.tile_all(row):
            store(out, full(T.row_vec, 1.0), (3, 0))

    x = np.full((16, 32), where in ("everywhere", "but at the last element"), np.float32)
    if "last" in where:
        x[15, 31] = 1 - x[15, 31]
    out = np.zeros((4, 32), np.float32)
    run(body, x, out)
    assert (out[::2] == x.any()).all() and (out[1::2] == x.all()).all()


@pytest.mark.parametrize(("dtype", "side"), [(bf16, "row"), (fp32, "col")])
def test_partial_sums_are_finished_once(run, sample, dtype, side):
    T = rt(32, 48, dtype, side)

    @cuda.jit
    def body(x, lanes, by_column):
        store(lanes, finish_sum(lane_sum(load(x, T, (0, 0)))), (0,))
        store(by_column, finish_sum(lane_col_sum(load(x, T, (0, 0)))), (0,))

    x, lanes, by_column = sample((32, 48), dtype), blank(32, dtype), blank(48, dtype)
    run(body, x, lanes, by_column)
    X = wide(x)
    of_columns = np.abs(X).sum(axis=0) * EPS[dtype] / 2 * (dtype is not fp32)
    close(by_column, X.sum(axis=0), ulp=0.51 if dtype is not fp32 else 0, atol=error_of("sum", X, 0) + of_columns)
    shares = np.abs(X).sum(axis=1) * EPS[dtype] / 2 * (dtype is not fp32)  # every lane's share is rounded
    close(lanes, X.sum(axis=1), ulp=0.51 if dtype is not fp32 else 0, atol=error_of("sum", X, 1) + shares)


@pytest.mark.parametrize("shape", [(16, 16), (32, 48), (16, 128)])
def test_first_moments_of_rows(run, sample, shape):
    """Each element is multiplied by the number of its column, and added to another partial sum before that is finished."""
    T = rt(*shape, fp32)

    @cuda.jit
    def body(x, moments, both):
        a = load(x, T, (0, 0))
        store(moments, finish_sum(lane_moment(a)), (0,))
        store(both, finish_sum(lane_moment(a) + lane_sum(a) * 3.0), (0,))

    x, moments, both = sample(shape), blank(shape[0]), blank(shape[0])
    run(body, x, moments, both)
    weighted = wide(x) * np.arange(shape[1])
    error = error_of("sum", np.abs(weighted) + 3 * np.abs(wide(x)), 1)
    close(moments, weighted.sum(axis=1), atol=error)
    close(both, weighted.sum(axis=1) + 3 * wide(x).sum(axis=1), atol=error)


@pytest.mark.parametrize(("rows", "size"), [(16, 1), (16, 4), (32, 2), (48, 8)])
def test_sums_of_groups_of_rows(run, sample, rows, size):
    T = rt(rows, 32, fp32)

    @cuda.jit
    def body(x, out, partial):
        a = load(x, T, (0, 0))
        store(out, group_sum(row_sum(a), size), (0,))
        store(partial, finish_sum(group_sum(lane_sum(a), size)), (0,))

    x, out, partial = sample((rows, 32)), blank(rows), blank(rows)
    run(body, x, out, partial)
    groups = wide(x).reshape(-1, size * 32)
    for actual in out, partial:
        close(actual, np.repeat(groups.sum(1), size), atol=np.repeat(error_of("sum", groups, 1), size))


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("tile", [rt(16, 16, bf16), rt(16, 16, fp32, "col")], ids=str)
def test_first_moments_are_of_fp32_in_row_layout(backend, tile):
    @cuda.jit
    def body(x, out):
        store(out, finish_sum(lane_moment(load(x, tile, (0, 0)))), (0,))

    with pytest.raises(TypeError, match=re.escape(f"lane_moment: takes a register tile of fp32 in row layout, got {tile}")):
        backend(body, blank((16, 16), tile.dtype), blank(16))


def test_row_max_drops_nan_as_fmax_does(run, sample):
    T = rt(16, 64, fp32)

    @cuda.jit
    def body(x, greatest, sums):
        a = load(x, T, (0, 0))
        store(greatest, row_max(a), (0,))
        store(sums, row_sum(a), (0,))

    x = sample((16, 64))
    for row in range(16):
        x[row, row :: 3 + row] = np.nan
    x[1], x[2], x[3, 5] = np.nan, -np.inf, np.inf
    greatest, sums = blank(16), np.zeros(16, np.float32)
    run(body, x, greatest, sums)
    with np.errstate(all="ignore"):
        close(greatest, np.fmax.reduce(x, axis=1))
    assert np.isnan(greatest[1]) and greatest[2] == -np.inf and greatest[3] == np.inf
    assert np.isnan(sums[[0, 1, 4, 15]]).all() and sums[2] == -np.inf


def test_partial_sums_may_be_scaled_added_and_divided(run, sample):
    """The running sum of an online softmax: l = l * alpha + lane_sum(p), finished once."""
    T = rt(32, 32, fp32)

    @cuda.jit
    def body(x, c, out):
        partial = lane_sum(load(x, T, (0, 0)))
        alpha = load(c, T.col_vec, (0,))
        for _ in range(3):
            partial = partial * alpha + lane_sum(load(x, T, (32, 0)))
        partial *= 2.0
        store(out, finish_sum((partial - lane_sum(load(x, T, (0, 0)))) / 4.0), (0,))

    x, c, out = sample((64, 32)), sample(32), blank(32)
    run(body, x, c, out)
    first, second = wide(x)[:32].sum(axis=1), wide(x)[32:].sum(axis=1)
    want = first
    for _ in range(3):
        want = want * wide(c) + second
    size = np.abs(wide(x)).sum(axis=1).max() * (1 + np.abs(wide(c))) ** 3
    close(out, (2 * want - first) / 4, atol=size * EPS[fp32] * 8)
