"""Arguments that the rules of pipelines refuse and accept, for test_refusals.py."""

from numba import types

from tiles import fp32, pipeline, rt, st
from tiles.op import OPS, TypeArgument

PIPE, N, X32 = pipeline(st(32, 64, fp32), 2, 4), types.int64, types.float32
TWO, THREE = types.UniTuple(N, 2), types.UniTuple(N, 3)
A2, A3, TABLE, LINE = (types.Array(t, n, "C") for t, n in ((X32, 2), (X32, 3), (types.int32, 2), (types.int32, 1)))
FOUND = OPS[pipeline.look_up].type(PIPE, TABLE, N, TWO, N, None)[0]
REFUSED = [
    (pipeline.fill, [PIPE, X32, A2, TWO, 0, 1, None, 16], "fill: the tile's number j must be an integer"),
    (pipeline.fill, [PIPE, N, A2, TWO, 0, 1, X32, 16], "fill: end must be an integer"),
    (pipeline.fill, [PIPE, N, A2, TWO, 0, 0, None, 16], "fill: st(32, 64, fp32) lies along 2 axes of the array, got 0 and 0"),
    (pipeline.fill, [PIPE, N, A2, TWO, -2, 0, None, 16], "fill: st(32, 64, fp32) lies along 2 axes of the array"),
    (pipeline.fill, [PIPE, N, A2, TWO, 0, 2, None, 16], "fill: st(32, 64, fp32) lies along 2 axes of the array"),
    (pipeline.fill, [PIPE, N, A2, TWO, -3, 1, None, 16], "fill: st(32, 64, fp32) lies along 2 axes of the array"),
    (pipeline.fill, [PIPE, N, A2, TWO, 0, 1, None, 2], "fill: vector_bytes must be one of"),
    (pipeline.look_up, [PIPE, A2, N, TWO, N, None], "look_up: takes int32 or int64 numbers"),
    (pipeline.look_up, [PIPE, LINE, N, TWO, N, None], "look_up: takes int32 or int64 numbers"),
    (pipeline.look_up, [PIPE, N, N, TWO, N, None], "look_up: takes int32 or int64 numbers"),
    (pipeline.look_up, [PIPE, TABLE, X32, TWO, N, None], "look_up: size, last and the two of `at` must be integers"),
    (pipeline.look_up, [PIPE, TABLE, N, THREE, N, None], "look_up: size, last and the two of `at` must be integers"),
    (pipeline.look_up, [PIPE, TABLE, N, N, N, None], "look_up: size, last and the two of `at` must be integers"),
    (pipeline.look_up, [PIPE, TABLE, N, types.UniTuple(X32, 2), N, None], "look_up: size, last and the two of `at` must be"),
    (pipeline.look_up, [PIPE, TABLE, N, TWO, X32, None], "look_up: size, last and the two of `at` must be integers"),
    (pipeline.look_up, [PIPE, TABLE, N, TWO, N, X32], "look_up: begin must be an integer or None"),
    (pipeline.fill_pages, [PIPE, N, A2, FOUND, TWO, N, None, 16], "fill_pages: takes a pool (page, row, ..., column)"),
    (pipeline.fill_pages, [PIPE, N, A3, FOUND, N, N, None, 16], "fill_pages: takes a pool (page, row, ..., column)"),
    (pipeline.fill_pages, [PIPE, N, A3, TWO, TWO, N, None, 16], "fill_pages: takes what look_up of a pipeline"),
    (pipeline.fill_pages, [PIPE, N, A3, N, TWO, N, None, 16], "fill_pages: takes what look_up of a pipeline"),
    (pipeline.fill_pages, [PIPE, N, A3, FOUND, TWO, X32, None, 16], "fill_pages: last must be an integer"),
    (pipeline.fill_pages, [PIPE, N, A3, FOUND, TWO, N, X32, 16], "fill_pages: end must be an integer"),
    (pipeline.wait_warp, [PIPE, N, -1], "wait_warp: newer must be 0 or more, got -1"),
    (pipeline.wait, [PIPE, N, -1], "wait: newer must be 0 or more, got -1"),
    (pipeline.reuse, [PIPE, TypeArgument(st(72, 64, fp32))], "reuse: takes the type of a shared tile of up to the 16384 bytes"),
    (pipeline.reuse, [PIPE, TypeArgument(rt(16, 64, fp32))], "reuse: takes the type of a shared tile of up to the 16384 bytes"),
]  # fmt: skip
TAKEN = [
    (pipeline.fill, [PIPE, N, A2, TWO, -2, -1, N, 4]),
    (pipeline.fill, [PIPE, N, A3, THREE, 2, 0, None, 16]),
    (pipeline.fill_pages, [PIPE, N, A3, FOUND, TWO, N, N, 16]),
    (pipeline.look_up, [PIPE, None, N, TWO, N, None]),
    (pipeline.look_up, [PIPE, TABLE, N, TWO, N, N]),
    (pipeline.wait_warp, [PIPE, N, 0]),
    (pipeline.wait, [PIPE, N, 0]),
    (pipeline.reuse, [PIPE, TypeArgument(st(64, 64, fp32))]),
]
