"""Errors of wrong arguments (see test_errors.py) to products, loads, stores and warpgroups."""

import numpy as np
from mistakes import S8, WIDE, B, E, RefusedKernels, S, T, check, smem
from numba import cuda

import tiles
from ops import cluster, copy_async, lane_sum, load, mma_AB, mma_ABt, mma_AtB, raw, row_max, store, subtile, warpgroup, zeros
from tiles import bf16, fp16, fp32, int8, rt

says = RefusedKernels()
H = rt(16, 64, fp16)
H48 = rt(16, 48, fp16)
NARROW_COLUMNS = rt(16, 64, bf16, "col")
turn = warpgroup.ping_pong(2)


@tiles.inlined
def written():
    """A shared tile that mmas may read."""
    tile = smem.open()[0]
    warpgroup.store(tile, zeros(B))
    warpgroup.sync()
    return tile


@says("store: stores a register tile or whole vector, got partial col_vec(16, fp32)")
def storing_a_partial_sum(x, g):
    store(x, lane_sum(zeros(T)), (0, 0))


@says(
    "warpgroup.mm_AB: got rt(16, 64, bf16, col), st(64, 64, bf16): a must be in row layout, rt(16, 64, bf16): load it so, or "
    "swap_layout it; takes a"
)
def product_of_a_column_tile(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mm_AB(zeros(NARROW_COLUMNS), s)


@says("add: this tile is still in flight: pending rt(16, 64, fp32); take it with warpgroup.wait")
def a_tile_in_flight_added(x, g):
    s = written()
    warpgroup.mm_ABt(s, s) + 1.0


@says("store: this tile is still in flight: pending rt(16, 64, fp32)")
def a_tile_in_flight_stored(x, g):
    s = written()
    store(x, warpgroup.mm_AB(s, s), (0, 0))


@says("warpgroup.mma_AB: got pending rt(16, 48, fp32), st(64, 64, bf16), st(64, 64, bf16); takes")
def an_accumulator_in_flight_of_another_shape(x, g):
    v = smem.open()[1]
    warpgroup.store(v, zeros(H48))
    warpgroup.sync()
    short = warpgroup.mm_AB(fp16(zeros(T)), v)
    s = smem.open()[0]
    warpgroup.mma_AB(short, s, s)


@says(
    "warpgroup.mma_AB: got rt(16, 64, fp32), pending rt(16, 64, fp32), st(64, 64, bf16): a is in flight, take it with "
    "warpgroup.wait(...) first; takes acc "
    "rt(16, n, fp32), a rt(16, k) or st(64, k), b st(k, n), both bf16 or both fp16. There are also mma_ABt (bf16, fp16"
)
def an_operand_in_flight(x, g):
    s = written()
    warpgroup.mma_AB(zeros(T), warpgroup.mm_AB(s, s), s)


@says("mm_AB: this tile is still in flight: pending rt(16, 64, fp32)")
def a_product_of_a_tile_in_flight(x, g):
    s = written()
    warpgroup.mm_AB(warpgroup.mm_AB(s, s), s)


@says(
    "wait: takes a tile in flight (from mm_* or mma_*), got rt(16, 64, fp32): if a loop before makes it one in flight, it "
    "would be none after no rounds; begin with mm_* before the loop, or wait within it"
)
def waiting_for_what_is_here(x, g):
    warpgroup.wait(zeros(T))


@says("wait: newer must be 0 or more, got -1")
def leaving_fewer_than_none_in_flight(x, g):
    s = written()
    warpgroup.wait(warpgroup.mm_ABt(s, s), -1)


@says(
    "warpgroup.mm_AB: got st(64, 64, bf16), st(64, 48, fp16): bf16 and fp16 are not multiplied with each other by this op; tak"
)
def product_of_unequal_dtypes(x, g):
    s, v, _, _ = smem.open()
    warpgroup.mm_AB(s, v)


@says(
    "mma_ABt: got rt(16, 64, fp32), rt(16, 64, fp16), st(64, 64, fp8e4m3): fp16 and fp8e4m3 are not multiplied with each "
    "other by this op; convert b, fp16(load(b, ..)), or multiply a of fp16 by b as it is, mma_ABt_unzipped; takes acc"
)
def product_by_shared_bytes(x, g):
    mma_ABt(zeros(T), zeros(H), smem.open()[2])


@says(
    "mma_ABt: got rt(16, 64, fp32), rt(16, 64, bf16), rt(64, 64, int8): bf16 and int8 are not multiplied with each other by "
    "this op; convert b, bf16(b); takes acc"
)
def product_by_bytes_in_registers(x, g):
    mma_ABt(zeros(T), zeros(B), zeros(rt(64, 64, int8)))


@says(
    "mma_ABt: got rt(16, 64, fp32), rt(16, 64, int8), rt(64, 64, int8): acc must be int32; the sum is converted, as bf16(acc); "
    "takes acc"
)
def sums_of_int8_in_fp32(x, g):
    mma_ABt(zeros(T), zeros(rt(16, 64, int8)), zeros(rt(64, 64, int8)))


@says("warpgroup.mm_ABt: got rt(16, 64, fp16), st(64, 48, fp16): k is 64 of a and 48 of b; takes a")
def product_of_unequal_k(x, g):
    _, v, _, _ = smem.open()
    warpgroup.mm_ABt(zeros(H), v)


@says(
    "warpgroup.mm_AB: got rt(16, 64, fp32), st(64, 64, bf16): fp32 and bf16 are not multiplied with each other by this op; tak"
)
def product_in_fp32(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mm_AB(zeros(T), s)


@says("warpgroup.mma_AB: got rt(16, 128, fp32), st(64, 64, bf16), st(64, 64, bf16); takes a")
def accumulator_of_another_shape(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mma_AB(zeros(WIDE), s, s)


@says("warpgroup.store: st(64, 64, bf16) does not take 4 x rt(16, 128, fp32)")
def storing_to_a_shared_tile_of_another_shape(x, g):
    s, _, _, _ = smem.open()
    warpgroup.store(s, zeros(WIDE))


@says("store: st(64, 64, bf16) does not take rt(16, 64, fp32): four warps fill it together, by warpgroup.store")
def storing_a_warps_tile_as_a_warpgroups(x, g):
    s, _, _, _ = smem.open()
    store(s, zeros(T))


@says(
    "mma_ABt: got rt(16, 16, fp32), rt(16, 64, fp32), rt(16, 64, fp32): fp32 is not multiplied; load a and b as bf16, fp16 or "
)
def a_product_of_fp32(x, g):
    mma_ABt(zeros(rt(16, 16, fp32)), zeros(T), zeros(T))


@says("mma_ABt: got rt(16, 16, bf16), rt(16, 64, bf16), rt(16, 64, bf16): acc must be fp32; the sum is converted, as bf16(acc)")
def a_sum_of_bf16(x, g):
    mma_ABt(zeros(rt(16, 16, bf16)), zeros(B), zeros(B))


@says("mma_ABt: got rt(16, 32, fp32), rt(16, 64, bf16), rt(16, 64, bf16): acc must be rt(16, 16, fp32); takes acc")
def a_sum_of_another_shape(x, g):
    mma_ABt(zeros(rt(16, 32, fp32)), zeros(B), zeros(B))


@says(
    "mma_ABt: got rt(16, 32, fp32), rt(32, 64, bf16), rt(16, 64, bf16): acc must be rt(32, 16, fp32), or a and b are swapped: "
    "mma_ABt(acc, a, b) is acc + a b^T"
)
def operands_that_are_swapped(x, g):
    mma_ABt(zeros(rt(16, 32, fp32)), zeros(rt(32, 64, bf16)), zeros(B))


@says("mma_ABt: got rt(16, 64, bf16), rt(32, 64, bf16), rt(16, 32, fp32): the sum comes first, mma_ABt(acc, a, b); takes")
def a_sum_that_comes_last(x, g):
    mma_ABt(zeros(B), zeros(rt(32, 64, bf16)), zeros(rt(16, 32, fp32)))


@says("warpgroup.mm_AB: got st(64, 64, bf16), rt(16, 64, bf16): b must lie in shared memory, as st(64, 64, bf16); takes acc")
def a_right_operand_in_registers(x, g):
    s, _, _, _ = smem.open()
    warpgroup.mm_AB(s, zeros(rt(16, 64, bf16)))


@says(f"mma_AtB: got rt({S8.cols}, {S8.cols}, fp32), {S8}, {S8}: a must lie in registers, as rt({S8.rows}, {S8.cols}, fp8e4m3)")
def bytes_in_shared_memory(x, g):
    _, _, f, _ = smem.open()
    mma_AtB(zeros(rt(S8.cols, S8.cols, fp32)), f, f)


@says('mma_AB: got rt(16, 64, fp32), rt(16, 16, bf16), rt(16, 64, bf16): b must be in col layout, rt(16, 64, bf16, "col"): lo')
def an_operand_in_row_layout(x, g):
    mma_AB(zeros(T), zeros(rt(16, 16, bf16)), zeros(B))


@says(
    "warpgroup.store: the target must be a shared tile or vector, or a global array, got remote st(64, 64, bf16): each warp "
    "reads and writes its part of it by cluster.load and cluster.store"
)
def storing_to_a_peer(x, g):
    s, _, _, _ = smem.open()
    warpgroup.store(cluster.map(s, 0), zeros(T))


@says(
    "cluster.store: st(64, 64, bf16) does not take rt(16, 64, fp32): four warps fill it together, each its part, "
    "cluster.map(subtile(tile, 16, warpgroup.rank()), block)"
)
def storing_a_warps_tile_to_a_peer(x, g):
    s, _, _, _ = smem.open()
    cluster.store(cluster.map(s, 0), zeros(T))


@says(
    "subtile: takes a shared tile, its rows and an integer, got remote st(64, 64, bf16) and int64: of the block's own, st(64, "
)
def a_part_of_a_peers_tile(x, g):
    s, _, _, _ = smem.open()
    subtile(cluster.map(s, 0), 16, x.shape[0])


@says("load: st(64, 64, bf16) does not hold rt(16, 64, bf16): four warps take it together, by warpgroup.load")
def a_warpgroup_s_tile_for_a_warp(x, g):
    s, _, _, _ = smem.open()
    load(s, rt(16, 64, bf16))


@says("load: st(64, 64, bf16) does not hold col_vec(16, fp32)")
def loading_a_vector_from_a_shared_tile(x, g):
    s, _, _, _ = smem.open()
    load(s, T.col_vec)


@says("warpgroup.load: `at` is for global arrays; a shared tile is taken whole, got (int, int)")
def loading_part_of_a_shared_tile(x, g):
    s, _, _, _ = smem.open()
    warpgroup.load(s, B, (0, 0))


@says("warpgroup.load: st(64, 64, fp8e4m3) does not hold rt(16, 64, bf16, col): rt: rows of rt(16, 64, fp8e4m3, col) must be")
def loading_fp8_by_half_base_tiles(x, g):
    _, _, f, _ = smem.open()
    warpgroup.load(f, NARROW_COLUMNS)


@says("row_max: tiles of fp8e4m3 are only for products: load it and convert it, fp32(x); got st(64, 64")
def a_maximum_of_shared_fp8(x, g):
    _, _, f, _ = smem.open()
    row_max(f)


@says("store: stores from registers, got st(64, 64, bf16): load(...) it first, or tma_store it")
def storing_a_shared_tile(x, g):
    store(x, written(), (0, 0))


@says("store: aligned accesses take tiles in row layout, of fp8 if the array is, got rt(16, 64, fp8e4m3), array(float32")
def storing_fp8_in_pieces(x, g):
    store(x, zeros(E), (0, 0), aligned=True)


@says("load: the type to load must be an rt or a vector type, got st(64, 64, bf16)")
def loading_a_shared_tile_type(x, g):
    load(x, S, (0, 0))


CAPTURED = np.zeros((64, 64), np.float32)


@says("load: this array is no argument of the kernel, which Numba has copied into it: pass it to the launch")
def loading_what_is_captured(x, g):
    load(CAPTURED, T, (0, 0))


@says("copy_async: this array is no argument of the kernel, which Numba has copied into it: pass it to the launch")
def copying_what_is_captured(x, g):
    copy_async(smem.open()[0], CAPTURED, (0, 0))


@says("load: rt(16, 64, fp32) lies along 2 axes of the array, and array(float32, 1d, A) has 1")
def loading_a_tile_of_a_vector(x, g):
    load(x[0], T, (0, 0))


@says("store: rt(16, 64, fp32) lies along 2 axes of the array, and array(float32, 1d, A) has 1")
def storing_a_tile_to_a_vector(x, g):
    store(x[0], zeros(T), (0,))


@says("load: `at` must be 2 integers for an array of 2 axes, got None")
def loading_with_no_index(x, g):
    load(x, T)


@says("load: `at` must be 2 integers for an array of 2 axes, got (int)")
def loading_with_too_few_indices(x, g):
    load(x, T, (0,))


@says("load: `at` must be 2 integers for an array of 2 axes, got (float")
def loading_at_a_fraction(x, g):
    load(x, T, (0.5, 1.5))


@says("load: rt(16, 64, fp32) lies along 2 axes of the array, got (1, -1) of 2")
def loading_along_one_axis_twice(x, g):
    load(x, T, (0, 0), 1, -1)


@says("load: rt(16, 64, fp32) lies along 2 axes of the array, got (0, 2) of 2")
def loading_along_an_axis_that_is_not_there(x, g):
    load(x, T, (0, 0), 0, 2)


@says("store: the target must be a shared tile or vector, or a global array, got")
def storing_into_a_number(x, g):
    store(1.0, zeros(T), (0, 0))


@says("tma_store: the target takes st(64, 64, bf16), got st(64, 48, fp16)")
def tma_store_of_another_tile(x, g):
    _, v, _, _ = smem.open()
    warpgroup.tma_store(g, (0, 0), v)


@says("tma_store: `at` must be up to 2 integers, got (int, int, int)")
def tma_store_with_too_many_indices(x, g):
    s, _, _, _ = smem.open()
    warpgroup.tma_store(g, (0, 0, 0), s)


@says("take: the player's number must be an integer, got array")
def taking_the_turn_of_nobody(x, g):
    turn.take(x)


@says("claim_registers: a multiple of 8 from 24 to 256, got 100")
def a_number_of_registers_that_setmaxnreg_refuses(x, g):
    warpgroup.claim_registers(100)


@says("raw.wait: takes barrier, int, got st(64, 64, bf16)")
def waiting_for_a_tile_as_for_a_barrier(x, g):
    s, _, _, _ = smem.open()
    raw.wait(s, 1)


@says("raw.tma_load: the array is cut into st(64, 64, bf16), got st(64, 48, fp16)")
def loading_a_tile_of_another_type(x, g):
    _, v, _, bar = smem.open()
    raw.tma_load(v, g, (0, 0), bar)


@says("raw.tma_store: the array is cut into st(64, 64, bf16), got st(32, 64, bf16) of 64 rows")
def storing_half_of_a_tile(x, g):
    s, _, _, _ = smem.open()
    raw.tma_store(g, (0, 0), subtile(s, 32, 1))


@says("raw.tma_load: `at` must be up to 2 integers, got int64, int64, int64")
def loading_from_a_third_axis(x, g):
    s, _, _, bar = smem.open()
    raw.tma_load(s, g, (cuda.blockIdx.x + 2**40, cuda.blockIdx.y + 2**40, cuda.blockIdx.y + 2**40), bar)


@says.sweep
def test_mistakes(backend, mistake, message):
    check(backend, mistake, message)
