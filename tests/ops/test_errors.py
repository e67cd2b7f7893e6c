"""What mistakes say: a TypeError in a user's words, with what was given and what is possible, the same on both backends."""

from dataclasses import replace

import numpy as np
import pytest
from numba import cuda
from sweep import blank, code, meaning

import tiles
from ops import (
    causal,
    col_index,
    exp2,
    fma,
    full,
    lane_sum,
    less,
    load,
    map,
    maximum,
    ones,
    raw,
    right_fill,
    row_index,
    row_max,
    row_sum,
    store,
    tanh,
    tile_any,
    tile_sum,
    total,
    transpose,
    warpgroup,
    where,
    zeros,
)  # fmt: skip
from tiles import barrier, bf16, fp8e4m3, fp16, fp32, ring, rt, st, tensor, tf32

T, B, H, WIDE = rt(16, 64, fp32), rt(16, 64, bf16), rt(16, 64, fp16), rt(16, 128, fp32)
H48 = rt(16, 48, fp16)
COLUMNS, NARROW_COLUMNS = rt(16, 64, fp32, "col"), rt(16, 64, bf16, "col")
S, S8 = st(64, 64, bf16), st(64, 64, tiles.fp8e4m3)
smem = tiles.shared(s=S, v=st(64, 48, fp16), f=S8, bar=barrier(1))
LONG, NARROW, E = rt(16, 512, bf16), rt(16, 16, fp32), rt(16, 64, fp8e4m3)
PARTIAL = replace(T.col_vec, partial=True)
turn = warpgroup.turns(2)


@tiles.inlined
def written():
    """A shared tile that mmas may read."""
    tile = smem.open()[0]
    warpgroup.store(tile, zeros(B))
    warpgroup.sync()
    return tile


def tile_of_another_shape(x, g):
    zeros(T) + zeros(WIDE)


def tile_of_another_dtype(x, g):
    zeros(T) * zeros(B)


def vector_of_another_length(x, g):
    zeros(T) - zeros(WIDE.row_vec)


def vectors_along_different_axes(x, g):
    maximum(zeros(T.row_vec), zeros(T.col_vec))


def tile_and_array(x, g):
    zeros(T) / x


def maximum_of_arrays(x, g):
    maximum(x, x)


def partial_sum_and_tile(x, g):
    zeros(T) * lane_sum(zeros(T))


def partial_sum_plus_vector(x, g):
    lane_sum(zeros(T)) + zeros(T.col_vec)


def dividing_by_a_partial_sum(x, g):
    zeros(T.col_vec) / lane_sum(zeros(T))


def a_longer_vector_times_a_partial_sum(x, g):
    zeros(WIDE.row_vec) * lane_sum(zeros(T))


def exp2_of_a_partial_sum(x, g):
    exp2(lane_sum(zeros(T)))


def exp2_of_an_array(x, g):
    exp2(x)


def storing_a_partial_sum(x, g):
    store(x, lane_sum(zeros(T)), (0, 0))


def total_of_a_whole_vector(x, g):
    total(zeros(T.col_vec))


def row_max_of_a_vector(x, g):
    row_max(zeros(T.col_vec))


def running_maximum_of_the_other_layout(x, g):
    row_max(zeros(COLUMNS), zeros(T.col_vec))


def sum_of_a_partial_sum(x, g):
    tile_sum(lane_sum(zeros(T)))


def any_of_a_tile_that_is_no_mask(x, g):
    tile_any(zeros(B))


def mask_of_two_bytes(x, g):
    where(zeros(B), zeros(B), 0.0)


def mask_of_another_shape(x, g):
    where(less(zeros(WIDE), 0.0), zeros(T), 0.0)


def comparing_with_an_array(x, g):
    less(zeros(T), x)


def fma_of_a_partial_sum(x, g):
    fma(zeros(T.col_vec), 2.0, lane_sum(zeros(T)))


def map_by_a_number(x, g):
    map(zeros(T), 2.0)


def map_of_a_number(x, g):
    map(2.0, exp2)


def tanh_of_an_array(x, g):
    tanh(x)


def bounds_of_a_vector(x, g):
    warpgroup.bounds(zeros(T.col_vec), 1, 2, 0.0)


def row_numbers_of_a_row_vec(x, g):
    row_index(T.row_vec)


def column_numbers_that_two_bytes_cannot_hold(x, g):
    col_index(LONG)


def ones_of_a_partial_sum(x, g):
    ones(PARTIAL)


def transpose_of_a_partial_sum(x, g):
    transpose(lane_sum(zeros(T)))


def tiles_of_different_layouts(x, g):
    zeros(T) + zeros(COLUMNS)


def column_vector_of_the_other_layout(x, g):
    zeros(T) + zeros(COLUMNS.col_vec)


def product_of_a_column_tile(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mm_AB(zeros(NARROW_COLUMNS), s)


def row_sum_of_an_array(x, g):
    row_sum(x)


def converting_an_array(x, g):
    bf16(x)


def zeros_of_a_shared_tile_type(x, g):
    zeros(S)


def full_of_a_tile(x, g):
    full(T, zeros(T))


def full_of_a_partial_sum(x, g):
    full(PARTIAL, 1.0)


def mask_at_a_fraction(x, g):
    right_fill(zeros(T), 1.5, 0.0)


def mask_of_a_vector(x, g):
    causal(zeros(T.col_vec), 0, 0.0)


def warpgroup_mask_of_an_array(x, g):
    warpgroup.causal(x, 0, 0.0)


def a_tile_in_flight_added(x, g):
    s = written()
    warpgroup.mm_ABt(s, s) + 1.0


def a_tile_in_flight_stored(x, g):
    s = written()
    store(x, warpgroup.mm_AB(s, s), (0, 0))


def an_accumulator_in_flight_of_another_shape(x, g):
    v = smem.open()[1]
    warpgroup.store(v, zeros(H48))
    warpgroup.sync()
    short = warpgroup.mm_AB(fp16(zeros(T)), v)
    s = smem.open()[0]
    warpgroup.mma_AB(short, s, s)


def an_operand_in_flight(x, g):
    s = written()
    warpgroup.mma_AB(zeros(T), warpgroup.mm_AB(s, s), s)


def a_product_of_a_tile_in_flight(x, g):
    s = written()
    warpgroup.mm_AB(warpgroup.mm_AB(s, s), s)


def waiting_for_what_is_here(x, g):
    warpgroup.wait(zeros(T))


def leaving_fewer_than_none_in_flight(x, g):
    s = written()
    warpgroup.wait(warpgroup.mm_ABt(s, s), -1)


def product_of_unequal_dtypes(x, g):
    s, v, _, _ = smem.open()
    warpgroup.mm_AB(s, v)


def product_of_unequal_k(x, g):
    _, v, _, _ = smem.open()
    warpgroup.mm_ABt(zeros(H), v)


def product_in_fp32(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mm_AB(zeros(T), s)


def accumulator_of_another_shape(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mma_AB(zeros(WIDE), s, s)


def storing_to_a_shared_tile_of_another_shape(x, g):
    s, _, _, _ = smem.open()
    warpgroup.store(s, zeros(WIDE))


def storing_a_warps_tile_as_a_warpgroups(x, g):
    s, _, _, _ = smem.open()
    store(s, zeros(T))


def loading_a_vector_from_a_shared_tile(x, g):
    s, _, _, _ = smem.open()
    load(s, T.col_vec)


def loading_part_of_a_shared_tile(x, g):
    s, _, _, _ = smem.open()
    warpgroup.load(s, B, (0, 0))


def loading_fp8(x, g):
    _, _, f, _ = smem.open()
    warpgroup.load(f, T)


def adding_fp8(x, g):
    fp8e4m3(zeros(T)) + 1.0


def a_maximum_of_tf32(x, g):
    row_max(tf32(zeros(T)))


def a_maximum_of_shared_fp8(x, g):
    _, _, f, _ = smem.open()
    row_max(f)


def row_numbers_of_fp8(x, g):
    row_index(E)


def storing_fp8_in_pieces(x, g):
    store(x, zeros(E), (0, 0), aligned=True)


def a_vector_of_fp8(x, g):
    fp8e4m3(zeros(T.col_vec))


def fp8_of_half_a_base_tile(x, g):
    fp8e4m3(zeros(NARROW))


def loading_a_shared_tile_type(x, g):
    load(x, S, (0, 0))


def loading_with_no_index(x, g):
    load(x, T)


def loading_with_too_few_indices(x, g):
    load(x, T, (0,))


def loading_at_a_fraction(x, g):
    load(x, T, (0.5, 1.5))


def loading_along_one_axis_twice(x, g):
    load(x, T, (0, 0), 1, -1)


def loading_along_an_axis_that_is_not_there(x, g):
    load(x, T, (0, 0), 0, 2)


def storing_into_a_number(x, g):
    store(1.0, zeros(T), (0, 0))


def tma_store_of_another_tile(x, g):
    _, v, _, _ = smem.open()
    warpgroup.tma_store(g, (0, 0), v)


def tma_store_with_too_many_indices(x, g):
    s, _, _, _ = smem.open()
    warpgroup.tma_store(g, (0, 0, 0), s)


def taking_the_turn_of_nobody(x, g):
    turn.take(x)


def a_number_of_registers_that_setmaxnreg_refuses(x, g):
    warpgroup.claim_registers(100)


def waiting_for_a_tile_as_for_a_barrier(x, g):
    s, _, _, _ = smem.open()
    raw.wait(s, 1)


CASES = {
    tile_of_another_shape: "add: rt(16, 64, fp32) and rt(16, 128, fp32) do not broadcast: with rt(16, 64, fp32) goes "
    "rt(16, 64, fp32), col_vec(16, fp32), row_vec(64, fp32) or a number",
    tile_of_another_dtype: "mul: rt(16, 64, fp32) and rt(16, 64, bf16) do not broadcast",
    vector_of_another_length: "sub: rt(16, 64, fp32) and row_vec(128, fp32) do not broadcast",
    vectors_along_different_axes: "maximum: row_vec(64, fp32) and col_vec(16, fp32) do not broadcast: with row_vec(64, fp32)",
    tile_and_array: "truediv: takes tiles, vectors and numbers, got rt(16, 64, fp32) and array(float32, 2d, A)",
    maximum_of_arrays: "maximum: takes tiles, vectors and numbers, got array",
    partial_sum_and_tile: "mul: rt(16, 64, fp32) and partial col_vec(16, fp32): take total(...) of the partial sum first",
    partial_sum_plus_vector: "add: partial col_vec(16, fp32) and col_vec(16, fp32): take total(...) of the partial sum first",
    dividing_by_a_partial_sum: "truediv: col_vec(16, fp32) and partial col_vec(16, fp32): take total(...)",
    a_longer_vector_times_a_partial_sum: "mul: row_vec(128, fp32) and partial col_vec(16, fp32) do not broadcast",
    exp2_of_a_partial_sum: "exp2: partial col_vec(16, fp32): take total(...) of the partial sum first",
    exp2_of_an_array: "exp2: takes a tile, a vector or a number, got array",
    storing_a_partial_sum: "store: stores a register tile or whole vector, got partial col_vec(16, fp32)",
    total_of_a_whole_vector: "total: takes a partial sum (from lane_sum), got col_vec(16, fp32)",
    row_max_of_a_vector: "row_max: takes a register tile or a shared one, got col_vec(16, fp32)",
    running_maximum_of_the_other_layout: "row_max: the running value of rt(16, 64, fp32, col) must be col_vec(16, fp32, col), "
    "got col_vec(16, fp32)",
    sum_of_a_partial_sum: "tile_sum: takes a tile or a whole vector, got partial col_vec(16, fp32)",
    any_of_a_tile_that_is_no_mask: "tile_any: takes a mask, which is fp32, such as less(x, y), got rt(16, 64, bf16)",
    mask_of_two_bytes: "where: the mask must be an fp32 tile or vector, such as less(x, y), got rt(16, 64, bf16)",
    mask_of_another_shape: "where: rt(16, 128, fp32), rt(16, 64, fp32) and float",
    comparing_with_an_array: "less: takes tiles, vectors and numbers, got rt(16, 64, fp32) and array(float32, 2d, A)",
    fma_of_a_partial_sum: "fma: col_vec(16, fp32), ",
    map_by_a_number: "map: takes a function of one number (a Python function under @tiles.inlined), got float",
    map_of_a_number: "map: takes a tile or a whole vector, got float",
    tanh_of_an_array: "tanh: takes a tile, a vector or a number, got array",
    bounds_of_a_vector: "warpgroup.bounds: takes a register tile, two integers and a number, got col_vec(16, fp32)",
    row_numbers_of_a_row_vec: "row_index: takes a tile type or a col_vec type, got row_vec(64, fp32)",
    column_numbers_that_two_bytes_cannot_hold: "col_index: bf16 holds integers up to 256 only, got rt(16, 512, bf16)",
    ones_of_a_partial_sum: "ones: partial col_vec(16, fp32): a partial sum can only start from zeros",
    transpose_of_a_partial_sum: "transpose: takes a register tile or a whole vector, got partial col_vec(16, fp32)",
    tiles_of_different_layouts: "add: rt(16, 64, fp32) and rt(16, 64, fp32, col) do not broadcast",
    column_vector_of_the_other_layout: "add: rt(16, 64, fp32) and col_vec(16, fp32, col) do not broadcast",
    product_of_a_column_tile: "warpgroup.mm_AB: got rt(16, 64, bf16, col), st(64, 64, bf16); takes a",
    row_sum_of_an_array: "row_sum: takes a register tile or a shared one, got array",
    converting_an_array: "bf16: converts a register tile or vector, got array",
    zeros_of_a_shared_tile_type: "zeros: shape must be a register tile or vector type such as rt(16, 64, fp32), got st(64, 64",
    full_of_a_tile: "full: value must be a number, got rt(16, 64, fp32)",
    full_of_a_partial_sum: "full: partial col_vec(16, fp32): a partial sum can only start from zeros",
    mask_at_a_fraction: "right_fill: takes a register tile, an integer and a number, got rt(16, 64, fp32)",
    mask_of_a_vector: "causal: takes a register tile, an integer and a number, got col_vec(16, fp32)",
    warpgroup_mask_of_an_array: "warpgroup.causal: takes a register tile, an integer and a number, got array",
    a_tile_in_flight_added: "add: this tile is still in flight: pending rt(16, 64, fp32); take it with warpgroup.wait",
    a_tile_in_flight_stored: "store: this tile is still in flight: pending rt(16, 64, fp32)",
    an_accumulator_in_flight_of_another_shape: "warpgroup.mma_AB: got pending rt(16, 48, fp32), st(64, 64, bf16), "
    "st(64, 64, bf16); takes",
    an_operand_in_flight: "warpgroup.mma_AB: got rt(16, 64, fp32), pending rt(16, 64, fp32), st(64, 64, bf16); takes acc "
    "rt(16, n, fp32), a rt(16, k) or st(64, k), b st(k, n), both bf16 or both fp16. There are also mma_ABt (bf16, fp16",
    a_product_of_a_tile_in_flight: "mm_AB: this tile is still in flight: pending rt(16, 64, fp32)",
    waiting_for_what_is_here: "wait: takes a tile in flight (from mm_* or mma_*), got rt(16, 64, fp32)",
    leaving_fewer_than_none_in_flight: "wait: newer must be 0 or more, got -1",
    product_of_unequal_dtypes: "warpgroup.mm_AB: got st(64, 64, bf16), st(64, 48, fp16); takes a",
    product_of_unequal_k: "warpgroup.mm_ABt: got rt(16, 64, fp16), st(64, 48, fp16); takes a",
    product_in_fp32: "warpgroup.mm_AB: got rt(16, 64, fp32), st(64, 64, bf16); takes a",
    accumulator_of_another_shape: "warpgroup.mma_AB: got rt(16, 128, fp32), st(64, 64, bf16), st(64, 64, bf16); takes a",
    storing_to_a_shared_tile_of_another_shape: "warpgroup.store: st(64, 64, bf16) does not take 4 x rt(16, 128, fp32)",
    storing_a_warps_tile_as_a_warpgroups: "store: st(64, 64, bf16) does not take rt(16, 64, fp32)",
    loading_a_vector_from_a_shared_tile: "load: st(64, 64, bf16) does not hold col_vec(16, fp32)",
    loading_part_of_a_shared_tile: "warpgroup.load: `at` is for global arrays; a shared tile is taken whole, got (int, int)",
    loading_fp8: "warpgroup.load: st(64, 64, fp8e4m3) does not hold rt(16, 64, fp32): fp8 tiles are converted "
    "in registers, fp8e4m3(x)",
    adding_fp8: "add: tiles of fp8e4m3 are only for products: convert it, fp32(x); got rt(16, 64, fp8e4m3)",
    a_maximum_of_tf32: "row_max: tiles of tf32 are only for products: convert it, fp32(x); got rt(16, 64, tf32)",
    a_maximum_of_shared_fp8: "row_max: tiles of fp8e4m3 are only for products: load it and convert it, fp32(x); got st(64, 64",
    row_numbers_of_fp8: "row_index: tiles of fp8e4m3 are only for products: convert fp32, got rt(16, 64, fp8e4m3)",
    storing_fp8_in_pieces: "store: aligned accesses take tiles in row layout, of fp32, bf16 or fp16 as is",
    a_vector_of_fp8: "fp8e4m3: vectors are of fp32, fp16, bf16, not of fp8e4m3; got col_vec(16, fp32)",
    fp8_of_half_a_base_tile: "fp8e4m3: rt: cols of rt(16, 16, fp8e4m3) must be a multiple of 32; got rt(16, 16, fp32)",
    loading_a_shared_tile_type: "load: the type to load must be an rt or a vector type, got st(64, 64, bf16)",
    loading_with_no_index: "load: `at` must be 2 integers for an array of 2 axes, got None",
    loading_with_too_few_indices: "load: `at` must be 2 integers for an array of 2 axes, got (int)",
    loading_at_a_fraction: "load: `at` must be 2 integers for an array of 2 axes, got (float",
    loading_along_one_axis_twice: "load: rt(16, 64, fp32) lies along 2 axes of the array, got (1, -1) of 2",
    loading_along_an_axis_that_is_not_there: "load: rt(16, 64, fp32) lies along 2 axes of the array, got (0, 2) of 2",
    storing_into_a_number: "store: the target must be a shared tile or vector, or a global array, got",
    tma_store_of_another_tile: "tma_store: the target takes st(64, 64, bf16), got st(64, 48, fp16)",
    tma_store_with_too_many_indices: "tma_store: `at` must be up to 2 integers, got (int, int, int)",
    taking_the_turn_of_nobody: "take: the player's number must be an integer, got array",
    a_number_of_registers_that_setmaxnreg_refuses: "claim_registers: a multiple of 8 from 24 to 256, got 100",
    waiting_for_a_tile_as_for_a_barrier: "raw.wait: takes barrier, int, got st(64, 64, bf16)",
}


@pytest.mark.parametrize("backend", [meaning, code], ids=["meaning", "code"])
@pytest.mark.parametrize("mistake", CASES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    """The message, then the kernel's line."""
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(mistake), np.zeros((64, 64), np.float32), tensor(blank((64, 64), bf16), S), warps=4, shared=smem)
    message = str(error.value)
    assert message.startswith(CASES[mistake])
    assert "test_errors.py" in message.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rt(16, 24, fp32), "rt: rows and cols must be positive multiples of 16, got 16 x 24"),
        (lambda: rt(16, 16, tiles.fp8e5m2), "rt: cols of rt(16, 16, fp8e5m2) must be a multiple of 32"),
        (lambda: rt(16, 32, tiles.fp8e5m2, "col"), "rt: rows of rt(16, 32, fp8e5m2, col) must be a multiple of 32"),
        (lambda: rt(16, 32, tiles.fp8e5m2).col_vec, "vectors are of fp32, fp16, bf16, not of fp8e5m2"),
        (lambda: st(64, 64, bf16, 256), "st: width must be one of (128, 64, 32) and divide a row of 128 bytes, got 256"),
        (lambda: st(64, 24, bf16), "a shared tile's row must be a multiple of 32 bytes, got 48"),
        (lambda: ring(S, 0), "ring: stages and readers must be positive, got 0 and 4"),
        (lambda: warpgroup.turns(1), "turns: 2 or more players on named barriers 1 to 7, got 1 from 1 on"),
        (lambda: warpgroup.turns(4, 5), "turns: 2 or more players on named barriers 1 to 7, got 4 from 5 on"),
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
        code(cuda.jit(body), np.zeros((64, 64), np.float32))
