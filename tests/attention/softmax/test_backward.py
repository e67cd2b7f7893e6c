"""attention.backward: gradients against float64 and finite differences; lengths around tile edges; what is refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import draw, inputs, poisoned, there
from places import BF16, OnCard, OnInterpreter

import attention
from attention import reference
from attention.softmax.backward import ampere, hopper
from attention.softmax.seen import CAUSAL, FULL, Left, Right
from attention.softmax.variants import Both
from tiles import bf16, fp16

F32, FP16 = np.float32, fp16.np
NAMES = "dq", "dk", "dv", "dsink"
NOTHING, NOISE = 1e-9, 1e-4


def agree(place, q, k, v, family=None, between=lambda: None, **options):
    """Run forward and, after `between`, backward, and judge by the rule for gradients: no NaN, every element written."""
    dout = draw((*q.shape[:-1], v.shape[-1]), q.dtype)
    put, given = [place.put(x) for x in (q, k, v)], there(place, options)
    out, lse = attention.forward(*put, return_lse=True, **given)
    between()
    of = [q, k, v, *[options[name] for name in ("sink",) if name in options]]
    made = {name: place.put(poisoned(x.shape, x.dtype)) for name, x in zip(NAMES, of)}
    got = attention.backward(place.put(dout), *put, out, lse, **given, **made, family=family)
    assert len(got) == len(of) and all(x is made[name] for name, x in zip(NAMES, got))
    ref, low = reference.backward(dout, q, k, v, **options), reference.backward_low(dout, q, k, v, **options)
    got = [place.get(x) for x in got]
    if "sink" in options:  # by the output as it was rounded: a few sums of many errors have no error worth comparing with
        *got, dsink = got
        delta = (dout.astype(float) * place.get(out).astype(float)).sum(-1).swapaxes(1, 2)
        want = -(np.exp(options["sink"][:, None] - place.get(lse).astype(float)) * delta).sum((0, 2))
        np.testing.assert_allclose(dsink, want, rtol=1e-4, atol=1e-4)
    for name, *each in zip(NAMES, got, ref, low):
        if np.abs(each[1]).max(initial=0) < NOTHING:  # each row sees one key: what is left are sums in another order
            assert np.abs(each[0].astype(F32)).max(initial=0) < NOISE, name
        else:
            reference.assert_close(*each, factor=3, name=name)
    return got


EDGES = [(1, 1), (1, 130), (63, 65), (64, 64), (128, 128), (129, 127), (130, 257), (5, 200), (200, 70)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lengths", "head_dim", "causal"), [*zip(EDGES, itertools.cycle([128, 64]), itertools.cycle([1, 1, 0]))]
)
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_lengths_around_every_tile_edge(place, lengths, head_dim, causal, family):
    """Tiles of 64 and 128 queries, blocks of 64 and 128 keys; more queries than keys leaves rows with no key."""
    agree(place, *inputs(1, *lengths, 1, 1, head_dim), family, causal=bool(causal))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"), [(8, 8, BF16), (72, 40, FP16), (64, 128, BF16), (192, 128, BF16), (256, 256, FP16)]
)
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_every_head_dim(place, head_dim, value_dim, dtype, family):
    """Padded inside to the next kernel's; never reading a neighbour head, whose values are huge here."""
    q, k, v = inputs(1, 70, 90, 2, 2, head_dim, dtype, value_dim=value_dim)
    for x in (q, k, v):
        x[:, :, 1] *= 100
    agree(place, q[:, :, :1], k[:, :, :1], v[:, :, :1], family, causal=True)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "layout", "family"),
    [
        (4, 2, "bhsd", "sm_90"),
        (3, 1, "bshd", "sm_80"),
        (3, 1, "bshd", "sm_90"),
        (2, 2, "bhsd", "sm_80"),
        (2, 2, "bshd", "sm_90"),
    ],
)
def test_shared_key_heads_and_layouts(place, heads, heads_kv, layout, family):
    agree(place, *inputs(2, 40, 130, heads, heads_kv, 64, layout=layout), family, causal=True, layout=layout, scale=0.2)


VARIANTS = {
    "window": dict(window=(70, 20)),
    "window of one key": dict(window=(0, 0)),
    "window, left": dict(window=(100, None)),
    "window, right": dict(window=(None, 10)),
    "window, causal": dict(causal=True, window=(64, 9)),
    "softcap": dict(softcap=2.0, window=(None, 60)),
    "softcap of scores that count much, alibi, causal": dict(
        softcap=5.0, alibi=np.array([0.3, 0.1], F32), causal=True, scale=0.4
    ),
    "bias of each sequence": dict(bias=draw((2, 2, 90, 170), F32, 3)),
    "sink, softcap": dict(sink=np.array([1.5, -2], F32), softcap=3.0, causal=True),
    "alibi": dict(alibi=np.array([0.5, 0.01], F32), window=(None, 30)),
    "alibi of each sequence, causal": dict(alibi=np.array([[0.5, 0.1], [0.2, 3]], F32), causal=True),
}


@pytest.mark.parametrize(("name", "head_dim"), [*zip(VARIANTS, itertools.cycle([64, 128]))])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_variants(place, name, head_dim, family):
    batch = 2 if "sequence" in name else 1
    agree(place, *inputs(batch, 90, 170, 2, 1, head_dim), family, **VARIANTS[name])


def test_what_sees_nothing_has_no_gradient(place):
    """More queries than keys: the first see none. A window: the first keys are seen by none."""
    dq, *_ = agree(place, *inputs(1, 200, 60, 1, 1, 128), causal=True)
    assert (dq[:, :140].astype(F32) == 0).all()
    _, dk, dv = agree(place, *inputs(1, 30, 300, 1, 1, 64), window=(10, 0))
    assert (dk[:, :250].astype(F32) == 0).all() and (dv[:, :250].astype(F32) == 0).all()


@pytest.mark.parametrize(("seq_q", "seq_kv", "batch"), [(4, 0, 1), (0, 4, 1), (3, 3, 0)])
def test_empty(place, seq_q, seq_kv, batch):
    q, k, v = (place.put(x) for x in inputs(batch, seq_q, seq_kv, 2, 2, 64))
    out, lse = attention.forward(q, k, v, return_lse=True)
    for got, x in zip(attention.backward(out, q, k, v, out, lse), (q, k, v), strict=True):
        assert got.shape == x.shape and (place.get(got).astype(F32) == 0).all()


@pytest.mark.parametrize("skip", [1, 2, 4])
def test_arrays_that_tma_cannot_address(place, skip):
    """Bases and strides of 2, 4 or 8 bytes, of results, too."""
    room = [place.put(x) for x in (*inputs(1, 70, 90, 2, 1, 64 + skip), *inputs(1, 70, 90, 2, 1, 64 + skip))]
    q, k, v, dq, dk, dv = (x[..., skip:] for x in room)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    attention.backward(q, q, k, v, out, lse, causal=True, dq=dq, dk=dk, dv=dv)
    host = [np.ascontiguousarray(place.get(x)[..., skip:]) for x in room]
    ref, low = (f(host[0], *host[:3], causal=True) for f in (reference.backward, reference.backward_low))
    for got, *each in zip(host[3:], ref, low, strict=True):
        reference.assert_close(got, *each, factor=3)


@pytest.mark.parametrize("seed", range(3))
def test_no_hazard_under_random_orders(seed, monkeypatch):
    monkeypatch.setenv("TILES_SEED", str(seed))
    agree(OnInterpreter(), *inputs(1, 200, 130, 2, 1, [64, 128, 256][seed]), causal=bool(seed % 2))


@pytest.mark.parametrize(("arch", "family"), [("sm_90a", "sm_90"), ("sm_80", "sm_80")])
def test_as_compiled(as_compiled, arch, family):
    """In the emulator."""
    agree(OnInterpreter(), *inputs(1, 20, 24, 1, 1, 64), family, lambda: as_compiled(arch), causal=True)


def test_scratch_memory_need_not_be_zero(monkeypatch):
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **more: np.full_like(empty(shape, dtype, **more), np.nan))
    agree(OnInterpreter(), *inputs(1, 70, 130, 1, 1, 128))


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 900), st.integers(1, 900), st.integers(1, 3), st.integers(1, 4), st.integers(1, 32),
    st.booleans(), st.sampled_from([BF16, FP16]), st.sampled_from(["bshd", "bhsd"]), st.floats(0.01, 1),
)  # fmt: skip
def test_random_problems_on_the_card(batch, seq_q, seq_kv, heads_kv, group, eighths, causal, dtype, layout, scale):
    pytest.importorskip("torch")
    q, k, v = inputs(batch, seq_q, seq_kv, heads_kv * group, heads_kv, 8 * eighths, dtype, layout)
    agree(OnCard(), q, k, v, causal=causal, layout=layout, scale=scale)


# ---- the formula -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*VARIANTS, "plain", "causal"])
def test_the_formula_agrees_with_finite_differences(name):
    options = {"plain": {}, "causal": {"causal": True, "scale": 0.7}}.get(name) or VARIANTS.get(name, {})
    q, k, v, dout = (draw((2, n, h, 8), np.float64, seed) for seed, (n, h) in enumerate([(7, 2), (9, 1), (9, 1), (7, 2)]))
    given, step = {"q": q, "k": k, "v": v} | {name: options[name].astype(float) for name in ("sink",) if name in options}, 1e-5
    for gradient, name in zip(reference.backward(dout, q, k, v, **options), given, strict=True):
        along = draw(given[name].shape, np.float64, 9)
        ends = []
        for sign in (1, -1):
            moved = options | given | {name: given[name] + sign * step * along}
            ends.append((reference.forward(**moved)[0] * dout).sum())
        assert math.isclose((ends[0] - ends[1]) / (2 * step), (gradient * along).sum(), rel_tol=1e-6, abs_tol=1e-7)


@pytest.mark.parametrize("variant", [FULL, CAUSAL, Right(), Left(), Both(Right(), Left())], ids=str)
def test_what_keys_are_seen_by(variant):
    """`seers` is what `keys` says, asked from the other side."""
    from types import SimpleNamespace

    for queries, keys in ((9, 9), (5, 12), (12, 5)):
        at = SimpleNamespace(shift=keys - queries, queries=queries, keys=keys, given=SimpleNamespace(left=2, right=1))
        sees = np.zeros((queries, keys), bool)
        for i in range(queries):
            one = variant.keys(i, i, at)
            sees[i, max(0, one.first) : max(0, one.end)] = True
        for first, last in ((0, 0), (1, 3), (4, 4)):
            found, some, all_ = (
                variant.seers(first, last, at),
                sees[:, first : last + 1].any(1),
                sees[:, first : last + 1].all(1),
            )
            inside = np.arange(queries)
            assert not some[(inside < found.first) | (inside >= found.end)].any()
            assert all_[(inside >= found.inner_first) & (inside < found.inner_end)].all()


# ---- what is refused -------------------------------------------------------------------------------------------------
def call(**other):
    """A call of which something is other."""
    q, k, v = inputs(1, 8, 8, 2, 1, 64)
    given = {"dout": q, "q": q, "k": k, "v": v, "out": q.copy(), "lse": np.zeros((1, 2, 8), F32)} | other
    return attention.backward(*[given.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")], **given)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (dict(deterministic=True), NotImplementedError, "deterministic: .*no fixed order yet"),
        (dict(family="sm_70"), ValueError, "family: must be None or one of"),
        (dict(lse=np.zeros((1, 1, 8), F32)), ValueError, "lse: heads must equal dout's"),
        (dict(lse=np.zeros((1, 2, 8), np.float64)), TypeError, "lse: "),
        (dict(out=np.zeros((1, 8, 2, 32), BF16)), ValueError, "out: "),
        (dict(dk=np.zeros((1, 8, 2, 64), BF16)), ValueError, "dk: heads must equal k's"),
        (dict(window=(-1, 0)), ValueError, "window: its ends must not be negative"),
        (dict(scale=0.0), ValueError, "scale: must be positive"),
        (dict(dout=np.zeros((1, 8, 2, 65), BF16)[..., 1:], family="sm_90"), ValueError, "multiples of 16 bytes"),
    ],
)
def test_what_is_refused_before_any_launch(other, error, words):
    with pytest.raises(error, match=words):
        call(**other)


def test_results_must_lie_apart():
    q, k, v = inputs(1, 8, 8, 1, 1, 64)
    room, out = np.zeros(q.shape, BF16), np.zeros(q.shape, BF16)
    with pytest.raises(ValueError, match="d[kv]: .*d[kv]|share memory|overlap"):
        attention.backward(q, q, k, v, out, np.zeros((1, 1, 8), F32), dk=room, dv=room)


def test_every_head_dim_has_a_configuration_that_fits():
    for head_dim, (module, room) in itertools.product(range(8, 257, 8), ((hopper, 227), (ampere, 99))):
        config = module.config_for(head_dim, bf16, CAUSAL)
        assert config.head_dim >= head_dim and module.make(config)[1].nbytes <= room * 1024, config


# ---- torch -----------------------------------------------------------------------------------------------------------
def torch_inputs(*shape, device="cpu"):
    torch = pytest.importorskip("torch")
    return [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_that_require_grad(device):
    """Through autograd, under torch.compile and checkpointed: what backward gives."""
    torch = pytest.importorskip("torch")
    given = torch_inputs(1, 24, 2, 64, device=device)

    def loss(q, k, v):
        return attention.forward(q, k, v, causal=True, window=(9, None)).float().square().sum()

    got = torch.autograd.grad(loss(*given), given)
    with torch.no_grad():
        out, lse = attention.forward(*given, causal=True, window=(9, None), return_lse=True)
        wanted = attention.backward((2 * out.float()).bfloat16(), *given, out, lse, causal=True, window=(9, None))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(*given), given)
    kept = torch.utils.checkpoint.checkpoint(loss, *given, use_reentrant=False)
    functional = torch.func.grad(loss, (0, 1, 2))(*[x.detach() for x in given])
    for one in (got, again, torch.autograd.grad(kept, given), functional):
        for x, y in zip(one, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def test_autograd_takes_an_expanded_gradient_and_autocast():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 20, 1, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.forward(q, q, q)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype is torch.float32 and torch.isfinite(q.grad).all() and q.grad.abs().max() > 0


def test_what_autograd_refuses():
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    out, lse = attention.forward(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    for loss in (out.sum(), out.float().square().sum()):
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(loss, q, create_graph=True, retain_graph=True)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda y: attention.forward(y, y, y).float().sum())(x).float().sum())
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        twice(q.detach())
    with pytest.raises(NotImplementedError, match="q: requires grad"):
        attention.forward(q, k, v, dropout=0.5, seed=1)
