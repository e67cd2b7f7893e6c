"""attention.nn.Attention, compared with the same module in plain torch, in float32; on torch's CPU wheel through the
interpreter."""

import pytest

torch = pytest.importorskip("torch")
from attention import nn  # noqa: E402
from attention.nn import Attention  # noqa: E402

DIM, TOKENS = 48, 20
# name: (arguments of the module, options of a call)
CASES = {
    "plain": (dict(heads=2, head_dim=16), {}),
    "all": (dict(heads=4, kv_heads=2, head_dim=16, causal=True, window=(7, None), sink=True, qk_norm=True, rotary=100.0,
                 bias=True), dict(positions=torch.arange(3, 3 + TOKENS))),
    "one head of keys": (dict(heads=2, kv_heads=1, qk_norm=True, softcap=2.0, scale=0.3), {}),
    "positions of each sequence": (dict(heads=3, head_dim=8, rotary=10_000.0, causal=True),
                                   dict(positions=torch.randint(50, (2, TOKENS)))),
    "at once": (dict(heads=2, kv_heads=1, head_dim=64, rotary=10_000.0), {}),
    "at once, all": (dict(heads=4, kv_heads=2, head_dim=64, causal=True, window=(7, None), sink=True, qk_norm=True,
                          rotary=100.0, bias=True, softcap=9.0, scale=0.2), dict(positions=torch.arange(3, 3 + TOKENS))),
    "one row of positions": (dict(heads=2, head_dim=16, rotary=100.0), dict(positions=3 * torch.arange(TOKENS)[None])),
    "at once, one row of positions": (dict(heads=1, head_dim=64, rotary=100.0),
                                      dict(positions=3 * torch.arange(TOKENS)[None])),
    "at once, norms": (dict(heads=1, head_dim=128, causal=True, qk_norm=True, rotary=100.0), {}),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


def made(name, dtype=torch.bfloat16, device="cpu"):
    """(the module, the options of its call, its input, and the gradient of its output)"""
    torch.manual_seed(0)
    arguments, options = CASES[name]
    module = Attention(DIM, **arguments, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    x, dout = (torch.randn(2, TOKENS, DIM, device=device).to(dtype) for _ in range(2))
    return module, {name: value.to(device) for name, value in options.items()}, x.requires_grad_(), dout


def plain(module, x, positions=None):
    """The formula of the class's docstring, in x's dtype."""
    W, tokens, dim = {name: p.to(x.dtype) for name, p in module.named_parameters()}, x.shape[1], module.head_dim
    y = torch.nn.functional.linear(x, W["project.weight"], W.get("project.bias")).unflatten(-1, (-1, dim)).transpose(1, 2)
    q, k, v = y.split([module.heads, module.kv_heads, module.kv_heads], 1)
    if "q_norm.weight" in W:
        q, k = (
            (z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt()) * W[f"{n}_norm.weight"] for n, z in (("q", q), ("k", k))
        )
    if module.rotary:
        at = torch.arange(tokens) if positions is None else positions
        turn = at.reshape(-1, 1, tokens, 1) / module.rotary ** (torch.arange(dim // 2) * 2 / dim)
        turn = torch.polar(torch.ones_like(turn, dtype=x.dtype), turn.to(x.dtype))
        pairs = [torch.complex(*z.chunk(2, -1)) * turn for z in (q, k)]
        q, k = (torch.cat([z.real, z.imag], -1) for z in pairs)
    k, v = (z.repeat_interleave(module.heads // module.kv_heads, 1) for z in (k, v))
    s = q @ k.transpose(-1, -2) * (module.options["scale"] or dim**-0.5)
    if cap := module.options["softcap"]:
        s = cap * (s / cap).tanh()
    far = torch.arange(tokens) - torch.arange(tokens)[:, None]
    left, _ = module.options["window"] or (None, None)
    seen = (far <= 0 if module.options["causal"] else far == far) & (far >= (-tokens if left is None else -left))
    s = s.masked_fill(~seen, -torch.inf)
    if "sink" in W:
        s = torch.cat([s, W["sink"][:, None, None].expand(len(s), -1, tokens, 1)], -1)
    out = s.softmax(-1)[..., :tokens] @ v
    return torch.nn.functional.linear(out.transpose(1, 2).flatten(-2), W["out.weight"], W.get("out.bias"))


def assert_near(actual, expected, name):
    """Close within the precision of bfloat16."""
    assert (actual.double() - expected).abs().max() < 0.03 * expected.abs().max() + 1e-6, name


@every_case
def test_is_what_it_says(name):
    """The module's output, and all gradients."""
    module, options, x, dout = made(name)
    out = module(x, **options)
    out.backward(dout)
    exact = x.detach().double().requires_grad_()
    twin = {n: p.grad for n, p in module.named_parameters()} | {"x": x.grad}
    module.zero_grad()
    again = plain(module.double(), exact, **options)
    again.backward(dout.double())
    assert_near(out, again, "out")
    for n, gradient in twin.items():
        assert_near(gradient, exact.grad if n == "x" else module.get_parameter(n).grad, n)


@pytest.mark.parametrize("name", ["all", "at once, all"])
def test_autocast(name):
    module, _, x, _ = made(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert_near(out, plain(module.double(), x.double()), "out")
    with pytest.raises(TypeError, match="q: dtype must be one of"):
        module.float()(x)


def test_options_of_a_call():
    """A mask in Python that reads an array."""
    module, _, x, _ = made("plain")
    docs = torch.arange(TOKENS) // 7
    with torch.no_grad():
        out = module(x, mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
        by_sequence = torch.cat([module(part) for part in x.split([7, 7, 6], 1)], 1)
    torch.testing.assert_close(out, by_sequence, rtol=2**-6, atol=2**-8)


def test_at_once_is_one_function(monkeypatch):
    """Projection, norms, rotary and attention are one function, in eager and compiled calls; they are separate if `attend` is
    overridden or a call has options."""
    asked, real = [], nn.ProjectedAttention.apply
    monkeypatch.setattr(nn.ProjectedAttention, "apply", lambda *args: asked.append(args[0].shape) or real(*args))
    module, _, x, _ = made("at once")
    x = x[:, :5]
    out = module(x)
    assert asked == [(2, 5, 4, 64)]
    module(x, bias=torch.zeros(1, 1, 1, 5))

    class Other(Attention):
        def attend(self, q, k, v, **options):
            return super().attend(q, k, v, **options)

    other = Other(DIM, 2, 1, 64, rotary=10_000.0, dtype=torch.bfloat16)
    other.load_state_dict(module.state_dict())
    assert_near(other(x), out.double(), "out")
    assert len(asked) == 1
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["all", "at once", "at once, all"])
def test_compiles_whole(name):
    module, options, x, _ = made(name)
    expected = torch.autograd.grad(module(x, **options).float().square().sum(), [x, *module.parameters()])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x, **options).float().square().sum(), [x, *module.parameters()])
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b.double(), "gradient")


@pytest.mark.parametrize(("arguments", "words"), [
    (dict(heads=4, kv_heads=3), "heads: must be a multiple of kv_heads: heads=4, kv_heads=3"),
    (dict(heads=0), "heads: must be a positive integer: heads=0"),
    (dict(heads=4, kv_heads=0), "kv_heads: must be a positive integer: kv_heads=0"),
    (dict(heads=4, head_dim=0), "head_dim: must be a multiple of 8, from 8 to 256: head_dim=0"),
    (dict(heads=5), "dim: must be a multiple of heads"),
    (dict(heads=1, rotary=-1.0), "rotary: must be positive, and finite in float32: rotary=-1.0"),
    (dict(heads=3, window=(-1, 0)), r"window: its ends must not be negative, .*: window=\(-1, 0\)"),
    (dict(heads=3, softcap=0.0), "softcap: must be positive, and finite in float32: softcap=0.0"),
    (dict(heads=3, scale=-1.0), "scale: must be positive, and finite in float32: scale=-1.0"),
    (dict(heads=1, head_dim=12), "head_dim: must be a multiple of 8, from 8 to 256: head_dim=12"),
])  # fmt: skip
def test_what_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Attention(DIM, **arguments)


@pytest.mark.parametrize("name", ["causal", "sink", "qk_norm", "bias"])
def test_what_is_no_bool(name):
    with pytest.raises(TypeError, match=f"^{name}: must be a bool: {name}=tensor"):
        Attention(DIM, 3, **{name: torch.zeros(3)})


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("shape", [(TOKENS + 1,), (3, TOKENS), (2, 1, TOKENS), ()])
def test_positions_of_another_shape(head_dim, shape):
    module = Attention(DIM, 3, head_dim=head_dim, rotary=100.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^positions: must be \(20\) or \(2, 20\), as x is: positions.shape=\("):
        module(torch.zeros(2, TOKENS, DIM).bfloat16(), torch.zeros(shape))


@pytest.mark.parametrize("head_dim", [16, 64])
def test_positions_that_are_learned(head_dim):
    """Transforms that our fused function does not support take torch's own steps."""
    module = Attention(DIM, 1, head_dim=head_dim, rotary=100.0, dtype=torch.bfloat16)
    x, positions = torch.randn(1, TOKENS, DIM).bfloat16(), torch.rand(TOKENS, requires_grad=True)
    (actual,) = torch.autograd.grad(module(x, positions).float().square().sum(), positions)
    exact = positions.detach().double().requires_grad_()
    out = plain(module.double(), x.double(), exact)
    assert_near(actual, torch.autograd.grad(out.square().sum(), exact)[0], "positions")


class Halved(torch.nn.RMSNorm):
    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize("rotary", [None, 100.0])
@pytest.mark.parametrize("how", ["class", "hook", "epsilon", "one"])
def test_norms_that_are_others(rotary, how):
    """A replaced norm is called, and so is one with hooks: kernels support two RMSNorms of torch alone."""
    module, expected = (Attention(DIM, 1, head_dim=64, rotary=rotary, qk_norm=True, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(1, 9, DIM).bfloat16()
    expected.load_state_dict(module.state_dict())
    with torch.no_grad():
        if how == "class":
            module.q_norm = Halved(64, 1e-6, dtype=torch.bfloat16)
            expected.q_norm.weight *= 0.5
        elif how == "hook":
            module.q_norm.register_forward_hook(lambda module, inputs, made: 0.5 * made)
            expected.q_norm.weight *= 0.5
        elif how == "epsilon":
            module.k_norm.eps, module.q_norm.eps = 1e12, None  # of its dtype
            expected.k_norm.weight *= 0.0
        else:
            module.k_norm, expected.k_norm = None, torch.nn.Identity()
        assert_near(module(x), expected(x).double(), how)


@pytest.mark.parametrize("shape", [(9, DIM), (1, 1, 9, DIM), (2, 9, DIM - 8)])
def test_of_another_shape(shape):
    for rotary in None, 10_000:
        with pytest.raises(ValueError, match=rf"^x: must be \(B, S, {DIM}\): x.shape=\({', '.join(map(str, shape))}\)"):
            Attention(DIM, heads=3, rotary=rotary)(torch.zeros(shape))


def test_without_memory():
    """Forward and backward on the meta device."""
    module = Attention(DIM, heads=3, causal=True, rotary=10_000, device="meta", dtype=torch.bfloat16)
    x = torch.empty(2, 9, DIM, device="meta", dtype=torch.bfloat16)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.shape and all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["causal", "scale", "sink"])
def test_an_option_of_the_module_is_none_of_a_call(name):
    with pytest.raises(TypeError, match=f"^{name}: is an argument of the module"):
        Attention(DIM, 2)(torch.zeros(1, 4, DIM), **{name: None})


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_its_norms_are_none_of_a_call(name):
    with pytest.raises(TypeError, match=f"^{name}: is an argument of the module"):
        Attention(DIM, 2, qk_norm=True)(torch.zeros(1, 4, DIM), **{name: torch.ones(24)})


@pytest.mark.parametrize(("name", "value"), [("layout", "bhsd"), ("return_lse", True), ("out", torch.zeros(1, 4, DIM))])
def test_what_would_change_axes_or_results(name, value):
    with pytest.raises(TypeError, match=f"^{name}: is not an argument of the module"):
        Attention(DIM, 2, dtype=torch.bfloat16)(torch.zeros(1, 4, DIM).bfloat16(), **{name: value})


@pytest.mark.parametrize("learned", ["project", "q_norm", "sink"])
def test_second_derivatives_of_what_is_learned_alone(learned):
    """The result depends on no other tensor that requires grad, and its gradient on none."""
    module = Attention(DIM, 1, head_dim=64, rotary=100.0, qk_norm=True, sink=True, dtype=torch.bfloat16).requires_grad_(False)
    parameter = getattr(module, learned)
    parameter = parameter if learned == "sink" else parameter.weight
    parameter.requires_grad_()
    out = module(torch.randn(1, 9, DIM).bfloat16())
    with pytest.raises(NotImplementedError, match="attention.forward: has no second derivatives"):
        torch.autograd.grad(out.sum(), parameter, create_graph=True)


def test_memory_comes_later():
    """A model is made on the meta device, as for FSDP, and every module then initialises its own parameters."""
    module = Attention(DIM, 2, head_dim=16, sink=True, qk_norm=True, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        module.sink.fill_(torch.nan)
    for each in module.modules():
        each.reset_parameters() if hasattr(each, "reset_parameters") else None
    assert not module.sink.any() and all(parameter.isfinite().all() for parameter in module.parameters())


def test_what_is_printed():
    assert "heads=4, kv_heads=2, head_dim=16, rotary=100.0, causal=True, window=(7, None)" in repr(made("all")[0])


@pytest.mark.gpu
@every_case
def test_on_the_card(name):
    """The GPU's results are close to the interpreter's."""
    results = []
    for device in "cpu", "cuda":
        module, options, x, dout = made(name)
        module, x = module.to(device), x.detach().to(device).requires_grad_()
        module(x, **{n: value.to(device) for n, value in options.items()}).backward(dout.to(device))
        results.append([x.grad.cpu(), *[p.grad.cpu() for p in module.parameters()]])
    for a, b in zip(*results, strict=True):
        assert_near(b, a.double(), name)
