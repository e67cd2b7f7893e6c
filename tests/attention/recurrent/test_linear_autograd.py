"""attention.linear through torch's autograd and jax.grad: the gradients of attention.linear_backward."""

import numpy as np
import pytest

import attention

NAMES = "q", "k", "v", "decay", "initial_state"


def tensors(kind="token", length=5, dim=16):
    """q, k, v, decay and initial_state, which require grad."""
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim, generator=draw).bfloat16() for heads in (1, 1, 2))
    shape = {"head": (2,), "token": (1, length, 2), "channel": (1, length, 2, dim)}[kind]
    decay, state = -torch.rand(shape, generator=draw), torch.randn(1, 2, dim, dim, generator=draw)
    return [x.requires_grad_() for x in (q, k, v, decay.bfloat16() if kind == "token" else decay, state)]


def loss(q, k, v, decay, initial_state):
    out, state = attention.linear(q, k, v, decay=decay, initial_state=initial_state, return_state=True)
    return out.float().square().sum() + state.square().sum()


def wanted(leaves):
    """The gradients of `loss` by linear_backward, in the dtypes of the arguments."""
    arrays = dict(zip(NAMES, [x.detach() for x in leaves]))
    out, state = attention.linear(**arrays, return_state=True)
    found = attention.linear_backward((2 * out.float()).to(out.dtype), **arrays, dstate=2 * state)
    return [x.to(leaf.dtype) for x, leaf in zip(found, leaves, strict=True)]


@pytest.mark.parametrize("kind", ["token", "channel"])
def test_torch(kind):
    """Eager, compiled as one graph, with checkpoints and in torch.func.grad."""
    torch = pytest.importorskip("torch")
    leaves = tensors(kind)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ways = [torch.autograd.grad(way(*leaves), leaves) for way in (loss, compiled)]
    if kind == "token":
        checkpoint_loss = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
        ways.append(torch.autograd.grad(checkpoint_loss, leaves))
        ways.append(torch.func.grad(loss, tuple(range(5)))(*[x.detach() for x in leaves]))
    want = wanted(leaves)
    for got in ways:
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_some_gradients_alone():
    """Of the state alone, or by decays alone; under autocast float32 arrays have float32 gradients."""
    torch = pytest.importorskip("torch")
    q, k, v, decay, start = leaves = tensors("head")
    everything = wanted(leaves)
    plain = [x.detach() for x in (q, k, v)]
    out, state = attention.linear(*plain, decay=decay, initial_state=start.detach(), return_state=True)
    (got,) = torch.autograd.grad(out.float().square().sum() + state.square().sum(), decay)
    assert torch.equal(got, everything[3])
    _, state = attention.linear(q, k, v, return_state=True)
    dq, dv = torch.autograd.grad(state.sum(), (q, v))
    assert not dq.any() and torch.isfinite(dv).all() and dv.any()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.linear(*wide)
    assert {x.dtype for x in torch.autograd.grad(out.float().sum(), wide)} == {torch.float32}


def test_named_members():
    """retention, lightning and gla are calls of linear."""
    torch = pytest.importorskip("torch")
    q, k, v, decay, _ = tensors("channel")
    calls = {
        "retention": lambda: attention.retention(q, k, v),
        "lightning": lambda: attention.lightning(q, k, v, 1, 4),
        "gla": lambda: attention.gla(q, k, v, decay),
    }
    for name, call in calls.items():
        assert all(x.abs().sum() > 0 for x in torch.autograd.grad(call().float().sum(), (q, k, v))), name


def test_what_has_no_gradient():
    torch = pytest.importorskip("torch")
    leaves = q, k, v, decay, _ = tensors()
    out = attention.linear(q, k, v, decay=decay)
    with pytest.raises(
        NotImplementedError, match=r"^attention\.linear: has no second derivatives; leave create_graph=True out"
    ):
        torch.autograd.grad(out.float().sum(), q, create_graph=True)
    for options in {"normalize": True}, {"out": torch.empty_like(v)}:
        with pytest.raises(
            NotImplementedError, match=f"^{next(iter(options))}: is not supported for tensors that require grad"
        ):
            attention.linear(q, k, v, **options)
    assert not any(x.requires_grad for x in attention.linear_backward(out.detach(), *leaves[:3], decay=decay))


def test_jax():
    jax = pytest.importorskip("jax")
    leaves = [x.detach().float().numpy() for x in tensors("head")]
    with jax.default_device(jax.devices("cpu")[0]):
        leaves = [jax.numpy.asarray(x).astype("bfloat16" if n < 3 else "float32") for n, x in enumerate(leaves)]

        def total(*arrays):
            out, state = attention.linear(*arrays[:3], decay=arrays[3], initial_state=arrays[4], return_state=True)
            return (out.astype("float32") ** 2).sum() + (state**2).sum()

        out, state = attention.linear(*leaves[:3], decay=leaves[3], initial_state=leaves[4], return_state=True)
        arrays = dict(zip(NAMES, leaves))
        want = attention.linear_backward((2 * out.astype("float32")).astype("bfloat16"), **arrays, dstate=2 * state)
        for got in (jax.grad(total, tuple(range(5)))(*leaves), jax.jit(jax.grad(total, tuple(range(5))))(*leaves)):
            for x, y in zip(got, want, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
