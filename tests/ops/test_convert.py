"""ops/elementwise/convert.py: every dtype to every other by calling it."""

import itertools

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store, warpgroup
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, ring, rt, st, tensor, tf32
from tiles.compiling.compiler import compile_kernel
from tiles.dtypes import _to_tf32
from tiles.launching.arguments import parameter
from tiles.testing import blank, close, pairs, wide


def corners(to):
    """Numbers that decide the rounding to `to`: ties, their neighbours, the ends of the range."""
    info = {bf16: (8, 127, -126), fp16: (11, 15, -14)}[to]
    digits, top, bottom = info
    ulp = 2.0 ** (1 - digits)
    greatest = (2 - ulp) * 2.0**top
    subnormal = 2.0**bottom * ulp
    ties = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-23, 1 + ulp / 2 - 2.0**-23, 1 + 3 * ulp / 2 - 2.0**-23]
    ends = [greatest, greatest * (1 + ulp / 4 * 0.99), min(greatest * (1 + ulp / 2), 3.4028235e38), 3.4028235e38]
    small = [2.0**bottom, 2.0**bottom - subnormal / 2, *(subnormal * x for x in (1, 0.5, 1.5, 2.5, 0.51))]
    numbers = np.array(ties + ends + small + [0.0, np.inf], np.float64).astype(np.float32)
    return np.concatenate([numbers, -numbers, [np.nan, -np.nan]]).astype(np.float32)


def values(dtype):
    """All finite numbers of a dtype of one byte, ascending from 0, and whether the last bit of each is 0."""
    bits = np.arange(128, dtype=np.uint8)
    actual = wide(bits.view(dtype.np))
    return actual[np.isfinite(actual)], bits[np.isfinite(actual)] % 2 == 0


def rounded(x, to):
    """x rounded to a dtype, in float64, without help of ml_dtypes where that means something else."""
    x = wide(x)
    if to is tf32:
        mantissa, exponent = np.frexp(x)
        return np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5), x) * np.exp2(exponent - 11.0)
    if to.itemsize > 1:
        with np.errstate(over="ignore"):
            return wide(x.astype(np.float32).astype(to.np))
    if to is int8:
        return np.where(np.isnan(x), 0.0, np.clip(np.rint(x), -128, 127)) + 0.0  # there is no -0
    ladder, even = values(to)
    low = np.clip(np.searchsorted(ladder, np.abs(x), side="right") - 1, 0, len(ladder) - 2)
    below, above = np.abs(x) - ladder[low], ladder[low + 1] - np.abs(x)
    up = (below > above) | (below == above) & even[low + 1]
    return np.where(np.isnan(x), x, np.copysign(np.where(up, ladder[low + 1], ladder[low]), x))


def decisive(dtype):
    """Numbers that decide the rounding to fp8 or int8, as many as 64 x 32 take."""
    ladder, _ = values(dtype)
    middles = (ladder[1:] + ladder[:-1]) / 2
    end = ladder[-1]
    beyond = [end * 1.01, end * 1.07, end * 2, 3e38, np.inf, np.nan, 1e-30, 0.0]
    numbers = np.concatenate([ladder, middles, middles * (1 - 2.0**-20), middles * (1 + 2.0**-20), beyond])
    return np.resize(np.concatenate([numbers, -numbers]).astype(np.float32), (64, 32))


ALL = [fp32, fp16, bf16, tf32, fp8e4m3, fp8e5m2, int8]
LAYOUTS = ["row", "col", "row", "col", "row", "col", "row"]


def check_conversions(run, body, source, shape, sample):
    """Run body(x, an output for each of ALL) with numbers of `source` that decide the rounding to each dtype of one byte; every
    fourth one is random."""
    for to in fp8e4m3, fp8e5m2, int8:
        x = np.where(np.arange(shape[-1]) % 4, np.resize(decisive(to), shape), sample(shape) * 8)
        x, outs = rounded(x, source).astype(source.np), [blank(shape, target) for target in ALL]
        run(body, x, *outs)
        for out, target in zip(outs, ALL, strict=True):
            want = rounded(rounded(x, source), target)
            same = (wide(out) == want) & (np.signbit(wide(out)) == np.signbit(want))
            assert (same | np.isnan(wide(out)) & np.isnan(want)).all(), target


@pytest.mark.parametrize(("source", "layout"), [*zip(ALL, LAYOUTS), (fp8e4m3, "col"), (int8, "col")], ids=str)
def test_every_dtype_to_every_other(run, sample, source, layout):
    """fp8 and int8 round ties to even and saturate; tf32 rounds ties away from zero, also when it is loaded."""
    T = rt(32, 32, source, layout)

    @cuda.jit
    def body(x, a, b, c, d, e, f, g):
        tile = load(x, T, (0, 0))
        store(a, fp32(tile), (0, 0))
        store(b, fp16(tile), (0, 0))
        store(c, bf16(tile), (0, 0))
        store(d, tf32(tile), (0, 0))
        store(e, fp8e4m3(tile), (0, 0))
        store(f, fp8e5m2(tile), (0, 0))
        store(g, int8(tile), (0, 0))

    check_conversions(run, body, source, (32, 32), sample)


@pytest.mark.parametrize(("source", "axis"), [*zip(ALL, itertools.cycle(["col_vec", "row_vec"])), (int8, "row_vec")], ids=str)
def test_vectors_of_every_dtype_to_every_other(run, sample, source, axis):
    V = getattr(rt(64, 64, source), axis)

    @cuda.jit
    def body(x, a, b, c, d, e, f, g):
        vector = load(x, V, (0,))
        store(a, fp32(vector), (0,))
        store(b, fp16(vector), (0,))
        store(c, bf16(vector), (0,))
        store(d, tf32(vector), (0,))
        store(e, fp8e4m3(vector), (0,))
        store(f, fp8e5m2(vector), (0,))
        store(g, int8(vector), (0,))

    check_conversions(run, body, source, (64,), sample)


SHARED = pytest.mark.parametrize(
    ("dtype", "layout", "width", "rows", "cols"),
    [(fp8e4m3, "row", 64, 16, 128), (fp8e5m2, "col", 32, 32, 64), (int8, "col", 128, 32, 128)],
)


@SHARED
def test_bytes_through_shared_memory(run, sample, dtype, layout, width, rows, cols):
    """A tile is rounded in registers, stored, loaded and widened."""
    T, narrow = rt(rows, cols, fp32, layout), rt(rows, cols, dtype, layout)
    smem = tiles.shared(a=st(rows, cols, dtype, width))

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        store(a, dtype(load(x, T, (0, 0))))
        cuda.syncthreads()
        store(out, fp32(load(a, narrow)), (0, 0))

    x, out = sample((rows, cols)) * 8, blank((rows, cols))
    run(body, x, out, shared=smem)
    assert (out == rounded(x, dtype)).all()


@SHARED
def test_loads_and_stores_convert_bytes(run, sample, dtype, layout, width, rows, cols):
    """fp32 goes into a tile of bytes, bytes into a tf32 tile, each to bytes, bf16 and back."""
    T, H, narrow = rt(rows, cols, fp32, layout), rt(rows, cols, bf16, layout), rt(rows, cols, dtype, layout)
    smem = tiles.shared(a=st(rows, cols, dtype, width), b=st(rows, cols, tf32))

    @cuda.jit
    def body(x, out):
        a, b = smem.open()
        store(a, load(x, T, (0, 0)))
        cuda.syncthreads()
        store(b, load(a, narrow))
        cuda.syncthreads()
        store(out, load(b, narrow), (0, 0))
        store(out, load(a, H), (rows, 0))

    x, out = sample((rows, cols)) * 8, blank((2 * rows, cols))
    run(body, x, out, shared=smem)
    assert (out == np.tile(rounded(x, dtype), (2, 1))).all()


@pytest.mark.parametrize(("dtype", "layout"), pairs([fp8e4m3, int8, fp8e5m2], ["row", "col"]))
def test_a_store_to_an_array_of_bytes_saturates(run, dtype, layout):
    T = rt(64, 32, fp32, layout)

    @cuda.jit
    def body(x, out):
        store(out, load(x, T, (0, 0)), (0, 0))

    x, out = decisive(dtype), blank((64, 32), dtype)
    run(body, x, out)
    assert np.array_equal(wide(out), rounded(x, dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [fp8e4m3, fp8e5m2, int8, tf32])
def test_by_four_warps(run, sample, dtype):
    T, narrow, S = rt(16, 64, fp32), rt(16, 64, dtype), st(64, 64, dtype)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        warpgroup.store(a, dtype(warpgroup.load(x, T, (0, 0))))
        warpgroup.sync()
        warpgroup.store(out, fp32(warpgroup.load(a, narrow)), (0, 0))

    x, out = sample((64, 64)) * 8, blank((64, 64))
    run(body, x, out, warps=4, shared=smem)
    assert (out == rounded(x, dtype)).all()


@pytest.mark.parametrize("dtype", [fp8e4m3, fp8e5m2, int8, tf32])
def test_by_tma(run, sample, dtype):
    """TMA copies bytes, or rounds to tf32 on the way in."""
    T, S = rt(16, 64, dtype), st(64, 64, dtype)
    smem = tiles.shared(a=ring(S, 1), b=S)

    @cuda.jit
    def body(x, seen, y):
        a, b = smem.open()
        a.fill(0, x, (1, 0))
        tile = warpgroup.load(a.wait(0), T)
        warpgroup.store(b, tile)
        warpgroup.tma_store(y, (0, 0), b)
        warpgroup.store(seen, fp32(tile), (0, 0))
        warpgroup.store_wait()

    x = rounded(sample((100, 64)) * 8, fp32 if dtype is tf32 else dtype).astype(dtype.np)
    if dtype is tf32:  # ties go to even
        x[64:, :8] = np.copysign(1 + np.array([1, 3, 5, 7] * 2) * 2.0**-11, [1] * 4 + [-1] * 4)
    seen, y = blank((64, 64)), blank((64, 64), dtype)
    run(body, tensor(x, S), seen, tensor(y, S), warps=4, shared=smem)
    want = np.zeros((64, 64))
    want[:36] = x[64:]
    if dtype is tf32:
        mantissa, exponent = np.frexp(want)
        want = np.ldexp(np.round(mantissa * 2**11), exponent - 11)
        assert (np.abs(want[:36, :4]) == 1 + np.array([0, 4, 4, 8]) * 2.0**-11).all()
    assert (seen == want).all() and (wide(y) == want).all()


def test_what_an_a100_lacks():
    """fp8 needs sm_89: the launch raises the error before it starts."""
    T = rt(16, 32, fp32)

    @cuda.jit
    def narrow(x):
        store(x, fp32(fp8e4m3(load(x, T, (0, 0)))), (0, 0))

    signature = [parameter("x", blank((16, 32))).type]
    with pytest.raises(Exception, match="cvt.e4m3x2.f32' requires .target sm_89 or higher"):
        compile_kernel(narrow, signature, "sm_80")
    for arch in ("sm_89", "sm_100a", "sm_120a"):
        assert compile_kernel(narrow, signature, arch).local_bytes == 0


def test_ties_of_tf32():
    """Ties go away from zero, or to even, as requested; less than half a unit goes down."""
    x = np.float32([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 - 2**-23])
    assert (_to_tf32(x) == [1 + 2**-10, -1 - 2**-10, 1 + 2**-9, 1]).all()
    assert (_to_tf32(x, to_even=True) == [1, -1, 1 + 2**-9, 1]).all()


@pytest.mark.parametrize("to", [bf16, fp16])
def test_rounds_to_nearest_even(run, sample, to):
    T = rt(16, 48, fp32)

    @cuda.jit
    def body(x, c, r, out, back, col, row):
        tile = to(load(x, T, (0, 0)))
        store(out, tile, (0, 0))
        store(back, fp32(tile), (0, 0))
        store(col, to(load(c, T.col_vec, (0,))), (0,))
        store(row, fp32(to(load(r, T.row_vec, (0,)))), (0,))

    x, r = sample((16, 48)), sample(48)
    special = corners(to)
    x[3, : len(special)] = special
    x[11, -len(special) :] = special
    c = special[:16].copy()
    out, back, col, row = blank(x.shape, to), np.zeros(x.shape, np.float32), blank(16, to), blank(48)
    run(body, x, c, r, out, back, col, row)
    with np.errstate(all="ignore"):
        want, c = x.astype(to.np), c.astype(to.np)
    same = lambda a, b: ((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)).all()
    assert same(out, want)
    assert same(back, want.astype(np.float32))
    assert same(col, c)
    assert same(row, r.astype(to.np).astype(np.float32))


def test_between_two_byte_types(run, sample):
    T, H = rt(16, 16, bf16), rt(16, 16, fp16)

    @cuda.jit
    def body(x, y, halves, same, brains):
        a = load(x, T, (0, 0))
        store(halves, fp16(a), (0, 0))
        store(same, bf16(a), (0, 0))
        store(brains, bf16(load(y, H, (0, 0))), (0, 0))

    x, y = sample((16, 16), bf16), sample((16, 16), fp16)
    x[0, :4] = [1e30, -1e-30, 65504, 1e-7]
    halves, same, brains = blank((16, 16), fp16), blank((16, 16), bf16), blank((16, 16), bf16)
    run(body, x, y, halves, same, brains)
    with np.errstate(over="ignore"):
        assert (halves == x.astype(np.float32).astype(np.float16)).all()
    assert (same == x).all() and (brains == y.astype(bf16.np)).all()


def test_a_tile_knows_its_dtype(run, sample):
    """Generic code converts by the tile's own attribute."""
    T = rt(16, 32, bf16)

    @cuda.jit
    def body(x, out):
        a = load(x, T, (0, 0))
        store(out, a.dtype(fp32(a) * 2), (0, 0))

    x, out = sample((16, 32), bf16), blank((16, 32), bf16)
    run(body, x, out)
    close(out, x.astype(np.float32) * 2)
