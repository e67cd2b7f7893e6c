"""tiles/testing: where kernels run under test, what their outputs lie in, and that a test would notice a fault."""

import functools
import importlib
import re
import sys
import unittest
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numpy.lib.stride_tricks import as_strided

import tiles
from ops import load, store
from tiles import bf16, fp16, fp32, rt, shared, st
from tiles.interpreter import interpret
from tiles.launching import interpreted_launch
from tiles.op import OPS
from tiles.testing import blank, broken, close, gpu, guarded, meaning, pairs, ptx

ROOT = Path(tiles.__file__).parents[1]
T = rt(16, 16, fp32)


@cuda.jit
def copy(x, y):
    row = T.rows * cuda.blockIdx.x
    store(y, load(x, T, (row, 0)), (row, 0))


# ---- where it runs -------------------------------------------------------------------------------------------------
def test_only_the_plugin_needs_pytest():
    files = [file for package in ("tiles", "ops", "attention") for file in (ROOT / package).rglob("*.py")]
    assert [file.name for file in files if re.search(r"^ *(import|from) pytest", file.read_text(), re.M)] == ["plugin.py"]


@pytest.mark.parametrize("grid", [3, (3,), (3, 1, 1)])
def test_a_grid(sample, grid):
    x, y = sample((40, 9)), blank((40, 9))
    meaning(copy, x, y, grid=grid)
    assert (x == y).all()


def test_one_block_if_no_grid_is_said(sample):
    x, y = sample((40, 9)), blank((40, 9))
    meaning(copy, x, y)
    assert (x[:16] == y[:16]).all() and np.isnan(y[16:]).all()


def copied(x, /, rows, **options):
    """A function that launches, and takes keywords that `meaning` knows, too."""
    y = blank(x.shape)
    tiles.launch(copy, -(-rows // T.rows), 32)(x, y)
    return y, options


def test_what_a_function_is_given_and_returns_on_the_card(monkeypatch):
    """Arrays of every rank, in tuples as attention.linear returns them; here torch's in host memory stand for the card's."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)

    def function(x, y):
        y += x
        return y, (x, None, [2 * y])

    x, y = np.array(3, np.float32), np.arange(2, dtype=np.float32)
    whole, (number, nothing, (twice,)) = gpu(function, x, y)
    assert isinstance(number, np.ndarray) and number.shape == () and number == 3 and nothing is None
    for actual, expected in (whole, [3, 4]), (y, [3, 4]), (twice, [6, 8]):
        assert isinstance(actual, np.ndarray) and actual.tolist() == expected


@pytest.mark.parametrize("way", [meaning, ptx])
def test_a_function_is_called(monkeypatch, sample, way):
    """Its launches go this way, whatever the environment says."""
    monkeypatch.setenv("TILES_INTERPRET", "nonsense")
    x = sample((20, 9))
    y, options = way(copied, x, rows=20, warps=2, grid=None)
    assert (x == y).all() and options == {"warps": 2, "grid": None}
    with pytest.raises(ValueError, match="TILES_INTERPRET must be"):
        copied(x, 20)


def test_a_function_may_fail():
    with pytest.raises(ZeroDivisionError):
        meaning(lambda: 1 // 0)
    assert meaning(interpreted_launch._choose_runner) is interpret and interpreted_launch._choose_runner() is interpret
    assert ptx(interpreted_launch._choose_runner, arch="sm_80").keywords == {"arch": "sm_80"}


@pytest.mark.parametrize("run", ["sm_80"], indirect=True)
def test_another_architecture(run):
    assert run.func is ptx and run.keywords == {"arch": "sm_80"}


@pytest.mark.parametrize("way", [meaning, ptx])
def test_what_a_launch_refuses(way):
    with pytest.raises(TypeError, match="unexpected keyword argument 'block'; a kernel takes its arguments in their order"):
        way(copy, blank(1), blank(1), block=32)
    with pytest.raises(ValueError, match="grid must be a positive integer"):
        way(copy, blank(1), blank(1), grid=0)
    with pytest.raises(ValueError, match="bytes a block, but the interpreter has 232448"):
        way(copy, blank(1), blank(1), shared=shared(a=st(1024, 64, fp32)))


def test_numbers_are_repeated_by_their_seed(monkeypatch, request):
    monkeypatch.setenv("TILES_SEED", "7")
    sample = request.getfixturevalue("sample")
    x = sample((3, 5), bf16)
    assert x.dtype == bf16.np and (x == bf16.round(np.random.default_rng(7).standard_normal((3, 5), np.float32))).all()


# ---- what outputs lie in -------------------------------------------------------------------------------------------
def test_pairs():
    assert pairs("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("order", "step"), [(None, 1), ((1, 0, 2), 2)])
def test_what_lies_around_is_guarded(order, step, aligned):
    view, check = guarded((3, 4, 16), fp16, order, step, aligned)
    assert view.shape == (3, 4, 16) and np.isnan(view).all()
    assert (view.strides[0] < view.strides[1]) == (order is not None)
    assert not aligned or not (view.ctypes.data % 16 or any(s % 16 for s in view.strides[:2]) or view.strides[2] != 2)
    view[...] = 7
    check()
    assert (view == 7).all()
    for axis, stride in enumerate(view.strides):
        for far in (-stride, view.shape[axis] * stride):
            outside = as_strided(view[:1, :1, :1], (2,), (far,))[1:]
            contents = outside.copy()
            outside[...] = 1
            with pytest.raises(AssertionError, match="memory around the array was written"):
                check()
            outside[...] = contents
    check()


def test_what_cannot_be_aligned():
    with pytest.raises(ValueError, match="no rows of multiples of 16 bytes"):
        guarded((3, 5), bf16, aligned=True)


# ---- units in the last place ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("outputs", "want", "ulp"),
    [
        (1.0, 1.0, 0),
        (1.0, 1.0 + 2.0**-11, 0.5),
        (np.inf, 65520.0, 0),
        (np.nan, np.nan, 0),
        (0.0, 2.0**-25, 1),
        (-np.inf, -1e9, 0),
    ],
)
def test_close(outputs, want, ulp):
    close(np.array([1, outputs], np.float16), [1, want], ulp=ulp)


@pytest.mark.parametrize(
    ("outputs", "want", "ulp"),
    [
        (1.0, 1.0 + 2.0**-11, 0.4),
        (np.inf, 65519.0, 9),
        (np.nan, 1.0, 9),
        (1.0, np.nan, 9),
        (np.inf, -np.inf, 9),
        (0.5, -0.5, 9),
    ],
)
def test_not_close(outputs, want, ulp):
    with pytest.raises(AssertionError, match=r"^1 of 2 elements are off, the first: \[1\] is "):
        close(np.array([1, outputs], np.float16), [1, want], ulp=ulp)


# ---- faults --------------------------------------------------------------------------------------------------------
@pytest.fixture
def written(module):
    """The name of a module of a file of its own."""
    return module(
        "from tiles import op\n\n@op\ndef twice(x):\n    return 2 * x\n\n@op\ndef thrice(x):\n    return 3 * x\n"
    ).__name__


def twice(name):
    """What the module says now of 1."""
    return importlib.import_module(name).twice.__wrapped__(1)


def test_a_fault_that_is_noticed(written):
    """Inside, the module is another; outside, all is as it was."""
    file, before, ops, globals_before = Path(sys.modules[written].__file__), sys.modules[written], set(OPS), globals().copy()
    text, seen = file.read_text(), []
    with broken(written, "2 * x", "5 * x"):
        seen.append(twice(written))
        assert twice(written) == 2
    assert seen == [5] and twice(written) == 2
    assert sys.modules[written] is before and file.read_text() == text and set(OPS) == ops
    assert globals().keys() == globals_before.keys() and all(globals()[name] is value for name, value in globals_before.items())


def test_a_fault_that_nobody_notices(written):
    survived = pytest.raises(AssertionError, match=r"no test failed with '5 \* x' in place of '2 \* x' in .*written")
    with survived, broken(written, "2 * x", "5 * x"):
        assert twice(written) > 1
    assert twice(written) == 2


@pytest.mark.parametrize(
    "error", [ValueError, tiles.Hazard.__mro__[1], ZeroDivisionError, functools.partial(pytest.fail.Exception, "DID NOT RAISE")]
)
def test_what_counts_as_noticed(written, error):
    with broken(written, "2 * x", "5 * x"):
        raise error()


@pytest.mark.parametrize("error", [NameError, ImportError, KeyboardInterrupt, unittest.SkipTest, pytest.skip.Exception])
def test_what_does_not_count(written, error):
    with pytest.raises(error if error is not pytest.skip.Exception else BaseException), broken(written, "2 * x", "5 * x"):
        raise error()


def test_the_text_must_stand_once(written):
    for old, count in (("7 * x", 0), (" * x", 2)):
        refused = pytest.raises(ValueError, match=rf"stands {count} times in .*written.*, not once")
        with refused, broken(written, old, "x"):
            pass
    with pytest.raises(ValueError, match="'nowhere' is no module with a file of its own"), broken("nowhere", "a", "b"):
        pass


def test_a_fault_in_the_calling_file():
    """The test below, of the function below, in this file."""
    with broken(__name__, "one" + " + one", "one"):
        check_pair()
    check_pair()


def pair(one):
    return one + one


def check_pair():
    assert pair(2) == 4
