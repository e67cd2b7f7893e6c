"""attention.quantize against NumPy, and as input of attention.forward."""

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
    expected = x / descale
    low, high = ((expected * (1 + sign * 4 * ULP)).clip(-448, 448).astype(F8) for sign in (-1, 1))
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


@pytest.mark.parametrize("shape", [(2, 300, 3, 64), (1, 1, 1, 8), (1, 128, 1, 136), (1, 257, 2, 40)], ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_each_block_has_a_descale(place, shape, centred):
    x = sample(*shape)
    x[:, 128:256] *= BF16(100)
    out, descale, *mean = map(place.get, attention.quantize(place.put(x), block=128, centred=centred))
    wide = x.astype(F32) - (mean[0][:, None] if centred else 0)
    if centred:
        np.testing.assert_allclose(mean[0], x.astype(float).mean(1), atol=1e-3, rtol=1e-5)
    blocks = -(-shape[1] // 128)
    assert descale.shape == (shape[0], blocks, shape[2])
    for n in range(blocks):
        rows = np.s_[:, 128 * n : 128 * (n + 1)]
        np.testing.assert_allclose(descale[:, n], np.maximum(np.abs(wide[rows]).max((1, 3)) / 448, 2.0**-120), rtol=1e-6)
        assert rounded_once(out[rows], wide[rows], descale[:, n, None, :, None])


@pytest.mark.parametrize("options", [{"centred": True}, {"centred": True, "block": 128}], ids=["heads", "blocks"])
def test_the_same_bits_always(place, options, monkeypatch):
    """For a head alone and among others, in whatever order the warps run."""
    x = sample(3, 1100, 2, 40)
    several = [place.get(y) for y in attention.quantize(place.put(x), **options)]
    for seed in (1, 2):
        monkeypatch.setenv("TILES_SEED", str(seed))
        single_head = [place.get(y) for y in attention.quantize(place.put(x[seed : seed + 1, :, 1:]), **options)]
        out, descale, mean = (y[seed : seed + 1] for y in several)
        for mine, its in zip(single_head, (out[:, :, 1:], descale[..., 1:], mean[:, 1:])):
            assert mine.tobytes() == np.ascontiguousarray(its).tobytes()


def test_blocks_in_another_layout():
    x = sample(1, 200, 2, 64)
    out, descale = attention.quantize(x, block=128)
    turned, its = attention.quantize(np.ascontiguousarray(x.swapaxes(1, 2)), block=128, layout="bhsd")
    assert (turned.swapaxes(1, 2) == out).all() and (its.swapaxes(1, 2) == descale).all()


def through_fp8(q, k, v, centred=True, **how):
    """(out, lse) of causal attention.forward of quantised q, k, v, with what K's subtracted mean adds to lse."""
    (q8, q_descale), (v8, v_descale) = attention.quantize(q, **how), attention.quantize(v, **how)
    k8, k_descale, *mean = attention.quantize(k, centred=centred, **how)
    kwargs = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = attention.forward(q8, k8, v8, causal=True, return_lse=True, **kwargs)
    each = np.repeat(q_descale, 128, 1)[:, : q.shape[1]] if how else q_descale[:, None]
    of_mean = [np.einsum("bshd,bhd->bhs", q8.astype(F32) * each[..., None], x) * q.shape[-1] ** -0.5 for x in mean]
    return out.astype(float), lse, *of_mean


def test_blocks_and_the_mean_of_keys_make_numbers_finer():
    """Keys have much in common; queries and values of a later block are a million times as large as those of the first."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 256, 1, 64)).astype(F32) for _ in range(3))
    k, q[:, 128:], v[:, 128:] = k + 8 * rng.standard_normal(64), 1e6 * q[:, 128:], 1e6 * v[:, 128:]
    q, k, v = (x.astype(BF16) for x in (q, k, v))
    ref, ref_lse = reference.forward(q, k, v, causal=True)
    small = np.s_[:, :128]
    error = lambda **how: np.abs(through_fp8(q, k, v, **how)[0] - ref)[small].max()
    best = error(block=128)
    assert best < error() / 10 and best < error(block=128, centred=False) / 2
    _, lse, of_mean = through_fp8(q, k, v, block=128)
    off = lambda x: np.abs(x - ref_lse)[..., :128].max()
    assert off(lse + of_mean) < 1 and off(lse) > 10


def test_a_layout_and_a_descale_that_is_given():
    x, descale = sample(2, 30, 2, 64), np.float32([[0.5, 0.01], [1, 2]])
    turned = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    out = attention.quantize(turned, descale=descale, layout="bhsd")
    assert rounded_once(out.transpose(0, 2, 1, 3), x.astype(F32), descale[:, None, :, None])


def test_zeros_stay_zeros():
    out, descale = attention.quantize(np.zeros((1, 20, 1, 64), BF16))
    assert (out.astype(F32) == 0).all() and (descale > 0).all()


def test_centring_makes_similar_keys_more_precise():
    """Subtracting the keys' mean changes no weight, and makes fp8 keys more precise."""
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


def test_blocks_as_compiled(as_compiled):
    as_compiled("sm_90a")
    x = sample(1, 140, 1, 40)
    out, descale = attention.quantize(x, block=128)
    assert rounded_once(out, x.astype(F32), np.repeat(descale, 128, 1)[:, :140, :, None])


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
        (
            "out: .* attention.append quantises to int8",
            np.zeros((1, 2, 1, 64), BF16),
            dict(out=np.zeros((1, 2, 1, 64), np.int8)),
        ),
        ("block: must be 128, the rows that share a descale", np.zeros((1, 2, 1, 64), BF16), dict(block=64)),
        (
            "descale: must be None where block is passed",
            np.zeros((1, 2, 1, 64), BF16),
            dict(block=128, descale=np.ones((1, 1), F32)),
        ),
        ("centred: must be a bool", np.zeros((1, 2, 1, 64), BF16), dict(centred=1)),
    ],
)
def test_what_is_refused(message, x, options):
    with pytest.raises((TypeError, ValueError), match=message):
        attention.quantize(x, **options)
