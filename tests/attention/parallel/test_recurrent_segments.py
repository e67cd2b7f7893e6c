"""attention.parallel's recurrences on ranks that are threads, whose shards are split into segments."""

import pytest

pytest.importorskip("torch")

import torch
from ranks import drawn
from threads import together

import attention
from attention import parallel
from attention.parallel import sequence_shard as parts
from attention.parallel.orders import Span
from attention.parallel.recurrence import ShardedRecurrence
from attention.parallel.recurrent import ShardedDeltaRule
from attention.plans.recurrent import recurrent_chunks


def share(x, peers, order="contiguous", dim=1):
    return parallel.shard(x, peers, dim, order)


LENGTH = 64 * 6 + 12  # 192, 128 and 76 tokens a rank: three segments, two, and one


def recurrent(name, arrays, whole=(), **options):
    """Compare a call on three ranks, whose shards are split into segments, with the same call on one."""
    expected = getattr(attention, name)(*arrays, **options)

    def rank(peers):
        mine = [x if n in whole else share(x, peers) for n, x in enumerate(arrays)]
        call_options = {n: share(x, peers) if n == "decay" and x.ndim > 1 else x for n, x in options.items()}
        return getattr(parallel, name)(*mine, group=peers, length=arrays[0].shape[1], **call_options)

    actual, (out, state) = together(3, rank), expected
    for x, y in (torch.cat([its for its, _ in actual], 1), out), *[(its, state) for _, its in actual]:
        assert (x.float() - y.float()).abs().max() <= 2.0**-6 * y.float().abs().max(), name


@pytest.fixture
def cut(monkeypatch):
    """How many segments shards are split into. The interpreter has three multiprocessors: a shard of one head is split into as
    many as it has chunks, where no costs are weighed (linear attention and Mamba-2 weigh them)."""
    monkeypatch.setattr(recurrent_chunks, "MIN_SEGMENT_CHUNKS", 1)
    counts = []
    for owner in ShardedRecurrence, recurrent_chunks:
        count = owner.count_segments
        monkeypatch.setattr(owner, "count_segments", lambda *args, count=count: counts.append(count(*args)) or counts[-1])
    return counts


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
    assert max(cut) == 3


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
    assert max(cut) == 3


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

    def sums(*inputs):
        out = parallel.forward(*inputs, causal=True)
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
