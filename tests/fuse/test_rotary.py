"""Rotary embedding: maps of halves of rows, with cos and sin that broadcast along heads."""

import numpy as np
import pytest
from references import compare

import fuse
from fuse import inspect, operators
from fuse.language.trace import Shape
from fuse.planning.cost import card_of
from tiles import bf16, fp16
from tiles.inspect import figures

SHAPES = {  # of x, and of cos and sin
    "rows": ((19, 48), (19, 24)),
    "more_rows": ((2, 9, 48), (2, 9, 24)),
    "heads_lead": ((2, 3, 70, 136), (70, 68)),
    "heads_follow": ((2, 19, 3, 48), (19, 1, 24)),
    "one_position": ((2, 3, 1, 48), (1, 24)),
    "several tiles of columns": ((37, 400), (37, 200)),
    "pieces_of_heads": ((2, 3, 19, 272), (19, 136)),
    "bands_of_heads": ((2, 37, 3, 128), (37, 1, 64)),
}


def sample(*shapes):
    """Arrays of normal numbers in bf16, one for each shape."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(bf16.np) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
def test_rotary(name):
    x, cos = SHAPES[name]
    arrays = sample(x, cos, cos)
    outputs = operators.rotary.run(*arrays)
    x, cos, sin = (a.astype(np.float64) for a in arrays)
    a, b = np.split(x, 2, -1)
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    assert outputs.shape == want.shape and np.abs(outputs.astype(np.float64) - want).max() <= 2**-8 * np.abs(want).max()
    assert np.abs(operators.rotary(*arrays).astype(np.float64) - want).max() <= 2**-8 * np.abs(want).max()


@pytest.mark.parametrize("name", ["rows", "heads_lead", "heads_follow", "pieces_of_heads", "bands_of_heads"])
def test_proof(name):
    x, cos = SHAPES[name]
    proof = operators.rotary.proof(*sample(x, cos, cos))
    assert proof.holds, proof


def test_everything_is_asked_for_at_once():
    """Many warps with small tiles issue all loads at once, whatever the width."""
    for columns in 64, 66, 4096:
        text = operators.rotary.source(*sample((9, columns), (9, columns // 2), (9, columns // 2)))
        assert "TILE = rt(16, 32, fp32)" in text and ("col_tiles" in text) == (columns > 64)
        assert text.count("load_unordered(") == 4 and "range(" not in text


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.release)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_registers_are_spilled(arch, dtype):
    """Launch bounds for many blocks cause no spills."""
    shapes = [Shape(shape, dtype) for shape in ((64, 512), (64, 256), (64, 256))]
    ((kernel, types, threads, shared),) = operators.rotary.launches(shapes, card_of(arch))
    actual = figures(kernel, types, arch, shared, threads)
    assert not inspect.is_bad(actual) and actual.occupancy.warps >= 14


@pytest.mark.parametrize("dtype", [np.float32, fp16.np])
def test_angles_of_another_dtype(dtype):
    """float32 elements are in another order than those of x."""
    x, cos, sin = sample((19, 96), (19, 48), (19, 48))
    arrays = x, cos.astype(dtype), sin.astype(dtype)
    assert ("load_unordered" in operators.rotary.source(*arrays)) == (dtype is fp16.np)
    compare(operators.rotary, arrays, operators.rotary.run(*arrays))


def test_warps_side_by_side_read_the_same_angles():
    """So do the tiles of one row, which lie side by side."""
    text = operators.rotary.source(*sample((2, 3, 19, 272), (19, 136), (19, 136)))
    assert text.index("col_tile = divmod(") < text.index("head = divmod(rest") < text.index("band, batch = divmod(rest")


@pytest.mark.parametrize("columns", [80, 400])
def test_one_half(columns):
    """A gate and its columns are the two halves of one array."""
    gated = fuse.kernel(lambda x: fuse.silu(fuse.halves(x)[0]) * fuse.halves(x)[1])
    arrays = sample((19, columns))
    text = gated.source(*arrays)
    assert text.count("@cuda.jit") == 1 and len(text.splitlines()) < 40
    proof = gated.proof(*arrays)
    assert proof.holds, proof
    want = gated.run(*arrays)
    compare(gated, arrays, want)
    space, y = {}, np.full_like(want, np.nan)
    exec(text, space)
    space["launch"](*arrays, y)
    assert y.shape == (19, columns // 2) and (y == want).all()


def test_odd_columns():
    with pytest.raises(ValueError, match="even number of columns"):
        operators.rotary(*sample((4, 7), (4, 3), (4, 3)))
