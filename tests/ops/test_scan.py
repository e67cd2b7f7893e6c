"""ops/reductions/scan.py: running sums of vectors and tiles, against NumPy's."""

import numpy as np
import pytest
from numba import cuda
from numpy import float32

from ops import block, col_index, cumsum, cumsum_columns, load, reverse_cumsum_columns, store
from ops.reductions.scan import fall_shares
from tiles import bf16, fp16, fp32, inlined, rt, shared, st, static, sv
from tiles.testing import blank, close, wide

ROUNDING = 3e-4  # of sums of up to 128 terms, at most 40, in any order: each addition rounds by 2**-24 of its sum


@pytest.mark.parametrize("length", [16, 64, 128])
def test_cumsum(run, sample, length):
    V = rt(16, length, fp32).row_vec

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, V, (0,))), (0,))

    x, y = sample(length), blank(length)
    run(body, x, y)
    close(y, np.cumsum(wide(x)), atol=ROUNDING)


@pytest.mark.parametrize("length", [64, 192])
def test_cumsum_along_a_line(run, sample, length):
    """Through shared memory, with the numbers of its columns added."""
    L, smem = rt(1, length, fp32, "line"), shared(sums=sv(length, fp32))

    @cuda.jit
    def body(x, y):
        (sums,) = smem.open()
        store(sums, cumsum(load(x, L, (1, 0))) + col_index(L))
        block.sync()
        store(y, load(sums, L), (0, 0))

    x, y = sample((2, length)), blank((1, length))
    run(body, x, y, shared=smem)
    close(y[0], np.cumsum(wide(x)[1]) + np.arange(length), atol=ROUNDING)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (32, 48)])
def test_cumsum_down_columns(run, sample, shape):
    T = rt(*shape, fp32, "col")

    @cuda.jit
    def body(x, y):
        store(y, cumsum(load(x, T, (0, 0))), (0, 0))

    x, y = sample(shape), blank(shape)
    run(body, x, y)
    close(y, np.cumsum(wide(x), axis=0), atol=ROUNDING)


@pytest.mark.parametrize(
    ("shape", "dtype", "in_loop"),
    [((64, 32), fp32, False), ((64, 16), bf16, True), ((32, 64), fp16, False), ((64, 48), fp32, True)],
)
def test_sum_down(run, sample, shape, dtype, in_loop):
    T, S = rt(*shape, fp32), st(*shape, dtype)
    smem = shared(x=S, sums=st(*shape, fp32))

    @cuda.jit
    def body(x, y):
        source, sums = smem.open()
        store(source, load(x, T, (0, 0)))
        block.sync()
        cumsum_columns(sums, source, -1.0, in_loop=in_loop)
        store(y, load(sums, T), (0, 0))

    x, y = sample(shape, dtype), blank(shape)
    x[shape[0] // 2, 5] = np.nan  # from there on its column's sums are none
    run(body, x, y, shared=smem)
    close(y, np.cumsum(np.maximum(wide(x), -1), axis=0), atol=ROUNDING)


def test_elements_below_the_least_may_count_as_another(run, sample):
    T, smem = rt(64, 32, fp32), shared(x=st(64, 32, fp32))

    @cuda.jit
    def body(x, y):
        (tile,) = smem.open()
        store(tile, load(x, T, (0, 0)))
        block.sync()
        cumsum_columns(tile, tile, -0.5, below=-3.0)
        store(y, load(tile, T), (0, 0))

    x, y = sample((64, 32)), blank((64, 32))
    run(body, x, y, shared=smem)
    close(y, np.cumsum(np.where(wide(x) < -0.5, -3.0, wide(x)), axis=0), atol=ROUNDING)


@pytest.mark.parametrize(("dtype", "in_loop"), [(bf16, False), (bf16, True), (fp32, False), (fp32, True)])
def test_sums_fall_by_a_limited_amount(run, sample, dtype, in_loop):
    """Within 16 rows from the second on, whatever the first one is; elements that are not too low stay."""
    T, S, fall = rt(64, 32, fp32), st(64, 32, dtype), 30.0
    smem = shared(x=S, sums=st(64, 32, fp32))

    @cuda.jit
    def body(x, y):
        source, sums = smem.open()
        store(source, load(x, T, (0, 0)))
        block.sync()
        cumsum_columns(sums, source, -100.0, fall=fall, in_loop=in_loop)
        store(y, load(sums, T), (0, 0))

    x, y = sample((64, 32), dtype), blank((64, 32))
    x[:] = -abs(wide(x))
    x[:, 3] = -100
    x[:, [4, 8]] = -0.5
    x[5, 4] = x[16, 4] = x[17, 4] = -80
    x[:, 5] = -3
    x[20, 6] = np.nan
    x[18, 7], x[19, 7], x[37, 8] = -100, -20, -20
    run(body, x, y, shared=smem)
    g = wide(x)
    steps = np.diff(wide(y), axis=0, prepend=0)
    assert np.isnan(steps[20:, 6]).all() and not np.isnan(np.delete(steps, 6, axis=1)).any()
    g, steps = np.delete(g, 6, axis=1), np.delete(steps, 6, axis=1)
    np.testing.assert_allclose(steps[::16], g[::16], atol=1e-3)
    most = fall * np.array(fall_shares())[1:, None]
    for first in range(1, 64, 16):
        raw, cut = g[first : first + 15], steps[first : first + 15]
        assert (cut.cumsum(axis=0) >= -most - 1e-3).all()
        is_cut = cut > raw + 1e-3  # then by no more than is needed
        np.testing.assert_allclose(cut.cumsum(axis=0)[is_cut], np.broadcast_to(-most, cut.shape)[is_cut], atol=1e-3)
        assert (cut[is_cut] <= most[0] - most[1] + 1e-3).all()
        np.testing.assert_allclose(cut[1:, 3], most[:-1, 0] - most[1:, 0], atol=1e-3)  # all are too low
    np.testing.assert_allclose(steps[37, 7], 4 * 0.5 - most[4], atol=1e-3)  # where no other one is


@static
class WeightedSum:
    """A function of numbers, as a method of a static object."""

    slope: float

    @inlined
    def at(self, x, y, z):
        return x * float32(self.slope) + y * z


@pytest.mark.parametrize("dtype", [bf16, fp32])
def test_sums_of_a_function_down_columns(run, sample, dtype):
    """Of each element, a number, and an element of a vector for the column."""
    T, weighted = rt(16, 32, fp32), WeightedSum(0.5)
    smem = shared(x=st(16, 32, dtype), sums=st(16, 32, fp32), z=sv(32, fp32))

    @cuda.jit
    def body(x, z, y):
        source, sums, of_columns = smem.open()
        store(source, load(x, T, (0, 0)))
        store(of_columns, load(z, T.row_vec, (0,)))
        block.sync()
        cumsum_columns(sums, source, -0.25, weighted.at, float32(2.0), of_columns)
        store(y, load(sums, T), (0, 0))

    x, z, y = sample((16, 32), dtype), sample(32), blank((16, 32))
    run(body, x, z, y, shared=smem)
    close(y, np.cumsum(np.maximum(0.5 * wide(x) + 2 * wide(z), -0.25), axis=0), atol=ROUNDING)


@inlined
def shift(x, y, z):
    """x + y z: of fp32 numbers alone."""
    return x + y * z


@pytest.mark.parametrize(
    ("divides", "least", "in_loop"), [(False, -0.25, False), (True, -0.25, True), (True, -0.25, False), (True, None, False)]
)
def test_sums_of_a_factor_and_a_function(run, sample, divides, least, in_loop):
    """Times a function, or over it. An infinite divisor spoils nothing, NaN the sums from it on."""
    T, smem = rt(32, 32, fp32), shared(x=st(32, 32, bf16), sums=st(32, 32, fp32), z=sv(32, fp32))

    @cuda.jit
    def body(x, z, factor, y):
        source, sums, of_columns = smem.open()
        store(source, load(x, T, (0, 0)))
        store(of_columns, load(z, T.row_vec, (0,)))
        block.sync()
        cumsum_columns(sums, source, least, shift, float32(2.0), of_columns, None, None, factor, divides, in_loop)
        store(y, load(sums, T), (0, 0))

    x, z, y = sample((32, 32), bf16), sample(32), blank((32, 32))
    x[:], z[:] = 1 + abs(wide(x)), abs(wide(z))
    x[3, 4], x[6, 5], x[8, 5] = (np.inf, 2.0**100, np.nan) if divides else (100, 200, np.nan)
    run(body, x, z, np.float32(-0.5), y, shared=smem)
    value = wide(x) + 2 * wide(z)
    terms = -0.5 / value if divides else -0.5 * value
    close(y, np.cumsum(terms if least is None else np.maximum(terms, least), axis=0), atol=ROUNDING)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_sum_up(run, sample, shape):
    T = rt(*shape, fp32)
    smem = shared(x=st(*shape, fp32), last=sv(shape[1], fp32))

    @cuda.jit
    def body(x, z, y):
        sums, last = smem.open()
        store(sums, load(x, T, (0, 0)))
        store(last, load(z, T.row_vec, (0,)))
        block.sync()
        reverse_cumsum_columns(sums, last)
        store(y, load(sums, T), (0, 0))

    x, z, y = sample(shape), sample(shape[1]), blank(shape)
    run(body, x, z, y, shared=smem)
    close(y, np.cumsum(np.concatenate([wide(z)[None], wide(x)[::-1]]), axis=0)[:0:-1], atol=ROUNDING)


def test_a_loop_takes_whole_groups(run):
    """A loop adds up 16 rows in each round, so a tile of 24 is refused."""
    smem = shared(x=st(24, 32, fp32))

    @cuda.jit
    def body():
        (x,) = smem.open()
        cumsum_columns(x, x, -1.0, in_loop=True)

    with pytest.raises(TypeError, match="a multiple of 16 rows"):
        run(body, shared=smem)


def test_sums_are_of_fp32(run):
    smem = shared(x=st(16, 32, bf16), y=st(16, 32, bf16))

    @cuda.jit
    def body():
        x, y = smem.open()
        cumsum_columns(y, x, -1.0)

    with pytest.raises(TypeError, match="cumsum_columns: takes an fp32 shared tile"):
        run(body, shared=smem)
