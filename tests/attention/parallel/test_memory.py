"""How much memory calls of attention.parallel hold besides their shards, as bench/ranks_memory.py counts it, and how many
messages they send."""

import pytest

pytest.importorskip("torch")

import torch

from attention import parallel
from attention.parallel import agreement, gather
from bench.ranks_memory import UnsentPeers, counts

LENGTH, HEADS, KV_HEADS, DIM = 4096, 4, 4, 64
KEYS = LENGTH * KV_HEADS * DIM * 4  # bytes of all keys and values
SMALL = 4096  # bytes of what else there may be


def most(monkeypatch, world, rank, **options):
    """Bytes that a call holds beyond its shards, its output and lse."""
    monkeypatch.setattr(agreement, "_CACHED", {})
    counted, shard_bytes = counts(world, rank, LENGTH, HEADS, KV_HEADS, DIM, **options)
    return counted.most - shard_bytes


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 1), (4, 3)])
def test_gather_holds_only_remote_keys(monkeypatch, world, rank, in_turn):
    """Keys that its last query does not see are not received. In two steps, its own keys are copied next to the received
    ones."""
    monkeypatch.setattr(gather, "STEP_BYTES", 0 if in_turn else 2**40)
    actual = most(monkeypatch, world, rank, scheme="gather", causal=True)
    seen = KEYS * (2 * world - rank) / (2 * world)
    lse = 4 * HEADS * LENGTH // world if in_turn else 0  # of the heads that are computed, which is copied to its place
    needed = seen + lse if in_turn else seen - KEYS / world
    assert needed - lse <= actual <= needed + SMALL


def test_a_window_holds_its_halo(monkeypatch):
    actual = most(monkeypatch, 4, 2, scheme="gather", window=(128, 0))
    shard_bytes, halo = KEYS / 4, 2 * 256 * KV_HEADS * DIM * 4  # of two parts; halos begin at a block of keys of any kernel
    assert shard_bytes < actual <= shard_bytes + halo + 4 * HEADS * LENGTH // 8 + SMALL


@pytest.mark.parametrize("world", [2, 4])
def test_ring_holds_two_shards_and_a_result(monkeypatch, world):
    """The result is in float32, and each shard's attention is added to it."""
    share, result = KEYS / world, LENGTH // world * HEADS * (DIM * 4 + 4)
    actual = most(monkeypatch, world, 1, scheme="ring", causal=True)
    assert actual <= min(2, world - 1) * share + result + SMALL


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shares", [2.0, 1.0, 4.0])
def test_ring_respects_its_memory_limit(monkeypatch, world, shares):
    """In several sweeps; the target is two shards, while the float32 result alone would be as much."""
    actual = most(monkeypatch, world, 1, scheme="ring", causal=True, memory=shares * KEYS / world)
    assert actual <= max(shares, 1.3) * KEYS / world + SMALL


@pytest.mark.parametrize(("world", "most"), [(2, 4), (4, 4)])
def test_cached_calls_make_few_operations(world, most):
    """The number of torch operations is the part of the host time that grows: allocations of keys and of values, and
    attention's own. See bench/test_host_ranks.py."""
    assert counts(world, 0, LENGTH, HEADS, KV_HEADS, DIM, scheme="gather", causal=True)[0].calls <= most


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_reorder_is_one_exchange(order):
    peers, other = UnsentPeers(None, 1, 4, (0, 1, 2, 3)), {"zigzag": "contiguous", "contiguous": "zigzag"}[order]
    before = UnsentPeers.exchanges
    parallel.reorder(torch.zeros(1, LENGTH // 4, 2, 8), peers, order=order, to=other)
    assert UnsentPeers.exchanges == before + 1
