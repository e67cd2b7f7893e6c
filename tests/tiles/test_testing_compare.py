"""tiles/testing/compare.py: the rule that judges kernels, by what it must refuse."""

import ml_dtypes
import numpy as np
import pytest

from tiles import fp8e4m3, fp8e5m2, int8
from tiles.testing import assert_close, close, tolerance, wide

bf16 = ml_dtypes.bfloat16


def test_tolerance():
    ref, low = np.array([1.0, -4.0, -np.inf]), np.array([1.25, -4.0, -np.inf])
    assert tolerance(ref, low, bf16) == 2 * 0.25 + 4 * 2**-8
    assert tolerance(ref, low, np.float16, factor=3) == 3 * 0.25 + 4 * 2**-11
    assert tolerance(ref, low, np.float32) == 2 * 0.25 + 4 * 2**-24
    assert tolerance(np.zeros((0, 3)), np.zeros((0, 3)), bf16) == 0


def test_tensors_that_require_grad_are_compared():
    torch = pytest.importorskip("torch")
    ref = torch.ones(3, requires_grad=True)
    assert_close(ref * 1, ref, ref)
    with pytest.raises(AssertionError, match="3 of 3"):
        assert_close(ref * 2, ref, ref)


def test_infinities_must_be_the_same():
    ref = np.array([-np.inf, 1.0])
    assert_close(np.array([-np.inf, 1.0], np.float32), ref, ref)
    for wrong in ([np.inf, 1.0], [-1e30, 1.0], [-np.inf, -np.inf]):
        with pytest.raises(AssertionError, match="^lse: 1 of 2"):
            assert_close(np.array(wrong, np.float32), ref, ref, name="lse")


def test_nan_never_passes():
    good, nan = np.ones(2), np.array([1, np.nan])
    for ref, low in ((nan, good), (good, nan), (nan, nan)):
        with pytest.raises(ValueError, match="NaN in"):
            assert_close(good.astype(np.float32), ref, low)
    with pytest.raises(AssertionError, match="1 of them NaN"):
        assert_close(nan.astype(np.float32), good, good)


def test_a_yardstick_that_overflowed_lets_nothing_pass():
    """Its error would be infinite, and so would what is allowed."""
    ref, low = np.array([1.0, 2.0]), np.array([np.inf, 2.0])
    with pytest.raises(ValueError, match="low is infinite in 1 elements where ref is finite"):
        assert_close(np.array([9.0, 2.0], np.float32), ref, low)


@pytest.mark.parametrize(("of", "greatest"), [(fp8e4m3, 448.0), (fp8e5m2, 57344.0), (int8, 127.0)])
def test_units_of_bytes(of, greatest):
    """Which saturate, and have few numbers, all of which are told apart."""
    numbers = np.arange(256, dtype=np.uint8).view(of.np)
    numbers = np.unique(wide(numbers)[np.isfinite(wide(numbers))])
    close(of.round(numbers), numbers)
    close(of.round(numbers * 1.02), numbers * 1.02, ulp=0.5)
    ends = np.array([1e6, -np.inf, 0.0 if of is int8 else np.nan])
    close(of.round(ends), ends)
    for k in range(len(numbers) - 1):
        with pytest.raises(AssertionError, match="1 of 1 elements are off"):
            close(of.round(numbers[k : k + 1]), numbers[k + 1 : k + 2])
    with pytest.raises(AssertionError, match=f"is .*{greatest}"):
        close(of.round(np.array([greatest])), np.array([greatest / 2]), ulp=1)


def test_shapes_must_be_equal():
    with pytest.raises(AssertionError, match=r"out.shape=\(1, 3\) is not ref.shape=\(3,\)"):
        assert_close(np.ones((1, 3)), np.ones(3), np.ones(3))
