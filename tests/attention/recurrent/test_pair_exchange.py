"""Gradients of linear attention where value heads share keys, two of them in the blocks of a cluster, which add up dQ and dK
(parts/recurrent/pair_exchange.py)."""

import numpy as np
import pytest
from gradient_cases import case, check, run
from places import OnInterpreter

import attention
from attention import reference
from attention.kernels.recurrent import linear_gradients_hopper
from attention.plans.recurrent import recurrent_chunks, token_loop_gradients
from tiles.targets import parse_target


@pytest.fixture
def pairs_only(monkeypatch, nothing_known):
    """Calls that pairs do not serve fail."""
    monkeypatch.setattr(token_loop_gradients, "serves_linear_shared_heads", lambda *_: False)
    monkeypatch.setattr(token_loop_gradients, "serves_walk", lambda *_: False)


CASES = [(200, "token", 2, 128, 128), (66, "head", 4, 80, 96)]


@pytest.mark.parametrize(("length", "decay", "heads", "key_dim", "value_dim"), CASES)
def test_gradients(place, pairs_only, length, decay, heads, key_dim, value_dim):
    """Of more chunks than there is room for in what the blocks send each other; of two pairs."""
    check(place, case(length, decay, heads=heads, key_heads=heads // 2, key_dim=key_dim, value_dim=value_dim))


def test_segments(place, pairs_only, monkeypatch):
    """Both blocks have the same segment."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: 3)
    check(place, case(170, heads=2, key_heads=1, key_dim=80, value_dim=80))


def test_stored_states_without_gates(place, pairs_only):
    args = case(70, "none", heads=2, key_heads=1, key_dim=80, value_dim=80)
    inputs = {name: place.put(x) for name, x in args.items() if name not in ("dout", "dstate")}
    *_, states = attention.linear(**inputs, return_chunk_states=True)
    got = run(place, args | {"chunk_states": place.get(states)})
    want, low = (reference.linear_backward(**args, low=low) for low in (False, True))
    for name in "dq", "dk", "dv":
        reference.assert_close(got[name], want[name], low[name], factor=3, name=name)


def test_other_groups(monkeypatch):
    """Of four heads, of dQ and dK in float32 and of packed sequences no pairs are made."""
    served = []
    serves = token_loop_gradients.serves_pairs
    monkeypatch.setattr(token_loop_gradients, "serves_pairs", lambda *args: served.append(serves(*args)) or served[-1])
    sizes = {"key_heads": 1, "key_dim": 80, "value_dim": 80}
    attention.linear_backward(**case(5, heads=4, **sizes))
    args = case(5, heads=2, **sizes)
    attention.linear_backward(**args | {"cu_seqlens": np.array([0, 5], np.int32)})
    into = {"d" + name: np.zeros(args[name].shape, np.float32) for name in ("q", "k", "v", "decay", "initial_state")}
    attention.linear_backward(**args, **into, accumulate=True)
    attention.linear_backward(**args)
    assert served == [False, False, False, True]


def test_space():
    """Pairs of 128 channels, with every kind of gates."""
    configs = [config for config in linear_gradients_hopper.space(parse_target("sm_90a"), False) if config.paired]
    assert {config.gate for config in configs} == set(linear_gradients_hopper.GATES) and all(c.cluster == 2 for c in configs)


@pytest.mark.release
def test_as_compiled(as_compiled, pairs_only):
    """The PTX, for two chunks of which one is shorter."""
    as_compiled("sm_90a")
    check(OnInterpreter(), case(66, heads=2, key_heads=1, key_dim=80, value_dim=80))
