"""Values without a GPU: windows of global tensors at every edge, tiles that never change, pending ones that nobody can use."""

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import ops  # operators get their meanings  # noqa: F401
from tiles import Tile, bf16, fp32, pending, rt, st, tensor
from tiles.op import TypeArgument
from tiles.values import PendingTile, spec_of, wrap

TILE = st(8, 16, bf16)  # small, so that edges are many


def padded(array, tile, rows, cols, at):
    """What the tile at `at` holds, by plain slicing of an array padded with zeros on all sides."""
    pad = [(0, 0)] * array.ndim
    pad[rows] = pad[cols] = (128, 128)
    wide = np.pad(array.astype(np.float32), pad)
    index = list(at)
    index[rows] = slice(128 + tile.rows * at[rows], 128 + tile.rows * (at[rows] + 1))
    index[cols] = slice(128 + tile.cols * at[cols], 128 + tile.cols * (at[cols] + 1))
    part = wide[tuple(index)]
    return part if rows < cols else part.T


@given(
    some.permutations(range(4)).map(lambda axes: axes[:2]),
    some.lists(some.integers(1, 40), min_size=4, max_size=4),
    some.lists(some.integers(-2, 5), min_size=4, max_size=4),
    some.integers(0, 2**32 - 1),
)
def test_windows_equal_plain_slicing(axes, shape, at, seed):
    """Loads and stores at all edges and beyond them, tile axes in any order and place."""
    rows, cols = axes
    for axis in set(range(4)) - {rows, cols}:
        shape[axis], at[axis] = min(shape[axis], 3), abs(at[axis]) % min(shape[axis], 3)
    array = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(bf16.np)
    source = tensor(array, TILE, rows, cols)
    want = padded(array, TILE, rows, cols, at)
    np.testing.assert_array_equal(source.load(at).astype(np.float32), want)

    values = np.arange(TILE.rows * TILE.cols, dtype=np.float32).reshape(TILE.shape).astype(bf16.np)
    target = np.zeros(shape, bf16.np)
    tensor(target, TILE, rows, cols).store(at, values)
    inside = padded(np.ones(shape), TILE, rows, cols, at)
    np.testing.assert_array_equal(padded(target, TILE, rows, cols, at), values.astype(np.float32) * inside)
    assert np.count_nonzero(target) <= inside.sum(), "nothing else is written"


def test_trailing_indices_are_zero():
    array = np.arange(3 * 20 * 2 * 16, dtype=np.float32).reshape(3, 20, 2, 16).astype(bf16.np)
    source = tensor(array, TILE, 1)
    np.testing.assert_array_equal(source.load((2, 1)), source.load((2, 1, 0, 0)))


@pytest.mark.parametrize("at", [(3, 0, 0), (-1, 0, 0), (0, 0, 2), (0, 0, -1)])
def test_other_axes_have_bounds(at):
    source = tensor(np.zeros((3, 20, 2, 16), bf16.np), TILE, 1)
    with pytest.raises(IndexError, match=r"is out of range for axis [02] of an array of shape \(3, 20, 2, 16\)"):
        source.load(at)


@pytest.mark.parametrize("rows, cols", [(1, 1), (-1, 1)])
def test_rows_and_cols_differ(rows, cols):
    with pytest.raises(ValueError, match="rows and cols must be different axes"):
        tensor(np.zeros((8, 16), bf16.np), TILE, rows, cols)


# ---- tiles and pending tiles -----------------------------------------------------------------------------------------
def test_a_tile_never_changes():
    tile = Tile(rt(16, 16, fp32), np.zeros((16, 16), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        tile.array[0, 0] = 1
    other = tile
    other *= 2.0
    assert other is not tile, "in-place forms make a new tile"


def test_a_tile_has_its_types_members():
    tile = Tile(rt(16, 32, bf16), 1.0)
    assert (tile.rows, tile.cols, tile.dtype, tile.col_vec) == (16, 32, bf16, rt(16, 32, bf16).col_vec)
    assert tile.array.shape == (16, 32) and tile.array.dtype == bf16.np
    assert str(tile).startswith("rt(16, 32, bf16)\n")


def test_unknown_members_are_named():
    with pytest.raises(AttributeError, match="'rt' object has no attribute 'colums'"):
        _ = Tile(rt(16, 32, bf16), 1.0).colums
    with pytest.raises(AttributeError, match=r"'rt' object has no attribute 'T': use transpose\(t\); got rt\(16, 32, bf16\)"):
        _ = Tile(rt(16, 32, bf16), 1.0).T
    with pytest.raises(TypeError, match="tensor: takes an array and a tile in shared memory, st or sv, got rt"):
        tensor(np.zeros((16, 32), np.float32), rt(16, 32, fp32))
    with pytest.raises(TypeError, match=r"tensor: takes an array .* got \[1\]"):
        tensor([1], st(64, 64, bf16))


def test_a_branch_cannot_depend_on_a_tile():
    with pytest.raises(TypeError, match=r"a branch cannot depend on a tile: rt\(16, 16, fp32\)"):
        bool(Tile(rt(16, 16, fp32), 1.0))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "iadd", "imul"])
def test_a_pending_tile_is_refused_in_the_same_words_everywhere(name):
    words = r"this tile is still in flight: pending rt\(16, 16, fp32\); take it with warpgroup.wait\(...\) first"
    tile, use = PendingTile(rt(16, 16, fp32), None, 1), getattr(operator, name)
    for arguments in ((tile, 2.0), (2.0, tile), (tile, tile), (Tile(rt(16, 16, fp32), 1.0), tile)):
        with pytest.raises(TypeError, match=words):
            use(*arguments)
    with pytest.raises(TypeError, match=words):
        operator.neg(tile)


def test_a_branch_cannot_depend_on_a_pending_tile_either():
    with pytest.raises(TypeError, match=r"pending rt\(16, 16, fp32\)"):
        bool(PendingTile(rt(16, 16, fp32), None, 1))


def test_values_have_types():
    tile = Tile(rt(16, 16, fp32), 1.0)
    assert spec_of(tile) == rt(16, 16, fp32)
    assert spec_of(PendingTile(rt(16, 16, fp32), None, 1)) == pending(rt(16, 16, fp32))
    assert (str(spec_of(3)), spec_of(3, fixed=True), str(spec_of(2.5)), str(spec_of(True))) == ("int64", 3, "float32", "bool")
    assert spec_of(np.True_, fixed=True) is True
    assert [str(spec_of(x)) for x in (np.int32(3), np.float64(1))] == ["int64", "float32"]
    assert len(spec_of((1, 2, 3))) == 3 and spec_of(np.zeros((2, 3), np.float32)).ndim == 2
    assert spec_of(rt(16, 16, fp32)) == TypeArgument(rt(16, 16, fp32)), "the name of a type is no value of it"


def test_results_are_wrapped_in_the_type_that_was_announced():
    assert wrap(rt(16, 16, bf16), np.ones((16, 16))).array.dtype == bf16.np
    assert wrap(spec_of(1.0), 2).dtype == np.float32
    assert wrap(spec_of(1), 2) == 2
