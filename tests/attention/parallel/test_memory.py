"""What calls of attention.parallel take besides their shards: all arrays that are made are counted. And how often they talk.
One rank of several runs; its messages go nowhere, and its attention computes nothing."""

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import parallel
from attention.parallel import agreed, gather, softmax
from attention.parallel.peers import Peers, Pending
from attention.softmax import elsewhere

LENGTH, HEADS, KV_HEADS, DIM = 4096, 4, 4, 64
KEYS = LENGTH * KV_HEADS * DIM * 4  # bytes of all keys and values
SMALL = 4096  # bytes of what else there may be


class Counted(TorchDispatchMode):
    """Counts bytes that were allocated inside and are in use, the most there were, and torch's operations."""

    def __init__(self):
        super().__init__()
        self.known, self.most, self.calls = {}, 0, 0

    def before(self, *arrays):
        self.given = {x.untyped_storage()._cdata for x in arrays}
        return self

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found, self.calls = function(*args, **kwargs or {}), self.calls + 1
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.given:
                storage = x.untyped_storage()
                self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.known = {key: one for key, one in self.known.items() if not one[0].expired()}
        self.most = max(self.most, sum([nbytes for _, nbytes in self.known.values()]))
        return found


class Silent(Peers):
    """A rank whose messages go nowhere; they hold what they would read until they are waited for."""

    exchanges = 0

    def exchange(self, sends, receives):
        Silent.exchanges += 1
        return Pending((), [x for _, x in (*sends, *receives)])

    def gathered(self, said, device):
        return [said] * self.world


def nothing(q, k, v, *, out=None, return_lse=False, **options):
    """What attention.forward makes."""
    return torch.empty_like(q) if out is None else out, torch.empty(q.shape[0], q.shape[2], q.shape[1])


def most(monkeypatch, world, rank, **options):
    """Bytes that a call takes beyond its shards, its output and lse."""
    counted, own = counts(monkeypatch, world, rank, **options)
    return counted.most - own


def counts(monkeypatch, world, rank, **options):
    """(what a call counts, bytes of its output and lse)"""
    planned = softmax._planned

    def in_earnest(*given):
        with monkeypatch.context() as real:
            real.setattr(attention, "forward", forward)
            return planned(*given)

    forward, peers = attention.forward, Silent(None, rank, world, tuple(range(world)))
    monkeypatch.setattr(softmax, "_planned", in_earnest)
    monkeypatch.setattr(attention, "forward", nothing)
    monkeypatch.setattr(elsewhere, "apart", lambda q, *others: nothing(q, None, None))
    rows = sum(map(len, parallel.Zigzag().spans(LENGTH, world)[rank]))
    q, k, v = (torch.empty(1, rows, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    call = lambda: parallel.forward(q, k, v, group=peers, **options)
    with torch.no_grad():
        call()  # what is remembered is taken once
        with Counted().before(q, k, v) as counted:
            call()
    return counted, rows * HEADS * (DIM * 2 + 4)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 1), (4, 3)])
def test_gather_takes_the_keys_and_values_of_others_and_no_more(monkeypatch, world, rank, in_turn):
    """Those that its last query does not see are left out. In turns, own ones are put with them."""
    monkeypatch.setattr(gather, "LONG", 0 if in_turn else 2**40)
    monkeypatch.setattr(agreed, "_KNOWN", {})
    found = most(monkeypatch, world, rank, scheme="gather", causal=True)
    seen = KEYS * (2 * world - rank) / (2 * world)
    lse = 4 * HEADS * LENGTH // world if in_turn else 0  # of the heads that are computed, which is copied to its place
    needed = seen + lse if in_turn else seen - KEYS / world
    assert needed - lse <= found <= needed + SMALL


def test_a_window_takes_its_halo(monkeypatch):
    found = most(monkeypatch, 4, 2, scheme="gather", window=(128, 0))
    own, halo = KEYS / 4, 2 * 256 * KV_HEADS * DIM * 4  # of two parts; halos begin at a block of keys of any kernel
    assert own < found <= own + halo + 4 * HEADS * LENGTH // 8 + SMALL


@pytest.mark.parametrize("world", [2, 4])
def test_ring_takes_two_shares_and_a_result(monkeypatch, world):
    """In float32, to which each share's is added."""
    share, result = KEYS / world, LENGTH // world * HEADS * (DIM * 4 + 4)
    found = most(monkeypatch, world, 1, scheme="ring", causal=True)
    assert found <= min(2, world - 1) * share + result + SMALL


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shares", [2.0, 1.0, 4.0])
def test_ring_takes_what_it_may(monkeypatch, world, shares):
    """In turns: the goal is two shares, of which results in float32 alone would be as many."""
    found = most(monkeypatch, world, 1, scheme="ring", causal=True, memory=shares * KEYS / world)
    assert found <= max(shares, 1.3) * KEYS / world + SMALL


@pytest.mark.parametrize(("world", "most"), [(2, 10), (4, 10)])
def test_a_known_form_takes_few_operations(monkeypatch, world, most):
    """Of the host's time they are what grows: of keys and of values an allocation, a split of what there is and of what is to
    come; a copy of all own parts; and what attention makes. See bench/test_host_ranks.py."""
    assert counts(monkeypatch, world, 0, scheme="gather", causal=True)[0].calls <= most


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_between_attention_and_a_recurrence_ranks_talk_once(order):
    peers, other = Silent(None, 1, 4, (0, 1, 2, 3)), {"zigzag": "contiguous", "contiguous": "zigzag"}[order]
    before = Silent.exchanges
    parallel.reorder(torch.zeros(1, LENGTH // 4, 2, 8), peers, order=order, to=other)
    assert Silent.exchanges == before + 1
