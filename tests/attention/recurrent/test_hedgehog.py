"""attention.hedgehog against its formula in float64, in the interpreter and on the card."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.kernels.recurrent import hedgehog_hopper as module
from attention.public.hedgehog_features import hedgehog
from tiles import bf16
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


def inputs(batch, length, heads, head_dim=128, value_dim=128, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((batch, length, heads, n), np.float32).astype(dtype) for n in (head_dim, head_dim, value_dim)
    )
    maps = ((rng.standard_normal((heads, head_dim, 64), np.float32) / 8).astype(dtype) for _ in range(2))
    weights = (rng.random(heads, np.float32) * 2 for _ in range(2))
    return q, k, v, *maps, *weights


def agree(place, *arrays, **options):
    """Call the function with a poisoned out, and compare it with the reference."""
    v = arrays[2]
    out = place.put(np.full(v.shape, np.nan, v.dtype))
    assert hedgehog(*map(place.put, arrays), out=out, **options) is out
    ref, low = (reference.hedgehog(*arrays, low=low, **options)[0] for low in (False, True))
    reference.assert_close(place.get(out), ref, low)
    return place.get(out)


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 192, 400])
def test_lengths_around_every_block(place, length):
    """Features count from the third block on."""
    agree(place, *inputs(1, length, 1))


def test_one_key(place):
    """The first token's output is its value: the sum of weights is that of rounded ones, which products have."""
    agree(place, *inputs(1, 1, 16, 16, 48, seed=1))


@pytest.mark.parametrize(("head_dim", "value_dim", "dtype"), [(64, 64, BF16), (128, 80, FP16), (16, 128, BF16)])
def test_head_dims(place, head_dim, value_dim, dtype):
    agree(place, *inputs(2, 200, 2, head_dim, value_dim, dtype))


@pytest.mark.parametrize("which", ["window", "features", "least features"])
def test_window_or_features_alone(place, which):
    """With alpha = 0 only the window counts; with beta = 0 only the features, so that the first two blocks have outputs of 0.
    Large numbers make nearly all features the floor."""
    *arrays, alphas, betas = inputs(1, 300, 1)
    if which == "least features":
        arrays[0], arrays[1] = arrays[0] * BF16.type(32), arrays[1] * BF16.type(32)
    (alphas if which == "window" else betas)[...] = 0
    out = agree(place, *arrays, alphas, betas)
    assert which == "window" or not out[:, :128].any()


def test_shared_keys(place):
    q, k, v, *maps, alphas, betas = inputs(1, 200, 4)
    q, k, maps = q[:, :, ::2].copy(), k[:, :, ::2].copy(), [m[::2].copy() for m in maps]
    shared = agree(place, q, k, v, *maps, alphas, betas)
    q, k, maps = q.repeat(2, axis=2), k.repeat(2, axis=2), [m.repeat(2, axis=0) for m in maps]
    assert (shared == agree(place, q, k, v, *maps, alphas, betas)).all()


def test_layouts_agree(place):
    q, k, v, *rest = inputs(2, 140, 3)
    turned = hedgehog(*(place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v)), *map(place.put, rest), layout="bhsd")
    assert (place.get(turned).swapaxes(1, 2) == agree(place, q, k, v, *rest)).all()


def test_later_tokens_change_nothing(place):
    """Later tokens of another block change no bit, not even NaN."""
    q, k, v, *rest = inputs(2, 300, 2)
    before = agree(place, q, k, v, *rest)[0, :256, 0].copy()
    for x in (q, k, v):
        x[0, 256:] = x[1] = x[:, :, 1] = np.nan
    assert (place.get(hedgehog(*map(place.put, (q, k, v, *rest))))[0, :256, 0] == before).all()


def test_packed_sequences(place):
    """Each has the outputs that it has by itself; one has NaN, another no token."""
    ends = np.array([0, 65, 65, 192, 193, 400], np.int32)
    q, k, v, *rest = inputs(1, 400, 2)
    for x in (q, k, v):
        x[:, 192:193] = np.nan
    rest = [place.put(x) for x in rest]
    together = place.get(hedgehog(*map(place.put, (q, k, v)), *rest, cu_seqlens=place.put(ends)))
    for part in (slice(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]):
        single_sequence = place.get(hedgehog(*(place.put(x[:, part].copy()) for x in (q, k, v)), *rest))
        np.testing.assert_array_equal(together[:, part].astype(np.float64), single_sequence.astype(np.float64))


def test_large_scores(place):
    """Scores of thousands, and maps that pick one feature."""
    q, k, v, q_map, k_map, *weights = inputs(1, 200, 1)
    agree(place, q * 30, k * 30, v, q_map, k_map, *weights)


def test_machine_code():
    """No spills, and no wgmma serialised by ptxas."""
    kernel, _ = module.make(module.Config(bf16, varlen=True))
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=128), "window: must be 64: window=128"),
        (dict(v=np.zeros((1, 8, 1, 256), BF16)), "v: head_dim must be at most 128: 256"),
        (dict(q_map=np.zeros((1, 128, 32), BF16), k_map=np.zeros((1, 128, 32), BF16)), "q_map: must have 64 columns"),
        (dict(k_map=np.zeros((1, 64, 64), BF16)), "k_map: key_dim must equal q's"),
        (dict(alphas=np.zeros(2, np.float32)), "alphas: heads must equal v's"),
    ],
)
def test_errors(change, message):
    arrays = dict(zip("q k v q_map k_map alphas betas".split(), inputs(1, 8, 1))) | change
    with pytest.raises(ValueError, match=message):
        hedgehog(**arrays)


def test_no_token():
    q, k, v, *rest = inputs(1, 0, 1)
    assert hedgehog(q, k, v, *rest).shape == v.shape
