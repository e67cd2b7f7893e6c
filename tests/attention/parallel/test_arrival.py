"""Keys and values that are copied while attention reads them: the schedule, on ranks that are threads; test_nccl.py tests the
copies themselves, which take two GPUs."""

import pytest

pytest.importorskip("torch")

import threads
import torch
from ranks import drawn
from threads import RankThread, together

import attention
from attention import parallel
from attention.parallel import copy_schedule as arrival
from attention.parallel.copy_schedule import plan_copies
from attention.parallel.gather_in_place import InPlaceGather
from attention.parallel.orders import Span, find_order
from attention.parallel.subcalls import ForwardCall


class CopyingThread(RankThread):
    """A rank whose copies are done before attention begins. Rows that are not copied are NaN."""

    overlaps_copies = True

    def start_copies(self, arrival, k, v):
        actual = []
        for x in (k, v):
            others = torch.full((1, arrival.rows, *x.shape[2:]), torch.nan, dtype=x.dtype)
            shares = self.all_gather_text(x)
            for rank, source, place in arrival.copies:
                others[:, slice(*place)] = shares[rank][:, slice(*source)]
            actual.append(others)
        return *actual, arrival.required[-1:]


@pytest.mark.parametrize(("world", "length"), [(2, 512), (2, 1024), (3, 768)])
def test_streaming_copies_have_the_bits_of_one_gpu(monkeypatch, world, length):
    monkeypatch.setattr(threads, "RankThread", CopyingThread)
    q, k, v = drawn(length)
    expected = attention.forward(q, k, v, causal=True, return_lse=True)
    called = []
    start_copies = CopyingThread.start_copies
    monkeypatch.setattr(CopyingThread, "start_copies", lambda *x: called.append(x) or start_copies(*x))

    def rank(peers):
        mine = [parallel.shard(x, peers) for x in (q, k, v)]
        out, lse = parallel.forward(*mine, group=peers, scheme="gather", causal=True, return_lse=True)
        return torch.equal(out, parallel.shard(expected[0], peers)), torch.equal(lse, parallel.shard(expected[1], peers, 2))

    assert together(world, rank) == [(True, True)] * world
    assert len(called) == world


@pytest.mark.parametrize(("world", "length"), [(2, 512), (2, 1000), (3, 1536)])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_own_keys_stay_in_place(monkeypatch, world, length, order):
    """By messages: a rank's own keys stay where they are if its parts are equally long, and the bits are those of one GPU."""
    q, k, v = drawn(length)
    expected, called, attend = attention.forward(q, k, v, causal=True, scale=0.2), [], InPlaceGather.attend
    monkeypatch.setattr(InPlaceGather, "attend", lambda *x: called.append(x) or attend(*x))

    def rank(peers):
        mine = [parallel.shard(x, peers, order=order) for x in (q, k, v)]
        call_options = dict(group=peers, order=order, length=length, scheme="gather", causal=True, scale=0.2)
        return torch.equal(parallel.forward(*mine, **call_options), parallel.shard(expected, peers, order=order))

    assert all(together(world, rank))
    assert len(called) == (1 if length == 1000 else world if order == "zigzag" else world - 1)


def planned(world, rank, length, order="zigzag", **call_options):
    spans = find_order(order).spans(length, world)
    call = ForwardCall(call_options, length, length, Span(0, 4), Span(0, 2), (64, 64), torch.device("cpu"), True)
    return plan_copies(rank, spans, spans, 1, call)


def test_copies_are_in_the_order_of_reading():
    """Blocks of keys are read from the last to the first, so copies are in this order."""
    actual = planned(3, 0, 1536, causal=True)
    assert actual.copies == (
        (1, Span(256, 512), Span(768, 1024)),
        (2, Span(0, 512), Span(256, 768)),
        (1, Span(0, 256), Span(0, 256)),
    )
    assert (actual.rows, actual.max_rows, actual.placement) == (1024, 512, (1536, 0, 256, 1280, 1536, True, None, None))
    assert actual.required.tolist() == [0, 0, 3, 3, 2, 2, 2, 2, 1, 1, 0, 0, 3]
    last = planned(3, 2, 1536, causal=True)
    assert last.copies == ((1, Span(0, 256), Span(256, 512)), (0, Span(0, 256), Span(0, 256)))
    assert (last.rows, last.placement[:5]) == (512, (1024, 512, 1024, 1024, 1024))
    assert last.required.tolist() == [2, 2, 1, 1, 0, 0, 0, 0, 2]


def test_large_spans_are_split_into_copies(monkeypatch):
    """A span is copied in several copies of whole blocks, each large enough to be worth its host time."""
    monkeypatch.setattr(arrival, "MIN_COPY_BYTES", 256 * 2 * 2 * 128)  # 256 rows of keys and values
    actual = planned(2, 1, 4096, causal=True)
    assert [copy.target for copy in actual.copies] == [Span(768, 1024), Span(512, 768), Span(256, 512), Span(0, 256)]
    assert actual.required.tolist() == [4] * 2 + [3] * 2 + [2] * 2 + [1] * 2 + [0] * 16 + [4]


@pytest.mark.parametrize(
    "call_options", [dict(length=1000), dict(window=(100, 0)), dict(causal=True, softcap=5.0), dict(length=1280 + 64)]
)
def test_unsupported_calls_have_no_schedule(call_options):
    """Either all ranks read while they copy or none does, because all of them meet at the barrier."""
    call_options = dict(call_options)
    length = call_options.pop("length", 1024)
    assert [planned(2, rank, length, **{"causal": True, **call_options}) for rank in range(2)] == [None, None]
