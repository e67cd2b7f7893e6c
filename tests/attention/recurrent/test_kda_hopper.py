"""attention.delta_rule with decays of channels (Kimi delta attention) against its recurrence in float64, in the interpreter and
on the card."""

import numpy as np
import pytest
from delta_cases import BF16, FP16, DeltaRuleTests, agree
from delta_cases import inputs as inputs_of_tokens
from members import draw_model_decays

from attention.kernels.delta import kda_hopper, kda_transform_hopper, kda_walk_hopper
from attention.parts.recurrent import channel_decay
from attention.plans.recurrent import token_loop
from attention.public.delta_rules import delta_rule
from tiles import bf16, fp16, fp32
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature


def inputs(batch, length, heads, key_dim, value_dim, dtype=BF16, key_heads=None, gate=0.02, seed=0):
    """q, k (of length 1), v, beta, and decays with a mean of -gate."""
    q, k, v, beta, _ = inputs_of_tokens(batch, length, heads, key_dim, value_dim, dtype, key_heads, seed=seed)
    draw = np.random.default_rng(seed + 1)
    return q, k, v, beta, -gate * draw.standard_exponential((batch, length, heads, key_dim), np.float32)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch, nothing_known):
    """No call is served by the token loop."""
    monkeypatch.setattr(token_loop, "launch", lambda *_: pytest.fail("the token loop was launched"))


class TestDeltaRuleByChannels(DeltaRuleTests):
    """With decays of channels, which round keys once more."""

    BETWEEN_PARTS = 2**-6
    inputs = staticmethod(inputs)


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length):
    agree(place, *inputs(1, length, 1, 64, 64))


@pytest.mark.parametrize(("gate", "dtype"), [(0.3, BF16), (50, FP16), (1e-4, BF16)])
def test_gates_of_any_size(place, gate, dtype):
    """Gates of channels and chunks that differ much, with 0 and -inf among them."""
    q, k, v, beta, decay = inputs(1, 120, 1, 64, 64, dtype, gate=gate)
    decay[0, 50:70, :, ::3] = -50
    decay[0, 80:90] = 0
    decay[0, 110] = -np.inf
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("strength", [0.99, 1.01, 0.85 * 64 / 15, 2 * 64 / 15], ids=["weak", "strong", "blocks", "halved"])
@pytest.mark.parametrize(("dtype", "of"), [(BF16, bf16), (FP16, fp16)])
def test_strong_chunks(place, strength, dtype, of):
    """Chunks on both sides of the limit, and a warp's 16 tokens on both sides of theirs."""
    q, k, v, beta, decay = inputs(1, 130, 1, 128, 64, dtype)
    decay[:] = strength * 2 * channel_decay.MIN_LOG2_DECAY[of] / channel_decay.LOG2_E / 64
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize(("dtype", "gate", "great"), [(BF16, -0.05, -np.inf), (FP16, -0.9, -4)])
def test_decays_between_blocks_of_a_strong_chunk(place, dtype, gate, great):
    """From one block's reference to the next a channel decays by more than a dtype holds, in each block by less."""
    q, k, v, beta, decay = inputs(1, 64, 1, 64, 64, dtype)
    decay[:] = gate
    decay[:, [16, 33] if dtype is FP16 else [17, 34]] = great
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize(
    ("dtype", "gate", "great"),
    [(BF16, -4.6, -4.6), (BF16, -4.7, -4.7), (FP16, -0.48, -0.48), (FP16, -0.5, -0.5), (BF16, -2, -np.inf), (FP16, -0.4, -5)],
)
def test_halves_of_a_strong_chunk(place, dtype, gate, great):
    """Halves on both sides of what they may decay by (two_block_scores.py), and a great decay between two of them."""
    q, k, v, beta, decay = inputs(1, 70, 1, 64, 64, dtype)
    decay[:] = gate
    decay[:, 32] = great
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "extremes"), [(64, 64, BF16, True), (128, 128, BF16, False), (128, 64, FP16, True)]
)
def test_decays_of_models(place, key_dim, value_dim, dtype, extremes):
    q, k, v, beta, decay = inputs(1, 130, 1, key_dim, value_dim, dtype)
    agree(place, q, k, v, beta, draw_model_decays(decay.shape, extremes))


def test_a_walk_with_decays_of_models(place, monkeypatch):
    """Chunks of which some are strong, and some halved, by the launch before a walk."""
    monkeypatch.setattr("attention.public.delta_rules.serves_channel_walk", lambda _: True)
    q, k, v, beta, decay = inputs(1, 130, 1, 64, 64)
    agree(place, q, k, v, beta, draw_model_decays(decay.shape, True))


@pytest.mark.parametrize("gate", [-1.12, -1.14, -4.6, -4.7])
def test_a_walk_with_equal_gates(place, monkeypatch, gate):
    """On both sides of what a chunk and a block of the launch before it may decay by (two_block_scores.py)."""
    monkeypatch.setattr("attention.public.delta_rules.serves_channel_walk", lambda _: True)
    *arrays, decay = inputs(1, 70, 1, 64, 64)
    decay[:] = gate
    agree(place, *arrays, decay)


def test_repeated_keys(place):
    """A and its powers are as large as they can be, and the factored keys that A is computed from are rounded."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, gate=1e-3)
    k[:] = k[:, :1]
    beta[:] = 1
    agree(place, q, k, v, beta, decay, factor=6)


@pytest.mark.parametrize(("gate", "dtype"), [(0.02, BF16), (6, FP16)])
def test_dtypes_of_beta_and_decay(place, gate, dtype):
    q, k, v, beta, decay = inputs(1, 70, 2, 64, 64, gate=gate)
    agree(place, q, k, v, beta.astype(dtype), decay.astype(dtype))


@pytest.mark.parametrize(
    ("ends", "gate"), [([0, 64, 128], 0.02), ([0, 1, 70, 70, 198], 0.02), ([0, 1, 40, 40, 110], 6), ([0, 200], 0.02)]
)
def test_packed_sequences(place, ends, gate):
    """Each has the outputs and the state that it has by itself, also next to NaN."""
    ends = np.array(ends, np.int32)
    arrays = inputs(1, ends[-1], 1, 64, 128, gate=gate)
    start = 0.3 * np.random.default_rng(1).standard_normal((len(ends) - 1, 1, 64, 128), np.float32)
    out, state = agree(place, *arrays, cu_seqlens=ends, initial_state=start)
    for n in range(0, len(ends) - 1, 2):
        own_tokens = slice(ends[n], ends[n + 1])
        poisoned = [np.full_like(x, np.nan) for x in arrays]
        for x, p in zip(arrays, poisoned, strict=True):
            p[:, own_tokens] = x[:, own_tokens]
        *arguments, decay = map(place.put, poisoned)
        actual, last = delta_rule(
            *arguments, decay=decay, cu_seqlens=place.put(ends), initial_state=place.put(start), return_state=True
        )
        assert (place.get(actual)[:, own_tokens] == out[:, own_tokens]).all()
        assert (place.get(last)[n] == state[n]).all()


def test_another_schedule(monkeypatch):
    """In any order of the warps."""
    monkeypatch.setenv("TILES_SEED", "0")
    place = type("Here", (), {"put": staticmethod(lambda x: x), "get": staticmethod(lambda x: x)})
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 128)
    decay[:, 64:128] *= 200
    agree(place, q, k, v, beta, decay)


SHIPPED = [
    (kda_hopper, kda_hopper.Config(128, 2, fp32, bf16, True)),
    pytest.param(kda_transform_hopper, kda_transform_hopper.Config(128, 0, bf16, bf16), marks=pytest.mark.release),
    pytest.param(kda_walk_hopper, kda_walk_hopper.Config(128, bf16, True), marks=pytest.mark.release),
]


@pytest.mark.parametrize(("kernels", "config"), SHIPPED, ids=lambda x: str(x) if hasattr(x, "threads") else "")
def test_machine_code(kernels, config):
    """No spills, no wgmma serialised by ptxas, and shared memory for as many blocks as an SM is to have."""
    kernel, smem = kernels.make(config)
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
    assert (smem.nbytes + 1024) * getattr(config, "ctas_per_sm", 1) <= 228 * 1024
