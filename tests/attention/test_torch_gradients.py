"""Gradients of attention.forward through torch: autograd, torch.compile, checkpoints, torch.func."""

import importlib

import numpy as np
import pytest

import attention
from tiles import bf16


def torch_inputs(*shape, device="cpu"):
    torch = pytest.importorskip("torch")
    return [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]


LOSSES = {  # (of out and lse, its gradients by them)
    "out": (lambda out, lse: out.float().square().sum(), lambda out, lse: ((2 * out.float()).bfloat16(), None)),
    "lse": (lambda out, lse: lse.square().sum(), lambda out, lse: (out * 0, 2 * lse)),
    "both": (
        lambda out, lse: out.float().square().sum() + lse.exp().sum(),
        lambda out, lse: ((2 * out.float()).bfloat16(), lse.exp()),
    ),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [dict(causal=True), dict(causal=True, window=(9, None))], ids=["plain", "window"])
@pytest.mark.parametrize("of", LOSSES)
def test_torch_tensors_that_require_grad(of, options, device):
    """Gradients through autograd, under torch.compile and with checkpoints, of a loss of out, of lse and of both, equal
    attention.backward's."""
    torch = pytest.importorskip("torch")
    inputs = torch_inputs(1, 24, 2, 64, device=device)
    of_results, gradients = LOSSES[of]

    def loss(q, k, v):
        return of_results(*attention.forward(q, k, v, return_lse=True, **options))

    outputs = torch.autograd.grad(loss(*inputs), inputs)
    out, lse = (x.detach() for x in attention.forward(*inputs, return_lse=True, **options))
    dout, dlse = gradients(out, lse)
    expected = attention.backward(dout, *inputs, out, lse, dlse=dlse, **options)
    assert not any(x.requires_grad for x in expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(*inputs), inputs)
    checkpoint_loss = torch.utils.checkpoint.checkpoint(loss, *inputs, use_reentrant=False)
    functional = torch.func.grad(loss, (0, 1, 2))(*[x.detach() for x in inputs])
    for one in (outputs, again, torch.autograd.grad(checkpoint_loss, inputs), functional):
        for x, y in zip(one, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def attended(q, k, v, **options):
    return attention.forward(q, k, v, layout="bhsd", return_lse=True, **options)


def of_softmax(q, k, v):
    """softmax(q k^T / 8) v and the log-sum-exp, in float64."""
    s = q.double() @ k.double().mT / 8
    return s.softmax(-1) @ v.double(), s.logsumexp(-1)


def joined(q, k, v):
    """Attention of two parts of the keys, merged by lse."""
    (out, lse), (more, its) = (attended(q, k[..., part, :], v[..., part, :]) for part in (slice(9), slice(9, None)))
    total_lse = lse.logaddexp(its)
    return (lse - total_lse).exp()[..., None] * out.double() + (its - total_lse).exp()[..., None] * more.double(), total_lse


USES = {
    "z-loss": (attended, lambda out, lse: out.square().sum() + 0.1 * lse.square().sum()),
    "sigmoid of lse": (attended, lambda out, lse: (out * (lse - 3).sigmoid()[..., None]).square().sum()),
    "parts": (joined, lambda out, lse: out.square().sum() - lse.cos().sum()),
}


@pytest.mark.parametrize("use", USES)
def test_what_lse_is_used_for(use):
    """A few optimiser steps give the formula's losses."""
    torch = pytest.importorskip("torch")
    function, of_results = USES[use]
    inputs = torch_inputs(1, 2, 24, 64)
    losses = [of_results(*[x.double() for x in one(*inputs)]) for one in (function, of_softmax)]
    for x, y in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        assert (x.double() - y.double()).norm() < 2**-7 * y.double().norm()


@pytest.mark.parametrize("options", [{}, {"softcap": 1e4}], ids=["plain", "softcap"])
def test_lse_of_a_query_that_sees_nothing_has_no_part_in_gradients(options):
    """lse of a row without keys is -inf, and its gradient may be -inf or NaN. With a sink lse is the sink, and has a
    gradient."""
    torch = pytest.importorskip("torch")
    q, (k, v) = torch_inputs(1, 1, 24, 64)[0], torch_inputs(1, 1, 16, 64)[:2]
    out, lse = attended(q, k, v, causal=True, **options)
    outputs = torch.autograd.grad(out.float().sum() + lse.square().sum() + (lse - lse).sum(), (q, k, v))
    out, lse = attended(q[..., 8:, :], k, v, causal=True, **options)
    expected = torch.autograd.grad(out.float().sum() + lse.square().sum(), (q, k, v))
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)
    sink = torch.tensor([0.5], requires_grad=True)
    of_sink, of_keys = attended(q, k, v, causal=True, sink=sink, **options)[1].split([8, 16], -1)
    torch.testing.assert_close(torch.autograd.grad(of_sink.sum(), sink, retain_graph=True)[0], torch.tensor([8.0]))
    of_keys.sum().backward()
    torch.testing.assert_close(sink.grad, (sink.detach() - of_keys.detach()).exp().sum()[None], rtol=1e-4, atol=1e-4)


WAYS = {  # of the gradient of a loss of q
    "eager": lambda torch, loss, q: torch.autograd.grad(loss(q), q),
    "torch.func.grad": lambda torch, loss, q: torch.func.grad(loss)(q.detach()),
    "vmap of it": lambda torch, loss, q: torch.vmap(torch.func.grad(loss))(q.detach()[None]),
    "it of vmap": lambda torch, loss, q: torch.func.grad(lambda q: torch.vmap(loss)(q).sum())(q.detach()[None]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_results_that_nobody_uses_cost_nothing(way, options, monkeypatch):
    """Without a gradient of lse no zeros are made, and the same kernels run; without any gradient nothing is computed."""
    torch = pytest.importorskip("torch")
    backward, asked = importlib.import_module("attention.public.softmax_backward"), []
    programs = [getattr(backward, name) for name in ("_backward", "_variant")]
    for program in programs:
        monkeypatch.setattr(program, "run", lambda *args, real=program.run: asked.append(args[1][6]) or real(*args))
    (q, *_) = torch_inputs(1, 8, 1, 64)
    WAYS[way](torch, lambda q: attention.forward(q, q, q, return_lse=True, **options)[0].float().sum(), q)
    assert asked == [None]
    WAYS[way](torch, lambda q: q.float().sum() + 0 * sum(len(x) for x in attention.forward(q, q, q, return_lse=True)), q)
    assert asked == [None]


def test_no_graph_has_zeros_for_an_lse_that_is_not_returned():
    """torch.compile makes zeros for each result without a gradient."""
    torch = pytest.importorskip("torch")
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, _: graphs.append(graph.code) or make_boxed_func(graph.forward),
    )
    (q, *_) = torch_inputs(1, 8, 1, 64)
    loss = lambda q: attention.forward(q, q, q, softcap=3.0).float().square().sum()
    torch.compile(loss, fullgraph=True, backend=backend)(q).backward()
    assert len(graphs) == 1 and "tiles.backward_variant" in graphs[0] and "zeros" not in graphs[0]


def test_backward_of_tensors_that_require_grad():
    """Gradients are plain tensors, as torch.autograd.grad returns them. torch.func.grad would treat them as constants, so the
    error says that they have no derivatives."""
    torch = pytest.importorskip("torch")
    inputs, ones = torch_inputs(1, 8, 1, 64), torch.ones(64, requires_grad=True)
    options = {"sink": ones[:1].detach().requires_grad_(), "q_norm": (ones.detach(), ones)}
    for more in {}, options:
        out, lse = attention.forward(*inputs, return_lse=True, **more)
        result = attention.backward(out, *inputs, out, lse, dlse=lse, **more)
        with torch.no_grad():
            expected = attention.backward(out, *inputs, out, lse, dlse=lse, **more)
        flat = [[x for one in actual for x in (one if isinstance(one, tuple) else (one,))] for actual in (result, expected)]
        assert not any(x.requires_grad for x in flat[0]) and all(map(torch.equal, *flat))
    *rest, out, lse = (x.detach() for x in (*inputs, out, lse))
    twice = torch.func.grad(lambda q: attention.backward(out, q, *rest[1:], out, lse)[0].float().sum())
    with pytest.raises(NotImplementedError, match="^q: requires grad, but this call computes no gradient"):
        twice(rest[0])


@pytest.mark.parametrize("case", ["keys are values", "one array of ends"])
def test_one_tensor_in_two_places(case):
    """Eagerly and in a graph: an array that is q, k and v at once, or both cu_seqlens."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 24, 2, 64)
    ends = torch.tensor([0, 9, 24], dtype=torch.int32)
    options = {"cu_seqlens": ends, "cu_seqlens_k": ends} if case == "one array of ends" else {}

    def once(q, k, v):
        return attention.forward(q, k, v, causal=True, **options) if options else attention.forward(k, k, k, causal=True)

    inputs = (q, k, v) if options else (k,)
    expected = torch.autograd.grad(once(q, k, v).float().square().sum(), inputs)
    compiled = torch.compile(once, fullgraph=True, backend="aot_eager")
    outputs = torch.autograd.grad(compiled(q, k, v).float().square().sum(), inputs)
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def test_what_dynamo_gives_up_on():
    """Dynamo traces torch.func.grad, but not an autograd.Function inside: the call runs eagerly, and Dynamo does not trace into
    the program. With fullgraph=True the error says what to do."""
    torch = pytest.importorskip("torch")
    q = torch_inputs(1, 24, 2, 64)[0].detach()
    derived = torch.func.grad(lambda x: attention.forward(x, x, x, causal=True).float().square().sum())
    torch.testing.assert_close(torch.compile(derived, backend="aot_eager")(q), derived(q))
    torch.compiler.reset()
    with pytest.raises(Exception, match="no gradient without its function; where torch.compile traces torch.func.grad leave"):
        torch.compile(derived, backend="aot_eager", fullgraph=True)(q)


OPTIONS = {
    "packed": dict(cu_seqlens=np.array([0, 9, 24], np.int32), causal=True),
    "keys in use, in order": dict(lengths_k=np.array([17], np.int32), deterministic=True),
    "dropout": dict(dropout=0.4, seed=7, window=(9, None)),
    "seed in memory": dict(dropout=0.4, seed=np.array([7])),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_torch_tensors_with_options(case):
    """Gradients through autograd and under torch.compile equal attention.backward's."""
    torch = pytest.importorskip("torch")
    inputs = torch_inputs(1, 24, 1, 64)
    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in OPTIONS[case].items()}

    def loss(q, k, v):
        return attention.forward(q, k, v, **options).float().square().sum()

    outputs = torch.autograd.grad(loss(*inputs), inputs)
    again = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    with torch.no_grad():
        out, lse = attention.forward(*inputs, return_lse=True, **options)
        expected = attention.backward((2 * out.float()).bfloat16(), *inputs, out, lse, **options)
    for x, y, z in zip(outputs, again, expected, strict=True):
        torch.testing.assert_close(x, z, rtol=2**-6, atol=2**-8)
        torch.testing.assert_close(y, z, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("options", [{}, {"window": (3, None)}])
def test_autograd_is_deterministic_where_torch_is(monkeypatch, options):
    """deterministic algorithms are respected for q, k and v alone, and with further gradients."""
    torch = pytest.importorskip("torch")
    from attention import autograd

    backward = importlib.import_module("attention.public.softmax_backward")
    (q, *_), asked, real, plain = torch_inputs(1, 8, 1, 64), [], autograd.compute_gradients, backward.backward_without_options
    monkeypatch.setattr(
        autograd, "compute_gradients", lambda *args: asked.append(args[5].get("deterministic", False)) or real(*args)
    )
    monkeypatch.setattr(backward, "backward_without_options", lambda *args: asked.append(args[3]) or plain(*args))
    for on, of_call in ((False, False), (True, False), (False, True)):
        torch.use_deterministic_algorithms(on)
        try:
            attention.forward(q, q, q, deterministic=of_call, **options).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_what_asks_for_other_derivatives_is_told_what_there_is(options):
    """Forward-mode derivatives of tensors that require grad; many gradients at once, by a vmap that no op sees."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^k: has a tangent"):
        attention.forward(q, torch.autograd.forward_ad.make_dual(k, k.detach()), v, **options)
    with pytest.raises(NotImplementedError, match=r"^attention\.forward: has no forward-mode derivatives \(jvp, .* hessian"):
        torch.func.hessian(lambda k: attention.forward(q, k, v, **options).float().sum())(k.detach())
    out, many = attention.forward(q, k, v, **options), torch.ones(2, 1, 8, 1, 64).bfloat16()
    with pytest.raises(TypeError, match=r"^dout: stands for many gradients at once.* torch\.func\.vjp and torch\.vmap"):
        torch.autograd.grad(out, q, many, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors_are_told_of_packed_ones(layout, grad):
    torch = pytest.importorskip("torch")
    rows = [torch.zeros(n, 2, 64).bfloat16() for n in (3, 4)]
    x = torch.nested.nested_tensor(rows, layout=getattr(torch, layout), requires_grad=grad)
    with pytest.raises(TypeError, match=r"^q: is a NestedTensor, .* q\.values\(\)\[None\], and cu_seqlens=q\.offsets\(\)"):
        attention.forward(x, x, x)


@pytest.mark.parametrize("slopes", [False, True])
def test_gradients_are_added_to_tensors(slopes):
    """accumulate=True adds to the arrays, in eager calls and in compiled ones, where torch sees the writes."""
    torch = pytest.importorskip("torch")
    q, k, v = (x.detach() for x in torch_inputs(1, 12, 1, 64))
    options = {"alibi": torch.tensor([0.2])} if slopes else {}
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    names = "dq", "dk", "dv", *["dalibi"] * slopes
    eager, compiled = ([*(torch.ones(q.shape) for _ in range(3)), *[torch.ones(1)] * slopes] for _ in range(2))

    def add(*result):
        attention.backward(q, q, k, v, out, lse, accumulate=True, **dict(zip(names, result)), **options)
        return result[0] + 0

    assert (add(*eager) == eager[0]).all()
    assert (torch.compile(add, fullgraph=True, backend="aot_eager")(*compiled) == eager[0]).all()
    asked = {"dalibi": True} if slopes else {}
    for x, y, z in zip(eager, compiled, attention.backward(q, q, k, v, out, lse, **options, **asked), strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(x - 1, z.float(), rtol=2**-7, atol=2**-6)  # by a kernel that rounds otherwise


def test_autograd_takes_an_expanded_gradient_and_autocast():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 20, 1, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention.forward(q, q, q, return_lse=True)
    assert out.dtype is torch.bfloat16
    (out.sum() + lse.sum()).backward()
    assert q.grad.dtype is torch.float32 and torch.isfinite(q.grad).all() and q.grad.abs().max() > 0


def test_what_autograd_refuses():
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    out, lse = attention.forward(q, k, v, return_lse=True)
    for loss in (out.sum(), out.float().square().sum(), lse.sum(), lse.square().sum()):
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            torch.autograd.grad(loss, q, create_graph=True, retain_graph=True)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda y: attention.forward(y, y, y).float().sum())(x).float().sum())
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        twice(q.detach())
    with pytest.raises(NotImplementedError, match="out: is not supported for tensors that require grad; omit it"):
        attention.forward(q, k, v, out=torch.empty_like(q.detach()))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("name", ["lse", "accumulate"])
def test_what_would_be_forgotten_is_refused(name, options):
    """A failed call has neither written lse= nor added to any array."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    inputs = {"lse": {"lse": torch.zeros(1, 1, 8), "return_lse": True}, "accumulate": {"accumulate": True}}[name]
    with pytest.raises(NotImplementedError, match=f"{name}: is not supported for tensors that require grad"):
        attention.forward(q, k, v, **inputs, **options)


def test_options_that_are_numpys():
    """NumPy arrays as options are supported for tensors in host memory, with and without gradients: torch saves nothing else
    for the backward pass."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    for theirs, ours in (
        ({"dropout": 0.25, "seed": np.int64(3)}, {"dropout": 0.25, "seed": 3}),
        ({"cu_seqlens": np.array([0, 3, 8], np.int32)}, {"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32)}),
    ):
        one, other = (torch.autograd.grad(attention.forward(q, k, v, **inputs).sum(), (k, v)) for inputs in (theirs, ours))
        assert all(map(torch.equal, one, other))


def test_options_that_are_numpys_may_change_before_the_backward_pass():
    """An array is changed between forward and backward, like a seed that counts up per layer: torch would notice it of a
    tensor, and cannot of an array."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    seed, bias = np.array([3]), np.ones((1, 1, 8, 8), bf16.np)  # of which torch knows no dtype
    bias.setflags(write=False)
    out = attention.forward(q, k, v, dropout=0.25, seed=seed, bias=bias)
    expected = torch.autograd.grad(out.sum(), (k, v), retain_graph=True)
    seed += 1
    bias.setflags(write=True)
    bias[..., :4] = 0
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (k, v)), expected))


@pytest.mark.parametrize("name", ["q", "k", "cu_seqlens", "lengths_k"])
def test_a_list_is_no_array(name):
    torch = pytest.importorskip("torch")
    q = torch_inputs(1, 8, 1, 64)[0]
    for x in (q.detach(), q):
        for options in ({}, {"softcap": 3.0}):
            for wrong in ([0, 8], None) if name in ("q", "k") else ([0, 8],):
                with pytest.raises(TypeError, match=f"^{name}: must be an array"), torch.autocast("cpu", torch.bfloat16):
                    attention.forward(**({"q": x, "k": x, "v": x} | {name: wrong}), **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_keys_that_are_numpys(options):
    """As without gradients, for tensors in host memory."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    numpy_k = k.detach().view(torch.int16).numpy().view(bf16.np)
    expected = torch.autograd.grad(attention.forward(q, k, v, **options).sum(), (q, v))
    assert all(map(torch.equal, torch.autograd.grad(attention.forward(q, numpy_k, v, **options).sum(), (q, v)), expected))


def test_lists_that_are_made_where_a_gradient_is_to_come():
    """Inside a module that is trained: they depend on no tensor that requires grad."""
    torch = pytest.importorskip("torch")
    inputs, docs = torch_inputs(1, 24, 2, 64), torch.arange(24) // 9
    call_options = dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
    expected = torch.autograd.grad(attention.forward(*inputs, **call_options).float().square().sum(), inputs)
    lists = attention.block_lists(*inputs, **call_options)
    outputs = torch.autograd.grad(attention.forward(*inputs, blocks=lists, **call_options).float().square().sum(), inputs)
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def test_what_has_no_gradient_is_named():
    torch = pytest.importorskip("torch")
    q = torch_inputs(1, 8, 1, 64)[0]
    with pytest.raises(NotImplementedError, match=r"^lengths_k: of shape \(B, C\) it has no gradient"):
        attention.forward(q, q, q, lengths_k=torch.tensor([[4, 8]]))
    with pytest.raises(NotImplementedError, match=r"^lengths_k: requires grad, and has no gradient; pass lengths_k\.detach"):
        attention.forward(q, q, q, lengths_k=torch.tensor([4.0], requires_grad=True))
    with pytest.raises(TypeError, match="^aux: must be up to 8 arrays: 9 of"):
        attention.forward(q, q, q, score=lambda s, b, h, i, j, *aux: s, aux=(torch.ones(1),) * 9)
    many = torch.zeros(1, requires_grad=True).expand(2**24)
    with pytest.raises(ValueError, match=r"^aux0: requires grad, and has 2\*\*24 elements or more, .* pass it as bias, or"):
        attention.forward(q, q, q, score=lambda s, b, h, i, j, many: s + many[j], aux=(many,))
