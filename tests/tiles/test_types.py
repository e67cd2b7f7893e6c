"""Tile types: what they refuse and in which words, how they print, what they derive, when they are equal."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from tiles import barrier, bf16, fp8e4m3, fp8e5m2, fp16, fp32, gl, pending, rt, rv, st, sv, tf32
from tiles.dtypes import DTYPES, dtype_of
from tiles.types import finished_type


@pytest.mark.parametrize("dtype", [fp32, tf32, fp16, bf16, fp8e4m3, fp8e5m2], ids=str)
def test_a_copied_dtype_is_the_dtype_itself(dtype):
    """In another process, too: a tile type that went there is still the same."""
    assert copy.deepcopy(dtype) is dtype and pickle.loads(pickle.dumps(dtype)) is dtype
    tile = st(64, 64, dtype)
    assert pickle.loads(pickle.dumps(tile)) == tile and pickle.loads(pickle.dumps(tile)).dtype is dtype


@pytest.mark.parametrize("rows, cols", [(0, 16), (8, 16), (16, 24), (-16, 16), (16, 0)])
def test_register_tiles_are_made_of_base_tiles(rows, cols):
    with pytest.raises(ValueError, match=f"rt: rows and cols must be positive multiples of 16, got {rows} x {cols}"):
        rt(rows, cols, fp32)


def test_register_tiles_hold_what_registers_compute_with():
    with pytest.raises(ValueError, match=r"rt: cols of rt\(16, 16, fp8e4m3\) must be a multiple of 32"):
        rt(16, 16, fp8e4m3)


def test_register_tiles_are_laid_out_by_row_or_column():
    with pytest.raises(ValueError, match=r"rt: layout must be one of \('row', 'col', 'line'\), got 'diagonal'"):
        rt(16, 16, fp32, "diagonal")


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"), [(16, 64, fp32), (1, 32, fp32), (1, 96, bf16), (1, 0, bf16), (1, 64, fp8e4m3)]
)
def test_lines_have_one_row(rows, cols, dtype):
    with pytest.raises(ValueError, match=rf"rt: a line has one row, .* of 64 columns, .* got {rows} x {cols} of"):
        rt(rows, cols, dtype, "line")


def test_lanes_have_a_line_run_by_run():
    line = rt(1, 128, bf16, "line")
    assert line.elements == 4 and str(line) == "rt(1, 128, bf16, line)"
    places = [line.element(lane, index) for lane in range(32) for index in range(4)]
    assert places == [(0, col) for col in range(128)]


@pytest.mark.parametrize("rows", [0, 4, -8, 12])
def test_shared_tiles_are_made_of_eight_rows(rows):
    with pytest.raises(ValueError, match=f"st: rows must be a positive multiple of 8, got {rows}"):
        st(rows, 64, bf16)


@pytest.mark.parametrize("cols, width", [(64, 48), (32, 128), (48, 64), (64, 16)])
def test_a_panel_divides_a_row(cols, width):
    with pytest.raises(
        ValueError, match=rf"st: width must be one of \(128, 64, 32\) and divide a row of {2 * cols} bytes, got {width}"
    ):
        st(8, cols, bf16, width)


def test_rows_of_shared_tiles_have_whole_panels():
    with pytest.raises(ValueError, match="a shared tile's row must be a multiple of 32 bytes, got 48"):
        st(8, 24, bf16)


@pytest.mark.parametrize(
    "spec, text",
    [
        (rt(16, 64, bf16), "rt(16, 64, bf16)"),
        (rt(16, 64, bf16, "col"), "rt(16, 64, bf16, col)"),
        (rt(16, 64, bf16).col_vec, "col_vec(16, bf16)"),
        (rt(16, 64, bf16, "col").col_vec, "col_vec(16, bf16, col)"),
        (rt(16, 64, fp32).row_vec, "row_vec(64, fp32)"),
        (rv(16, fp32, "col_vec", partial=True), "partial col_vec(16, fp32)"),
        (pending(rt(16, 64, fp32)), "pending rt(16, 64, fp32)"),
        (st(64, 128, fp16), "st(64, 128, fp16)"),
        (sv(64, fp32), "sv(64, fp32)"),
        (gl(sv(64, fp32), 3, None, 1), "gl(sv(64, fp32) over axis 1 of 3)"),
        (gl(st(64, 128, fp16), 4, 1, 3), "gl(st(64, 128, fp16) over axes 1, 3 of 4)"),
        (barrier(2), "barrier(2)"),
        (bf16, "bf16"),
    ],
)
def test_types_print_as_one_writes_them(spec, text):
    assert str(spec) == text


def test_a_register_tile_knows_its_vectors():
    tile = rt(32, 64, fp16)
    assert (tile.shape, tile.elements) == ((32, 64), 64)
    assert (tile.col_vec, tile.col_vec.shape, tile.col_vec.elements) == (rv(32, fp16, "col_vec"), (32, 1), 4)
    assert (tile.row_vec, tile.row_vec.shape, tile.row_vec.elements) == (rv(64, fp16, "row_vec"), (1, 64), 16)
    assert finished_type(rv(32, fp16, "col_vec", partial=True)) == tile.col_vec


def test_a_shared_tile_knows_its_panels():
    tile = st(64, 192, bf16)
    assert (tile.width, tile.panel_cols, tile.panels, tile.panel_bytes, tile.nbytes) == (128, 64, 3, 8192, 24576)
    assert (st(64, 96, bf16).width, st(64, 48, bf16).width, st(64, 32, fp32).width) == (64, 32, 128)
    assert st(64, 64, bf16) == st(64, 64, bf16, 128) != st(64, 64, bf16, 64), "the width is part of the type"


def test_a_shared_vector_knows_its_parts():
    assert (sv(48, bf16).panels, sv(48, bf16).nbytes, sv(48, bf16).stage_bytes) == (1, 96, 128)
    assert [(sv(n, fp32).panels, sv(n, fp32).panel_cols) for n in (256, 384, 512)] == [(1, 256), (3, 128), (2, 256)]
    assert (sv(32, bf16).offsets() == 2 * np.arange(32)).all() and gl(sv(32, bf16), 3, None, 1).origin((1, 2, 3)) == (1, 64, 3)


def test_a_global_tensor_finds_a_tiles_origin():
    source = gl(st(64, 128, bf16), 4, 1, 3)
    assert source.origin((2, 3, 5)) == (2, 192, 5, 0), "tile axes count tiles, others elements, what is left out is 0"
    assert source.origin((2, 3, 5, 1)) == (2, 192, 5, 128)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rt(16, 32, fp32),
        lambda: rt(16, 32, fp32).col_vec,
        lambda: st(64, 64, bf16),
        lambda: sv(64, bf16),
        lambda: barrier(3),
    ],
)
def test_types_are_values(make):
    one, other = make(), make()
    assert one == other and hash(one) == hash(other) and one is not other
    field = dataclasses.fields(one)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, getattr(one, field))


def test_types_of_different_kinds_differ():
    kinds = [
        rt(16, 16, fp32),
        rt(16, 16, bf16),
        pending(rt(16, 16, fp32)),
        st(16, 16, fp32),
        rt(16, 16, fp32).col_vec,
        rt(16, 16, fp32).row_vec,
    ]
    assert len({*kinds}) == len(kinds)


def test_dtypes_of_arrays():
    for dtype in DTYPES.values():
        assert dtype_of(np.zeros(1, dtype.np)) is dtype
    with pytest.raises(TypeError, match="no tile dtype for int64; there are fp32, fp16, bf16, fp8e4m3, fp8e5m2"):
        dtype_of(np.zeros(1, "int64"))
