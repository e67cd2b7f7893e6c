"""Machine code ahead of time, without a GPU: no spills and no warnings of ptxas."""

import re

import numpy as np
import pytest

import fuse
import fuse.operators as operators
from tiles import fp16

SHAPES = {
    "rms_norm_linear": ((16, 4096), (4096,), (4096, 6144), ()),
    "gated_mlp": ((512, 4096), (4096, 14336), (4096, 14336)),
    "normalised_step": ((4096, 4096), (4096, 4096), (4096,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_spills(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILES_CACHE", "1")
    operator = fuse.compile(getattr(operators, name), *SHAPES[name])
    compiled = operator.compile(*SHAPES[name])
    assert operator is getattr(operators, name)
    assert compiled and len(list(tmp_path.glob("entries/*/*"))) == len(compiled)
    for one in compiled:
        assert not one.warnings and not re.search(r"[1-9]\d* bytes spill", one.log), one.log


def test_numbers_have_their_defaults(monkeypatch):
    """Shapes of numbers may be left out ahead of time; fuse.operators needs no import of its own."""
    monkeypatch.setenv("TILES_CACHE", "0")
    function = fuse.__getattr__("operators").rms_norm_linear
    assert function is operators.rms_norm_linear
    actual, same = (function.compile((16, 64), (64,), (64, 64), *more) for more in ((), ((),)))
    assert len(actual) == len(same) == 1
    with pytest.raises(TypeError, match="shapes must be tuples of integers, .* got '64'"):
        function.compile((16, 64), "64", (64, 64))


def test_a_scale_does_not_move_in_fp16():
    """x is large and its norm is not: in fp16 the norm must be the operand of the product."""
    x = np.full((3, 64), 60000, np.float16)
    w = np.full((64, 32), 1.0, np.float16)
    actual = operators.rms_norm_linear.candidates(x, np.full(64, 2.0, np.float16), w)
    assert not any(candidate.rules for candidate in actual)
    y = operators.rms_norm_linear.run(x / np.float16(300), np.full(64, 2.0, fp16.np), w)
    assert np.allclose(y, 128, rtol=1e-2)
