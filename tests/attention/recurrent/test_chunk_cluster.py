"""attention/kernels/recurrent/chunk_cluster_hopper.py: long sequences whose chunks the thread blocks of a cluster have in
turn."""

import numpy as np
import pytest
from places import OnInterpreter
from test_linear import check, inputs

from attention.plans.recurrent import recurrent_chunks
from attention.plans.recurrent.recurrent_chunks import prefers_clusters
from tiles.testing import pairs

f16 = np.float16


@pytest.fixture(autouse=True)
def in_clusters(monkeypatch, nothing_known):
    """Every sequence is scanned by a cluster."""
    monkeypatch.setattr(recurrent_chunks, "prefers_clusters", lambda *_: True)
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: pytest.fail("no cluster scans this sequence"))


@pytest.mark.parametrize(("length", "decay"), pairs([1, 64, 129, 256, 300, 1025], ["none", "head", "token"]))
def test_lengths(place, length, decay):
    """A cluster's round has 256 tokens, a block's run 128."""
    check(place, inputs(1, length, decay=decay))


SIZES = [(2, 16, 16, "head"), (1, 128, 128, "token"), (1, 80, 80, "none")]


@pytest.mark.parametrize(("batch", "key_dim", "value_dim", "decay"), SIZES)
def test_sizes(place, batch, key_dim, value_dim, decay):
    check(place, inputs(batch, 270, key_dim, value_dim, decay, heads=1))


def test_shared_keys_and_other_scales(place):
    """In fp16, with a scale that is not added to exponents."""
    check(place, inputs(1, 140, decay="token", key_heads=1, dtype=f16), scale=-0.3)


@pytest.mark.parametrize("decay", ["head", "token"])
def test_strong_decays(place, decay):
    """No overflow and no NaN if some tokens set the state to nearly 0 and others keep it."""
    args = inputs(1, 400, decay=decay)
    args["decay"] = np.where(np.random.default_rng(2).random(args["decay"].shape) < 0.3, -50.0, -0.01).astype(np.float32)
    if decay == "token":
        args["decay"][0, [20, 130, 390]] = -np.inf
    check(place, args)


def test_without_an_initial_state(place):
    args = inputs(1, 200, decay="token")
    del args["initial_state"]
    check(place, args)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_other_schedules(monkeypatch, seed):
    """In any order of the warps, and of what blocks send each other."""
    monkeypatch.setenv("TILES_SEED", seed)
    check(OnInterpreter(), inputs(1, 1000, decay="token", heads=1))


@pytest.mark.parametrize(("key_dim", "length"), [pytest.param(64, 257, marks=pytest.mark.release), (128, 130)])
def test_as_compiled(as_compiled, key_dim, length):
    """Also keys of several panels, which a block of a cluster must not address as others do (cluster.unmap)."""
    as_compiled("sm_90a")
    check(OnInterpreter(), inputs(1, length, key_dim, decay="token", heads=1))


def test_clusters_are_preferred_where_they_fill_the_gpu():
    assert [n for n in (32, 59, 60, 66, 67, 128) if prefers_clusters(n, 512, 132, False)] == [60, 66]
    assert not prefers_clusters(64, 32, 132, False) and not prefers_clusters(64, 512, 132, True)
