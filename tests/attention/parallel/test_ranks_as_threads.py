"""attention.parallel on any number of ranks, which are threads here: sequences of any length, and recurrences whose shards are
split into segments."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import drawn
from threads import PATIENCE, RankThread, compared, together

import attention
from attention import parallel
from attention.kernels import forward_hopper
from attention.parallel import agreement, gather, redistribution
from attention.parallel import sequence_shard as parts
from attention.parallel.gather import GatherAttention
from attention.parallel.orders import ORDERS, Span
from attention.parallel.peers import PendingMessages
from attention.parallel.recurrent import ShardedDeltaRule
from attention.parallel.ring import RingAttention
from attention.parallel.symmetric_memory import MappedPeers, SymmetricBuffers
from attention.plans import recurrent_chunks, split_forward

OPTIONS = dict(causal=True), dict(window=(9, 3)), dict(causal=True, window=(20, None)), dict()


def share(x, peers, order="contiguous", dim=1):
    return parallel.shard(x, peers, dim, order)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_ranks_without_tokens(order):
    """There are fewer tokens than ranks, and each rank has a head."""
    q, k, v = drawn(2, 3, 3, dim=80, seed=0)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    call_options = dict(causal=True, scheme="ulysses", order=order, length=2, return_lse=True)
    found = together(
        3, lambda peers: parallel.forward(*[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options)
    )
    for (its, sums), mine in zip(found, ORDERS[order].spans(2, 3), strict=True):
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
    found = together(
        world, lambda peers: parallel.forward(*[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options)
    )
    spans = ORDERS[order].spans(length, world)
    for (its, sums), mine in zip(found, spans, strict=True):
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
    found = together(3, lambda peers: parallel.forward(*[share(x, peers) for x in (q, k, v)], group=peers, **call_options))
    assert torch.equal(torch.cat(found, 1), out)


@pytest.mark.parametrize(("dim", "options"), [(64, {}), (128, dict(softcap=5.0))])
def test_parts_have_the_blocks_of_keys_of_the_whole(monkeypatch, dim, options):
    """The bits are the same where short sequences have smaller blocks, or blocks that need fewer registers. Here every sequence
    shorter than the whole counts as short, which usually starts at 2048 keys."""
    short, *longer = forward_hopper.BY_LENGTH[64, True].values()
    monkeypatch.setitem(forward_hopper.BY_LENGTH, (64, True), {300.5: short, 301.5: longer[0]})
    q, k, v = drawn(330, 1, 1, dim=dim)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True, **options)
    call_options = dict(options, causal=True, scheme="gather", length=330, return_lse=True)
    found = together(
        2, lambda peers: parallel.forward(*[share(x, peers, "zigzag") for x in (q, k, v)], group=peers, **call_options)
    )
    for (its, sums), spans in zip(found, ORDERS["zigzag"].spans(330, 2), strict=True):
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
        wanted = attention.forward(q, k, v, **call_options, return_lse=True)

        call_options |= dict(order=order, scheme="gather", return_lse=True)
        ranks = lambda peers, call_options=call_options: parallel.forward(
            *[share(x, peers, order) for x in (q, k, v)], group=peers, **call_options
        )
        found = together(world, ranks)
        for x, y, axis in zip(zip(*found), wanted, (1, 2)):
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
            found = []
            for arrays in (q, k, v), bad:
                mine = [share(x, peers).requires_grad_() for x in arrays]
                with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                    out = parallel.forward(*mine, group=peers, **whole, **call_options)
                    grads = torch.autograd.grad(out, mine, share(arrays[0], peers)) if "cu_seqlens" in call_options else []
                found.append([out.detach(), *grads])
            return found

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
    wanted = torch.autograd.grad(attention.forward(*whole, causal=True), whole, dout)
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

        for found, spans in zip(together(2, rank), ORDERS["zigzag"].spans(128, 2), strict=True):
            rows = [n for span in spans for n in range(*span)]
            for x, y in zip(found, wanted):
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
    wanted = torch.autograd.grad(results, whole, of_results)

    def rank(peers):
        mine = [share(x.detach(), peers, "zigzag").requires_grad_() for x in whole]
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            used = parallel.forward(*mine, group=peers, scheme=scheme, **options)[peers.rank]
            return torch.autograd.grad(used, mine, parallel.shard(of_results[peers.rank], peers, 1 + peers.rank, "zigzag"))

    for found, its in zip(together(2, rank), spans, strict=True):
        rows = [n for span in its for n in range(*span)]
        for x, y in zip(found, wanted):
            assert (x.float() - y[:, rows].float()).abs().max() <= 2.0**-6 * y.float().abs().max()


def test_reduce_scatter_adds_in_the_order_of_ranks():
    """On every rank, whatever arrives first."""
    parts = torch.tensor([1e8, 1.0, -1e8, 3.0])
    cuts = tuple([redistribution.ShardRegion((Span(rank, rank + 1),), Span(0, 1)) for rank in range(4)])
    every = (redistribution.ShardRegion((Span(0, 4),), Span(0, 1)),) * 4

    def rank(peers):
        x = parts[peers.rank].expand(1, 4, 1, 1).contiguous()
        return redistribution.reduce_scatter(peers, (x, redistribution.plan_redistribution(peers.rank, every, cuts)))[0].item()

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
    """One GPU recognises them as ALiBi by algebra; so do ranks, for pieces that begin anywhere, and the bits are the same,
    unless slopes are computed."""
    q, k, v = drawn(70, 2, 2)
    call_options = dict(causal=True, score=SLOPED[kind], aux=(torch.tensor([0.3, 0.01]),), return_lse=True)
    wanted = attention.forward(q, k, v, **call_options)
    ranks = lambda peers: parallel.forward(
        *[share(x, peers) for x in (q, k, v)], group=peers, length=70, order="contiguous", scheme=scheme, **call_options
    )
    for x, y, axis in zip(zip(*together(2, ranks)), wanted, (1, 2)):
        x = torch.cat(x, axis)
        assert torch.equal(x, y) if kind != "computed" else (x - y).abs().max() <= 2**-6 * y.abs().max()


LENGTH = 64 * 6 + 12  # 192, 128 and 76 tokens a rank: three segments, two, and one


def recurrent(name, arrays, whole=(), **options):
    """Compare a call on three ranks, whose shards are split into segments, with the same call on one."""
    wanted = getattr(attention, name)(*arrays, **options)

    def rank(peers):
        mine = [x if n in whole else share(x, peers) for n, x in enumerate(arrays)]
        call_options = {n: share(x, peers) if n == "decay" and x.ndim > 1 else x for n, x in options.items()}
        return getattr(parallel, name)(*mine, group=peers, length=arrays[0].shape[1], **call_options)

    found, (out, state) = together(3, rank), wanted
    for x, y in (torch.cat([its for its, _ in found], 1), out), *[(its, state) for _, its in found]:
        assert (x.float() - y.float()).abs().max() <= 2.0**-6 * y.float().abs().max(), name


@pytest.fixture
def cut(monkeypatch):
    """The interpreter has three multiprocessors: a shard of one head is split into as many segments as it has chunks."""
    monkeypatch.setattr(recurrent_chunks, "MIN_PARALLEL_SEGMENT_CHUNKS", 1)


def members(batch=1):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, LENGTH, 1, 16).bfloat16() for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    return q, k, v, torch.rand(batch, LENGTH, 1)


@pytest.mark.parametrize("channels", [False, True])
def test_the_delta_rule_in_segments(cut, channels):
    """With an initial state, and with sequences that have no chunk in some shard."""
    q, k, v, beta = members()
    decay = -0.02 * torch.rand(1, LENGTH, 1, *[16] * channels)
    recurrent("delta_rule", (q, k, v, beta), decay=decay, initial_state=torch.randn(1, 1, 16, 16), return_state=True)
    if not channels:
        ends = torch.tensor([0, 150, 150, LENGTH], dtype=torch.int32)
        recurrent("delta_rule", (q, k, v, beta), cu_seqlens=ends, return_state=True)


def test_forgotten_chunks_are_skipped(cut, monkeypatch):
    """One head forgets within a few chunks, and the other does not."""
    monkeypatch.setattr(parts, "MIN_CHUNKS", 1)
    counts, count_forgotten = [], parts.SequenceShard.count_forgotten_chunks
    monkeypatch.setattr(
        parts.SequenceShard, "count_forgotten_chunks", lambda *args: counts.append(count_forgotten(*args)) or counts[-1]
    )
    q, k, v, beta = (x.repeat_interleave(2, 2) for x in members())
    decay = torch.tensor([-0.9, -0.01]) * torch.ones(1, LENGTH, 2)
    recurrent("delta_rule", (q, k, v, beta), decay=decay, initial_state=torch.randn(1, 2, 16, 16), return_state=True)
    skipped = torch.stack([x.amax(0)[:, 0] for x in counts])
    assert (skipped[:, 1] == 0).all() and skipped[:, 0].max() > 0


@pytest.mark.parametrize(("strength", "rate", "alike"), [(1, 1.0, False), (1, 0.1, False), (3, 2.0, False), (3, 1.0, True)])
def test_remembered_chunks_are_not_skipped(monkeypatch, strength, rate, alike):
    """Tokens with beta |k|^2 above 2 make a state grow, although it decays."""
    monkeypatch.setattr(parts, "MIN_CHUNKS", 1)
    torch.manual_seed(0)
    length, heads = 64 * 5 - 9, 3
    k, v = torch.randn(2, 1, length, heads, 16).bfloat16()
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    beta, decay = strength * torch.rand(1, length, heads), -rate * torch.rand(1, length, heads)
    if alike:
        k, beta = k[:, :1].expand_as(k), torch.full_like(beta, strength)
    shard = parts.SequenceShard(Span(0, length), 1, None, "cpu")
    skipped = ShardedDeltaRule((k, k, v, beta), {"decay": decay})._forgotten_chunks(shard)[0, :, 0].int()
    assert (skipped.min() > 0) == (rate >= 1 and not alike)
    for head, n in enumerate(skipped.tolist()):
        m = torch.eye(16, dtype=torch.float64)
        for t in range(64 * n, length) if n else ():
            key = k[0, t, head].double()
            m = decay[0, t, head].double().exp() * (m - beta[0, t, head].double() * torch.outer(key, key @ m))
        assert not n or torch.linalg.matrix_norm(m, 2) < 2.0**-63


def test_batches_in_segments(cut):
    q, k, v, beta = members(2)
    recurrent("delta_rule", (q, k, v, beta), decay=torch.tensor([-0.01]), return_state=True)


def test_decays_of_channels_in_segments(cut):
    """Some channels forget everything at one token."""
    q, k, v, _ = members()
    decay = -0.02 * torch.rand(1, LENGTH, 1, 16)
    decay[:, 130:132, :, :3] = -torch.inf
    recurrent("linear", (q, k, v), decay=decay, return_state=True)


def test_mamba2_in_segments(cut):
    q, k, v, beta = members()
    call_options = dict(
        dt_bias=torch.rand(1), dt_softplus=True, initial_states=torch.randn(1, 1, 16, 16), return_final_states=True
    )
    recurrent("mamba2", (v, 0.1 * beta, -torch.rand(1), k, q), whole=(2,), **call_options)


@pytest.mark.parametrize(
    ("call_options", "said"),
    [
        (dict(initial_state=torch.zeros(1, 1, 16, 15)), "initial_state: value_dim must equal v's"),
        (dict(decay=torch.zeros(3)), "decay: heads must equal v's"),
        (dict(decays=torch.zeros(1)), "decays"),
        (dict(decay=-0.1), "decay: must be an array"),
        (dict(family="sm_70"), "family: must be None or one of"),
        (dict(return_state="no"), "return_state: must be a bool"),
        (dict(out=torch.zeros(1, 1, 1, 16).bfloat16()), "out: is not supported on several ranks"),
        (dict(cu_seqlens=torch.tensor([0, 1, 9])), "cu_seqlens: must end at 1"),
        (dict(cu_seqlens=torch.tensor([1, 1])), "cu_seqlens: must begin at 0"),
    ],
)
def test_errors_of_a_recurrence_are_raised_on_every_rank(call_options, said):
    """Also on ranks without tokens, and on ranks that get no initial state: no rank waits for one that has raised."""
    q, k, v, beta = (x[:, :1] for x in members())
    raised = []

    def rank(peers):
        mine = [share(x, peers) for x in (q, k, v, beta)]
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=said):
            parallel.delta_rule(
                *mine, group=peers, length=1, **(call_options if peers.rank == 0 or "initial_state" not in call_options else {})
            )
        raised.append(peers.rank)

    together(3, rank)
    assert sorted(raised) == [0, 1, 2]


def test_cu_seqlens_are_checked_in_every_call():
    """cu_seqlens are checked in every call, not only in the first with a signature, which is planned."""
    q, k, v, _ = (x[:, :8] for x in members())

    def rank(peers):
        mine = [share(x, peers) for x in (q, k, v)]
        for function in parallel.linear, parallel.forward:
            function(*mine, group=peers, length=8, cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32))
            with pytest.raises(ValueError, match=r"^cu_seqlens: must end at 8.* cu_seqlens\[2\]=9"):
                function(*mine, group=peers, length=8, cu_seqlens=torch.tensor([0, 3, 9], dtype=torch.int32))

    together(2, rank)


def test_decays_must_be_arrays():
    q, k, v, _ = (x[:, :8] for x in members())
    with pytest.raises(TypeError, match="^decay: must be an array"):
        parallel.linear(q, k, v, decay=-0.1)


def test_torch_compile_breaks_its_graph():
    """It breaks the graph at the functions, and the gradients are the same."""
    q, k, v = (x.requires_grad_() for x in drawn(24, 1))

    def sums(*given):
        out = parallel.forward(*given, causal=True)
        return parallel.unshard(parallel.reorder(out, to="contiguous"), order="contiguous").float().square()

    outs = sums(q, k, v), torch.compile(sums, backend="eager")(q, k, v)
    assert torch.equal(*outs)
    for x, y in zip(*[torch.autograd.grad(out.sum(), (q, k, v)) for out in outs]):
        assert torch.equal(x, y)


def test_arrays_must_be_torch_tensors():
    """The error names the array, whatever the call is."""
    q, k, v, *_ = members()
    with pytest.raises(TypeError, match="^v: must be a torch tensor, .* not ndarray"):
        parallel.linear(q, k, v.float().numpy())
    with pytest.raises(TypeError, match="^beta: must be a torch tensor, .* not float"):
        parallel.delta_rule(q, k, v, 0.5)


def test_recurrences_refuse_gradients():
    q, k, v, _ = members()
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="there is no backward pass on several ranks"):
        parallel.linear(q.requires_grad_(), k, v)


class SharedBuffers:
    """Memory of a thread that all others read, in place of symmetric_memory.SymmetricBuffers. every: each rank's two halves."""

    available, uses_copy_engines, half, late = True, False, 0, 0

    def __init__(self, every, meeting):
        self.every, self.meeting = every, meeting

    def switch_half(self, nbytes):
        assert nbytes <= self.every[0].shape[1]
        self.half ^= 1

    def view(self, at, dtype, shape, rank, first, end):
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.every[rank, self.half, at + first * size : at + end * size].view(dtype).view(1, end - first, *shape)

    def copy(self, local, copies):
        for place, x in local:
            place.copy_(x)
        self.meeting.wait(PATIENCE)
        time.sleep(self.late)
        for place, x in copies:
            place.copy_(x)
        return PendingMessages(())


class MappedThreads(MappedPeers, RankThread):
    """Ranks that are threads and map each other's memory."""


@pytest.mark.parametrize("world", [2, 3])
def test_mapped_rows_are_copied(world):
    """Repeated calls with two signatures and new arrays, some ranks being late: no message is sent."""
    every, meeting = torch.zeros(world, 2, 2**16, dtype=torch.uint8), threading.Barrier(world)
    calls = [(61 + 9 * (n % 2), drawn(61 + 9 * (n % 2), seed=n)) for n in range(6)]
    wanted = [attention.forward(*whole, causal=True) for _, whole in calls]

    def rank(peers):
        mine = MappedThreads(None, peers.rank, world, peers.ranks, memory := SharedBuffers(every, meeting))
        vars(mine).update(room=peers.room, exchange=None)
        for n, (length, whole) in enumerate(calls):
            memory.late = 0.05 * ((n + peers.rank) % world)
            given = [share(x, peers, "zigzag") for x in whole]
            out = parallel.forward(*given, group=mine, scheme="gather", causal=True, length=length)
            assert torch.equal(out, share(wanted[n], peers, "zigzag"))

    together(world, rank)


class StreamingSharedBuffers(SymmetricBuffers):
    """SymmetricBuffers whose memory the other threads read, with stand-ins for streams."""

    available = uses_copy_engines = True

    def __init__(self, every, meeting):
        self.every, self.meeting, self.views, self.half, self.nbytes = every, meeting, {}, 0, every[0].numel() // 2
        self.handle = self
        self.caller = self.stream = self.event = SimpleNamespace(wait_event=lambda event: None, record=lambda stream: None)

    def switch_half(self, nbytes):
        assert nbytes <= self.nbytes
        self.half = 0 if self.half else self.nbytes

    def barrier(self, channel, patience):
        self.meeting.wait(PATIENCE)

    def get_buffer(self, rank, shape, dtype, begin):
        return self.every[rank].view(dtype)[begin : begin + torch.Size(shape).numel()].view(shape)

    def write(self, count, at, n):
        count.view(torch.int32)[at] = n


@pytest.mark.parametrize("world", [2, 3])
def test_mapped_keys_are_streamed(monkeypatch, world):
    """Repeated calls with two alternating signatures, once with a k that is not contiguous: no message is sent, and the bits
    are those of one call."""
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    every, meeting = torch.zeros(world, 2**17, dtype=torch.uint8), threading.Barrier(world)
    lengths = [256 * world * (1 + n % 2) for n in range(4)]
    calls = [drawn(length, heads=1, seed=n) for n, length in enumerate(lengths)]
    wanted = [attention.forward(*whole, causal=True) for whole in calls]

    def rank(peers):
        mine = MappedThreads(None, peers.rank, world, peers.ranks, StreamingSharedBuffers(every, meeting))
        vars(mine).update(room=peers.room, exchange=None)
        for n, whole in enumerate(calls):
            q, k, v = (share(x, peers, "zigzag") for x in whole)
            if n == 3:
                k = torch.stack([k, k], -1)[..., 0]
            out = parallel.forward(q, k, v, group=mine, scheme="gather", causal=True)
            assert torch.equal(out, share(wanted[n], peers, "zigzag"))

    together(world, rank)
