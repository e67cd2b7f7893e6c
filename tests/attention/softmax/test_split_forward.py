"""Calls with few tiles of queries and many keys: which of them decode's kernels serve, in tiles of query tokens and parts of
the keys (split_forward.py, decode/splits.py), and that they give the same."""

import importlib

import decode_checks
import numpy as np
import pytest
from forward_checks import agree, inputs

import attention
from attention.parts.decode import splits
from attention.plans.decode import decode_launches, split_forward
from tiles.launching.devices import Interpreter

PROCESSORS = 40


@pytest.fixture
def shared(monkeypatch, nothing_known):
    """The calls of plan_split_kv, on a GPU with more multiprocessors than problems here have tiles; 100 keys are many."""
    plan_split_kv, calls = decode_launches.plan_split_kv, []
    monkeypatch.setattr(decode_launches, "machine", lambda ordinal: Interpreter(processors=PROCESSORS))
    monkeypatch.setattr(split_forward, "LEAST", 60)
    monkeypatch.setattr(splits, "LONG", 100)
    for module in (split_forward, importlib.import_module("attention.public.decoding")):
        monkeypatch.setattr(module, "plan_split_kv", lambda *args: calls.append(args) or plan_split_kv(*args))
    return calls


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "causal", "layout"),
    [
        ((1, 200), (8, 2), 128, False, "bshd"),
        ((5, 300), (4, 2), 64, True, "bhsd"),
        ((40, 130), (2, 2), 96, True, "bshd"),
        ((64, 150), (1, 1), 256, False, "bshd"),
        ((70, 200), (2, 1), 128, True, "bhsd"),
        ((130, 270), (2, 2), 64, True, "bshd"),
    ],
)
def test_forward(shared, place, lengths, heads, head_dim, causal, layout):
    """Tiles of 16, 32 and 64 rows, of several heads or of one alone; of more rows than a tile has."""
    agree(place, *inputs(1, *lengths, *heads, head_dim, layout=layout), causal=causal, layout=layout)
    assert shared


@pytest.mark.parametrize(
    ("lengths", "heads", "more"),
    [
        ((1, 50), (2, 2), {}),  # few keys
        ((1, 200), (2, 2), {"family": "sm_90"}),
        ((1, 200), (2, 2), {"softcap": 5.0}),
        ((110, 200), (2, 2), {}),  # nearly as many queries as keys
        ((70, 200), (22, 2), {}),  # tiles for more than half of the multiprocessors
    ],
)
def test_what_forward_does_itself(shared, place, lengths, heads, more):
    agree(place, *inputs(1, *lengths, *heads, 64), **more)
    assert not shared


def test_gradients_come_as_ever(shared):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in inputs(1, 3, 120, 2, 1, 64))
    actual = []
    for more in ({}, {"family": "sm_90"}):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention.forward(*leaves, causal=True, **more)
        actual.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert shared
    for one, other in zip(*actual):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("tokens", "lengths", "size", "more", "wanted"),
    [
        (70, (200,), None, {}, 1),
        (70, (200, 90), 16, {}, 1),
        (66, (300,), 64, {"window": (150, 0)}, 1),
        (70, (200,), None, {"window": (20, 0)}, 0),  # which sees few keys
        (70, (200,), None, {"family": "sm_90"}, 0),
    ],
)
def test_decode(shared, place, tokens, lengths, size, more, wanted):
    """A part of a prompt over a long cache."""
    q, k, v = decode_checks.case(lengths, tokens=tokens, heads=2, kv_heads=1, head_dim=64)
    decode_checks.agree(place, q, k, v, lengths, size=size, **more)
    assert bool(shared) == wanted  # planned again where lengths are watched


@pytest.mark.parametrize(
    ("batch", "queries", "heads", "keys", "wanted"),
    [
        (1, 64, 32, 32768, True),
        (1, 256, 32, 32768, True),
        (1, 257, 32, 32768, False),
        (2, 64, 64, 8192, False),
        (1, 64, 8, 2000, False),
    ],
)
def test_what_leaves_multiprocessors_idle(batch, queries, heads, keys, wanted):
    assert splits.underfills_gpu(batch, queries, heads, keys, 132) is wanted
