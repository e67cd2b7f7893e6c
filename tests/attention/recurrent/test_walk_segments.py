"""A walk with decays of channels in segments (segment_spans.py), where chunks before a segment leave nothing of older states,
and the bound that tells (channel_history.py), in the interpreter and on the card."""

from types import SimpleNamespace

import numpy as np
import pytest
from delta_cases import BF16, FP16, agree
from test_kda_hopper import inputs

from attention import reference
from attention.plans.delta import delta_channel_walk
from attention.plans.delta.delta_channel_walk import count_walk_segments
from attention.public import delta_rules


@pytest.fixture
def cut(monkeypatch, nothing_known):
    """cut(n): calls are served by a walk in n segments from then on."""
    monkeypatch.setattr(delta_rules, "serves_channel_walk", lambda _: True)
    return lambda n: monkeypatch.setattr(delta_channel_walk, "count_walk_segments", lambda *_: n)


def model_inputs(length, heads=1, value_dim=64, dtype=BF16, **more):
    """With decays of -5 sigmoid(normal)."""
    *arrays, decay = inputs(1, length, heads, 64, value_dim, dtype, **more)
    normal = np.random.default_rng(length).standard_normal(decay.shape)
    return *arrays, (-5 / (1 + np.exp(-normal))).astype(np.float32)


@pytest.mark.parametrize(("segments", "dtype"), [(2, BF16), (4, FP16), (9, BF16)])
def test_models_gates(place, cut, segments, dtype):
    """Segments of several chunks, of one, and ones without tokens."""
    cut(segments)
    agree(place, *model_inputs(500, dtype=dtype))


def test_gates_that_keep_the_state(place, cut):
    """One block goes on through all segments; then through those behind slow gates only."""
    cut(4)
    agree(place, *inputs(1, 500, 1, 64, 64))
    q, k, v, beta, decay = model_inputs(760, seed=1)
    decay[:, 250:600] *= 1e-3
    agree(place, q, k, v, beta, decay)


def test_forgotten_at_one_token(place, cut):
    """All that is before a token with gates of -inf is forgotten, whatever is there."""
    cut(2)
    q, k, v, beta, decay = inputs(1, 256, 1, 64, 64)
    decay[:, [3, 100, 127]] = -np.inf
    agree(place, q, k, v, beta, decay)


def test_keys_that_carry_a_state_to_other_channels(place, cut):
    """Of two channels each forgets every other token what the keys then bring back from the other one: both have decayed by
    far, one by one, and the state has not."""
    q, k, v, beta, decay = inputs(1, 256, 1, 64, 64)
    k[:], decay[:], v[:, 128:] = 0, 0, 0
    k[..., :2] = 2**-0.5
    beta[:] = 2
    decay[:, ::2, :, 0] = decay[:, 1::2, :, 1] = -4
    outs = []
    for segments in 1, 2:
        cut(segments)
        returns_state = segments > 1  # another kind of call, which is planned anew
        out = delta_rules.delta_rule(*map(place.put, (q, k, v, beta)), decay=place.put(decay), return_state=returns_state)
        out = out[0] if returns_state else out
        outs.append(place.get(out)[:, 128:].astype(float))
    assert np.abs(outs[0]).max() > 2**-6
    assert (outs[0] == outs[1]).all()


def test_keys_that_grow_a_state(place, cut):
    """Long keys multiply a state by more than gates take away."""
    cut(2)
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64)
    beta[:], decay[:], k[:] = 1, -1.2, 1.9 * k
    agree(place, q, k, v, beta, decay)


def test_beta_that_grows_a_state(place, cut):
    """Where kernels divide keys by their lengths, beta above 2 multiplies a state by more than 1."""
    cut(2)
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64)
    k[:], beta[:], decay[:], v[:, 64:] = k[:, :1], 2.82, -0.61, 0
    outs = [
        place.get(delta_rules.delta_rule(*map(place.put, (q, x, v, beta)), decay=place.put(decay), qk_l2norm=norm))
        for x, norm in ((k, False), ((4 * k.astype(float)).astype(BF16), True))
    ]
    want, low = (reference.linear(q, k, v, beta=beta, decay=decay, low=low)[0][:, 128:] for low in (False, True))
    for out in outs:
        reference.assert_close(out[:, 128:], want, low, factor=4)


def test_packed_sequences(place, cut):
    """Empty ones, ones with fewer chunks than segments, and one of several chunks, with initial states."""
    cut(3)
    ends = np.array([0, 70, 70, 330, 331], np.int32)
    start = np.random.default_rng(1).standard_normal((4, 2, 64, 128), np.float32)
    arrays = model_inputs(331, heads=2, value_dim=128, key_heads=1)
    agree(place, *arrays, cu_seqlens=ends, initial_state=start)


def test_nothing_older_is_read(place, cut):
    """NaN in the first chunk does not reach the second segment, to which nothing is left of it."""
    cut(2)
    q, k, v, beta, decay = model_inputs(512)
    v[:, :64] = np.nan
    out = delta_rules.delta_rule(*map(place.put, (q, k, v, beta)), decay=place.put(decay))
    assert np.isnan(place.get(out)[:, :64]).all()
    assert np.isfinite(place.get(out)[:, 256:].astype(float)).all()


@pytest.mark.parametrize(
    ("walk_blocks", "chunks", "segments"),
    [(24, 32, 5), (8, 16, 16), (64, 512, 2), (128, 64, 1), (200, 64, 1), (0, 64, 1), (8, 3, 1)],
)
def test_count_walk_segments(walk_blocks, chunks, segments):
    """As many as fill 132 multiprocessors; one if nothing is gained."""
    assert count_walk_segments(walk_blocks, chunks, 132) == segments


def test_calls_choose_segments(monkeypatch, nothing_known):
    """By the number of heads and chunks."""
    chosen = []
    monkeypatch.setattr(delta_channel_walk, "machine", lambda _: SimpleNamespace(processors=9))
    count = count_walk_segments
    monkeypatch.setattr(delta_channel_walk, "count_walk_segments", lambda *args: chosen.append(count(*args)) or chosen[-1])
    place = SimpleNamespace(put=lambda x: x, get=lambda x: x)
    agree(place, *model_inputs(640))
    assert [int(x) for x in chosen] == [9]
