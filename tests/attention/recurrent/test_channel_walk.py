"""The gradients of linear attention with decays of channels by one walk in reverse (channel_gradients_hopper.py), and the pairs
of strong chunks (channel_pairs_ampere.py), against the reference's."""

import ml_dtypes
import numpy as np
import pytest
from gradient_cases import case, check, check_heads_first, check_packed, relative_rms, run
from places import OnInterpreter

import attention
from attention import reference
from attention.plans.recurrent import channel_gradient_walk, token_loop_gradients

bf16, f32 = ml_dtypes.bfloat16, np.float32


@pytest.fixture(autouse=True)
def only_the_walk(monkeypatch, nothing_known, request):
    """Any plan but the walk's raises, except in tests of other kernels."""

    def refuse(problem):
        raise AssertionError("another plan")

    if "other" not in request.node.name:
        monkeypatch.setattr(token_loop_gradients, "serves_channel_gradients", refuse)


def one_head(length, gate=None, **more):
    """A case with one head; gates: all the same, or by default -5 sigmoid(normal), as models have them."""
    args = case(length, "channel", **{"heads": 1, "key_heads": 1, "key_dim": 80, "value_dim": 80} | more)
    normal = np.random.default_rng(length).standard_normal(args["decay"].shape)
    args["decay"] = (-5 / (1 + np.exp(-normal))).astype(f32)
    if gate is not None:
        args["decay"][:] = gate
    return args


@pytest.mark.parametrize(("length", "key_dim", "value_dim"), [(1, 128, 128), (30, 80, 48), (64, 128, 16), (130, 96, 128)])
def test_lengths(place, length, key_dim, value_dim):
    check(place, one_head(length, key_dim=key_dim, value_dim=value_dim))


@pytest.mark.parametrize("gate", [0.0, -1.0, -4.0, -5.0, -1e4, -np.inf])
def test_equal_gates(place, gate):
    """None, what numbers hold for all of a chunk, for a block alone, for no block; and where all is forgotten."""
    actual = check(place, one_head(70, gate))
    if gate < -100:
        assert not actual["ddecay"].any() and not actual["dinitial_state"].any()


def test_gates_that_forget_everything(place):
    """Some are -inf or -1e4, others 0: everything is finite, and the gradient of such a gate is 0."""
    args = one_head(100)
    draw = np.random.default_rng(2).random(args["decay"].shape)
    args["decay"] = np.where(draw < 0.1, -np.inf, np.where(draw < 0.2, -1e4, np.where(draw < 0.5, 0, -0.1))).astype(f32)
    actual = check(place, args)
    assert (actual["ddecay"][args["decay"] < -100] == 0).all()


@pytest.mark.parametrize("token", [0, 31, 32, 40])
def test_one_gate_that_forgets(place, token):
    """At the edges of blocks and within one; a gate just below the floor counts as -inf, too."""
    args = one_head(70, -0.5)
    args["decay"][:, token, :, ::4], args["decay"][:, token, :, 1::4] = -101.0, -1e4
    actual = check(place, args)["ddecay"][:, token]
    assert not actual[..., ::4].any() and not actual[..., 1::4].any() and actual[..., 2::4].all()


def test_strong_channels_and_strong_chunks_beside_others(place):
    """Half of the channels forget everything at each token of the second of three chunks."""
    args = one_head(160)
    args["decay"][:, 64:128, :, ::2] = -np.inf
    check(place, args)


@pytest.mark.parametrize("first", [40, 64])
def test_errors_of_later_tokens_stay_there(place, first):
    """A gate of -inf inside a chunk, or between two, behind which gradients are a thousand times as large."""
    args = one_head(128)
    args["decay"][:, first], args["dout"][:, first:] = -np.inf, args["dout"][:, first:] * bf16(1024)
    actual, want = run(place, args)["ddecay"], reference.linear_backward(**args)["ddecay"]
    for part in slice(first), slice(first, None):
        assert relative_rms(actual[:, part], want[:, part]) < 0.02


def test_gates_of_zero(place):
    """Gates of channels that are alike have gradients whose sum is that of the gate of a token."""
    args = one_head(100, 0)
    by_channel, by_token = run(place, args), run(place, args | {"decay": np.zeros(args["decay"].shape[:3], f32)})
    assert relative_rms(by_channel["ddecay"].sum(-1), by_token["ddecay"]) < 0.01


def test_value_heads_that_share_keys(place):
    check_heads_first(place, one_head(70, heads=2))


def test_gates_without_gradients():
    """The other gradients are the same to the last bit."""
    args = one_head(20)
    without = attention.linear_backward(**args, ddecay=False)
    dq, dk, dv, _, first = attention.linear_backward(**args)
    for x, y in zip(without, (dq, dk, dv, first), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scale", [0.0, -0.3, 7.0])
def test_any_scale(place, scale):
    check(place, one_head(20), scale=scale)


@pytest.mark.parametrize("gate", [-0.2, -1.0])
def test_float16(place, gate):
    """float16 has a smaller range of decays than bfloat16."""
    check(place, one_head(70, gate, dtype=np.float16))


def test_accumulation(place):
    """Gradients are added to float32 arrays, of strong chunks, too."""
    args = one_head(70, heads=2)
    args["decay"][:, :20] = -7
    want = {name: x.astype(f32) for name, x in run(place, args).items()}
    sums = {name: place.put(np.ones(x.shape, f32)) for name, x in want.items()}
    attention.linear_backward(**{name: place.put(x) for name, x in args.items()}, **sums, accumulate=True)
    for name, x in sums.items():
        assert relative_rms(place.get(x) - 1, want[name]) < 0.004, name


def test_packed_sequences(place, monkeypatch):
    """The long one has strong chunks, the one of a token has none."""

    def make(length, decay, **more):
        args = one_head(length, -8.0, **{"key_dim": 80, "value_dim": 48} | more)
        args["decay"][:, -1] = -2
        return args

    check_packed(place, monkeypatch, make, "channel")


@pytest.mark.parametrize(("segments", "varlen", "recent"), [(3, False, False), (3, False, True), (2, True, True)])
def test_segments(place, monkeypatch, segments, varlen, recent):
    """States before them are composed of what each makes of a state of 0, in both directions; some have no tokens."""
    monkeypatch.setattr(channel_gradient_walk, "scans_recent_states", lambda dtype: recent)
    monkeypatch.setattr(channel_gradient_walk, "choose_segments", lambda *_: segments)
    args = one_head(150, -0.3)
    args["decay"][:, 90:100] = -9
    if varlen:
        args["cu_seqlens"] = np.array([0, 10, 150])
        args |= {name: np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate")}
    check(place, args)


@pytest.mark.parametrize(("segments", "batch", "length"), [(1, 2, 70), (2, 1, 150)])
def test_stored_states(place, monkeypatch, segments, batch, length):
    """Forward stores the states that the walk reads: within a rounding those that it would compute."""
    monkeypatch.setattr(channel_gradient_walk, "choose_segments", lambda *_: segments)
    args = one_head(length, batch=batch)
    inputs = {name: place.put(x) for name, x in args.items() if name not in ("dout", "dstate")}
    *_, states = attention.linear(**inputs, return_chunk_states=True)
    stored = args | {"chunk_states": place.get(states)}
    assert stored["chunk_states"].shape == (batch, -(-length // 64), 1, 80, 80)
    assert relative_rms(stored["chunk_states"][:, 0], args["initial_state"].swapaxes(2, 3)) < 0.003
    actual = run(place, stored)
    for name, x in run(place, args).items():
        assert relative_rms(actual[name], x) < 0.005, name


def test_other_kernels_take_what_the_walk_does_not(place):
    """Gates that are not float32, and rows that TMA does not read."""
    args = one_head(20, dtype=bf16)
    args["decay"] = args["decay"].astype(bf16)
    check(place, args)


def test_as_compiled(as_compiled):
    """The PTX of the kernels, for a strong chunk and one that is none, which is shorter."""
    as_compiled("sm_90a")
    args = one_head(100)
    args["decay"][:, :64] = -7
    check(OnInterpreter(), args)


@pytest.mark.release  # forward's strong chunks: test_segments.py
def test_stored_states_as_compiled(as_compiled):
    """Forward's PTX, for a strong chunk and one that is none: all lanes have read a tile before one of them gives it back."""
    args = {name: x for name, x in one_head(70).items() if name not in ("dout", "dstate")}
    want = attention.linear(**args, return_chunk_states=True)
    as_compiled("sm_90a")
    for x, y in zip(attention.linear(**args, return_chunk_states=True), want, strict=True):
        assert relative_rms(x.astype(f32), y.astype(f32)) < 0.002
