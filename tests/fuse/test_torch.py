"""Fused functions on torch's tensors: their values, torch.compile, gradients, and fuse as a backend."""

import pytest

import fuse
import fuse.operators as operators

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def tensors(*shapes):
    return [torch.randn(s, dtype=torch.bfloat16) / max(1, s[0] * (len(s) > 1)) ** 0.5 for s in shapes]


def close(outputs, want, bits=6):
    assert (outputs.double() - want.double()).abs().max() <= 2**-bits * want.abs().max()


def test_values():
    x, g, w = tensors((3, 40), (40,), (40, 24))
    close(operators.rms_norm_linear(x, g, w), F.rms_norm(x.double(), (40,), g.double(), 1e-5) @ w.double())


def test_compiled():
    """One graph, for any number of rows, and weights as nn.Linear stores them."""
    x, g, w = tensors((3, 40), (40,), (40, 24))
    step = torch.compile(lambda x, g, w: operators.rms_norm_linear(x * 2, g, w) + 1, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 9):
        x = torch.randn(rows, 40, dtype=torch.bfloat16)
        assert torch.equal(step(x, g, w), operators.rms_norm_linear(x * 2, g, w) + 1)
    transposed = w.t().contiguous().t()
    assert torch.equal(step(x, g, transposed), operators.rms_norm_linear(x * 2, g, transposed) + 1)


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2)])
def test_compiled_for_all_rows(dynamic, graphs):
    """One graph serves all classes of rows. Without dynamic=True torch specialises on the first number."""
    result = []

    def backend(graph, _):
        result.append(graph)
        return graph.forward

    x, g, w = tensors((70, 40), (40,), (40, 24))
    step = torch.compile(lambda *args: operators.rms_norm_linear(*args), fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 5, 20, 70, 33):
        assert torch.equal(step(x[:rows], g, w), operators.rms_norm_linear(x[:rows], g, w))
    assert len(result) == graphs


def test_compiled_with_names_that_are_not_ascii():
    """Torch's op signatures allow ASCII only."""
    x, w = tensors((5, 64), (64, 32))

    @fuse.kernel
    def größe(x, Δ, δ):
        return fuse.gelu(x @ Δ) * δ

    close(torch.compile(größe, backend="eager", fullgraph=True)(x, w, 0.5), größe._by_parts(x, w, 0.5))


def test_other_dtypes_compiled():
    """fp8 in and out, scales of float32, a seed in memory."""
    x, r, g = tensors((5, 48), (5, 48), (48,))
    w, scale = torch.randn(32, 48).to(torch.float8_e4m3fn).t(), torch.rand(32)
    quantise = torch.compile(lambda *args: operators.residual_rms_norm_quantise(*args), fullgraph=True, backend="aot_eager")
    outputs, want = quantise(x, r, g), operators.residual_rms_norm_quantise(x, r, g)
    assert [y.dtype for y in outputs] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(outputs, want))
    linear = torch.compile(lambda *args: operators.fp8_linear(*args), fullgraph=True, backend="aot_eager")
    close(linear(x, w, scale), x.double() @ (w.double() * scale))
    dropped = torch.compile(lambda *args: operators.dropout_residual_layer_norm(*args), fullgraph=True, backend="aot_eager")
    results = [dropped(x, r, g, g, torch.tensor([seed]))[1] for seed in (5, 5, 6)]
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_by_parts_of_several_dtypes(compiled):
    """Torch multiplies no fp8, and no bf16 by float32."""
    (x,) = tensors((5, 48))
    w, scale = torch.randn(32, 48).to(torch.float8_e4m3fn).t(), torch.rand(32)
    x.requires_grad_()
    linear = operators.fp8_linear
    if compiled:
        linear = torch.compile(lambda *args: operators.fp8_linear(*args), fullgraph=True, backend="aot_eager")
    y = linear(x, w, scale)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    close(x.grad, (w.double() * scale).sum(1).expand(5, 48), 5)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled):
    x, g = (t.requires_grad_() for t in tensors((3, 40), (40,)))
    r = torch.zeros_like(x)
    function = operators.residual_rms_norm
    if compiled:
        function = torch.compile(lambda *args: operators.residual_rms_norm(*args), fullgraph=True, backend="aot_eager")
    y, h = function(x, r, g)
    (y * h).sum().backward()
    x64, g64 = (t.detach().double().requires_grad_() for t in (x, g))
    (F.rms_norm(x64, (40,), g64, 1e-5) * x64).sum().backward()
    close(x.grad, x64.grad, 5)
    close(g.grad, g64.grad, 5)


def test_gradients_by_kernels(monkeypatch):
    """No op of the definition runs backward; compiled, in one graph and for any number of rows, gradients are the same."""
    monkeypatch.setattr("fuse.calls.autograd.by_parts", None)
    monkeypatch.setattr(fuse.Fused, "_by_parts", None)
    norm = operators.residual_rms_norm
    compiled = torch.compile(lambda *args: norm(*args), fullgraph=True, backend="aot_eager")
    for lead in ((3,), (2, 4)):
        (x, r), g = [torch.randn(*lead, 40).bfloat16().requires_grad_() for _ in "xr"], tensors((40,))[0].requires_grad_()
        actual = [torch.autograd.grad((function(x, r, g)[0] * 2).sum(), (x, r, g)) for function in (norm, compiled)]
        x64, g64 = (t.detach().double().requires_grad_() for t in (x + r, g))
        (F.rms_norm(x64, (40,), g64, 1e-5) * 2).sum().backward()
        for eager, result, ref in zip(*actual, (x64, x64, g64)):
            assert torch.equal(eager, result)
            close(eager, ref.grad, 5)


def test_pieces_by_parts():
    """Where kernels cannot take the arrays, torch's ops on a gradient's terms compute the kernel outputs."""
    x, cos, dy = tensors((3, 48), (3, 24), (3, 48))
    gradient = operators.rotary.gradient
    for outputs, want in zip(gradient._by_parts(*gradient._arguments((x, cos, cos, dy))), gradient(x, cos, cos, dy)):
        close(outputs, want)
    x, w, one = *tensors((5, 40), (40, 24)), torch.ones(5, 1)
    gradient, args = operators.linear_cross_entropy.gradient, (x, w, torch.tensor([3, 0, -100, 23, 7]), one, one)
    for outputs, want in zip(gradient._by_parts(*gradient._arguments(args)), fuse.Fused.run(gradient, *args)):
        close(outputs, want)


def test_gradients_under_autocast():
    """float32 products, which no template computes, run by parts, with float32 gradients."""
    x, g, w = (torch.randn(s, requires_grad=True) for s in ((3, 40), (40,), (40, 24)))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning, match="no template computes matmul"):
        y = operators.rms_norm_linear(x, g, w)
    y.float().sum().backward()
    x64, g64, w64 = (t.detach().double().requires_grad_() for t in (x, g, w))
    (F.rms_norm(x64, (40,), g64, 1e-5) @ w64).sum().backward()
    for t, ref in zip((x, g, w), (x64, g64, w64)):
        assert y.dtype == torch.bfloat16 and t.grad.dtype == torch.float32
        close(t.grad, ref.grad, 16)


def test_one_gradient_by_kernels_another_by_parts():
    function = fuse.kernel(lambda x, y: (fuse.silu(x) * 2.0, fuse.concatenate([y, y, y]) * 1.0))
    x, y = (t.requires_grad_() for t in tensors((3, 40), (3, 8)))
    with pytest.warns(RuntimeWarning, match="no template computes concat"):
        args = function(x, y)
    (args[0].sum() + args[1].sum()).backward()
    assert [*function.gradients.served_names.values()] == [("x",)]
    s = x.detach().double().sigmoid()
    close(x.grad, 2 * s * (1 + x.detach().double() * (1 - s)))
    assert (y.grad == 3).all()
    x.grad = None
    function(x, y.detach())[0].sum().backward()  # the other result is not used
    close(x.grad, 2 * s * (1 + x.detach().double() * (1 - s)))


def test_backend(monkeypatch):
    """A norm, a gated MLP and the residual are fused; the rest of the graph is left to inductor."""
    targets = []

    def rest(graph, inputs, config_patches):
        assert config_patches == {"fx_graph_cache": False}  # a graph with our functions has no name
        targets.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: rest)

    def layer(x, g, gate, up, down):
        h = F.rms_norm(x, x.shape[-1:], g, 1e-5)
        return torch.cumsum(x + (F.silu(h @ gate) * (h @ up)) @ down, 0)

    args = tensors((3, 40), (40,), (40, 24), (40, 24), (24, 40))
    with torch.no_grad():
        close(torch.compile(layer, backend=fuse.backend, fullgraph=True)(*args), layer(*[t.double() for t in args]))
    assert len(targets[0]) == 2 and "fused" in targets[0][0] and targets[0][1] is torch.cumsum


def test_gradients_with_the_backend(monkeypatch):
    """Kernels compute the gradients of the fused subgraphs."""
    aot = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: lambda graph, inputs, **_: aot(graph, inputs))
    monkeypatch.setattr(fuse.Fused, "_by_parts", None)
    args = [t.requires_grad_() for t in tensors((3, 40), (40,), (40, 24))]

    def layer(x, g, w):
        return torch.cumsum(F.rms_norm(x, x.shape[-1:], g, 1e-5) @ w, 0)

    torch.compile(layer, backend=fuse.backend, fullgraph=True)(*args).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in args]
    layer(*wide).sum().backward()
    for t, ref in zip(args, wide):
        close(t.grad, ref.grad, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: F.rms_norm(x, x.shape[-1:], g),  # eps is torch's, by the dtype
        lambda x, g: (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, keepdim=True) + 1e-5)) * g.float(),  # fp32 out
    ],
    ids=["eps", "dtype"],
)
def test_backend_leaves_what_it_would_change(function, monkeypatch):
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: lambda graph, inputs: graph.forward)
    x, g = tensors((3, 40), (40,))
    with torch.no_grad():
        outputs, want = torch.compile(function, backend=fuse.backend, fullgraph=True)(x, g), function(x, g)
    assert outputs.dtype == want.dtype and torch.equal(outputs, want)


def test_numbers_beside_a_mask():
    """Numbers become numbers of the other arguments' dtype, not booleans."""
    x = torch.tensor([[3.0, -1.0, 2.0], [-4.0, -2.0, -3.0]], dtype=torch.bfloat16)
    assert torch.equal(fuse.where(x > 0, x, -2.5), torch.where(x > 0, x, torch.tensor(-2.5, dtype=x.dtype)))
    assert fuse.top(x, 2).tolist() == [[3, 0, 2], [0, -2, -3]]


def test_experts():
    """The definition runs on torch's tensors, and its gradient reaches the experts."""
    *args, down = tensors((3, 16), (16, 8), (8, 128, 16), (8, 128, 16), (8, 128, 16))
    args = *args, down
    close(
        operators.mixture_of_experts(*args),
        operators.mixture_of_experts.definition(*[t.double() for t in args]),
        5,
    )
    down.requires_grad_()
    operators.mixture_of_experts(*args).sum().backward()
    assert down.grad.isfinite().all() and (down.grad != 0).any(-1).any(-1).sum() >= 2


def test_what_says_how_it_is_computed_takes_what_requires_grad():
    """explain, source and proof take tensors that require grad, as a model's weights do."""
    args = [x.requires_grad_() for x in tensors((3, 40), (40,), (40, 24))]
    plain = [x.detach() for x in args]
    for name, how in ("explain", {}), ("source", {}), ("proof", {"seed": 1}):
        says = getattr(operators.rms_norm_linear, name)
        assert str(says(*args, **how)) == str(says(*plain, **how))


def test_what_has_no_kernel():
    """It runs by parts, and the warning says why."""
    kernel = fuse.kernel(lambda x: fuse.concatenate([x, x]) * 2.0)
    (x,) = tensors((3, 40))
    with pytest.warns(RuntimeWarning, match="no template computes concat"):
        assert torch.equal(kernel(x), torch.cat([x, x], -1) * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_of_cross_entropy(compiled):
    """By parts, with ignored targets left out by the caller."""
    x, w = (t.requires_grad_() for t in tensors((5, 40), (40, 24)))
    target = torch.tensor([3, 0, -100, 23, 7])
    function = operators.linear_cross_entropy
    if compiled:
        function = torch.compile(lambda *args: operators.linear_cross_entropy(*args), fullgraph=True, backend="aot_eager")
    loss, lse = function(x, w, target)
    assert loss.dtype == lse.dtype == torch.float32 and loss.shape == (5, 1)
    loss[target >= 0].sum().backward()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    expected = F.cross_entropy(x64 @ w64, target, reduction="sum")
    expected.backward()
    close(loss.detach()[target >= 0].sum(), expected.detach())
    close(x.grad, x64.grad, 5)
    close(w.grad, w64.grad, 5)


def test_adapters_by_index():
    """Their values, and gradients that reach the chosen adapters only."""
    x, w, a, b = tensors((5, 40), (40, 24), (2, 8, 40), (2, 8, 24))
    index = torch.tensor([1, -1, 1, 1, 1])
    lora_part = (x.double()[:, None] @ a.double()[1].T @ b.double()[1])[:, 0] * (index >= 0)[:, None]
    close(operators.lora_linear_by_index(x, w, a, b, index), x.double() @ w.double() + lora_part)
    b.requires_grad_()
    operators.lora_linear_by_index(x, w, a, b, index).sum().backward()
    low = (x.double() @ a.double()[1].T)[index >= 0].sum(0)
    assert not b.grad[0].any() and (b.grad[1].double() - low[:, None]).abs().max() <= 2**-5 * low.abs().max()


@fuse.kernel
def scaled_norm(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


def test_transforms_of_torch_func():
    """They run by parts, whose torch ops support vmap and grad."""
    x, g = torch.randn(3, 5, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    total = lambda x, g: scaled_norm(x, g).float().square().sum()
    each = [x.clone().requires_grad_(), g.clone().requires_grad_()]
    sum(total(a, b) for a, b in zip(*each)).backward()
    outside = [x.clone().requires_grad_(), g.clone().requires_grad_()]
    torch.vmap(scaled_norm)(*outside).float().square().sum().backward()
    inside = torch.vmap(torch.func.grad(total, (0, 1)))(x, g)
    for expected, a, b in zip(each, outside, inside, strict=True):
        for outputs in a.grad, b:
            close(outputs, expected.grad, bits=5)  # parts round after each


def test_a_tangent_of_a_fused_function_is_refused():
    x, g = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    with pytest.raises(NotImplementedError, match="^x: has a tangent"):
        torch.func.jvp(lambda x: scaled_norm(x, g), (x,), (x,))
