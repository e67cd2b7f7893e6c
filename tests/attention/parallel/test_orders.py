"""Which tokens ranks hold, and that the subcalls of a call together see what the whole call sees, each key once: no process is
started."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.parallel.choice import (
    PAIRS,
    SCHEMES,
    MachineSpeeds,
    choose,
    choose_pair,
    estimate,
    estimate_pair,
    min_sweeps,
    plan_sweeps,
)
from attention.parallel.gather import GatherAttention
from attention.parallel.orders import Contiguous, Span, Zigzag, count_tokens, find_order, merge_spans, subtract_spans
from attention.parallel.peers import Peers, PendingMessages
from attention.parallel.redistribution import ShardRegion, intersect_regions, widen
from attention.parallel.ring import RingAttention
from attention.parallel.subcalls import ForwardCall
from attention.reference.scores import ReferenceVariant
from bench.ranks_model import call_of

ORDERS = st.sampled_from([Zigzag(), Contiguous(), Zigzag(64), Contiguous(1)])


@given(ORDERS, st.integers(0, 3000), st.integers(1, 9))
def test_ranks_have_every_token_once_and_as_many_blocks(order, length, world):
    spans = order.spans(length, world)
    positions = np.concatenate([np.arange(*span) for one in spans for span in one] or [np.arange(0)])
    np.testing.assert_array_equal(np.sort(positions), np.arange(length))
    tokens = np.array([count_tokens(one) for one in spans])
    assert tokens.max() <= tokens.mean() + order.block or tokens.max() - tokens.min() <= 2 * (1 + length // (2 * world))
    blocks = [-(-n // order.block) for n in tokens]
    assert length < 2 * world * order.block or max(blocks) <= sum(blocks) / world + 1


@given(st.integers(2, 8), st.integers(1, 6))
def test_zigzag_gives_causal_attention_as_much_work_for_each(world, each):
    length = 2 * world * each * 128
    work = [sum((span.start + span.stop) * len(span) for span in spans) for spans in Zigzag().spans(length, world)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("order", [Zigzag, Contiguous])
@pytest.mark.parametrize("block", [0, -128, 1.5])
def test_invalid_block_sizes(order, block):
    with pytest.raises(ValueError, match=f"^block: must be an integer, one or more: block={block}"):
        order(block)


def test_unknown_orders():
    for order in "reversed", ["zigzag"]:
        with pytest.raises(ValueError, match="^order: must be one of"):
            find_order(order)


def call(length, keys, heads=4, kv_heads=2, **options):
    return ForwardCall(options, length, keys, Span(0, heads), Span(0, kv_heads), (64, 64), "cpu")


WINDOWS = st.sampled_from([None, (7, None), (0, 0), (30, 4), (None, 9), (200, 0), (3, 50)])


@settings(max_examples=150)
@given(st.integers(1, 90), st.integers(0, 40), st.integers(1, 4), ORDERS, st.booleans(), WINDOWS, st.booleans())
def test_subcalls_see_what_the_whole_sees_each_key_once(length, more, world, order, causal, window, by_ring):
    keys = length + more - 20 if length + more > 20 else length
    options = ({"causal": True} if causal else {}) | ({"window": window} if window else {})
    one, whole = call(length, keys, **options), ReferenceVariant(causal=causal, window=window)
    actual = np.zeros((length, keys), int)
    shares = [span for spans in order.spans(keys, world) for span in spans]
    for q in [span for spans in order.spans(length, world) for span in spans]:
        for k in shares if by_ring else [one.key_range(q)]:
            part = one.subcall(q, k)
            if part is None:
                continue
            i, j = np.arange(len(part.rows))[:, None], np.arange(len(part.keys))[None]
            seen = ReferenceVariant(causal=part.options.get("causal", False), window=part.options.get("window"))
            rows, columns = slice(*part.rows), slice(*part.keys)
            actual[rows, columns] += seen.visible(0, 0, i, j, len(part.keys) - len(part.rows))
    i, j = np.arange(length)[:, None], np.arange(keys)[None]
    np.testing.assert_array_equal(actual, whole.visible(0, 0, i, j, keys - length))


@settings(max_examples=100)
@given(st.integers(1, 90), st.integers(1, 4), ORDERS, st.booleans(), WINDOWS)
def test_ring_sees_what_the_whole_sees_in_few_calls(length, world, order, causal, window):
    """The calls for each shard see what the whole call sees of it, also where adjacent parts are merged. Causal attention of
    even parts takes one call for each shard."""
    options = ({"causal": True} if causal else {}) | ({"window": window} if window else {})
    one, whole, spans = (
        call(length, length, **options),
        ReferenceVariant(causal=causal, window=window),
        order.spans(length, world),
    )
    positions = [np.array([n for span in mine for n in range(*span)], int) for mine in spans]
    actual, even = np.zeros((length, length), int), length % (2 * world * order.block) == 0 and world > 1
    for rank in range(world):
        scheme = RingAttention(Peers(None, rank, world, tuple(range(world))), spans, spans)
        for sweep in scheme._sweeps(torch.empty(1, len(positions[rank]), 4, 8), one):
            for share, parts in sweep.todo.items():
                assert len(parts) == 1 or window or order == Contiguous(order.block) or not even, (share, rank)
                for (rows, seen, part), _ in parts:
                    i, j = positions[rank][rows], positions[share][seen]
                    ends = part.options.get("lengths_k", torch.tensor([[len(j)]])).flatten().tolist()
                    its = ReferenceVariant(causal=part.options.get("causal", False), window=part.options.get("window"))
                    for mine, end in zip(np.split(i, len(ends)), ends):
                        a, b = np.arange(len(mine))[:, None], np.arange(end)[None]
                        actual[np.ix_(mine, j[:end])] += its.visible(0, 0, a, b, end - len(mine))
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    np.testing.assert_array_equal(actual, whole.visible(0, 0, i, j, 0))


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=4))
def test_a_span_without_others(start, size, others):
    others = merge_spans(tuple([Span(first, first + n) for first, n in others if n]))
    left = subtract_spans(Span(start, start + size), others)
    assert [n for span in left for n in range(*span)] == [
        n for n in range(start, start + size) if not any(a <= n < b for a, b in others)
    ]
    assert all(len(span) for span in left)


def test_only_a_windows_halo_is_fetched():
    one = call(64 * 1024, 64 * 1024, window=(4096, 0))
    for spans in Zigzag().spans(64 * 1024, 8):
        needs = count_tokens(merge_spans(tuple(map(one.key_range, spans))))
        assert needs <= count_tokens(spans) + 2 * (4096 + 128)


class SilentPeers(Peers):
    """A rank whose messages are recorded and not sent."""

    def exchange(self, sends, receives):
        self.sent.extend([x for _, x in sends])
        return PendingMessages(())


def test_gather_holds_the_keys_that_queries_see_and_nothing_else():
    """Sent tensors are views of the shards, or of the gathered arrays."""
    length, spans = 1024, Zigzag().spans(1024, 2)
    peers, k = SilentPeers(None, 0, 2, (0, 1)), torch.zeros(1, 512, 8, 16, dtype=torch.bfloat16)
    vars(peers)["sent"] = []
    scheme, one = GatherAttention(peers, spans, spans), call(length, length, 8, 8, causal=True)
    gathered_keys = [x for heads in (Span(0, 2), Span(2, 8)) for x in scheme._gather(k, k, one, heads).wait()]
    assert sum([x.nbytes for x in gathered_keys]) == length * 8 * 16 * 4
    memory = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (k, *gathered_keys)]
    assert peers.sent and all(any(first <= x.data_ptr() < end for first, end in memory) for x in peers.sent)


def test_intersection_of_regions():
    source, target = ShardRegion((Span(0, 8), Span(20, 30)), Span(0, 4)), ShardRegion((Span(4, 24),), Span(2, 4))
    actual = intersect_regions(source, target)
    assert [(box.rows, box.to_rows) for box in actual] == [(slice(4, 8), slice(0, 4)), (slice(8, 12), slice(16, 20))]
    assert all((box.heads, box.to_heads) == (slice(2, 4), slice(0, 2)) for box in actual)
    assert intersect_regions(source, ShardRegion((Span(0, 8),), Span(4, 6))) == []


@pytest.mark.parametrize(
    ("options", "heads", "world", "limit", "scheme"),
    [
        (dict(causal=True), (32, 8), 8, float("inf"), "gather"),
        (dict(causal=True), (4, 4), 8, 2e8, "ring"),  # keys of all tokens would take 0.3 GB, and heads are too few
        (dict(causal=True, alibi=None), (32, 8), 8, float("inf"), "gather"),
        (dict(lengths_k=None, window=(9, 9)), (32, 8), 8, float("inf"), "ulysses"),  # which alone keeps positions
    ],
)
def test_auto_chooses_by_time_and_memory(options, heads, world, limit, scheme):
    length = 2**18
    spans = Zigzag().spans(length, world)
    actual = choose(call(length, length, *heads, **options), 1, spans, spans, limit)
    assert actual.scheme == scheme, str(actual)
    assert all(name in str(actual) for name in SCHEMES)


def test_ring_sweeps_follow_the_memory_limit():
    """For 16k tokens and 32 heads over 8 key heads, where the float32 result alone is 4 times as large as a received shard."""
    spans, one = Zigzag().spans(2**14, 2), call(2**14, 2**14, 32, 8, causal=True)._replace(head_dims=(128, 128))
    sweeps = [plan_sweeps(one, 1, spans, spans, limit) for limit in (float("inf"), 169e6, 168e6, 67.2e6, 1.0)]
    assert sweeps == [1, 1, 2, 4, 8]
    said = choose(one, 1, spans, spans, 67.2e6)
    assert "in 4 sweeps" in str(said.estimates[2]) and said.estimates[2].extra_bytes <= 67.2e6 and said.scheme == "gather"


def test_long_sweeps_hold_two_shards():
    """For 64k tokens and 32 heads over 8 key heads a sweep of four takes 6 ms; the backward pass takes as few sweeps as it
    can."""
    spans, one = Zigzag().spans(2**16, 2), call(2**16, 2**16, 32, 8, causal=True)._replace(head_dims=(128, 128))
    assert plan_sweeps(one, 1, spans, spans, float("inf")) == 4 and min_sweeps(one, 1, spans, spans, float("inf")) == 1
    said = choose(one, 1, spans, spans, float("inf")).estimates[2]
    assert said.sweeps == 4 and said.extra_bytes <= 2 * 2**15 * 8 * 128 * 4


def test_auto_reports_why_no_scheme_works():
    spans = Zigzag().spans(4096, 3)
    with pytest.raises(NotImplementedError, match="gather: lengths_k.*ulysses: 4 heads.*ring: lengths_k"):
        choose(call(4096, 4096, lengths_k=None, window=(9, 9)), 1, spans, spans, float("inf"))


MEASURED = {  # on four H200s: (tokens, heads, key heads, window) -> milliseconds; bench/results/2026-11-29-h200-four.md
    (2**14, 32, 8, None): {"gather": 1.08, "ring": 1.43, "gather, ulysses": 1.30, "ring, ulysses": 1.54},
    (2**16, 32, 8, None): {"gather": 14.2, "ulysses": 14.8, "ring": 15.0, "gather, ulysses": 14.4, "ring, ulysses": 14.9},
    (2**16, 16, 16, None): {"ulysses": 8.09, "ring": 9.28, "gather, ulysses": 7.58, "ring, ulysses": 7.96},
    (2**18, 32, 8, None): {"gather": 212, "ulysses": 213, "ring": 226, "gather, ulysses": 221, "ring, ulysses": 230},
    (2**19, 16, 16, None): {"gather": 476, "ulysses": 439, "ring": 454, "gather, ulysses": 452, "ring, ulysses": 445},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_model_is_within_a_tenth_of_what_was_measured(shape):
    call, spans, machine = call_of(*shape), Zigzag().spans(shape[0], 4), MachineSpeeds()
    estimates = [estimate(scheme, call, 1, spans, spans, machine) for scheme in SCHEMES]
    estimates += [estimate_pair(pair, call, 1, spans, spans, 2, (machine, machine)) for pair in PAIRS]
    for one in estimates:
        measured = MEASURED[shape].get(one.name)
        assert measured is None or 0.9 <= 1e3 * one.seconds / measured <= 1.1, str(one)


def test_pairs_are_chosen_by_time_and_memory():
    """Eight hosts of four ranks: ring holds less than gather, and heads that the inner ranks cannot share leave one pair."""
    spans, one = Zigzag().spans(2**18, 32), call_of(2**18, 16, 16, None)
    free = choose_pair(one, 1, spans, spans, 4, float("inf"))
    assert free.scheme == ("gather", "ulysses") and "no other scheme is a tenth faster" in free.why
    less = choose_pair(one, 1, spans, spans, 4, 0.99 * free.estimates[0].extra_bytes)
    assert less.scheme == ("ring", "ulysses") and "gather, ulysses and ring, gather would hold more than" in less.why
    odd = choose_pair(call_of(2**18, 3, 3, None), 1, spans, spans, 4, float("inf"))
    assert odd.scheme == ("ring", "gather") and [bool(x.why) for x in odd.estimates] == [True, True, False]


def test_a_slow_network_is_waited_for():
    spans, one = Zigzag().spans(2**18, 64), call_of(2**18, 32, 8, None)
    fast, slow = MachineSpeeds(), MachineSpeeds(link_bandwidth=45e9)
    for pair in PAIRS:
        within, across = (estimate_pair(pair, one, 1, spans, spans, 8, (outer, fast)) for outer in (fast, slow))
        assert across.seconds > within.seconds and across.nbytes == within.nbytes


def test_copies_use_elements_of_eight_bytes():
    x = torch.randn(2, 6, 3, 16).bfloat16()
    both = widen(x[:, 1:, :2], torch.empty(2, 5, 2, 16, dtype=torch.bfloat16))
    both[1].copy_(both[0])
    assert both[1].dtype == torch.float64 and torch.equal(both[1].view(torch.bfloat16), x[:, 1:, :2])
    assert all([y.dtype == x.dtype for y in widen(x, x[..., 1:9])]) and widen(x.transpose(2, 3))[0].dtype == x.dtype
    assert (
        widen(x[..., 0, :])[0].dtype == x.dtype
        and widen(x[..., :6])[0].dtype == x.dtype
        and widen(x.double())[0].shape == x.shape
    )
