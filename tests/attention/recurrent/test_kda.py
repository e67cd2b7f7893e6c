"""attention.delta_rule with decays of channels (Kimi delta attention) against its recurrence in float64, in the interpreter and
on the card."""

import numpy as np
import pytest
from test_delta_rule import BF16, FP16, STATE, agree
from test_delta_rule import inputs as inputs_of_tokens

from attention.recurrent import delta_rule as module
from attention.recurrent import kda
from attention.recurrent.delta_rule import delta_rule
from tiles import bf16, fp16, fp32
from tiles.compiler import compile_kernel


def inputs(batch, length, heads, key_dim, value_dim, dtype=BF16, key_heads=None, gate=0.02, seed=0):
    """q, k (of length 1), v, beta, and decays of -gate on the mean."""
    q, k, v, beta, _ = inputs_of_tokens(batch, length, heads, key_dim, value_dim, dtype, key_heads, seed=seed)
    draw = np.random.default_rng(seed + 1)
    return q, k, v, beta, -gate * draw.standard_exponential((batch, length, heads, key_dim), np.float32)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """Nothing here is walked token by token."""

    def walked(problem, keep):
        raise AssertionError(f"{problem} is walked")

    monkeypatch.setattr(module, "walk", walked)


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length):
    agree(place, *inputs(1, length, 1, 64, 64))


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype"),
    [(128, 128, BF16), (64, 128, FP16), (128, 64, BF16), (128, 128, FP16), (16, 16, BF16), (80, 208, FP16), (48, 256, BF16)],
)
def test_sizes_of_keys_and_values(place, key_dim, value_dim, dtype):
    agree(place, *inputs(2, 150, 2, key_dim, value_dim, dtype))


@pytest.mark.parametrize(("processors", "length"), [(0, 187), (1000, 188)], ids=["two consumers", "one"])
@pytest.mark.parametrize(("key_dim", "dtype"), [(64, FP16), (128, BF16)])
def test_consumers_of_a_block(place, monkeypatch, processors, length, key_dim, dtype):
    """Whatever the card has room for. (Lengths that no other test has: what was planned is remembered.)"""
    monkeypatch.setattr(module, "processors", lambda _: processors)
    agree(place, *inputs(1, length, 2, key_dim, 128, dtype))


def test_values_that_share_keys(place):
    agree(place, *inputs(2, 130, 6, 64, 64, key_heads=2))


@pytest.mark.parametrize("length", [64, 70, 200])
def test_a_state_to_start_with(place, length):
    start = 0.3 * np.random.default_rng(1).standard_normal((2, 2, 128, 128), np.float32)
    agree(place, *inputs(2, length, 2, 128, 128), initial_state=start)


def test_a_sequence_in_parts(place):
    """The state after one part is where the next begins."""
    q, k, v, beta, decay = inputs(1, 200, 2, 64, 128)
    whole, last = agree(place, q, k, v, beta, decay)
    first, state = agree(place, *(x[:, :90] for x in (q, k, v, beta, decay)))
    second, end = agree(place, *(x[:, 90:] for x in (q, k, v, beta, decay)), initial_state=state)
    both = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(both.astype(float), whole.astype(float), atol=2**-6 * np.abs(whole.astype(float)).max())
    np.testing.assert_allclose(end, last, atol=2 * STATE * np.abs(last).max())


def test_scale_and_layouts(place):
    q, k, v, beta, decay = inputs(2, 70, 3, 64, 64)
    out, _ = agree(place, q, k, v, beta, decay, scale=0.7)
    turned = [place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v, beta, decay)]
    got = delta_rule(*turned[:4], decay=turned[4], scale=0.7, layout="bhsd")
    assert (place.get(got).swapaxes(1, 2) == out).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", [0.3, 2, 50, 1e-4])
def test_gates_of_any_size(place, gate, dtype):
    """Those of channels and chunks may differ as much as they like, 0 and the end of all memory included."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, dtype, gate=gate)
    decay[0, 70:90, :, ::3] = -50
    decay[0, 100:110] = 0
    decay[0, 150] = -np.inf
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("strength", [0.99, 1.01], ids=["weak", "strong"])
@pytest.mark.parametrize(("dtype", "of"), [(BF16, bf16), (FP16, fp16)])
def test_chunks_as_strong_as_a_dtype_holds(place, strength, dtype, of):
    """On both sides of the limit."""
    q, k, v, beta, decay = inputs(1, 130, 1, 128, 64, dtype)
    decay[:] = strength * 2 * kda.LEAST[of] / kda.LOG2_E / 64
    agree(place, q, k, v, beta, decay)


def test_the_same_key_again_and_again(place):
    """A is as far from 0 as it can be, and its powers are large; and the keys that it is made of are rounded in their frame."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, gate=1e-3)
    k[:] = k[:, :1]
    beta[:] = 1
    agree(place, q, k, v, beta, decay, factor=6)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gate", [0.02, 6])
def test_dtypes_of_beta_and_decay(place, dtype, gate):
    q, k, v, beta, decay = inputs(1, 100, 2, 64, 128, gate=gate)
    agree(place, q, k, v, beta.astype(dtype), decay.astype(dtype))


@pytest.mark.parametrize(
    ("ends", "gate"), [([0, 64, 128], 0.02), ([0, 1, 70, 70, 200, 263], 0.02), ([0, 1, 70, 70, 150], 6), ([0, 300], 0.02)]
)
def test_sequences_one_behind_the_other(place, ends, gate):
    """As each by itself; its neighbours may be NaN."""
    ends = np.array(ends, np.int32)
    arrays = inputs(1, ends[-1], 1, 64, 128, gate=gate)
    start = 0.3 * np.random.default_rng(1).standard_normal((len(ends) - 1, 1, 64, 128), np.float32)
    out, state = agree(place, *arrays, cu_seqlens=ends, initial_state=start)
    for n in range(0, len(ends) - 1, 2):
        mine = slice(ends[n], ends[n + 1])
        poisoned = [np.full_like(x, np.nan) for x in arrays]
        for x, p in zip(arrays, poisoned, strict=True):
            p[:, mine] = x[:, mine]
        *others, decay = map(place.put, poisoned)
        got, last = delta_rule(
            *others, decay=decay, cu_seqlens=place.put(ends), initial_state=place.put(start), return_state=True
        )
        assert (place.get(got)[:, mine] == out[:, mine]).all()
        assert (place.get(last)[n] == state[n]).all()


@pytest.mark.parametrize("schedule", [0, 1])
def test_other_schedules(monkeypatch, schedule):
    """Whatever order the warps take."""
    monkeypatch.setenv("TILES_SEED", str(schedule))
    place = type("Here", (), {"put": staticmethod(lambda x: x), "get": staticmethod(lambda x: x)})
    q, k, v, beta, decay = inputs(1, 330, 1, 64, 128)
    decay[:, 64:128] *= 200
    agree(place, q, k, v, beta, decay)


CONFIGS = [
    *(kda.Config(key_dim, consumers, fp32, bf16) for key_dim in kda.KEY_DIMS for consumers in (1, 2)),
    *(kda.Config(128, 2, gates, fp16, varlen) for gates in (fp32, fp16) for varlen in (True, False)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_machine_code(config):
    """Nothing spills, and no wgmma waits for another; a block has room."""
    kernel, smem = kda.make(config)
    found = compile_kernel(kernel, kda.signature(config), "sm_90a")
    assert (found.spill_bytes, found.local_bytes, found.warnings) == (0, 0, [])
    assert smem.nbytes <= 227 * 1024
