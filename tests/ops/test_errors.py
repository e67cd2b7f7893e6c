"""Errors of wrong arguments: a TypeError in a user's terms, with the values and the alternatives, the same on both backends.
These are about maps, reductions, masks and types; test_errors_of_memory.py has the others."""

from dataclasses import replace

import numpy as np
import pytest
from mistakes import WIDE, B, E, RefusedKernels, S, T, check
from numba import cuda

import tiles
from ops import (  # fmt: skip
    causal,
    col_index,
    exp2,
    finish_sum,
    fma,
    full,
    lane_sum,
    less,
    map,
    maximum,
    ones,
    right_fill,
    row_index,
    row_max,
    row_sum,
    store,
    tanh,
    tile_any,
    tile_sum,
    transpose,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, fp8e4m3, fp16, fp32, int32, ring, rt, st, tf32
from tiles.testing import ptx

says = RefusedKernels()
COLUMNS = rt(16, 64, fp32, "col")
HIGH = rt(32, 64, fp32)
LONG = rt(16, 512, bf16)
NARROW = rt(16, 16, fp32)
PARTIAL = replace(T.col_vec, partial=True)


@says(
    "add: rt(16, 64, fp32) and rt(16, 128, fp32) do not broadcast: with rt(16, 64, fp32) goes "
    "rt(16, 64, fp32), col_vec(16, fp32), row_vec(64, fp32) or a number"
)
def tile_of_another_shape(x, g):
    zeros(T) + zeros(WIDE)


@says("mul: rt(16, 64, fp32) and rt(16, 64, bf16) do not broadcast")
def tile_of_another_dtype(x, g):
    zeros(T) * zeros(B)


@says("sub: rt(16, 64, fp32) and row_vec(128, fp32) do not broadcast")
def vector_of_another_length(x, g):
    zeros(T) - zeros(WIDE.row_vec)


@says(
    "maximum: row_vec(64, fp32) and col_vec(16, bf16) do not broadcast: with rt(16, 64, bf16) goes "
    "rt(16, 64, bf16), col_vec(16, bf16), row_vec(64, bf16) or a number"
)
def vectors_along_both_axes_of_different_dtypes(x, g):
    maximum(zeros(T.row_vec), zeros(B.col_vec))


@says("truediv: takes tiles, vectors and numbers, got rt(16, 64, fp32) and array(float32, 2d, A)")
def tile_and_array(x, g):
    zeros(T) / x


@says("maximum: takes tiles, vectors and numbers, got array")
def maximum_of_arrays(x, g):
    maximum(x, x)


@says("mul: rt(16, 64, fp32) and partial col_vec(16, fp32): take finish_sum(...) of the partial sum first")
def partial_sum_and_tile(x, g):
    zeros(T) * lane_sum(zeros(T))


@says("add: partial col_vec(16, fp32) and col_vec(16, fp32): take finish_sum(...) of the partial sum first")
def partial_sum_plus_vector(x, g):
    lane_sum(zeros(T)) + zeros(T.col_vec)


@says("sub: partial col_vec(16, fp32) and col_vec(16, fp32): take finish_sum(...) of the partial sum first")
def partial_sum_less_a_vector(x, g):
    lane_sum(zeros(T)) - zeros(T.col_vec)


@says("col_index: fp16 holds integers up to 2048 only, got rt(16, 4096, fp16)")
def columns_of_fp16(x, g):
    col_index(rt(16, 4096, fp16))


@says("truediv: col_vec(16, fp32) and partial col_vec(16, fp32): take finish_sum(...)")
def dividing_by_a_partial_sum(x, g):
    zeros(T.col_vec) / lane_sum(zeros(T))


@says("mul: col_vec(32, fp32) and partial col_vec(16, fp32) do not broadcast")
def a_longer_vector_times_a_partial_sum(x, g):
    zeros(HIGH.col_vec) * lane_sum(zeros(T))


@says("mul: row_vec(64, fp32) and partial col_vec(16, fp32): take finish_sum(...) of the partial sum first")
def a_vector_along_the_other_axis_times_a_partial_sum(x, g):
    zeros(T.row_vec) * lane_sum(zeros(T))


@says("exp2: partial col_vec(16, fp32): take finish_sum(...) of the partial sum first")
def exp2_of_a_partial_sum(x, g):
    exp2(lane_sum(zeros(T)))


@says("exp2: takes a tile, a vector or a number, got array")
def exp2_of_an_array(x, g):
    exp2(x)


@says("finish_sum: takes a partial sum (from lane_sum), got col_vec(16, fp32)")
def total_of_a_whole_vector(x, g):
    finish_sum(zeros(T.col_vec))


@says("row_max: takes a register tile or a shared one, got col_vec(16, fp32)")
def row_max_of_a_vector(x, g):
    row_max(zeros(T.col_vec))


@says("row_max: the running value of rt(16, 64, fp32, col) must be col_vec(16, fp32, col), got col_vec(16, fp32)")
def running_maximum_of_the_other_layout(x, g):
    row_max(zeros(COLUMNS), zeros(T.col_vec))


@says("tile_sum: takes a tile or a whole vector, got partial col_vec(16, fp32)")
def sum_of_a_partial_sum(x, g):
    tile_sum(lane_sum(zeros(T)))


@says("tile_any: takes a mask, which is fp32, such as less(x, y), got rt(16, 64, bf16)")
def any_of_a_tile_that_is_no_mask(x, g):
    tile_any(zeros(B))


@says("where: the mask must be an fp32 tile or vector, such as x < y, or a number, got rt(16, 64, bf16)")
def mask_of_two_bytes(x, g):
    where(zeros(B), zeros(B), 0.0)


@says("where: rt(16, 128, fp32), rt(16, 64, fp32) and float")
def mask_of_another_shape(x, g):
    where(less(zeros(WIDE), 0.0), zeros(T), 0.0)


@says("less: takes tiles, vectors and numbers, got rt(16, 64, fp32) and array(float32, 2d, A)")
def comparing_with_an_array(x, g):
    less(zeros(T), x)


@says("fma: col_vec(16, fp32), ")
def fma_of_a_partial_sum(x, g):
    fma(zeros(T.col_vec), 2.0, lane_sum(zeros(T)))


@says("map: takes a function of numbers (a Python function under @tiles.inlined), got float")
def map_by_a_number(x, g):
    map(zeros(T), 2.0)


@says("map: rt(16, 64, fp32) and rt(16, 128, fp32) do not broadcast: with rt(16, 64, fp32) goes rt(16, 64, fp32), col_vec(16")
def map_of_tiles_of_other_shapes(x, g):
    map(zeros(T), exp2, zeros(WIDE))


@says("map: has a z, rt(16, 64, fp32), and no y")
def map_without_a_second(x, g):
    map(zeros(T), exp2, z=zeros(T))


@says("map: takes a tile or a whole vector, got float")
def map_of_a_number(x, g):
    map(2.0, exp2)


@says("map: takes a tile or a whole vector, got partial col_vec(16, fp32)")
def map_of_a_partial_sum(x, g):
    map(lane_sum(zeros(T)), exp2)


@says("tanh: takes a tile, a vector or a number, got array")
def tanh_of_an_array(x, g):
    tanh(x)


@says("warpgroup.outside_fill: takes a register tile, two integers and a number, got col_vec(16, fp32)")
def bounds_of_a_vector(x, g):
    warpgroup.outside_fill(zeros(T.col_vec), 1, 2, 0.0)


@says("row_index: takes a tile type or a col_vec type, got row_vec(64, fp32)")
def row_numbers_of_a_row_vec(x, g):
    row_index(T.row_vec)


@says("col_index: bf16 holds integers up to 256 only, got rt(16, 512, bf16)")
def column_numbers_that_two_bytes_cannot_hold(x, g):
    col_index(LONG)


@says("ones: partial col_vec(16, fp32): a partial sum can only start from zeros")
def ones_of_a_partial_sum(x, g):
    ones(PARTIAL)


@says("transpose: takes tiles of 2 or 4 bytes an element: fp8e4m3(transpose(fp16(x))); got rt(16, 64, fp8e4m3)")
def transpose_of_fp8(x, g):
    transpose(fp8e4m3(zeros(T)))


@says("transpose: takes a register tile or a whole vector, got partial col_vec(16, fp32)")
def transpose_of_a_partial_sum(x, g):
    transpose(lane_sum(zeros(T)))


@says("add: rt(16, 64, fp32) and rt(16, 64, fp32, col) do not broadcast")
def tiles_of_different_layouts(x, g):
    zeros(T) + zeros(COLUMNS)


@says("add: rt(16, 64, fp32) and col_vec(16, fp32, col) do not broadcast")
def column_vector_of_the_other_layout(x, g):
    zeros(T) + zeros(COLUMNS.col_vec)


@says("row_sum: takes a register tile or a shared one, got array")
def row_sum_of_an_array(x, g):
    row_sum(x)


@says("bf16: converts a register tile or vector, got array")
def converting_an_array(x, g):
    bf16(x)


@says("zeros: shape must be a register tile or vector type such as rt(16, 64, fp32), got st(64, 64")
def zeros_of_a_shared_tile_type(x, g):
    zeros(S)


@says("full: value must be a number, got rt(16, 64, fp32)")
def full_of_a_tile(x, g):
    full(T, zeros(T))


@says("full: partial col_vec(16, fp32): a partial sum can only start from zeros")
def full_of_a_partial_sum(x, g):
    full(PARTIAL, 1.0)


@says("right_fill: takes a register tile, an integer and a number, got rt(16, 64, fp32)")
def mask_at_a_fraction(x, g):
    right_fill(zeros(T), 1.5, 0.0)


@says("causal: takes a register tile, an integer and a number, got col_vec(16, fp32)")
def mask_of_a_vector(x, g):
    causal(zeros(T.col_vec), 0, 0.0)


@says("warpgroup.causal: takes a register tile, an integer and a number, got array")
def warpgroup_mask_of_an_array(x, g):
    warpgroup.causal(x, 0, 0.0)


@says("add: tiles of fp8e4m3 are only for products: convert it, fp32(x); got rt(16, 64, fp8e4m3)")
def adding_fp8(x, g):
    fp8e4m3(zeros(T)) + 1.0


@says("row_max: tiles of tf32 are only for products: convert it, fp32(x); got rt(16, 64, tf32)")
def a_maximum_of_tf32(x, g):
    row_max(tf32(zeros(T)))


@says("add: tiles of int32 are sums of products: convert it, fp32(x); got rt(16, 64, int32)")
def adding_sums_of_products(x, g):
    zeros(rt(16, 64, int32)) + 1.0


@says("store: tiles of int32 are sums of products: convert it, fp32(x); got rt(16, 64, int32)")
def storing_sums_of_products(x, g):
    store(x, zeros(rt(16, 64, int32)), (0, 0))


@says("row_index: tiles of fp8e4m3 are only for products: convert fp32, got rt(16, 64, fp8e4m3)")
def row_numbers_of_fp8(x, g):
    row_index(E)


@says("mul: vectors of fp8e4m3 are only loaded and stored: convert it, fp32(x); got col_vec(16, fp8e4m3)")
def scaling_a_vector_of_fp8(x, g):
    fp8e4m3(zeros(T.col_vec)) * 2.0


@says("fp8e4m3: rt: cols of rt(16, 16, fp8e4m3) must be a multiple of 32; got rt(16, 16, fp32)")
def fp8_of_half_a_base_tile(x, g):
    fp8e4m3(zeros(NARROW))


@says.sweep
def test_mistakes(backend, mistake, message):
    check(backend, mistake, message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rt(16, 24, fp32), "rt: rows and cols must be positive multiples of 16, got 16 x 24"),
        (lambda: rt(16.0, 16, fp32), "rt: rows and cols must be positive multiples of 16, got 16.0 x 16"),
        (lambda: rt(16, 16, tiles.fp8e5m2), "rt: cols of rt(16, 16, fp8e5m2) must be a multiple of 32"),
        (lambda: rt(16, 32, tiles.fp8e5m2, "col"), "rt: rows of rt(16, 32, fp8e5m2, col) must be a multiple of 32"),
        (lambda: tiles.sv(32, "fp8"), "sv: dtype must be one of (fp32, fp16, bf16, tf32, fp8e4m3, fp8e5m2, int8), got 'fp8'"),
        (
            lambda: tiles.types.rv(32, "fp8", "row_vec"),
            "rv: dtype must be one of (fp32, fp16, bf16, tf32, fp8e4m3, fp8e5m2, int8), got",
        ),
        (lambda: st(64, 64, bf16, 256), "st: width must be one of (128, 64, 32) and divide a row of 128 bytes, got 256"),
        (lambda: st(64, 24, bf16), "a shared tile's row must be a multiple of 32 bytes, got 48"),
        (lambda: ring(S, 0), "ring: stages and readers must be positive, got 0 and 4"),
        (lambda: warpgroup.ping_pong(1), "ping_pong: 2 or more players on named barriers 1 to 6, got 1 from 1 on"),
        (lambda: warpgroup.ping_pong(3, 5), "ping_pong: 2 or more players on named barriers 1 to 6, got 3 from 5 on"),
    ],
)
def test_types_that_cannot_be(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)


def test_what_must_be_known_when_the_kernel_is_compiled():
    def body(x):
        warpgroup.release_registers(x.shape[0])

    with pytest.raises(TypeError, match="release_registers: n must be known when the kernel is compiled, got int64"):
        ptx(cuda.jit(body), np.zeros((64, 64), np.float32))
