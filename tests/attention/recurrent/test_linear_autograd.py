"""attention.linear and delta_rule through torch's autograd and jax.grad: the gradients of attention.linear_backward and
delta_rule_backward."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import attention
from attention.plans.delta import delta_records
from attention.public import linear_family


class Trained(NamedTuple):
    """A function, that of its gradients, and the names of its arrays in the order of these. by_record: do outputs have other
    bits where it stores what gradients read?"""

    call: Callable
    backward: Callable
    names: tuple[str, ...]
    by_record: bool = False

    def loss(self, *leaves):
        """A loss of outputs and the last state."""
        out, state = self.call(**dict(zip(self.names, leaves)), return_state=True)
        return out.float().square().sum() + state.square().sum()

    def results(self, arrays):
        """(out, state, what gradients read besides), as training computes them."""
        if not self.by_record:
            return *self.call(**arrays, return_state=True), {}
        out, state, record = self.call(**arrays, return_state=True, return_chunk_states=True)
        return out, state, {"chunk_states": record}

    def wanted(self, leaves):
        """The gradients of `loss` by `backward`, in the dtypes of the arguments."""
        arrays = dict(zip(self.names, [x.detach() for x in leaves]))
        out, state, stored = self.results(arrays)
        actual = self.backward((2 * out.float()).to(out.dtype), **arrays, **stored, dstate=2 * state)
        return [x.to(leaf.dtype) for x, leaf in zip(actual, leaves, strict=True)]


LINEAR = Trained(attention.linear, attention.linear_backward, ("q", "k", "v", "decay", "initial_state"))
DELTA_NAMES = "q", "k", "v", "beta", "decay", "initial_state"
DELTA_RULE = Trained(functools.partial(attention.delta_rule, memory="recompute"), attention.delta_rule_backward, DELTA_NAMES)
STORED_DELTA_RULE = Trained(attention.delta_rule, attention.delta_rule_backward, DELTA_NAMES, by_record=True)


def test_gradients_take_all_options():
    """An option that the program of gradients lacked would be ignored by torch's autograd and by JAX."""

    def tilted(problem, scale: float | None, return_state: bool, memory: str, tilt: float):
        raise NotImplementedError

    with pytest.raises(TypeError, match=r"^attention.linear: its gradients would ignore \['tilt'\]"):
        linear_family.LINEAR_DERIVATIVE.make_program(linear_family.LINEAR)(tilted)


def tensors(kind="token", length=5, dim=16, names=LINEAR.names):
    """The arrays of these names, which require grad."""
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim, generator=draw).bfloat16() for heads in (1, 1, 2))
    shape = {"head": (2,), "token": (1, length, 2), "channel": (1, length, 2, dim)}[kind]
    decay, state = -torch.rand(shape, generator=draw), torch.randn(1, 2, dim, dim, generator=draw)
    arrays = {"q": q, "k": k, "v": v, "decay": decay.bfloat16() if kind == "token" else decay, "initial_state": state}
    if "beta" in names:
        arrays["beta"] = torch.rand(1, length, 2, generator=draw)
        arrays["k"] = (k.float() / k.float().norm(dim=-1, keepdim=True)).bfloat16()
    return [arrays[name].requires_grad_() for name in names]


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        *[(member, kind) for member in (LINEAR, DELTA_RULE) for kind in ("token", "channel")],
        *[(STORED_DELTA_RULE, kind) for kind in ("token", "channel")],
    ],
)
def test_torch(member, kind):
    """Eager, compiled as one graph, with checkpoints and in torch.func.grad."""
    torch = pytest.importorskip("torch")
    leaves = tensors(kind, names=member.names)
    loss = lambda *leaves: member.loss(*leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ways = [torch.autograd.grad(way(*leaves), leaves) for way in (loss, compiled)]
    if kind == "token":
        checkpoint_loss = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
        ways.append(torch.autograd.grad(checkpoint_loss, leaves))
    if kind == "token" and not member.by_record:  # torch.func's transforms store nothing
        ways.append(torch.func.grad(loss, tuple(range(len(leaves))))(*[x.detach() for x in leaves]))
    want = member.wanted(leaves)
    for outputs in ways:
        for x, y in zip(outputs, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def saved_shapes(call):
    """The shapes of what torch saves for a backward pass of what `call` returns."""
    torch, shapes = pytest.importorskip("torch"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        call()
    return shapes


def test_what_is_saved():
    """States before chunks, unless `memory` or the decays say otherwise: gradients are the same."""
    torch = pytest.importorskip("torch")
    leaves = tensors("token", length=70)
    q, k, v, decay, _ = leaves
    loss = lambda memory: LINEAR._replace(call=functools.partial(attention.linear, memory=memory)).loss(*leaves)
    states = (1, 2, 2, 16, 16)
    assert states in saved_shapes(lambda: loss("states")) and states not in saved_shapes(lambda: loss("recompute"))
    for x, y in zip(*(torch.autograd.grad(loss(memory), leaves) for memory in ("states", "recompute")), strict=True):
        assert torch.equal(x, y)
    assert states in saved_shapes(lambda: attention.retention(q, k, v))
    channels = decay.detach()[..., None].expand(*decay.shape, 16).contiguous()
    assert states not in saved_shapes(lambda: attention.gla(q, k, v, channels))
    with pytest.raises(NotImplementedError, match="^return_chunk_states: is not supported for tensors that require grad"):
        attention.linear(q, k, v, return_chunk_states=True)


def test_what_the_delta_rule_saves():
    """What gradients read, unless `memory` says otherwise, or heads are too few for it to be faster."""
    torch = pytest.importorskip("torch")
    leaves = q, k, v, beta, decay, _ = tensors("token", length=70, names=DELTA_NAMES)
    loss = lambda memory: STORED_DELTA_RULE._replace(call=functools.partial(attention.delta_rule, memory=memory)).loss(*leaves)
    record = {(1, 2, 2, 16, 16), (1, 2, 2, 64, 16), (1, 2, 2, 128, 64), (1, 2, 2, 256)}
    assert record <= {*saved_shapes(lambda: loss("states"))} and not record & {*saved_shapes(lambda: loss("recompute"))}
    for x, y in zip(*(torch.autograd.grad(loss(memory), leaves) for memory in ("states", "recompute")), strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item())
    channels = decay.detach()[..., None].expand(*decay.shape, 16).contiguous()
    by_channel = {(1, 2, 2, 16, 16), (1, 2, 2, 64, 16), (1, 2, 2, 128, 64), (1, 2, 2, 64, 64), (1, 2, 2, 16), (1, 2, 2, 64)}
    assert by_channel <= {*saved_shapes(lambda: attention.delta_rule(q, k, v, beta, decay=channels))}
    assert delta_records.choose_record("states", q, v, decay, torch.zeros(1), "bshd", None) == ""  # no sequence
    with pytest.raises(NotImplementedError, match="^return_chunk_states: is not supported for tensors that require grad"):
        attention.delta_rule(q, k, v, beta, return_chunk_states=True)


def test_some_gradients_alone():
    """Of the state alone, or by decays alone; under autocast float32 arrays have float32 gradients."""
    torch = pytest.importorskip("torch")
    q, k, v, decay, start = leaves = tensors("head")
    everything = LINEAR.wanted(leaves)
    plain = [x.detach() for x in (q, k, v)]
    out, state = attention.linear(*plain, decay=decay, initial_state=start.detach(), return_state=True)
    (outputs,) = torch.autograd.grad(out.float().square().sum() + state.square().sum(), decay)
    assert torch.equal(outputs, everything[3])
    _, state = attention.linear(q, k, v, return_state=True)
    dq, dv = torch.autograd.grad(state.sum(), (q, v))
    assert not dq.any() and torch.isfinite(dv).all() and dv.any()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.linear(*wide)
    assert {x.dtype for x in torch.autograd.grad(out.float().sum(), wide)} == {torch.float32}


def test_beta_alone():
    """The delta rule's beta may be all that has a gradient."""
    torch = pytest.importorskip("torch")
    leaves = tensors("head", names=DELTA_RULE.names)
    alone = [x if name == "beta" else x.detach() for name, x in zip(DELTA_RULE.names, leaves)]
    (outputs,) = torch.autograd.grad(DELTA_RULE.loss(*alone), leaves[3])
    assert torch.equal(outputs, DELTA_RULE.wanted(leaves)[3])


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
    beta = torch.rand(v.shape[:3])
    for name, out in {
        "linear": attention.linear(q, k, v, decay=decay),
        "delta_rule": attention.delta_rule(q, k, v, beta, decay=decay),
    }.items():
        with pytest.raises(
            NotImplementedError, match=rf"^attention\.{name}: has no second derivatives; leave create_graph=True out"
        ):
            torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^out: is not supported for tensors that require grad"):
        attention.linear(q, k, v, out=torch.empty_like(v))
    assert not any(x.requires_grad for x in attention.linear_backward(out.detach(), *leaves[:3], decay=decay))


@pytest.mark.parametrize("member", [LINEAR, STORED_DELTA_RULE], ids=["linear", "delta_rule"])
def test_jax(member):
    jax = pytest.importorskip("jax")
    leaves = dict(zip(member.names, [x.detach().float().numpy() for x in tensors("head", names=member.names)]))
    with jax.default_device(jax.devices("cpu")[0]):
        leaves = {name: jax.numpy.asarray(x).astype("bfloat16" if name in "qkv" else "float32") for name, x in leaves.items()}

        def total(*arrays):
            out, state = member.call(**dict(zip(leaves, arrays)), return_state=True)
            return (out.astype("float32") ** 2).sum() + (state**2).sum()

        out, state, stored = member.results(leaves)
        want = member.backward((2 * out.astype("float32")).astype("bfloat16"), **leaves, **stored, dstate=2 * state)
        gradient = jax.grad(total, tuple(range(len(leaves))))
        assert "bf16[1,1,2,16,16]" in str(jax.make_jaxpr(gradient)(*leaves.values()))  # states before chunks are stored
        for outputs in (gradient(*leaves.values()), jax.jit(gradient)(*leaves.values())):
            for x, y in zip(outputs, want, strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
