"""The arguments that rules of ops refuse, and the limits of those they accept: types alone, no kernel is run or compiled. The
errors that users see on both backends are in test_errors.py and test_errors_of_memory.py."""

from dataclasses import replace

import pipeline_arguments
import pytest
from numba import types

import ops
from ops import block, cluster, cluster_sum, grid, warpgroup
from ops.for_attention import triangular_inverse
from tiles import barrier, bf16, fp8e4m3, fp16, fp32, rt, st, sv
from tiles.op import OPS, TypeArgument
from tiles.types import remote

T, B, COLUMNS, SIXTEEN = rt(16, 64, fp32), rt(16, 64, bf16), rt(16, 64, fp32, "col"), rt(16, 16, fp32)
S, F, NARROW, V = st(64, 64, bf16), st(64, 64, fp32), st(64, 64, fp8e4m3), sv(64, fp32)
PARTIAL = replace(T.col_vec, partial=True)
N, X, TWO = types.int64, types.float32, types.UniTuple(types.int64, 2)
A, COUNTS, BYTES = (types.Array(t, 2, "C") for t in (types.float32, types.int32, types.uint8))
LENGTHS, COMPLEX = types.Array(types.int32, 1, "C"), types.Array(types.complex128, 1, "C")
PART, FOUND = TypeArgument(rt(16, 64, fp8e4m3)), types.UniTuple(types.int64, 4)

REST = [*[None] * 6, False, False]  # the options of cumsum_columns

REFUSED = [  # an op, types of arguments of which one does not fit, and how the message begins
    (cluster.unmap, [T], "cluster.unmap: takes a shared tile of this block"),
    (cluster.unmap, [V], "cluster.unmap: takes a shared tile of this block"),
    (cluster.map, [T, N], "cluster.map: takes a shared tile, vector or barrier, and a number"),
    (cluster.map, [S, X], "cluster.map: takes a shared tile, vector or barrier, and a number"),
    (cluster.store, [S, B], "cluster.store: takes a peer's shared tile or vector"),
    (cluster.store, [remote(barrier(1)), B], "cluster.store: takes a peer's shared tile or vector"),
    (cluster.store, [remote(V), PARTIAL], "cluster.store: takes a register tile or whole vector"),
    (cluster.store, [remote(S), X], "cluster.store: takes a register tile or whole vector"),
    (ops.lazy_maximum, [T.col_vec, T.row_vec, X], "lazy_maximum: takes two vectors of one type and a number"),
    (ops.lazy_maximum, [T, T, X], "lazy_maximum: takes two vectors of one type and a number"),
    (ops.lazy_maximum, [PARTIAL, PARTIAL, X], "lazy_maximum: takes two vectors of one type and a number"),
    (ops.lazy_maximum, [T.col_vec, T.col_vec, T], "lazy_maximum: takes two vectors of one type and a number"),
    (ops.compute_now, [S], "compute_now: takes a register tile or vector"),
    (ops.compute_now, [X], "compute_now: takes a register tile or vector"),
    (ops.rescale, [B, B.col_vec], "rescale: takes an fp32 tile and its col_vec"),
    (ops.rescale, [T, T.row_vec], "rescale: takes an fp32 tile and its col_vec"),
    (ops.rescale, [T.col_vec, T.col_vec], "rescale: takes an fp32 tile and its col_vec"),
    (triangular_inverse.inverse_unit_lower, [T], "inverse_unit_lower: takes rt(16, 16, fp32), got rt(16, 64, fp32)"),
    (grid.wait, [X], "grid.wait: `after` must be an integer"),
    (ops.unzipped, [COLUMNS, None], "unzipped: takes a tile in row layout: of fp8 or int8 with a dtype"),
    (ops.rezipped, [T.row_vec], "rezipped: takes a tile in row layout, and not of fp8"),
    (ops.copy_async, [T, A, TWO, 0, 1, 16], "copy_async: copies to a shared tile, got rt"),
    (ops.copy_async, [sv(64, bf16), A, TWO, 0, 1, 16], "copy_async: copies to a shared tile, got sv(64, bf16): load and"),
    (ops.look_up, [T, COUNTS, N, TWO, N, None], "look_up: takes the type of a shared tile"),
    (ops.copy_pages, [T, A, TWO, TWO, N, 16], "copy_pages: copies to a shared tile"),
    (ops.wait_group, [-1], "wait_group: newer must be 0 or more, got -1"),
    (ops.store_wait, [-1], "store_wait: newer must be 0 or more, got -1"),
    (warpgroup.store_wait, [-1], "store_wait: newer must be 0 or more, got -1"),
    (ops.count_up, [A, TWO], "count_up: takes a global array of int32"),
    (ops.count_up, [N, TWO], "count_up: takes a global array of int32"),
    (ops.count_stored, [COUNTS, N], "count_stored: `at` must be 2 integers"),
    (ops.count_stored, [LENGTHS, TWO], "count_stored: `at` must be 1 integers"),
    (ops.count_stored, [COUNTS, types.UniTuple(X, 2)], "count_stored: `at` must be 2 integers"),
    (ops.reset_count, [A, TWO], "reset_count: takes a global array of int32"),
    (grid.wait_count, [COUNTS, TWO, X], "wait_count: takes an integer, got float32"),
    (ops.wait_count, [COUNTS, TWO, X], "wait_count: takes an integer, got float32"),
    (ops.truncate, [T, 0, N], "truncate: takes a global array, one of its axes and an integer"),
    (ops.truncate, [A, 0, X], "truncate: takes a global array, one of its axes and an integer"),
    (ops.truncate, [A, 2, N], "truncate: takes a global array, one of its axes and an integer"),
    (ops.truncate, [A, -1, N], "truncate: takes a global array, one of its axes and an integer"),
    (ops.load, [COMPLEX, T.row_vec, types.UniTuple(N, 1), -2, -1, 0, 1], "load: the array must hold"),
    (ops.add_fragment, [A, B, TWO, 1], "add_fragment: takes a register tile of fp32"),
    (ops.add_fragment, [A, T.col_vec, TWO, 1], "add_fragment: takes a register tile of fp32"),
    (ops.add_fragment, [COUNTS, T, TWO, 1], "add_fragment: takes a global array of fp32"),
    (ops.add_fragment, [F, T, TWO, 1], "add_fragment: takes a global array of fp32"),
    (ops.add_fragment, [A, T, N, 1], "add_fragment: `at` must be 2 integers"),
    (ops.add_fragment, [A, T, types.UniTuple(N, 3), 1], "add_fragment: `at` must be 2 integers"),
    (ops.add_fragment, [A, T, TWO, 2], "add_fragment: 1 or 4 of a lane's elements are adjacent, got 2"),
    (ops.load_fragment, [A, B, TWO, 1], "load_fragment: takes a register tile of fp32"),
    (ops.load_fragment, [A, T, TWO, 2], "load_fragment: 1 or 4 of a lane's elements are adjacent, got 2"),
    (warpgroup.store_fragment, [st(128, 32, fp32), B], "store_fragment: takes a register tile of fp32"),
    (warpgroup.store_fragment, [st(128, 32, fp32), T.col_vec], "store_fragment: takes a register tile of fp32"),
    (warpgroup.store_fragment, [st(128, 32, bf16), T], "store_fragment: takes a shared tile of 128 rows and 32 columns"),
    (warpgroup.store_fragment, [st(64, 32, fp32), T], "store_fragment: takes a shared tile of 128 rows and 32 columns"),
    (warpgroup.load_shared_fragment, [st(64, 32, fp32), T], "load_shared_fragment: takes a shared tile of 128 rows and 32"),
    (ops.load_part_of_fragment, [st(64, 32, fp32), T], "load_part_of_fragment: takes a shared tile of 32 rows and 32 columns"),
    (ops.load_row, [T, T.row_vec, N, 1], "load_row: takes a shared tile, its fp32 row_vec or a line, and an integer"),
    (ops.load_row, [S, B.row_vec, N, 1], "load_row: takes a shared tile, its fp32 row_vec or a line, and an integer"),
    (ops.load_row, [S, rt(1, 64, fp32, "line"), N, 1], "load_row: takes a shared tile, its fp32 row_vec or a line, and an"),
    (ops.load_row, [S, T.row_vec, X, 1], "load_row: takes a shared tile, its fp32 row_vec or a line, and an integer"),
    (ops.load_row_of_group, [T, T, N, N, 1], "load_row_of_group: takes a shared tile, an fp32 tile of its shape"),
    (ops.load_row_of_group, [S, B, N, N, 1], "load_row_of_group: takes a shared tile, an fp32 tile of its shape"),
    (ops.load_row_of_group, [S, T, N, X, 1], "load_row_of_group: takes a shared tile, an fp32 tile of its shape"),
    (ops.last_element, [sv(64, bf16)], "last_element: takes an fp32 shared vector"),
    (ops.last_element, [F], "last_element: takes an fp32 shared vector"),
    (warpgroup.load_transposed, [F, B, 1, 0], "load_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k)"),
    (warpgroup.load_transposed, [st(64, 128, bf16), B, 1, 0], "load_transposed: takes a 2-byte or fp32 st(k, 64)"),
    (warpgroup.load_transposed, [st(72, 64, bf16), B, 1, 0], "load_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k)"),
    (warpgroup.load_transposed, [S, T, 1, 0], "load_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k)"),
    (warpgroup.store_transposed, [F, B, 0], "store_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k) in row layout"),
    (warpgroup.store_transposed, [S, COLUMNS, 0], "store_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k)"),
    (warpgroup.store_transposed, [S, SIXTEEN, 0], "store_transposed: takes a 2-byte or fp32 st(k, 64) and rt(16, k)"),
    (warpgroup.store_transposed, [st(64, 64, bf16, 64), B, 0], "store_transposed: takes a 2-byte or fp32 st(k, 64)"),
    (ops.load_pages, [A, PART, FOUND, TWO, N], "load_pages: takes an fp8 array and a type rt(16, 64 n)"),
    (ops.load_pages, [N, PART, FOUND, TWO, N], "load_pages: takes an fp8 array and a type rt(16, 64 n)"),
    (ops.store_unordered, [A, T.col_vec, TWO, -2, -1, None], "store_unordered: takes register tiles and global arrays"),
    (ops.store_unordered, [A, T.col_vec, TWO, -2, -1, False], "store_unordered: aligned=False takes tiles in row layout"),
    (warpgroup.zero_rows, [T, N, 1], "zero_rows: takes a shared tile, an integer and 1 to 8 warpgroups"),
    (warpgroup.zero_rows, [S, X, 1], "zero_rows: takes a shared tile, an integer and 1 to 8 warpgroups"),
    (warpgroup.zero_rows, [S, N, 0], "zero_rows: takes a shared tile, an integer and 1 to 8 warpgroups"),
    (warpgroup.zero_rows, [S, N, 9], "zero_rows: takes a shared tile, an integer and 1 to 8 warpgroups"),
    (ops.lane_sum, [T.col_vec], "lane_sum: takes a register tile"),
    (ops.lane_col_sum, [T.row_vec], "lane_col_sum: takes a register tile"),
    (ops.group_sum, [T.row_vec, 2], "group_sum: takes a col_vec of fp32"),
    (ops.group_sum, [T.col_vec, 3], "group_sum: size must be 1, 2, 4 or 8, got 3"),
    (ops.lane_moment, [T.col_vec], "lane_moment: takes a register tile of fp32 in row layout"),
    (ops.lane_moment, [B], "lane_moment: takes a register tile of fp32 in row layout"),
    (ops.lane_moment, [COLUMNS], "lane_moment: takes a register tile of fp32 in row layout"),
    (warpgroup.reduce_sum, [T, V], "warpgroup.reduce_sum: takes a number or a whole vector of each warp"),
    (warpgroup.reduce_sum, [replace(SIXTEEN.row_vec, partial=True), V], "warpgroup.reduce_sum: takes a number or a whole"),
    (warpgroup.reduce_sum, [SIXTEEN.row_vec, T.row_vec], "warpgroup.reduce_sum: scratch must be an fp32 shared vector"),
    (warpgroup.reduce_sum, [SIXTEEN.row_vec, sv(64, bf16)], "warpgroup.reduce_sum: scratch must be an fp32 shared vector"),
    (warpgroup.reduce_sum, [SIXTEEN.row_vec, sv(48, fp32)], "warpgroup.reduce_sum: scratch must be an fp32 shared vector"),
    (block.reduce_max, [T.row_vec, sv(48, fp32)], "block.reduce_max: scratch must be an fp32 shared vector of 64"),
    (ops.cumsum, [T], "cumsum: takes an fp32 tile in column layout"),
    (ops.cumsum, [B.row_vec], "cumsum: takes an fp32 tile in column layout"),
    (ops.cumsum, [T.col_vec], "cumsum: takes an fp32 tile in column layout"),
    (ops.cumsum, [replace(T.row_vec, partial=True)], "cumsum: takes an fp32 tile in column layout"),
    (ops.cumsum_columns, [S, S, X, *REST], "cumsum_columns: takes an fp32 shared tile"),
    (ops.cumsum_columns, [F, NARROW, X, *REST], "cumsum_columns: takes an fp32 shared tile"),
    (ops.cumsum_columns, [F, st(32, 64, fp32), X, *REST], "cumsum_columns: takes an fp32 shared tile"),
    (ops.cumsum_columns, [F, T, X, *REST], "cumsum_columns: takes an fp32 shared tile"),
    (ops.cumsum_columns, [T, F, X, *REST], "cumsum_columns: takes an fp32 shared tile"),
    (ops.cumsum_columns, [F, F, X, *REST[:5], X, *REST[6:]], "cumsum_columns: takes a factor of a function"),
    (ops.reverse_cumsum_columns, [S, V], "reverse_cumsum_columns: takes an fp32 shared tile and vector"),
    (ops.reverse_cumsum_columns, [F, sv(16, fp32)], "reverse_cumsum_columns: takes an fp32 shared tile and vector"),
    (warpgroup.warp_rows, [T.col_vec], "warp_rows: takes a row_vec of 64 elements"),
    (warpgroup.warp_rows, [SIXTEEN.row_vec], "warp_rows: takes a row_vec of 64 elements"),
    (warpgroup.warp_rows, [T], "warp_rows: takes a row_vec of 64 elements"),
    (warpgroup.warp_rows, [replace(T.row_vec, partial=True)], "warp_rows: takes a row_vec of 64 elements"),
    (warpgroup.diagonal, [COLUMNS], "diagonal: takes rt(16, 64, fp32) in row layout"),
    (warpgroup.diagonal, [replace(T, dtype=bf16)], "diagonal: takes rt(16, 64, fp32) in row layout"),
    (warpgroup.diagonal_block, [COLUMNS], "diagonal_block: takes rt(16, 64) in row layout"),
    (warpgroup.diagonal_block, [SIXTEEN], "diagonal_block: takes rt(16, 64) in row layout"),
    (warpgroup.on_diagonal, [T], "on_diagonal: takes rt(16, 16) in row layout"),
    (warpgroup.on_diagonal, [rt(16, 16, fp32, "col")], "on_diagonal: takes rt(16, 16) in row layout"),
    (ops.subtile, [V, 24, N, 0, 0], "subtile: the elements must be a multiple of 16 that divides 64, got 24"),
    (ops.subtile, [V, 48, N, 0, 0], "subtile: the elements must be a multiple of 16 that divides 64, got 48"),
    (ops.subtile, [V, 0, N, 0, 0], "subtile: the elements must be a multiple of 16 that divides 64, got 0"),
    (ops.subtile, [S, 8, X, 0, 0], "subtile: takes a shared tile, its rows and an integer"),
    (ops.subtile, [S, 0, N, 0, 0], "subtile: rows must be a multiple of 8 that divides 64, got 0"),
    (ops.subtile, [S, 12, N, 0, 0], "subtile: rows must be a multiple of 8 that divides 64, got 12"),
    (ops.subtile, [S, 24, N, 0, 0], "subtile: rows must be a multiple of 8 that divides 64, got 24"),
    (ops.subtile, [S, 64, N, 32, N], "subtile: cols must be a multiple of the 64 columns of a panel, up to 64, got 32"),
    (ops.subtile, [S, 64, N, 128, N], "subtile: cols must be a multiple of the 64 columns of a panel, up to 64, got 128"),
    (ops.subtile, [S, 64, N, -64, N], "subtile: cols must be a multiple of the 64 columns of a panel, up to 64, got -64"),
    (ops.subtile, [S, 64, N, 64, X], "subtile: takes a shared tile, its rows and an integer"),
    (ops.turned, [S], "turned: takes a register tile or vector"),
    (ops.viewed, [T, S], "viewed: takes a shared tile and the type of one"),
    (ops.viewed, [S, T], "viewed: takes a shared tile and the type of one"),
    (ops.viewed, [S, st(64, 64, fp32)], "viewed: takes a type of as many rows, as many bytes long"),
    (ops.viewed, [S, st(32, 64, fp16)], "viewed: takes a type of as many rows, as many bytes long"),
    (ops.viewed, [st(64, 64, fp16, 64), S], "viewed: takes a type of as many rows, as many bytes long"),
    (warpgroup.sync_several, [0], "sync_several: takes 1 to 8 warpgroups, got 0"),
    (warpgroup.sync_several, [9], "sync_several: takes 1 to 8 warpgroups, got 9"),
    (warpgroup.load, [A, T, TWO, -2, -1, 0, 0], "warpgroup.load: fenced=False is for a shared tile"),
    (warpgroup.quarter, [st(16, 64, bf16)], "warpgroup.quarter: takes a shared tile of 32, 64, 96, ... rows"),
    (warpgroup.quarter, [V], "warpgroup.quarter: takes a shared tile of 32, 64, 96, ... rows"),
    (ops.line_up, [A, None, N, 64, N, N, N, N, None], "line_up: takes arrays of one axis of int32 or int64"),
    (ops.line_up, [LENGTHS, COMPLEX, N, 64, N, N, N, N, None], "line_up: takes arrays of one axis of int32 or int64"),
    (ops.line_up, [LENGTHS, None, N, 48, N, N, N, N, None], "line_up: takes integers, and a power of 2"),
    (ops.line_up, [LENGTHS, None, N, 0, N, N, N, N, None], "line_up: takes integers, and a power of 2"),
    (ops.line_up, [LENGTHS, None, N, 64, N, N, N, X, None], "line_up: takes integers, and a power of 2"),
    (ops.line_up, [LENGTHS, None, N, 64, N, N, N, N, X], "line_up: takes integers, and a power of 2"),
]  # fmt: skip
TAKEN = [  # the edges of what they take
    (cluster.unmap, [S]),
    (cluster.map, [barrier(1), N]),
    (cluster.map, [V, N]),
    (ops.lazy_maximum, [T.col_vec, T.col_vec, X]),
    (ops.rescale, [T, T.col_vec]),
    (grid.wait, [None]),
    (grid.wait, [N]),
    (ops.wait_group, [0]),
    (ops.store_wait, [0]),
    (ops.truncate, [A, 0, N]),
    (ops.truncate, [A, 1, N]),
    (ops.add_fragment, [A, T, TWO, 1]),
    (ops.add_fragment, [A, T, TWO, 4]),
    (ops.load_fragment, [A, T, TWO, 4]),
    (warpgroup.store_fragment, [st(128, 32, fp32), T]),
    (warpgroup.load_shared_fragment, [st(128, 32, fp32), T]),
    (ops.load_part_of_fragment, [st(32, 32, fp32), T]),
    (ops.load_row, [NARROW, T.row_vec, N, 1]),
    (ops.load_row_of_group, [NARROW, rt(64, 64, fp32), N, N, 1]),
    (warpgroup.load_transposed, [st(16, 64, bf16), rt(16, 16, bf16), 0, 0]),
    (warpgroup.store_transposed, [S, T, 0]),
    (warpgroup.zero_rows, [S, N, 1]),
    (warpgroup.zero_rows, [S, N, 8]),
    (ops.lane_sum, [COLUMNS]),
    (warpgroup.reduce_sum, [SIXTEEN.row_vec, V]),
    (block.reduce_max, [T.row_vec, V]),
    (ops.cumsum, [COLUMNS]),
    (ops.cumsum, [COLUMNS.col_vec]),
    (ops.cumsum_columns, [F, S, X, *REST]),
    (warpgroup.warp_rows, [T.row_vec]),
    (ops.subtile, [V, 16, N, 0, 0]),
    (ops.subtile, [V, 64, N, 0, 0]),
    (ops.subtile, [S, 8, N, 0, 0]),
    (ops.subtile, [S, 64, N, 64, N]),
    (ops.viewed, [S, st(64, 128, fp8e4m3)]),
    (ops.viewed, [S, st(64, 64, fp16, 64)]),
    (warpgroup.sync_several, [1]),
    (warpgroup.sync_several, [8]),
    (warpgroup.quarter, [st(32, 64, bf16)]),
    (ops.line_up, [LENGTHS, None, N, 1, N, N, N, N, None]),
    (ops.line_up, [LENGTHS, LENGTHS, N, 64, N, N, N, N, N]),
]


REFUSED += pipeline_arguments.REFUSED
TAKEN += pipeline_arguments.TAKEN


def named(row):
    op, args, *_ = row
    return f"{OPS[op].name}({', '.join(map(str, args))})"


@pytest.mark.parametrize(("op", "args", "message"), REFUSED, ids=map(named, REFUSED))
def test_refused(op, args, message):
    with pytest.raises(TypeError) as error:
        OPS[op].type(*args)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("op", "args"), TAKEN, ids=map(named, TAKEN))
def test_taken(op, args):
    assert OPS[op].type(*args)


@pytest.mark.parametrize(("blocks", "warps", "tile"), [(0, 4, T), (3, 4, T), (2, 4, rt(32, 64, fp32)), (2, 4, B)])
def test_sums_of_a_cluster_that_cannot_be(blocks, warps, tile):
    with pytest.raises(ValueError, match=r"ClusterSum: (blocks must divide the warps|a warp's tile has 16 rows of fp32), got"):
        cluster_sum.ClusterSum(blocks, warps, tile)
    assert cluster_sum.ClusterSum(4, 4, T).blocks == 4
