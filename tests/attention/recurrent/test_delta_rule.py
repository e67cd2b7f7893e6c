"""attention.delta_rule against its recurrence in float64, in the interpreter and on the card."""

import numpy as np
import pytest
from delta_cases import BF16, Sequences, agree, inputs

from attention import reference
from attention.recurrent import token_plan
from attention.recurrent.delta_rule import delta_rule
from attention.recurrent.kernels import delta_hopper
from tiles import bf16, fp16
from tiles.arguments import signature
from tiles.compiler import compile_kernel


class TestSequences(Sequences):
    """With decays of tokens."""


@pytest.mark.smoke
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length, gated):
    *others, decay = inputs(1, length, 1, 64, 64)
    agree(place, *others, decay if gated else None)


def test_long_keys_are_walked(place):
    agree(place, *inputs(1, 20, 2, 256, 64))


def test_decays_of_heads(place):
    """Are those of all tokens."""
    q, k, v, beta, _ = inputs(2, 100, 2, 64, 64)
    decay = np.array([-0.05, -0.5], np.float32)
    out, _ = agree(place, q, k, v, beta, decay)
    of_tokens = np.broadcast_to(decay, (2, 100, 2)).copy()
    assert (agree(place, q, k, v, beta, of_tokens)[0] == out).all()


@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("channels", [False, True])
def test_arrays_that_tma_cannot_read(elements, channels):
    """So many elements past a multiple of 16 bytes, rows a multiple of them apart, NaN between: token by token."""
    *given, decay = inputs(1, 20, 2, 64, 64)
    decay = np.full((1, 20, 2, 64), -0.1, np.float32) if channels else decay
    apart = []
    for x in given[:3]:
        apart.append(np.full((*x.shape[:-1], 64 + elements), np.nan, BF16)[..., elements:])
        apart[-1][...] = x
    out = np.full((1, 20, 2, 64 + elements), np.nan, BF16)
    delta_rule(*apart, given[3], decay=decay, out=out[..., elements:])
    arrays = dict(zip(("q", "k", "v", "beta", "decay"), (*given, decay), strict=True))
    reference.assert_close(out[..., elements:], reference.linear(**arrays)[0], reference.linear(**arrays, low=True)[0])
    assert np.isnan(out[..., :elements].astype(np.float32)).all(), "columns beside out were written"


@pytest.mark.parametrize("length", [1, 70])
def test_decays_of_channels(place, length):
    """Kimi delta attention."""
    q, k, v, beta, _ = inputs(2, length, 2, 64, 64)
    decay = -0.2 * np.random.default_rng(2).standard_exponential((2, length, 2, 64), np.float32)
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("gate", [1, 50, 1e-4])
def test_gates_of_any_size(place, gate):
    """Exponents are never positive, however far the sums go: no infinity, no NaN."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, gate=gate)
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
    q, k, v, beta, decay = inputs(1, ends[-1], 1, 64, 128)
    decay = decay if gated else None
    start = 0.3 * np.random.default_rng(1).standard_normal((len(ends) - 1, 1, 64, 128), np.float32)
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
    agree(place, *inputs(1, 200, 1, 64, 128))


@pytest.mark.parametrize(("key_dim", "value_dim", "gate"), [(256, 64, 0.1), (208, 80, 0.1), (256, 16, 3)])
def test_wide_keys(place, monkeypatch, nothing_known, key_dim, value_dim, gate):
    """In chunks, by one consumer; strong chunks, too."""
    monkeypatch.setattr(token_plan, "launch", lambda *_: pytest.fail("token by token"))
    agree(place, *inputs(1, 150, 1, key_dim, value_dim, gate=gate))


CONFIGS = [
    delta_hopper.Config(128, 2, bf16, True, True),
    delta_hopper.Config(64, 1, fp16, False),
    delta_hopper.Config(256, 1, bf16, True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_machine_code(config):
    """Nothing spills, and no wgmma waits for another."""
    kernel, _ = delta_hopper.make(config)
    found = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (found.spill_bytes, found.local_bytes, found.warnings) == (0, 0, [])
