"""attention.quantize against NumPy, and with attention.forward."""

import ml_dtypes
import numpy as np
import pytest

import attention
from attention import reference

BF16, F16, F32, F8 = ml_dtypes.bfloat16, np.float16, np.float32, np.dtype(ml_dtypes.float8_e4m3fn)
ULP = 2.0**-23


def sample(*shape, dtype=BF16):
    """Heads of different sizes, whose columns have means."""
    drawn = np.random.default_rng(3)
    return (drawn.standard_normal(shape) * np.arange(1, shape[2] + 1)[:, None] + drawn.standard_normal(shape[3])).astype(dtype)


def rounded_once(out, x, descale):
    """Is it x / descale in e4m3, to a unit in the last place of the quotient? A tie may fall either way."""
    wanted = x / descale
    low, high = ((wanted * (1 + sign * 4 * ULP)).clip(-448, 448).astype(F8) for sign in (-1, 1))
    return ((out == low) | (out == high)).all()


@pytest.mark.parametrize("shape", [(2, 70, 3, 64), (1, 1, 1, 8), (1, 1100, 2, 40), (1, 33, 1, 256), (2, 16, 2, 136)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_each_head_has_a_descale(shape, dtype):
    x = sample(*shape, dtype=dtype)
    out, descale = attention.quantize(x)
    assert out.dtype == F8 and out.shape == x.shape
    wide = x.astype(F32)
    np.testing.assert_allclose(descale, np.abs(wide).max((1, 3)) / 448, rtol=2 * ULP)
    assert rounded_once(out, wide, descale[:, None, :, None])
    assert (np.abs(out.astype(F32)).max((1, 3)) == 448).all()


def test_centred(place):
    x = sample(2, 100, 2, 64)
    x[:, :, :, 5] -= 100
    x[:, :, :, 6] += 100
    out, descale, mean = map(place.get, attention.quantize(place.put(x), centred=True))
    wide = x.astype(F32)
    np.testing.assert_allclose(mean, wide.astype(float).mean(1), atol=1e-4)
    left = wide - mean[:, None]
    np.testing.assert_allclose(descale, np.abs(left).max((1, 3)) / 448, rtol=1e-6)
    assert rounded_once(out, left, descale[:, None, :, None])


def test_a_layout_and_a_descale_that_is_given():
    x, descale = sample(2, 30, 2, 64), np.float32([[0.5, 0.01], [1, 2]])
    turned = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    out = attention.quantize(turned, descale=descale, layout="bhsd")
    assert rounded_once(out.transpose(0, 2, 1, 3), x.astype(F32), descale[:, None, :, None])


def test_zeros_stay_zeros():
    out, descale = attention.quantize(np.zeros((1, 20, 1, 64), BF16))
    assert (out.astype(F32) == 0).all() and (descale > 0).all()


def test_keys_that_have_much_in_common_are_rounded_finer_without_it():
    """Attention through fp8: what a query makes of keys is the same without their mean."""
    q, k, v = (sample(1, 70, 1, 64) for _ in range(3))
    k = (0.3 * np.random.default_rng(1).standard_normal(k.shape) + 8).astype(BF16)
    q8, q_descale = attention.quantize(q)
    v8, v_descale = attention.quantize(v)
    ref, _ = reference.forward(q, k, v)
    errors = []
    for centred in False, True:
        k8, k_descale, *_ = attention.quantize(k, centred=centred)
        out = attention.forward(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        errors.append(np.abs(out.astype(float) - ref).max())
    assert errors[1] < errors[0] / 2


def test_as_compiled(as_compiled):
    as_compiled("sm_90a")
    x = sample(1, 20, 1, 40)
    out, descale, mean = attention.quantize(x, centred=True)
    assert rounded_once(out, x.astype(F32) - mean[:, None], descale[:, None, :, None])


@pytest.mark.parametrize(
    ("message", "x", "options"),
    [
        ("x: head_dim must be a multiple of 8", np.zeros((1, 2, 1, 12), BF16), {}),
        ("x: dtype must be one of", np.zeros((1, 2, 1, 64), F32), {}),
        ("x: must not be empty", np.zeros((1, 0, 1, 64), BF16), {}),
        ("descale: ", np.zeros((1, 2, 1, 64), BF16), dict(descale=np.ones(2, F32))),
        ("out: dtype must be one of", np.zeros((1, 2, 1, 64), BF16), dict(out=np.zeros((1, 2, 1, 64), BF16))),
        ("centred: must be a bool", np.zeros((1, 2, 1, 64), BF16), dict(centred=1)),
    ],
)
def test_what_is_refused(message, x, options):
    with pytest.raises((TypeError, ValueError), match=message):
        attention.quantize(x, **options)
