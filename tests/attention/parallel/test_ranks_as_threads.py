"""attention.parallel on any number of ranks, which are threads here: sequences of any length."""

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import drawn
from threads import compared, together

import attention
from attention import parallel
from attention.kernels.softmax import forward_hopper_shapes
from attention.parallel import agreement, gather, redistribution
from attention.parallel.gather import GatherAttention
from attention.parallel.orders import ORDERS, Span
from attention.parallel.ring import RingAttention
from attention.plans.decode import split_forward

OPTIONS = dict(causal=True), dict(window=(9, 3)), dict(causal=True, window=(20, None)), dict()


def share(x, peers, order="contiguous", dim=1):
    return parallel.shard(x, peers, dim, order)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_ranks_without_tokens(order):
    """There are fewer tokens than ranks, and each rank has a head."""
    q, k, v = drawn(2, 3, 3, dim=80, seed=0)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    call_options = dict(causal=True, scheme="ulysses", order=order, length=2, return_lse=True)
    actual = together(
        3, lambda peers: parallel.forward(*[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options)
    )
    for (its, sums), mine in zip(actual, ORDERS[order].spans(2, 3), strict=True):
        rows = [n for span in mine for n in range(*span)]
        assert torch.equal(its, out[:, rows]) and torch.equal(sums, lse[:, :, rows])


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 60), st.integers(2, 5), st.sampled_from(["gather", "ulysses", "ring"]), st.sampled_from([*ORDERS]),
    st.sampled_from(OPTIONS), st.integers(0, 99),
)  # fmt: skip
def test_any_length(length, world, scheme, order, options, seed):
    """gather and ulysses have the bits of one call; ring is close."""
    q, k, v = drawn(length, world if scheme == "ulysses" else 2, world if scheme == "ulysses" else 1, dim=80, seed=seed)
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    call_options = dict(options, scheme=scheme, order=order, length=length, return_lse=True)
    actual = together(
        world, lambda peers: parallel.forward(*[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options)
    )
    spans = ORDERS[order].spans(length, world)
    for (its, sums), mine in zip(actual, spans, strict=True):
        rows = [n for span in mine for n in range(*span)]
        if scheme == "ring":
            torch.testing.assert_close(its, out[:, rows], rtol=0, atol=2**-6 * out.abs().max().item())
            torch.testing.assert_close(sums, lse[:, :, rows], rtol=0, atol=2**-10)
        else:
            assert torch.equal(its, out[:, rows]) and torch.equal(sums, lse[:, :, rows])


def test_few_queries_of_a_rank_take_the_kernels_of_all(monkeypatch):
    """attention.forward alone would compute so few queries by split-KV, with other last bits."""
    monkeypatch.setattr(split_forward, "LEAST", 64)
    q, k, v = drawn(190, 1, 1, dim=64)
    out = attention.forward(q, k, v)
    few = attention.forward(q[:, :60], k, v)
    assert not torch.equal(few, out[:, :60])  # as it would be without
    call_options = dict(scheme="gather", order="contiguous", length=190)
    actual = together(3, lambda peers: parallel.forward(*[share(x, peers) for x in (q, k, v)], group=peers, **call_options))
    assert torch.equal(torch.cat(actual, 1), out)


@pytest.mark.parametrize(("dim", "options"), [(64, {}), (128, dict(softcap=5.0))])
def test_parts_have_the_blocks_of_keys_of_the_whole(monkeypatch, dim, options):
    """The bits are the same where short sequences have smaller blocks, or blocks that need fewer registers. Here every sequence
    shorter than the whole counts as short, which usually starts at 2048 keys."""
    short, *longer = forward_hopper_shapes.BY_LENGTH[64, True].values()
    monkeypatch.setitem(forward_hopper_shapes.BY_LENGTH, (64, True), {300.5: short, 301.5: longer[0]})
    q, k, v = drawn(330, 1, 1, dim=dim)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True, **options)
    call_options = dict(options, causal=True, scheme="gather", length=330, return_lse=True)
    actual = together(
        2, lambda peers: parallel.forward(*[share(x, peers, "zigzag") for x in (q, k, v)], group=peers, **call_options)
    )
    for (its, sums), spans in zip(actual, ORDERS["zigzag"].spans(330, 2), strict=True):
        rows = [n for span in spans for n in range(*span)]
        assert torch.equal(its, out[:, rows]) and torch.equal(sums, lse[:, :, rows])


@pytest.mark.parametrize(("order", "world"), [("zigzag", 2), ("contiguous", 2)])
def test_local_queries_of_a_window_come_first(monkeypatch, order, world):
    """Most queries see only their own rank's keys, and are computed first; the bits are those of one call, also with a mask
    that depends on positions."""
    q, k, v = drawn(1024 * world, 1, 1)
    by_rows, turns = GatherAttention._window_steps, []
    monkeypatch.setattr(GatherAttention, "_window_steps", lambda *given: turns.append(by_rows(*given)) or turns[-1])
    for call_options in dict(window=(100, 0)), dict(window=(100, 0), causal=True, mask=lambda b, h, i, j: (i + j) % 7 > 0):
        expected = attention.forward(q, k, v, **call_options, return_lse=True)

        call_options |= dict(order=order, scheme="gather", return_lse=True)
        ranks = lambda peers, call_options=call_options: parallel.forward(
            *[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options
        )
        actual = together(world, ranks)
        for x, y, axis in zip(zip(*actual), expected, (1, 2)):
            for its, spans in zip(x, ORDERS[order].spans(q.shape[1], world), strict=True):
                rows = [n for span in spans for n in range(*span)]
                assert torch.equal(its, y[:, rows] if axis == 1 else y[:, :, rows])
    assert len(turns) == 2 * world and all([2 * computed(turn[0]) >= 1024 and turn[0].plan is None for turn in turns])


@pytest.mark.parametrize(("scheme", "world"), [("gather", 2), ("gather", 3), ("ulysses", 2), ("ring", 3)])
def test_unseen_nan_does_not_spread(scheme, world):
    """NaN in the last rank's tokens, which no causal query of the others sees, and in a document that begins in the middle of a
    shard: the others' results and gradients stay free of NaN. (With ulysses a rank has all tokens of its heads, and a tile
    multiplies unseen values by 0, as on one GPU.)"""
    q, k, v = (x[:, :, :2].contiguous() for x in drawn(190, 2, 2))
    bad = [x.clone() for x in (q, k, v)]
    ((*_, last),) = ORDERS["contiguous"].spans(190, world)[-1:]
    documents = dict(cu_seqlens=torch.tensor([0, 40, 131, 190], dtype=torch.int32))
    for call_options, first in ((documents, 131), *[(dict(causal=True), last.start)] * (scheme != "ulysses")):
        for x, clean in zip(bad, (q, k, v)):
            x.copy_(clean)[:, first:] = torch.nan
        whole = {"order": "contiguous", "scheme": scheme, "length": 190}

        def rank(peers, call_options=call_options, whole=whole):
            actual = []
            for arrays in (q, k, v), bad:
                mine = [share(x, peers).requires_grad_() for x in arrays]
                with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                    out = parallel.forward(*mine, group=peers, **whole, **call_options)
                    grads = torch.autograd.grad(out, mine, share(arrays[0], peers)) if "cu_seqlens" in call_options else []
                actual.append([out.detach(), *grads])
            return actual

        for clean, dirty in zip(*[[torch.cat(x, 1) for x in zip(*its)] for its in zip(*together(world, rank))]):
            assert torch.equal(clean[:, :first], dirty[:, :first]) and torch.isfinite(clean).all()
            assert dirty[:, first:].isnan().any()


def computed(turn):
    """How many queries a step computes."""
    return sum([one.stop - one.start for one, _, _ in turn.parts])


def test_gradients_return_in_groups_of_heads(monkeypatch):
    """In two groups of heads, and at once; for a rank whose parts are adjacent, and one whose parts are not."""
    q, k, v = drawn(128, 4, 2)
    dout, whole = torch.randn_like(q), [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention.forward(*whole, causal=True), whole, dout)
    monkeypatch.setattr(gather, "TILE", 1)
    for full, turns in (1, 2), (10**6, 1):
        monkeypatch.setattr(gather, "FULL_GPU_TILES", full)
        agreement._CACHED.clear()
        sent = []
        send = lambda *given, sent=sent, **call_options: (
            sent.append(0) or redistribution.start_reduce_scatter(*given, **call_options)
        )
        monkeypatch.setattr(gather, "start_reduce_scatter", send)

        def rank(peers):
            mine = [share(x.detach(), peers, "zigzag").requires_grad_() for x in whole]
            with torch.enable_grad():
                out = parallel.forward(*mine, group=peers, scheme="gather", causal=True)
                return torch.autograd.grad(out, mine, share(dout, peers, "zigzag"))

        for actual, spans in zip(together(2, rank), ORDERS["zigzag"].spans(128, 2), strict=True):
            rows = [n for span in spans for n in range(*span)]
            for x, y in zip(actual, expected):
                assert (x.float() - y[:, rows].float()).abs().max() <= 2.0**-6 * y.float().abs().max()
        assert len(sent) == 2 * turns


@pytest.mark.parametrize(("scheme", "in_order"), [("gather", False), ("gather", True), ("ring", False), ("ulysses", False)])
def test_losses_of_different_results(scheme, in_order):
    """The loss depends on out on one rank, and on lse on the other: a rank without a gradient of lse sends zeros if queries
    move."""
    options = dict(causal=True, return_lse=True, deterministic=in_order)
    whole = [x.requires_grad_() for x in drawn(128, 4, 2)]
    results, of_results = attention.forward(*whole, **options), (torch.randn(1, 128, 4, 16).bfloat16(), torch.randn(1, 4, 128))
    spans = ORDERS["zigzag"].spans(128, 2)
    for rank, x in enumerate(of_results):
        for span in spans[1 - rank]:
            x.movedim(1 + rank, 0)[slice(*span)] = 0
    expected = torch.autograd.grad(results, whole, of_results)

    def rank(peers):
        mine = [share(x.detach(), peers, "zigzag").requires_grad_() for x in whole]
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            used = parallel.forward(*mine, group=peers, scheme=scheme, **options)[peers.rank]
            return torch.autograd.grad(used, mine, parallel.shard(of_results[peers.rank], peers, 1 + peers.rank, "zigzag"))

    for actual, its in zip(together(2, rank), spans, strict=True):
        rows = [n for span in its for n in range(*span)]
        for x, y in zip(actual, expected):
            assert (x.float() - y[:, rows].float()).abs().max() <= 2.0**-6 * y.float().abs().max()


def test_reduce_scatter_adds_in_the_order_of_ranks():
    """On every rank, whatever arrives first."""
    parts = torch.tensor([1e8, 1.0, -1e8, 3.0])
    cuts = tuple([redistribution.ShardRegion((Span(rank, rank + 1),), Span(0, 1)) for rank in range(4)])
    whole = (redistribution.ShardRegion((Span(0, 4),), Span(0, 1)),) * 4

    def rank(peers):
        x = parts[peers.rank].expand(1, 4, 1, 1).contiguous()
        return redistribution.reduce_scatter(peers, (x, redistribution.plan_redistribution(peers.rank, whole, cuts)))[0].item()

    assert together(4, rank) == [((parts[0] + parts[1]) + parts[2] + parts[3]).item()] * 4


IN_TURNS = {
    "a mask of heads, rows without keys, sinks of -inf": dict(
        mask=lambda b, h, i, j: ((i + 2 * j + h) % 3 != 0) & (i % 7 > 0), sink=torch.tensor([0.5, -torch.inf, 2.0, -torch.inf])
    ),
    "a sink": dict(causal=True, sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "a window": dict(window=(20, 0)),
}


@pytest.mark.parametrize("name", IN_TURNS)
def test_ring_in_several_sweeps(monkeypatch, name):
    """One key head in each sweep, because memory allows no more; the results are those of one sweep."""
    went, go = [], RingAttention._go_around
    monkeypatch.setattr(RingAttention, "_go_around", lambda self, k, *given: went.append(k.shape[2]) or go(self, k, *given))
    shapes, learned = dict(heads=4, kv_heads=2), ["sink"] * ("sink" in IN_TURNS[name])
    compared(2, 70, "ring", shapes=shapes, bitwise=(), learned=learned, requested=dict(memory=1), **IN_TURNS[name])
    assert went == [1] * 8  # two turns, on two ranks, there and back


SLOPED = {
    "signed": lambda s, b, h, i, j, t: s - t[h] * (i - j),
    "absolute": lambda s, b, h, i, j, t: s - abs(j - i) * t[h],
    "computed": lambda s, b, h, i, j, t: s - 2 * t[h] * (i - j),
}


@pytest.mark.parametrize(("scheme", "kind"), [("gather", "signed"), ("ulysses", "absolute"), ("gather", "computed")])
def test_scores_that_are_alibi(scheme, kind):
    """One GPU recognises them as ALiBi by algebra; so do ranks, for subcalls that begin anywhere, and the bits are the same,
    unless slopes are computed."""
    q, k, v = drawn(70, 2, 2)
    call_options = dict(causal=True, score=SLOPED[kind], aux=(torch.tensor([0.3, 0.01]),), return_lse=True)
    expected = attention.forward(q, k, v, **call_options)
    ranks = lambda peers: parallel.forward(
        *[share(x, peers) for x in (q, k, v)], group=peers, length=70, order="contiguous", scheme=scheme, **call_options
    )
    for x, y, axis in zip(zip(*together(2, ranks)), expected, (1, 2)):
        x = torch.cat(x, axis)
        assert torch.equal(x, y) if kind != "computed" else (x - y).abs().max() <= 2**-6 * y.abs().max()
