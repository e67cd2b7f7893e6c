"""Raw inputs in training: kernels compute norms of queries and keys and gates of channels, and their gradients; compared with
torch in float64."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from attention import gates  # noqa: E402
from attention.plans.recurrent.raw_gradients import evaluate_by_kernels, normalize_by_kernels  # noqa: E402

bf16, f16 = torch.bfloat16, torch.float16
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FORMULAS = {
    "softplus": lambda x, A, bias: -A.exp() * F.softplus(x + bias, threshold=1e9),
    "sigmoid": lambda x, A, bias: -5 * torch.sigmoid(A.exp() * (x + bias)),
    "logsigmoid": lambda x, A, bias: F.logsigmoid(x + bias) / 16,
}


def relative_error(actual, expected):
    return float((actual.detach().double() - expected).norm() / expected.norm())


def draw(*shape, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@on_each_device
@pytest.mark.parametrize("form", ["whole", "view", "heads before tokens"])
@pytest.mark.parametrize(("columns", "dtype"), [(32, bf16), (128, f16), (96, bf16)])
def test_l2_norms(columns, dtype, form, device):
    """Rows of an array, of a part of a projection, and with tokens and heads swapped."""
    x = draw(2, 37, 6, columns, device=device, dtype=dtype)
    rows = {"whole": x, "view": x[:, :, 2:5], "heads before tokens": x.transpose(1, 2)}[form]
    leaf, exact = rows.detach().requires_grad_(), rows.double().requires_grad_()
    gradient = draw(*rows.shape, device=device, dtype=dtype, seed=1)
    y, z = normalize_by_kernels(leaf), exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert "RecurrentFunction" in str(y.grad_fn if form != "heads before tokens" else y.grad_fn.next_functions[0][0])
    (dx,), (dz,) = torch.autograd.grad(y, leaf, gradient), torch.autograd.grad(z, exact, gradient.double())
    assert relative_error(y, z.detach()) < 2e-3 and relative_error(dx, dz) < 2e-3


def test_l2_norms_of_other_rows():
    """Rows that kernels do not serve are torch's: float32, of 16 columns, with other strides."""
    x = draw(1, 5, 2, 64, dtype=bf16)
    for rows in (x.float(), x[..., :16], x.mT.contiguous().mT, x[0]):
        leaf = rows.detach().requires_grad_()
        assert torch.equal(normalize_by_kernels(leaf), gates.normalize(leaf))


@on_each_device
@pytest.mark.parametrize("bias", ["channel", "head", None])
@pytest.mark.parametrize("name", FORMULAS)
def test_gates_of_channels(name, bias, device):
    """Several strips of tokens, channels that are no multiple of a warp's, and the same bits again."""
    x, gradient = 2 * draw(2, 300, 3, 80, device=device, dtype=bf16), draw(2, 300, 3, 80, device=device, seed=1)
    arrays = {"a": x}
    if name != "logsigmoid":
        arrays["A_log"] = draw(3, device=device, seed=2)
    if bias:
        arrays["dt_bias"] = draw(*(3, 80)[: 1 + (bias == "channel")], device=device, seed=3)
    leaves, exact = ([y.detach().to(y.dtype if same else torch.float64).requires_grad_() for y in arrays.values()]
                     for same in (True, False))  # fmt: skip
    results = []
    for _ in range(2):
        out = evaluate_by_kernels(getattr(gates, name)(**dict(zip(arrays, leaves))), "bshd")
        results.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
    by_name = dict(zip(arrays, exact))
    of_head = lambda y: y if y is None or y.ndim == 2 else y[:, None]
    A, b = (of_head(by_name.get(key)) for key in ("A_log", "dt_bias"))
    want = FORMULAS[name](by_name["a"], A if A is not None else x.new_zeros(()).double(), 0 if b is None else b)
    expected = [want.detach(), *torch.autograd.grad(want, exact, gradient.double())]
    assert all(map(torch.equal, *results)) and results[0][0].dtype == torch.float32
    for actual, right, limit in zip(results[0], expected, [1e-6, 2e-3, 1e-5, 1e-5]):
        assert actual.shape == right.shape and relative_error(actual, right) < limit


def test_gates_with_heads_before_tokens():
    x = draw(1, 20, 2, 32, dtype=bf16).transpose(1, 2).requires_grad_()
    A_log, bias = draw(2, seed=1).requires_grad_(), draw(2, 32, seed=2).requires_grad_()
    gate = gates.softplus(x, A_log, bias)
    results = [f(gate, "bhsd") for f in (evaluate_by_kernels, gates.evaluate)]
    gradients = [torch.autograd.grad(y.square().sum(), gate.arrays) for y in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


def test_wrong_parameters_are_refused():
    x = draw(1, 5, 2, 32, dtype=bf16).requires_grad_()
    with pytest.raises(ValueError, match=r"^A_log: must be \(2,\), as the gate"):
        evaluate_by_kernels(gates.softplus(x, torch.zeros(3)), "bshd")


@pytest.mark.parametrize("tokens", [0, 3])
def test_few_tokens(tokens):
    x, A_log = draw(1, tokens, 2, 32, dtype=bf16).requires_grad_(), torch.zeros(2, requires_grad=True)
    out = normalize_by_kernels(x).sum() + evaluate_by_kernels(gates.softplus(x, A_log), "bshd").sum()
    dx, dA_log = torch.autograd.grad(out, (x, A_log))
    assert dx.shape == x.shape and dA_log.isfinite().all() and (tokens or not dA_log.any())


def test_training_calls_them(monkeypatch):
    """A step of KDA with raw inputs calls no formula of torch but beta's."""
    q, k, v = (draw(1, 40, 2, 32, dtype=bf16, seed=n).requires_grad_() for n in range(3))
    raw, b, A_log = draw(1, 40, 2, 32, dtype=bf16, seed=3), draw(1, 40, 2, dtype=bf16), torch.zeros(2, requires_grad=True)
    evaluated = []
    monkeypatch.setattr(gates, "normalize", lambda x: pytest.fail("normalised by torch"))
    evaluate = gates.evaluate
    monkeypatch.setattr(gates, "evaluate", lambda x, layout="bshd": evaluated.append(x) or evaluate(x, layout))
    out = attention.delta_rule(q, k, v, gates.beta(b), decay=gates.softplus(raw, A_log), qk_l2norm=True)
    out.float().square().sum().backward()
    assert [type(x) for x in evaluated] == [gates.RawBeta] and A_log.grad.any() and q.grad.isfinite().all()


def test_as_compiled(as_compiled):
    """PTX for Hopper, on the CPU."""
    as_compiled("sm_90a")
    test_l2_norms(64, bf16, "view", "cpu")
    test_gates_of_channels("sigmoid", "channel", "cpu")
