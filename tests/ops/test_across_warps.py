"""ops/reductions/across_warps.py: reductions across the warps of a warpgroup or of a block."""

import math
import re

import numpy as np
import pytest
from numba import cuda

import ops
from ops import block, full, load, store, warpgroup, zeros
from tiles import Hazard, bf16, fp16, fp32, rt, shared, st, sv
from tiles.testing import EPS, blank, close, meaning, ptx, wide

KINDS = {"max": np.max, "min": np.min, "sum": np.sum, "prod": np.prod}
N = rt(16, 16, fp32).row_vec  # numbers are stored as vectors


def error_of(kind, X):
    """The error that an fp32 reduction over all rows may have."""
    return {"sum": np.abs(X).sum(0), "prod": np.abs(X.prod(0)) * len(X)}.get(kind, 0) * EPS[fp32] * 4


@pytest.mark.parametrize(
    ("scope", "warps", "cols", "dtype", "side"),
    [
        ("warpgroup", 4, 32, fp32, "row"), ("block", 2, 16, bf16, "col"), ("block", 8, 64, fp16, "row"),
        ("warpgroup", 4, 64, fp16, "col"), ("block", 8, 32, fp32, "col"), ("block", 2, 32, bf16, "row"),
    ],
)  # fmt: skip
def test_columns(run, sample, scope, warps, cols, dtype, side):
    """Each column of the warps' stacked tiles is reduced, and every warp gets the result. (A block's second warpgroup has the
    same rows as its first.)"""
    T, W, group, rows = rt(16, cols, dtype, side), rt(16, cols, fp32, side), getattr(ops, scope), 16 * min(warps, 4)
    plan = shared(scratch=sv(8 * cols, fp32))
    ways = [(getattr(ops, f"col_{kind}"), getattr(group, f"reduce_{kind}")) for kind in KINDS]
    (col_max, most), (col_min, least), (col_sum, total), (col_prod, product) = ways

    @cuda.jit
    def body(x, columns):
        (scratch,) = plan.open()
        tile = fp32(warpgroup.load(x, T, (0, 0)))
        for _ in range(2):  # scratch may be used again
            warpgroup.store(columns, zeros(W) + most(col_max(tile), scratch), (0, 0, 0), 1)
            warpgroup.store(columns, zeros(W) + least(col_min(tile), scratch), (1, 0, 0), 1)
            warpgroup.store(columns, zeros(W) + total(col_sum(tile), scratch), (2, 0, 0), 1)
            warpgroup.store(columns, zeros(W) + product(col_prod(tile), scratch), (3, 0, 0), 1)

    x, columns = (sample((rows, cols)) / 8 + 1).astype(dtype.np), blank((4, rows, cols))
    run(body, x, columns, warps=warps, shared=plan)
    X = np.tile(wide(x), (16 * warps // rows, 1))
    for k, (kind, reference) in enumerate(KINDS.items()):
        close(columns[k], reference(X, axis=0), atol=error_of(kind, X))


@pytest.mark.parametrize(("scope", "warps"), [("warpgroup", 4), ("block", 3), ("block", 8)])
def test_numbers(run, sample, scope, warps):
    """One number per warp is reduced."""
    T, group = rt(16, 32, fp32), getattr(ops, scope)
    plan = shared(scratch=sv(16 if scope == "warpgroup" else 64, fp32))
    most, least, total, product = (getattr(group, f"reduce_{kind}") for kind in KINDS)

    @cuda.jit
    def body(x, out):
        (scratch,) = plan.open()
        warp = cuda.threadIdx.x // 32
        tile = load(x, T, (16 * warp, 0))
        store(out, full(N, most(ops.tile_max(tile), scratch)), (warp, 0, 0))
        store(out, full(N, least(ops.tile_min(tile), scratch)), (warp, 1, 0))
        store(out, full(N, total(ops.tile_sum(tile), scratch)), (warp, 2, 0))
        store(out, full(N, product(warp + 1, scratch)), (warp, 3, 0))

    x, out = sample((16 * warps, 32)), blank((warps, 4, 16))
    run(body, x, out, warps=warps, shared=plan)
    X = wide(x)
    close(out[:, 0], X.max())
    close(out[:, 1], X.min())
    close(out[:, 2], X.sum(), atol=error_of("sum", X.reshape(-1, 1)).item())
    close(out[:, 3], math.factorial(warps))


def test_a_vector_is_rounded_to_its_own_dtype(run, sample):
    T, plan = rt(16, 16, bf16), shared(scratch=sv(64, fp32))

    @cuda.jit
    def body(x, out):
        (scratch,) = plan.open()
        row = load(x, T.row_vec, (0,))
        store(out, warpgroup.reduce_sum(row, scratch), (0,))

    x, out = sample(16, bf16), blank(16)
    run(body, x, out, warps=4, shared=plan)
    assert (out == (4 * x.astype(np.float32)).astype(bf16.np)).all()


def test_two_warpgroups_reduce_apart(run, sample):
    """Each warpgroup has scratch of its own, and goes at its own pace."""
    T, plan = rt(16, 32, fp32), shared(first=sv(128, fp32), second=sv(128, fp32))

    @cuda.jit
    def body(x, out):
        first, second = plan.open()
        wg = warpgroup.id()
        tile = warpgroup.load(x, T, (64 * wg, 0))
        if wg == 0:
            store(out, warpgroup.reduce_sum(ops.col_sum(tile), first), (0, 0))
        else:
            for _ in range(3):
                tile *= warpgroup.reduce_max(ops.col_max(tile), second)
            store(out, warpgroup.reduce_max(ops.col_max(tile), second), (1, 0))

    x, out = np.abs(sample((128, 32))), blank((2, 32))
    run(body, x, out, warps=8, shared=plan)
    close(out[0], wide(x[:64]).sum(axis=0), atol=1e-4)
    close(out[1], wide(x[64:]).max(axis=0) ** 8, ulp=64)


@pytest.mark.parametrize("scope", ["warpgroup", "block"])
@pytest.mark.parametrize("true", [(), (2,), (0, 1, 3), (0, 1, 2, 3)], ids=str)
def test_any_and_all(run, scope, true):
    """Each warp has a condition of its own, and all warps branch alike."""
    group, T = getattr(ops, scope), rt(16, 16, fp32)
    reduce_any, reduce_all = group.reduce_any, group.reduce_all

    @cuda.jit
    def body(x, out):
        warp = cuda.threadIdx.x // 32
        mask = load(x, T, (16 * warp, 0))
        for _ in range(2):
            if reduce_any(ops.tile_any(mask)):
                store(out, full(N, 1.0), (warp, 0, 0))
            if reduce_all(ops.tile_all(mask)):
                store(out, full(N, 1.0), (warp, 1, 0))

    x, out = np.zeros((64, 16), np.float32), np.zeros((4, 2, 16), np.float32)
    for warp in true:
        x[16 * warp : 16 * warp + 16] = 1
    run(body, x, out, warps=4)
    assert (out[:, 0] == bool(true)).all() and (out[:, 1] == (len(true) == 4)).all()


def test_each_warp_reduces_its_quarter_of_a_shared_tile(run, sample):
    """Rows are reduced by quarters, columns across the warps."""
    S = st(64, 48, bf16)
    plan = shared(s=S, scratch=sv(256, fp32))
    T = rt(16, 48, bf16)

    @cuda.jit
    def body(x, rows, cols):
        s, scratch = plan.open()
        warpgroup.store(s, warpgroup.load(x, T, (0, 0)))
        mine = warpgroup.quarter(s)  # what this warp itself wrote
        warpgroup.store(rows, ops.row_max(mine), (0,), 0, 0)
        store(cols, warpgroup.reduce_min(ops.col_min(mine), scratch), (0,))

    x, rows, cols = sample(S.shape, bf16), blank(64, bf16), blank(48, bf16)
    run(body, x, rows, cols, warps=4, shared=plan)
    assert (rows == x.max(axis=1)).all() and (cols == x.min(axis=0)).all()


def test_what_a_block_wrote_is_visible_to_wgmma(run, sample):
    """block.sync is a fence as well."""
    S, T = st(64, 64, bf16), rt(16, 64, bf16)
    plan = shared(a=S, b=S)

    @cuda.jit
    def body(x, y, out):
        a, b = plan.open()
        if warpgroup.id() == 0:
            warpgroup.store(a, warpgroup.load(x, T, (0, 0)))
        else:
            warpgroup.store(b, warpgroup.load(y, T, (0, 0)))
        block.sync()
        if warpgroup.id() == 0:
            warpgroup.store(out, warpgroup.wait(warpgroup.mm_AB(a, b)), (0, 0))

    x, y, out = sample((64, 64), bf16), sample((64, 64), bf16), blank((64, 64))
    run(body, x, y, out, warps=8, shared=plan)
    close(out, wide(x) @ wide(y), atol=1e-4)


# ---- mistakes ------------------------------------------------------------------------------------------------------
plan = shared(scratch=sv(32, fp32), halves=sv(128, bf16))
T = rt(16, 16, fp32)


def too_little_scratch():
    scratch, halves = plan.open()
    warpgroup.reduce_sum(full(T.row_vec, 1.0), scratch)


def scratch_of_bf16():
    scratch, halves = plan.open()
    block.reduce_sum(1.0, halves)


def a_tile():
    scratch, halves = plan.open()
    warpgroup.reduce_max(full(T, 1.0), scratch)


def a_partial_sum():
    scratch, halves = plan.open()
    block.reduce_sum(ops.lane_sum(full(T, 1.0)), scratch)


def a_number_for_a_condition():
    block.reduce_any(1.0)


def quarter_of_registers():
    warpgroup.quarter(full(T, 1.0))


MISTAKES = {
    too_little_scratch: "warpgroup.reduce_sum: scratch must be an fp32 shared vector of 4 x 16 elements or more, got sv(32",
    scratch_of_bf16: "block.reduce_sum: scratch must be an fp32 shared vector of 4 elements a warp, got sv(128, bf16)",
    a_tile: "warpgroup.reduce_max: takes a number or a whole vector of each warp, got rt(16, 16, fp32)",
    a_partial_sum: "block.reduce_sum: takes a number or a whole vector of each warp, got partial col_vec(16, fp32)",
    a_number_for_a_condition: "block.reduce_any: takes a condition, such as tile_any(mask), got float",
    quarter_of_registers: "warpgroup.quarter: takes a shared tile of 32, 64, 96, ... rows, got rt(16, 16, fp32)",
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    with pytest.raises(TypeError, match=f"^{re.escape(MISTAKES[mistake])}"):
        backend(cuda.jit(mistake), warps=4, shared=plan)


def test_scratch_for_more_warps_than_there_are(run):
    """The scratch of absent warps does not change the result."""
    plan = shared(scratch=sv(16, fp32))

    @cuda.jit
    def body(y):
        (scratch,) = plan.open()
        store(y, zeros(N) + block.reduce_min(3.0, scratch), (0, 0))
        store(y, zeros(N) + block.reduce_max(-3.0, scratch), (1, 0))
        store(y, zeros(N) + block.reduce_sum(3.0, scratch), (2, 0))
        store(y, zeros(N) + block.reduce_prod(3.0, scratch), (3, 0))

    y = blank((4, 16))
    run(body, y, warps=2, shared=plan)
    assert (y == np.array([3, -3, 6, 9])[:, None]).all()


def test_scratch_for_fewer_warps_than_there_are():
    """The launch raises the error, because only then is the number of warps known."""

    @cuda.jit
    def body():
        scratch, halves = plan.open()
        block.reduce_sum(full(T.row_vec, 1.0), scratch)

    meaning(body, warps=2, shared=plan)
    with pytest.raises(Hazard, match="3 warps bring 16 elements each, and scratch is sv"):
        meaning(body, warps=3, shared=plan)


def test_a_warp_that_stays_away():
    @cuda.jit
    def body():
        scratch, halves = plan.open()
        if cuda.threadIdx.x // 32 != 2:
            warpgroup.reduce_sum(1.0, scratch)

    with pytest.raises(Hazard, match="the warpgroup's sync: named barrier 15, where 96 of 128 threads have arrived"):
        meaning(body, warps=4, shared=plan)
