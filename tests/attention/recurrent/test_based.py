"""attention.based against its recurrence in float64, in the interpreter and on the card."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.kernels.recurrent import based_hopper as module
from attention.plans.recurrent import recurrent_chunks
from attention.plans.recurrent.based_chunks import COSTS
from attention.plans.recurrent.based_gradients import GRADIENT_COSTS
from attention.public.based_features import based
from tiles import bf16
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


def inputs(batch, length, heads, value_dim, dtype=BF16, key_heads=None, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    q, k = (draw((batch, length, key_heads or heads, 16), np.float32).astype(dtype) for _ in range(2))
    return q, k, draw((batch, length, heads, value_dim), np.float32).astype(dtype)


def agree(place, q, k, v, **options):
    """Call the function with a poisoned out, and compare it with the reference."""
    out = place.put(np.full(v.shape, np.nan, v.dtype))
    assert based(*map(place.put, (q, k, v)), out=out, **options) is out
    ref, low = (reference.based(q, k, v, low=low, **options)[0] for low in (False, True))
    reference.assert_close(place.get(out), ref, low)
    return place.get(out)


@pytest.mark.smoke
@pytest.mark.parametrize("normalize", [True, False], ids=["divided", "sums"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length, normalize):
    agree(place, *inputs(1, length, 1, 64), normalize=normalize)


@pytest.mark.parametrize(("value_dim", "dtype"), [(16, BF16), (64, FP16), (80, BF16), (128, BF16), (256, FP16)])
def test_value_dims(place, value_dim, dtype):
    agree(place, *inputs(2, 100, 2, value_dim, dtype))


def test_shared_keys(place):
    agree(place, *inputs(2, 130, 4, 64, key_heads=2))


@pytest.mark.parametrize("scale", [0.25, 0.3, 2])
def test_scale(place, scale):
    agree(place, *inputs(1, 150, 1, 64), scale=scale)


def test_layouts_agree(place):
    q, k, v = inputs(2, 70, 3, 64)
    turned = based(*(place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v)), layout="bhsd")
    assert (place.get(turned).swapaxes(1, 2) == agree(place, q, k, v)).all()


def test_later_tokens_change_nothing(place):
    """Later tokens of another chunk change no bit, not even NaN."""
    q, k, v = inputs(2, 200, 2, 64)
    before = agree(place, q, k, v)[0, :128, 0].copy()
    for x in (q, k, v):
        x[0, 128:] = x[1] = x[:, :, 1] = np.nan
    assert (place.get(based(*map(place.put, (q, k, v))))[0, :128, 0] == before).all()


def test_weights_that_are_one():
    """With q = 0 the output is the mean of the values so far."""
    _, k, v = inputs(1, 140, 1, 64)
    out = based(np.zeros_like(k), k, v).astype(np.float64)
    mean = v.astype(np.float64).cumsum(axis=1) / np.arange(1, 141)[:, None, None]
    assert np.abs(out - mean).max() < 2**-7


def features_of(x):
    """f(x) for each row of x, as attention.based's docstring defines it."""
    out = np.zeros((*x.shape[:-1], 160))
    for i in range(16):
        for d in range(9 if i < 8 else 8):
            out[..., 16 * d + i] = x[..., i] * x[..., (i + d) % 16] * (0.5 if d == 0 else 1)
    out[..., 136], out[..., 144:] = 1, x
    return out


def states(k, v):
    """(sum of f(k)^T v, sum of f(k)) in float64; k has as many heads as v."""
    f = features_of(k.astype(np.float64))
    return np.einsum("bshf,bshv->bhfv", f, v.astype(np.float64)), f.sum(axis=1)


def near(outputs, want):
    """Compare states, whose error is that of sums of rounded products."""
    assert outputs.dtype == np.float32 and outputs.shape == want.shape
    np.testing.assert_allclose(outputs, want, rtol=2**-7, atol=2**-7 * np.abs(want).max())


@pytest.mark.parametrize("length", [1, 64, pytest.param(100, marks=pytest.mark.release), 200])
def test_states(place, length):
    """The returned state, and as an initial state: a sequence in two calls has the outputs of one call."""
    q, k, v = inputs(2, 2 * length, 2, 80)
    whole = agree(place, q, k, v)
    halves = [tuple(place.put(x[:, part].copy()) for x in (q, k, v)) for part in (slice(length), slice(length, None))]
    first, state = based(*halves[0], return_state=True)
    second, (s, z) = based(*halves[1], initial_state=state, return_state=True)
    for outputs, want in zip(state, states(k[:, :length], v[:, :length])):
        near(place.get(outputs), want)
    for outputs, want in zip((s, z), states(k, v)):
        near(place.get(outputs), want)
    together = np.concatenate([place.get(first), place.get(second)], axis=1).astype(np.float64)
    assert np.abs(together - whole.astype(np.float64)).max() < 2**-6 * np.abs(whole).max()


def test_a_state_of_sums(place):
    q, k, v = inputs(1, 130, 4, 64, key_heads=2)
    _, state = based(*map(place.put, (q, k, v)), normalize=False, return_state=True)
    near(place.get(state), states(k.repeat(2, axis=2), v)[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_packed_sequences(place, normalize):
    """Each has the outputs that it has by itself; one has NaN, another no token."""
    ends = np.array([0, 65, 65, 192, 193, 300], np.int32)
    q, k, v = inputs(1, 300, 2, 64)
    for x in (q, k, v):
        x[:, 192:193] = np.nan
    together, actual = based(*map(place.put, (q, k, v)), cu_seqlens=place.put(ends), normalize=normalize, return_state=True)
    actual = actual if normalize else (actual,)
    for n, part in enumerate(slice(*pair) for pair in itertools.pairwise(ends)):
        if part.stop > part.start:
            single_sequence, state = based(
                *(place.put(x[:, part].copy()) for x in (q, k, v)), normalize=normalize, return_state=True
            )
            np.testing.assert_array_equal(
                *(x.astype(np.float64) for x in (place.get(together)[:, part], place.get(single_sequence)))
            )
            for outputs, want in zip(actual, state if normalize else (state,)):
                np.testing.assert_array_equal(place.get(outputs)[n], place.get(want)[0])
        else:
            assert not place.get(actual[0])[n].any()


def test_states_of_segments(place, monkeypatch, nothing_known):
    """Sequences that are cut into more segments than they have chunks, so that one has no tokens."""
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: 3)
    test_states(place, 70)


def test_packed_sequences_in_segments(place, monkeypatch, nothing_known):
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: 2)
    test_packed_sequences(place, True)


@pytest.mark.parametrize("costs", [COSTS, GRADIENT_COSTS])
def test_which_sequences_are_cut(costs):
    """Few long ones, so that blocks fill an H200, where 264 run at once."""
    assert recurrent_chunks.choose_segments(256, 1, 1, 32, 264, costs) == 1
    assert recurrent_chunks.choose_segments(32, 1, 1, 512, 264, costs) == 8
    assert 16 <= recurrent_chunks.choose_segments(4, 1, 1, 512, 264, costs) <= 66


@pytest.mark.gpu
def test_a_long_sequence(card):
    """The normalizer counts a quarter of a million tokens: if all values are equal, the output is that value."""
    q, k, v = inputs(1, 2**18, 1, 64)
    v[...] = 1.5
    out = card.get(based(*map(card.put, (q, k, v)))).astype(np.float64)
    assert np.abs(out - 1.5).max() < 0.03


def test_machine_code():
    """No spills, and no wgmma serialised by ptxas."""
    kernel, _ = module.make(module.Config(bf16, normalize=True, varlen=True))
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=np.zeros((1, 8, 1, 32), BF16), k=np.zeros((1, 8, 1, 32), BF16)), r"q: key_dim must be 16: key_dim=32, q."),
        (dict(v=np.zeros((1, 8, 1, 40), BF16)), "v: value_dim must be a multiple of 16"),
        (dict(v=np.zeros((1, 9, 1, 64), BF16)), "v: sequence must equal q's"),
        (
            dict(v=np.zeros((1, 8, 1, 68), BF16)[..., 4:]),
            "attention.based: takes addresses and positive strides that are multiples of 16",
        ),
    ],
)
def test_errors(change, message):
    arrays = dict(zip("qkv", inputs(1, 8, 1, 64))) | change
    with pytest.raises(ValueError, match=message):
        based(**arrays)


def test_no_token():
    x = np.zeros((0, 8, 1, 16), BF16)
    out, (state, z) = based(x, x, x, return_state=True)
    assert out.shape == x.shape and len(state) == len(z) == 0
    x = np.zeros((1, 0, 1, 16), BF16)
    assert based(x, x, x).shape == x.shape
    with pytest.raises(ValueError, match="return_state: there must be a token"):
        based(x, x, x, return_state=True)
