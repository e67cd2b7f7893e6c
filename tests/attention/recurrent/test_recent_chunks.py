"""Local states of segments with a decay a token, which are scanned only as far as tokens still count at the segment's end."""

import numpy as np
import pytest
from delta_cases import BF16
from gradient_cases import f32
from test_segments import agree, case

from attention import gates as raw_gates
from attention import reference
from attention.plans.recurrent import recurrent_chunks
from attention.public import linear_family
from attention.public.mamba import mamba2

CHUNK, SEGMENTS = 64, 2
CHUNKS_OF_SEGMENT = 5
LENGTH = CHUNK * CHUNKS_OF_SEGMENT * SEGMENTS - 30


@pytest.fixture(autouse=True)
def short_segments(monkeypatch, nothing_known):
    """Segments of five chunks are long enough."""
    monkeypatch.setattr(recurrent_chunks, "MIN_RECENT_CHUNKS", 1)
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: SEGMENTS)


def gates(*rates):
    """A decay a token, of heads that decay by 2^rate a chunk."""
    return np.broadcast_to(np.asarray(rates, f32) * f32(np.log(2) / CHUNK), (1, LENGTH, len(rates))).copy()


@pytest.mark.parametrize("rates", [(-60, -0.01), (-200, -3)])
def test_heads_that_forget_and_others(place, rates):
    """Outputs are those of all tokens, whether a head forgets within some chunks, within one, or never."""
    args = case(False, "token", LENGTH, 16, 64, heads=2) | {"decay": gates(*rates)}
    agree(place, args, family="sm_90")


def forgets(call, tokens):
    """call(**tokens) is finite in the second segment, and the same, if what its first tokens have is NaN. Returns it."""
    want = call(**tokens)[:, CHUNK * CHUNKS_OF_SEGMENT :]
    for x in tokens.values():
        x[:, :CHUNK] = np.nan
    np.testing.assert_array_equal(call(**tokens)[:, CHUNK * CHUNKS_OF_SEGMENT :], want)
    assert np.isfinite(want.astype(f32)).all()
    return want


def test_gates_of_a_formula(place):
    """Each head has an A_log and a bias of its own."""
    args = case(False, "token", LENGTH, 16, 64, heads=2) | {"initial_state": None}
    draw = np.random.default_rng(3)
    x, A_log, bias = draw.standard_normal((1, LENGTH, 2)).astype(f32), np.array([0.0, 0.7], f32), np.array([0.5, -0.2], f32)
    q, k, v = args["q"], args["k"], args["v"]

    def call(v, **more):
        decay = raw_gates.softplus(*map(place.put, (x, A_log, bias))) if not more else more["decay"]
        return place.get(linear_family.linear(*map(place.put, (q, k, v)), decay=decay, family="sm_90"))

    evaluated = place.put(raw_gates.evaluate(raw_gates.softplus(x, A_log, bias)).astype(f32))
    want = call(v, decay=evaluated)[:, CHUNK * CHUNKS_OF_SEGMENT :].astype(f32)
    np.testing.assert_allclose(forgets(call, {"v": v}).astype(f32), want, atol=2**-7 * np.abs(want).max())


def test_steps_of_mamba2(place):
    draw = np.random.default_rng(4)
    x, z = (draw.standard_normal((1, LENGTH, 2, 64)).astype(BF16) for _ in range(2))
    B, C = (draw.standard_normal((1, LENGTH, 1, 64)).astype(BF16) for _ in range(2))
    dt, A, bias = draw.standard_normal((1, LENGTH, 2)).astype(f32), -np.array([1, 2], f32), np.array([0.5, 1], f32)
    args = {"dt": dt, "A": A, "B": B, "C": C, "z": z, "dt_bias": bias}

    def call(x):
        on_device = {name: place.put(a) for name, a in (args | {"x": x}).items()}
        return place.get(mamba2(**on_device, dt_softplus=True, family="sm_90"))

    ref, _ = reference.mamba2(x=x, **args, dt_softplus=True)
    low, _ = reference.mamba2(x=x, **args, dt_softplus=True, low=True)
    second = np.s_[:, CHUNK * CHUNKS_OF_SEGMENT :]
    reference.assert_close(forgets(call, {"x": x}), ref[second], low[second])


def test_gates_of_infinity(place):
    """What comes before a token that forgets everything does not count; what comes after it does."""
    decay = gates(-0.5, -0.5)
    decay[:, 3 * CHUNK + 7, 0] = -np.inf
    agree(place, case(False, "token", LENGTH, 16, 64, heads=2) | {"decay": decay}, family="sm_90")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("rate", "recent"), [(-49, 4), (-51, 3), (-151, 1), (-1, CHUNKS_OF_SEGMENT)])
def test_how_far_back_tokens_are_read(place, reverse, rate, recent):
    """Chunks after which less than 2^-150 is left are not read: NaN there changes nothing, and in the chunk next to them all. A
    chunk counts if those behind it decay by more than that, so three chunks of 2^-51 behind it are too many."""
    length = CHUNK * CHUNKS_OF_SEGMENT * SEGMENTS
    args = case(False, "token", length, 16, 64, heads=1)
    decay = np.full((1, length, 1), rate * np.log(2) / CHUNK, f32)

    def local_states(first, last):
        """With NaN in a range of chunks of each segment, counted from its end, or in reverse from its start."""
        v = args["v"].copy()
        for segment in range(SEGMENTS):
            for chunk in range(first, last):
                number = chunk if reverse else CHUNKS_OF_SEGMENT - 1 - chunk
                token = CHUNK * (CHUNKS_OF_SEGMENT * segment + number)
                v[:, token : token + CHUNK] = np.nan
        arrays = [place.put(x) for x in (args["q"] if reverse else args["k"], args["k"], v)]
        local, total = linear_family.segment_states(*arrays, decay=place.put(decay), reverse=reverse, family="sm_90")
        return place.get(local), place.get(total)

    want, total = local_states(0, 0)
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    np.testing.assert_allclose(total, np.full_like(total, max(rate * recent, rate * CHUNKS_OF_SEGMENT)), rtol=1e-4)
    np.testing.assert_array_equal(local_states(recent, CHUNKS_OF_SEGMENT)[0], want)
    assert np.isnan(local_states(recent - 1, recent)[0]).all()
