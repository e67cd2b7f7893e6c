"""attention.mamba2 through torch's autograd and jax.grad: the gradients of attention.mamba2_backward."""

import numpy as np
import pytest

import attention

NAMES = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"
STEPS = {"dt_softplus": True, "dt_limit": (0.2, 1.5)}


def tensors(length=5, batch=1):
    """Arrays by NAMES, which require grad. dt and D are bfloat16, too."""
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    x, z = (torch.randn(batch, length, 2, 16, generator=draw).bfloat16() for _ in range(2))
    B, C = (torch.randn(batch, length, 1, 16, generator=draw).bfloat16() for _ in range(2))
    dt, bias = torch.randn(batch, length, 2, generator=draw).bfloat16(), torch.randn(2, generator=draw)
    rate, D = -torch.rand(2, generator=draw), torch.randn(2, 16, generator=draw).bfloat16()
    start = torch.randn(batch, 2, 16, 16, generator=draw)
    return [a.requires_grad_() for a in (x, dt, rate, B, C, D, z, bias, start)]


def loss(*leaves, **options):
    out, states = attention.mamba2(**dict(zip(NAMES, leaves)), **STEPS, **options, return_final_states=True)
    return out.float().square().sum() + states.square().sum()


def wanted(leaves, stored):
    """The gradients of `loss` by mamba2_backward, in the dtypes of the arguments. stored: from the states that forward stores?
    Those of another kernel have other bits."""
    arrays = dict(zip(NAMES, [a.detach() for a in leaves]))
    out, states, chunk_states = attention.mamba2(**arrays, **STEPS, return_final_states=True, return_chunk_states=True)
    options = STEPS | {"dstates": 2 * states, "chunk_states": chunk_states if stored else None}
    actual = attention.mamba2_backward((2 * out.float()).to(out.dtype), **arrays, **options)
    return [a.to(leaf.dtype) for a, leaf in zip(actual, leaves, strict=True)]


def test_torch():
    """Eager, compiled as one graph, with checkpoints and in torch.func.grad."""
    torch = pytest.importorskip("torch")
    leaves = tensors()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ways = [torch.autograd.grad(way(*leaves), leaves) for way in (loss, compiled)]
    ways.append(torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False), leaves))
    ways.append(torch.func.grad(loss, tuple(range(len(NAMES))))(*[a.detach() for a in leaves]))
    ways.append(torch.autograd.grad(loss(*leaves, memory="recompute"), leaves))
    for got, stored in zip(ways, [True, True, True, False, False], strict=True):
        for name, a, b in zip(NAMES, got, wanted(leaves, stored), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_some_gradients_alone():
    """Of the states alone; without z, D and dt_bias; under autocast float32 arrays have float32 gradients."""
    torch = pytest.importorskip("torch")
    x, dt, rate, B, C, *_ = leaves = tensors()
    _, states = attention.mamba2(*leaves[:5], return_final_states=True)
    dx, dC = torch.autograd.grad(states.sum(), (x, C))
    assert not dC.any() and torch.isfinite(dx).all() and dx.any()
    wide = [a.detach().float().requires_grad_() for a in leaves[:5]]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.mamba2(*wide)
    assert out.dtype == torch.bfloat16
    assert {a.dtype for a in torch.autograd.grad(out.float().sum(), wide)} == {torch.float32}


def test_seq_idx():
    """The gradients of packed batches are those of each sequence alone."""
    torch = pytest.importorskip("torch")
    leaves, seq_idx = tensors(6, batch=2)[:5], torch.tensor([[0, 0, 1, 1, 1, 1], [3, 3, 3, 3, 3, 7]])
    out, states = attention.mamba2(*leaves, seq_idx=seq_idx, return_final_states=True)
    got = torch.autograd.grad(out.float().square().sum() + states.sum(), leaves)
    parts = []
    for b, first, end in (0, 0, 2), (0, 2, 6), (1, 0, 5), (1, 5, 6):
        x, dt, rate, B, C = leaves
        of_part = [a[b : b + 1, first:end] for a in (x, dt, B, C)]
        out, states = attention.mamba2(*of_part[:2], rate, *of_part[2:], return_final_states=True)
        parts.append(out.float().square().sum() + (states.sum() if end == 6 else 0))
    for name, a, b in zip(NAMES, got, torch.autograd.grad(sum(parts), leaves)):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01, msg=name)


def test_what_has_no_gradient():
    torch = pytest.importorskip("torch")
    leaves = tensors()
    with pytest.raises(
        NotImplementedError, match=r"^attention\.mamba2: has no second derivatives; leave create_graph=True out"
    ):
        torch.autograd.grad(loss(*leaves), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="^out: is not supported for tensors that require grad"):
        attention.mamba2(*leaves[:5], out=torch.empty_like(leaves[0]))
    with pytest.raises(NotImplementedError, match="^return_chunk_states: is not supported for tensors that require grad"):
        attention.mamba2(*leaves[:5], return_chunk_states=True)


def test_jax():
    jax = pytest.importorskip("jax")
    tiles = "x", "B", "C", "z"
    leaves = dict(zip(NAMES, [a.detach().float().numpy() for a in tensors()]))
    with jax.default_device(jax.devices("cpu")[0]):
        leaves = {n: jax.numpy.asarray(a).astype("bfloat16" if n in tiles else "float32") for n, a in leaves.items()}

        def total(*arrays):
            out, states = attention.mamba2(**dict(zip(NAMES, arrays)), **STEPS, return_final_states=True)
            return (out.astype("float32") ** 2).sum() + (states**2).sum()

        out, states, chunk_states = attention.mamba2(**leaves, **STEPS, return_final_states=True, return_chunk_states=True)
        dout = (2 * out.astype("float32")).astype("bfloat16")
        want = attention.mamba2_backward(dout, **leaves, **STEPS, dstates=2 * states, chunk_states=chunk_states)
        of_all = jax.grad(total, tuple(range(len(NAMES))))
        for got in of_all(*leaves.values()), jax.jit(of_all)(*leaves.values()):
            for name, a, b in zip(NAMES, got, want, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), name)
