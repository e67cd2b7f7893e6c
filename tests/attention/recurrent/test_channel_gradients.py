"""attention.linear_backward with decays of channels against the reference's gradients: by chunks, and token by token. Packed
sequences and accumulation: test_linear_gradients.py."""

from types import SimpleNamespace

import numpy as np
import pytest
from gradient_cases import bf16, case, check, check_heads_first, check_row_strides, f32, relative_rms, run
from places import OnInterpreter

import attention
from attention import reference
from attention.plans.recurrent import channel_gradients, token_loop_gradients
from tiles.targets import MEDIUM, SMALL


@pytest.fixture(params=["chunks", "tokens"])
def kernels(request, monkeypatch, nothing_known):
    """By chunk kernels, or token by token."""
    if request.param == "tokens":
        monkeypatch.setattr(token_loop_gradients, "serves_channel_gradients", lambda problem: False)
    return request.param


def one_head(length, **more):
    """A case with decays of channels and one head."""
    return case(length, "channel", heads=1, key_heads=1, **more)


@pytest.mark.parametrize("length", [1, 30])
def test_lengths(place, kernels, length):
    check(place, case(length, "channel", heads=2, key_heads=1, key_dim=80, value_dim=48))


@pytest.mark.parametrize("length", [64, 130])
def test_chunks(place, length):
    check(place, one_head(length))


@pytest.mark.parametrize(("segments", "varlen"), [(3, False), (2, True)])
def test_segments(place, monkeypatch, nothing_known, segments, varlen):
    """States before them are composed of what each makes of a state of 0, in both directions; some have no tokens."""
    monkeypatch.setattr(channel_gradients, "choose_segments", lambda *_: segments)
    args = one_head(150, value_dim=80)
    if varlen:
        args["cu_seqlens"] = np.array([0, 10, 150])
        args |= {name: np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate")}
    check(place, args)


def test_no_tokens(place):
    """The gradient of the state is passed on."""
    args = one_head(0)
    np.testing.assert_array_equal(run(place, args)["dinitial_state"], args["dstate"])


@pytest.mark.parametrize(("length", "key_dim", "value_dim"), [(66, 128, 80), (20, 16, 208), (3, 144, 16)])
def test_sizes(place, length, key_dim, value_dim):
    """Blocks of columns that are not full, and channels that only the token loop holds."""
    check(place, one_head(length, key_dim=key_dim, value_dim=value_dim), family="sm_80")


def test_value_heads_that_share_keys(place):
    """They add to the gradients of queries and keys; each has gradients of its gates."""
    args = case(20, "channel", heads=2, key_heads=1, gates=bf16)
    check_heads_first(place, args)


@pytest.mark.parametrize("scale", [0.0, -0.3, 7.0])
def test_any_scale(place, scale):
    check(place, one_head(20), scale=scale)


def test_float16(place):
    check(place, one_head(70, dtype=np.float16))


@pytest.mark.parametrize("more", [4, 2, 1])
def test_any_alignment(more):
    """Strides that are multiples of 8, 4 and 2 bytes."""
    args = one_head(20)

    check_row_strides(args, more)


def test_many_channels_of_any_alignment(monkeypatch, nothing_known):
    """Inputs are copied, as no kernel of chunks takes them: views of a projection whose rows are no multiples of 16 bytes."""

    def refuse(*_):
        raise AssertionError("token by token")

    monkeypatch.setattr(token_loop_gradients, "plan_token_loop_gradients", refuse)
    check_row_strides(case(20, "channel", heads=2, key_heads=1, key_dim=80), 4, family="sm_80")


@pytest.mark.parametrize(("shared_bytes", "value_dim"), [(MEDIUM, 80), (MEDIUM, 144), (SMALL, 16)])
def test_little_shared_memory(place, monkeypatch, nothing_known, shared_bytes, value_dim):
    """Panels of states are not loaded ahead there, or there is no room for a chunk's values: then these are those of two heads,
    or tokens go one by one."""
    if shared_bytes == MEDIUM:
        refuse = lambda *_: pytest.fail("token by token")
        monkeypatch.setattr(token_loop_gradients, "plan_token_loop_gradients", refuse)
    monkeypatch.setattr(channel_gradients, "machine", lambda _: SimpleNamespace(shared_bytes=shared_bytes, processors=3))
    check(place, one_head(20, value_dim=value_dim))


@pytest.mark.release  # kernels of mma.sync: test_gla_ampere.py, test_delta_ampere.py
def test_as_compiled(as_compiled):
    """The PTX of the kernels, for two chunks of which one is shorter."""
    as_compiled("sm_80")
    check(OnInterpreter(), one_head(66))


def test_token_loop_as_compiled(as_compiled, monkeypatch, nothing_known):
    monkeypatch.setattr(token_loop_gradients, "serves_channel_gradients", lambda problem: False)
    as_compiled("sm_80")
    check(OnInterpreter(), one_head(3))


def test_gates_without_gradients():
    """The other gradients are the same to the last bit."""
    args = one_head(20)
    without = attention.linear_backward(**args, ddecay=False)
    dq, dk, dv, _, first = attention.linear_backward(**args)
    for x, y in zip(without, (dq, dk, dv, first), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- gates -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", [0.0, -2.5, -5.0, -1e4, -np.inf])
def test_equal_gates(place, gate):
    """Without decay; where all but the nearest tokens are forgotten; and where all are."""
    args = one_head(70)
    args["decay"][:] = gate
    actual = check(place, args)
    if gate < -100:
        assert not actual["ddecay"].any() and not actual["dinitial_state"].any()


def test_gates_that_forget_everything(place, kernels):
    """Some are -inf or -1e4, others 0: everything is finite, and the gradient of such a gate is 0."""
    args = one_head(100)
    draw = np.random.default_rng(2).random(args["decay"].shape)
    args["decay"] = np.where(draw < 0.1, -np.inf, np.where(draw < 0.2, -1e4, np.where(draw < 0.5, 0, -0.1))).astype(f32)
    actual = check(place, args)
    assert (actual["ddecay"][args["decay"] < -100] == 0).all()


def test_channels_that_differ(place):
    """Half of the channels forget everything at each token, the others nothing."""
    args = one_head(70)
    args["decay"][..., ::2], args["decay"][..., 1::2] = -np.inf, 0
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
    args = one_head(100)
    args["decay"][:] = 0
    by_channel, by_token = run(place, args), run(place, args | {"decay": np.zeros(args["decay"].shape[:3], f32)})
    assert relative_rms(by_channel["ddecay"].sum(-1), by_token["ddecay"]) < 0.01
