"""attention.delta_rule against its recurrence in float64, in the interpreter and on the card."""

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.recurrent import delta
from attention.recurrent import delta_rule as module
from attention.recurrent.delta_rule import delta_rule
from tiles import bf16, fp16
from tiles.compiler import compile_kernel

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
STATE = 2.0**-8  # times the factor, of the greatest element of a state: the products' operands are bf16


def inputs(batch, length, heads, key_dim, value_dim, dtype=BF16, key_heads=None, gate=0.1, seed=0):
    """q, k (of length 1), v, beta, and decays of -gate on the mean."""
    draw = np.random.default_rng(seed)
    q, k = (draw.standard_normal((batch, length, key_heads or heads, key_dim), np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.standard_normal((batch, length, heads, value_dim), np.float32)
    beta = draw.random((batch, length, heads), np.float32)
    decay = -gate * draw.standard_exponential((batch, length, heads), np.float32)
    return *(x.astype(dtype) for x in (q, k, v)), beta, decay


def agree(place, q, k, v, beta, decay, factor=2, **options):
    """Run into a poisoned output, and judge output and state."""
    put = lambda x: place.put(x) if isinstance(x, np.ndarray) else x
    given = {name: put(x) for name, x in options.items()}
    out = place.put(np.full(v.shape, np.nan, v.dtype))
    found, state = delta_rule(*map(put, (q, k, v, beta)), decay=put(decay), return_state=True, out=out, **given)
    assert found is out
    options |= {"beta": beta, "decay": decay}
    (ref, last), (low, _) = (reference.linear(q, k, v, low=low, **options) for low in (False, True))
    reference.assert_close(place.get(out), ref, low, factor=factor)
    assert np.abs(place.get(state) - last).max(initial=0) <= factor * STATE * np.abs(last).max(initial=1e-30)
    return place.get(out), place.get(state)


@pytest.mark.smoke
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length, gated):
    *others, decay = inputs(1, length, 1, 64, 64)
    agree(place, *others, decay if gated else None)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype"),
    [(128, 128, BF16), (64, 128, FP16), (128, 64, BF16), (128, 128, FP16), (16, 16, BF16), (80, 208, FP16), (48, 256, BF16)],
)
def test_sizes_of_keys_and_values(place, key_dim, value_dim, dtype):
    agree(place, *inputs(2, 150, 2, key_dim, value_dim, dtype))


@pytest.mark.parametrize(("processors", "length"), [(0, 189), (1000, 190)], ids=["two consumers", "one"])
@pytest.mark.parametrize(("key_dim", "dtype"), [(64, FP16), (128, BF16)])
def test_consumers_of_a_block(place, monkeypatch, processors, length, key_dim, dtype):
    """Whatever the card has room for. (Lengths that no other test has: what was planned is remembered.)"""
    monkeypatch.setattr(module, "processors", lambda _: processors)
    agree(place, *inputs(1, length, 2, key_dim, 128, dtype))


def test_long_keys_are_walked(place):
    agree(place, *inputs(1, 20, 2, 256, 64))


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
    np.testing.assert_allclose(both.astype(float), whole.astype(float), atol=2**-7 * np.abs(whole.astype(float)).max())
    np.testing.assert_allclose(end, last, atol=2 * STATE * np.abs(last).max())


def test_scale_and_layouts(place):
    q, k, v, beta, decay = inputs(2, 70, 3, 64, 64)
    out, _ = agree(place, q, k, v, beta, decay, scale=0.7)
    turned = [place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v, beta, decay)]
    got = delta_rule(*turned[:4], decay=turned[4], scale=0.7, layout="bhsd")
    assert (place.get(got).swapaxes(1, 2) == out).all()


def test_decays_of_heads(place):
    """Are those of all tokens."""
    q, k, v, beta, _ = inputs(2, 100, 2, 64, 64)
    decay = np.array([-0.05, -0.5], np.float32)
    out, _ = agree(place, q, k, v, beta, decay)
    of_tokens = np.broadcast_to(decay, (2, 100, 2)).copy()
    assert (agree(place, q, k, v, beta, of_tokens)[0] == out).all()


@pytest.mark.parametrize("length", [1, 70])
def test_decays_of_channels(place, length):
    """Kimi delta attention."""
    q, k, v, beta, _ = inputs(2, length, 2, 64, 64)
    decay = -0.2 * np.random.default_rng(2).standard_exponential((2, length, 2, 64), np.float32)
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("gate", [1, 50, 1e-4])
def test_gates_of_any_size(place, gate):
    """Exponents are never positive, however far the sums go: no infinity, no NaN."""
    q, k, v, beta, decay = inputs(1, 300, 2, 64, 64, gate=gate)
    decay[0, 100:120] = -50
    decay[0, 130:160] = 0
    agree(place, q, k, v, beta, decay)


def test_the_same_key_again_and_again(place):
    """A is as far from 0 as it can be, and its powers are large. What a token loses by rounding, `low` makes good with the next
    one, and chunks with the next chunk: hence the factor."""
    q, k, v, beta, _ = inputs(1, 200, 1, 64, 64)
    k[:] = k[:, :1]
    beta[:] = 1
    agree(place, q, k, v, beta, None, factor=4)


def test_dtypes_of_beta_and_decay(place):
    q, k, v, beta, decay = inputs(1, 100, 2, 64, 64)
    agree(place, q, k, v, beta.astype(BF16), decay.astype(BF16))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("ends", [[0, 64, 128], [0, 1, 70, 70, 200, 263], [0, 300]])
def test_sequences_one_behind_the_other(place, ends, gated):
    """As each by itself; its neighbours may be NaN."""
    ends = np.array(ends, np.int32)
    q, k, v, beta, decay = inputs(1, ends[-1], 2, 64, 128)
    decay = decay if gated else None
    start = 0.3 * np.random.default_rng(1).standard_normal((len(ends) - 1, 2, 64, 128), np.float32)
    out, state = agree(place, q, k, v, beta, decay, cu_seqlens=ends, initial_state=start)
    for n in range(0, len(ends) - 1, 2):
        mine = slice(ends[n], ends[n + 1])
        poisoned = [np.full_like(x, np.nan) for x in (q, k, v, beta)] + [np.full_like(decay, np.nan) if gated else None]
        for x, p in zip((q, k, v, beta, decay), poisoned, strict=True):
            if p is not None:
                p[:, mine] = x[:, mine]
        put = [None if x is None else place.put(x) for x in poisoned]
        got, last = delta_rule(
            *put[:4], decay=put[4], cu_seqlens=place.put(ends), initial_state=place.put(start), return_state=True
        )
        assert (place.get(got)[:, mine] == out[:, mine]).all()
        assert (place.get(last)[n] == state[n]).all()


def test_nothing_to_do():
    q, k, v, beta, decay = inputs(1, 0, 2, 64, 64)
    start = np.random.default_rng(1).standard_normal((1, 2, 64, 64), np.float32)
    out, state = delta_rule(q, k, v, beta, decay=decay, initial_state=start, return_state=True)
    assert out.shape == v.shape and (state == start).all()


def test_bad_arguments():
    q, k, v, beta, decay = inputs(1, 10, 2, 64, 64)
    with pytest.raises(ValueError, match="beta"):
        delta_rule(q, k, v, beta[:, :5])
    with pytest.raises(ValueError, match="decay"):
        delta_rule(q, k, v, beta, decay=decay[..., None, None])
    with pytest.raises(TypeError, match="beta"):
        delta_rule(q, k, v, None)


@pytest.mark.parametrize("schedule", [0, 1])
def test_other_schedules(monkeypatch, schedule):
    """Whatever order the warps take."""
    monkeypatch.setenv("TILES_SEED", str(schedule))
    place = type("Here", (), {"put": staticmethod(lambda x: x), "get": staticmethod(lambda x: x)})
    agree(place, *inputs(1, 330, 1, 64, 128))


CONFIGS = [
    *(delta.Config(128, 2, bf16, gated, varlen) for gated in (True, False) for varlen in (True, False)),
    *(delta.Config(key_dim, 1, fp16, gated) for key_dim in delta.STAGES for gated in (True, False)),
    delta.Config(64, 2, bf16, True, True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_machine_code(config):
    """Nothing spills, and no wgmma waits for another."""
    kernel, _ = delta.make(config)
    found = compile_kernel(kernel, delta.signature(config), "sm_90a")
    assert (found.spill_bytes, found.local_bytes, found.warnings) == (0, 0, [])
