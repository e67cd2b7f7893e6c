"""The gradients of attention.forward through torch: autograd, torch.compile, checkpoints, torch.func."""

import importlib

import numpy as np
import pytest

import attention
from tiles import bf16


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


@pytest.mark.parametrize("case", ["keys are values", "one array of ends"])
def test_one_tensor_in_two_places(case):
    """Eagerly and in a graph: as what is queries, keys and values, or says where queries and keys end."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 24, 2, 64)
    ends = torch.tensor([0, 9, 24], dtype=torch.int32)
    options = {"cu_seqlens": ends, "cu_seqlens_k": ends} if case == "one array of ends" else {}

    def once(q, k, v):
        return attention.forward(q, k, v, causal=True, **options) if options else attention.forward(k, k, k, causal=True)

    given = (q, k, v) if options else (k,)
    wanted = torch.autograd.grad(once(q, k, v).float().square().sum(), given)
    got = torch.autograd.grad(torch.compile(once, fullgraph=True, backend="aot_eager")(q, k, v).float().square().sum(), given)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def test_what_dynamo_gives_up_on():
    """It traces torch.func.grad, but not an autograd.Function in it: then all runs as it is, and Dynamo, which looks at every
    function that is called next, does not look into the program. With fullgraph=True the error says what to do."""
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
    """Through autograd and under torch.compile: what backward gives."""
    torch = pytest.importorskip("torch")
    given = torch_inputs(1, 24, 1, 64)
    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in OPTIONS[case].items()}

    def loss(q, k, v):
        return attention.forward(q, k, v, **options).float().square().sum()

    got = torch.autograd.grad(loss(*given), given)
    again = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*given), given)
    with torch.no_grad():
        out, lse = attention.forward(*given, return_lse=True, **options)
        wanted = attention.backward((2 * out.float()).bfloat16(), *given, out, lse, **options)
    for x, y, z in zip(got, again, wanted, strict=True):
        torch.testing.assert_close(x, z, rtol=2**-6, atol=2**-8)
        torch.testing.assert_close(y, z, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("options", [{}, {"window": (3, None)}])
def test_autograd_is_deterministic_where_torch_is(monkeypatch, options):
    """In either of its ways: of q, k and v alone, and with more."""
    torch = pytest.importorskip("torch")
    from attention.softmax import autograd

    backward = importlib.import_module("attention.softmax.backward.backward")
    (q, *_), asked, real, plain = torch_inputs(1, 8, 1, 64), [], autograd.gradients, backward.plain
    monkeypatch.setattr(autograd, "gradients", lambda *args: asked.append(args[4].get("deterministic", False)) or real(*args))
    monkeypatch.setattr(backward, "plain", lambda *args: asked.append(args[3]) or plain(*args))
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
    """By accumulate=True, in eager calls and in those that torch compiles, which then knows of the writes, to what is given."""
    torch = pytest.importorskip("torch")
    q, k, v = (x.detach() for x in torch_inputs(1, 12, 1, 64))
    options = {"alibi": torch.tensor([0.2])} if slopes else {}
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    names = "dq", "dk", "dv", *["dalibi"] * slopes
    eager, compiled = ([*(torch.ones(q.shape) for _ in range(3)), *[torch.ones(1)] * slopes] for _ in range(2))

    def add(*made):
        attention.backward(q, q, k, v, out, lse, accumulate=True, **dict(zip(names, made)), **options)
        return made[0] + 0

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
    with pytest.raises(NotImplementedError, match="out: cannot be given where a gradient is to come; leave it out"):
        attention.forward(q, k, v, out=torch.empty_like(q.detach()))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("name", ["lse", "accumulate"])
def test_what_would_be_forgotten_is_refused(name, options):
    """lse= was not written, and nothing was added to anything."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    given = {"lse": {"lse": torch.zeros(1, 1, 8), "return_lse": True}, "accumulate": {"accumulate": True}}[name]
    with pytest.raises(NotImplementedError, match=f"{name}: cannot be given where a gradient is to come"):
        attention.forward(q, k, v, **given, **options)


def test_options_that_are_numpys():
    """They serve tensors in host memory without gradients, and so with them: torch keeps nothing else for the backward pass."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    for theirs, ours in (
        ({"dropout": 0.25, "seed": np.int64(3)}, {"dropout": 0.25, "seed": 3}),
        ({"cu_seqlens": np.array([0, 3, 8], np.int32)}, {"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32)}),
    ):
        one, other = (torch.autograd.grad(attention.forward(q, k, v, **given).sum(), (k, v)) for given in (theirs, ours))
        assert all(map(torch.equal, one, other))


def test_options_that_are_numpys_may_change_before_the_backward_pass():
    """As a seed does that counts up from layer to layer: torch would notice of a tensor, and can not of an array."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    seed, bias = np.array([3]), np.ones((1, 1, 8, 8), bf16.np)  # of which torch knows no dtype
    bias.setflags(write=False)
    out = attention.forward(q, k, v, dropout=0.25, seed=seed, bias=bias)
    wanted = torch.autograd.grad(out.sum(), (k, v), retain_graph=True)
    seed += 1
    bias.setflags(write=True)
    bias[..., :4] = 0
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (k, v)), wanted))


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
    """As without gradients, where tensors lie in host memory."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_inputs(1, 8, 1, 64)
    held = k.detach().view(torch.int16).numpy().view(bf16.np)
    wanted = torch.autograd.grad(attention.forward(q, k, v, **options).sum(), (q, v))
    assert all(map(torch.equal, torch.autograd.grad(attention.forward(q, held, v, **options).sum(), (q, v)), wanted))


def test_lists_that_are_made_where_a_gradient_is_to_come():
    """As within a model that is trained: they depend on no tensor that requires grad."""
    torch = pytest.importorskip("torch")
    given, docs = torch_inputs(1, 24, 2, 64), torch.arange(24) // 9
    told = dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
    wanted = torch.autograd.grad(attention.forward(*given, **told).float().square().sum(), given)
    lists = attention.block_lists(*given, **told)
    got = torch.autograd.grad(attention.forward(*given, blocks=lists, **told).float().square().sum(), given)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-8)


def test_what_has_no_gradient_is_named():
    torch = pytest.importorskip("torch")
    q = torch_inputs(1, 8, 1, 64)[0]
    with pytest.raises(NotImplementedError, match=r"^lengths_k: there is no gradient where it has a number for each part"):
        attention.forward(q, q, q, lengths_k=torch.tensor([[4, 8]]))
    with pytest.raises(NotImplementedError, match=r"^lengths_k: requires grad, and has no gradient; pass lengths_k\.detach"):
        attention.forward(q, q, q, lengths_k=torch.tensor([4.0], requires_grad=True))
    with pytest.raises(TypeError, match="^aux: must be up to 8 arrays: 9 of"):
        attention.forward(q, q, q, score=lambda s, b, h, i, j, *aux: s, aux=(torch.ones(1),) * 9)
    many = torch.zeros(1, requires_grad=True).expand(2**24)
    with pytest.raises(ValueError, match=r"^aux0: requires grad, and has 2\*\*24 elements or more, .* pass it as bias, or"):
        attention.forward(q, q, q, score=lambda s, b, h, i, j, many: s + many[j], aux=(many,))
