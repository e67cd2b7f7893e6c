"""Fused operators beside torch's own ops, one by one (`eager`) and as torch.compile fuses them: Mirage's list (`-k mirage`; its
shapes for a batch of 8), and larger ones.

`-k gradients`: their gradients by all arguments, from the arguments and the gradients by the results, so that every provider
computes what it wants of the forward pass once more.

bf16; microseconds of a call in a CUDA graph, weights rotated past L2. FUSE_TUNE=1 measures the candidates first
(fuse/planning/tune.py).
`pytest -s bench/test_fused.py --benchmark-json=fused.json`; see measure.py for the protocol.
"""

import functools
import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import fuse  # noqa: E402
import fuse.operators as operators  # noqa: E402
from bench.measure import medians, replayed, report, rotated  # noqa: E402

F = torch.nn.functional
EPS = 1e-5
HEADS, GROUPS, DIM, KEYS = 32, 8, 128, 4096  # of QK-norm attention


def _rms_norm_linear(x, g, w):
    return F.rms_norm(x, x.shape[-1:], g, EPS) @ w


def _lora_linear(x, w, a, b):
    return x @ w + (x @ a) @ b


def _lora_linear_by_index(x, w, a, b, index):
    return x @ w + ((x[:, None] @ a[index].transpose(1, 2)) @ b[index])[:, 0]


def _gated_mlp(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


def _normalised_step(x, h, alpha):
    stepped = x + alpha * (F.normalize(h, dim=-1) - x)
    return F.normalize(stepped, dim=-1)


def _residual_rms_norm(x, residual, g):
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], g, EPS), h


def _fp8_linear(x, w, scale):
    return (x @ w.to(x.dtype)) * scale


def _residual_rms_norm_quantise(x, residual, g):
    y, h = _residual_rms_norm(x, residual, g)
    scale = (y.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale, h


def _dropout_residual_layer_norm(x, residual, g, b, seed):
    h = residual + F.dropout(x, 0.1)
    return F.layer_norm(h, h.shape[-1:], g, b, EPS), h


def _linear_cross_entropy(x, w, target):
    logits = (x @ w).float()
    lse = logits.logsumexp(-1, keepdim=True)
    return lse - logits.gather(-1, target[:, None]), lse


def _cross_entropy(x, target):
    return F.cross_entropy(x, target, reduction="none")[:, None]


def _residual_layer_norm(x, residual, g, b):
    h = x + residual
    return F.layer_norm(h, h.shape[-1:], g, b, EPS), h


def _layer_norm_linear(x, g, b, w):
    return F.layer_norm(x, x.shape[-1:], g, b, EPS) @ w


def _gated_mlp_down(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def _mixture_of_experts(x, router, gate, up, down):
    best, which = (x @ router).softmax(-1).topk(2)
    p = torch.zeros_like(x @ router).scatter(-1, which, best / best.sum(-1, keepdim=True))
    hidden = F.silu(x @ gate.mT) * (x @ up.mT)
    return (p.T[..., None] * (hidden @ down)).sum(0)


def _rotary(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attention(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def _qk_norm_attention(q, k, v, gq, gk):
    q, k = (F.rms_norm(x, x.shape[-1:], g, 1e-6) for x, g in ((q, gq), (k, gk)))
    groups, (q, k, v) = q.shape[1], (x.flatten(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).unflatten(1, (groups, -1))


def _mla_attention(q, latent, wk, wv):
    k, v = ((latent @ w.flatten(0, 1).T).unflatten(1, w.shape[:2]).transpose(0, 1) for w in (wk, wv))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


@fuse.kernel
def _fused_attention(q, k, v):
    """What Mirage's benchmarks call MHA and GQA."""
    return fuse.attention(q, k, v, q.shape[-1] ** -0.5)


ROWS = {  # operator and columns: {rows: the goal in microseconds}
    ("rms_norm_linear", 4096, 6144): {1: 14, 16: 14, 64: 15, 512: 36, 4096: 270},
    ("lora_linear", 4096, 4096): {1: 10, 16: 10, 64: 10, 4096: 205},
    ("lora_linear", 256, 4096): {16: 3.5},
    ("lora_linear_by_index", 4096, 4096): {1: None, 16: None, 64: None, 4096: None},
    ("gated_mlp", 4096, 4096): {1: 18.5, 8: 18.5},
    ("gated_mlp", 4096, 14336): {8: 60, 64: 62, 4096: 1250},
    ("expert_linear", 4096, 4096): {8: None, 512: None},
    ("linear_cross_entropy", 4096, 128256): {512: None, 4096: None},
    ("normalised_step", 4096, 4096): {4096: 27},
    ("residual_rms_norm", 4096, 4096): {4096: None},
    ("residual_rms_norm_quantise", 4096, 4096): {4096: None},
    ("fp8_linear", 4096, 6144): {1: None, 16: None, 64: None, 4096: None},
    ("dropout_residual_layer_norm", 1024, 1024): {16384: None},
    ("dropout_residual_layer_norm", 4096, 4096): {4096: None},
    ("layer_norm_linear", 4096, 6144): {16: None, 4096: None},
    ("gated_mlp_down", 4096, 14336): {8: None, 4096: None},
    ("expert_mlp", 4096, 4096): {8: None},
    ("mixture_of_experts", 4096, 4096): {8: None, 64: None},
    ("rotary", 4096, 4096): {4096: None},
}
RANK, EXPERTS = 16, 8
CASES = [(name, m, k, n, goal) for (name, k, n), goals in ROWS.items() for m, goal in goals.items()]
# attention: the name of a case, operator, shapes, goal
ATTENTION = {
    "GQA": ("_attention", ((16, 256, 64), (16, KEYS, 64), (16, KEYS, 64)), None),
    "MHA": ("_attention", ((256, 16, 64), (256, KEYS, 64), (256, KEYS, 64)), None),
    **{
        f"QK-norm, {name}": (
            "qk_norm_attention",
            ((b, GROUPS, HEADS // GROUPS, s, DIM), *[(b, GROUPS, 1, KEYS, DIM)] * 2, (DIM,), (DIM,)),
            goal,
        )
        for name, b, s, goal in (("decode 1", 1, 1, 7.5), ("decode 8", 8, 1, 40), ("prefill", 1, KEYS, 400))
    },
    "MLA": ("mla_attention", ((16, KEYS, 192), (KEYS, 512), (16, 192, 512), (16, 128, 512)), None),
}
MIRAGE = {  # its benchmark's list: the operator, shapes
    "RMS norm + linear": ("rms_norm_linear", ((16, 4096), (4096,), (4096, 6144))),
    "LoRA": ("lora_linear", ((16, 256), (256, 4096), (256, 16), (16, 4096))),
    "gated MLP": ("gated_mlp", ((8, 4096), (4096, 4096), (4096, 4096))),
    "GQA": ATTENTION["GQA"][:2],
    "QK-norm": ("qk_norm_attention", ((1, 2, 8, 16, 64), *[(1, 2, 1, KEYS, 64)] * 2, (64,), (64,))),
    "MHA": ATTENTION["MHA"][:2],
    "nTrans": ("normalised_step", ((8, 4096), (8, 4096), (4096,))),
    "mixture of experts": ("expert_linear", ((8, 8, 4096), (8, 4096, 4096))),
}
SHAPES = {
    "rms_norm_linear": lambda m, k, n: ((m, k), (k,), (k, n)),
    "lora_linear": lambda m, k, n: ((m, k), (k, n), (k, RANK), (RANK, n)),
    "lora_linear_by_index": lambda m, k, n: ((m, k), (k, n), (EXPERTS, RANK, k), (EXPERTS, RANK, n), (m,)),
    "gated_mlp": lambda m, k, n: ((m, k), (k, n), (k, n)),
    "expert_linear": lambda m, k, n: ((EXPERTS, m, k), (EXPERTS, k, n)),
    "linear_cross_entropy": lambda m, k, n: ((m, k), (k, n), (m,)),
    "cross_entropy": lambda m, k, n: ((m, n), (m,)),
    "normalised_step": lambda m, k, n: ((m, k), (m, k), (k,)),
    "residual_layer_norm": lambda m, k, n: ((m, k), (m, k), (k,), (k,)),
    "residual_rms_norm": lambda m, k, n: ((m, k), (m, k), (k,)),
    "fp8_linear": lambda m, k, n: ((m, k), (k, n), (n,)),
    "residual_rms_norm_quantise": lambda m, k, n: ((m, k), (m, k), (k,)),
    "dropout_residual_layer_norm": lambda m, k, n: ((m, k), (m, k), (k,), (k,), (1,)),
    "layer_norm_linear": lambda m, k, n: ((m, k), (k,), (k,), (k, n)),
    "gated_mlp_down": lambda m, k, n: ((m, k), (k, n), (k, n), (n, k)),
    "expert_mlp": lambda m, k, n: ((EXPERTS, m, k), (EXPERTS, k, n), (EXPERTS, k, n), (EXPERTS, n, k)),
    "mixture_of_experts": lambda m, k, n: ((m, k), (k, EXPERTS), (EXPERTS, n, k), (EXPERTS, n, k), (EXPERTS, n, k)),
    "rotary": lambda m, k, n: ((m, k), (m, k // 2), (m, k // 2)),
}
FP8 = torch.float8_e4m3fn
DTYPES = {  # of what is not bf16
    ("dropout_residual_layer_norm", 4): torch.int64,
    ("fp8_linear", 1): FP8,
    ("linear_cross_entropy", 2): torch.int64,
    ("cross_entropy", 1): torch.int64,
    ("lora_linear_by_index", 4): torch.int64,
}
RANDOM = {"dropout_residual_layer_norm"}  # torch drops others: only ours is compared, with its definition
PROVIDERS = "tiles", "eager", "compile"
EAGER = {
    "rms_norm_linear": _rms_norm_linear,
    "lora_linear": _lora_linear,
    "lora_linear_by_index": _lora_linear_by_index,
    "gated_mlp": _gated_mlp,
    "expert_linear": torch.matmul,
    "linear_cross_entropy": _linear_cross_entropy,
    "normalised_step": _normalised_step,
    "cross_entropy": _cross_entropy,
    "residual_layer_norm": _residual_layer_norm,
    "residual_rms_norm": _residual_rms_norm,
    "fp8_linear": _fp8_linear,
    "residual_rms_norm_quantise": _residual_rms_norm_quantise,
    "dropout_residual_layer_norm": _dropout_residual_layer_norm,
    "layer_norm_linear": _layer_norm_linear,
    "gated_mlp_down": _gated_mlp_down,
    "expert_mlp": _gated_mlp_down,
    "mixture_of_experts": _mixture_of_experts,
    "rotary": _rotary,
    "_attention": _attention,
    "qk_norm_attention": _qk_norm_attention,
    "mla_attention": _mla_attention,
}


def _inputs(name, shapes):
    """Rows in place, weights of a size that keeps results near 1."""
    scaled = name not in ("_attention", "qk_norm_attention", "rotary")
    weights = [scaled and n > 0 and len(s) >= 2 for n, s in enumerate(shapes)]
    made = [torch.randn(s, device="cuda") * (s[-2] ** -0.5 if weight else 1) for s, weight in zip(shapes, weights)]
    kinds = [DTYPES.get((name, n), torch.bfloat16) for n in range(len(made))]
    cast = [x.to(kind) if kind.is_floating_point else (100 * x).abs().to(kind) % EXPERTS for x, kind in zip(made, kinds)]
    return [x.t().contiguous().t() if x.dtype == FP8 else x for x in cast]  # as nn.Linear has them


def _wide(x):
    """Numbers in float64, seeds as they are."""
    return x.double() if x.dtype != torch.int64 else x


@functools.cache
def _times(name, shapes):
    """{provider: milliseconds of every round}"""
    sets = rotated(lambda: _inputs(name, shapes), 2 * sum(torch.Size(s).numel() for s in shapes))
    operator, eager = getattr(operators, name, _fused_attention), EAGER[name]
    if os.environ.get("FUSE_TUNE"):
        operator.tune(*sets[0])
    calls = {"tiles": operator, "eager": eager, "compile": torch.compile(eager, dynamic=False)}
    wanted = (operator.definition if name in RANDOM else eager)(*map(_wide, sets[0]))
    for provider, call in calls.items() if name not in RANDOM else [("tiles", operator)]:
        for got, ref in zip(*[x if isinstance(x, tuple) else (x,) for x in (call(*sets[0]), wanted)]):
            error = (got.double() - ref.double()).abs().max() / ref.double().abs().max()
            assert error < (2**-6 if got.itemsize > 1 else 2**-3), f"{name} {shapes} {provider}: {error}"
    work = 2 * shapes[0][-2] * sum(torch.Size(s).numel() for s in shapes[1:] if len(s) >= 2)
    if "attention" in name:
        work = 4 * torch.Size(shapes[0]).numel() * KEYS
    return replayed(calls, sets, calls=max(8, min(200, int(2e13 / max(work, 1)))))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name,m,k,n,goal", CASES)
def test_fused(benchmark, name, m, k, n, goal, provider):
    times = _times(name, SHAPES[name](m, k, n))
    _report(benchmark, f"{name} {m} x {k} x {n}", goal, provider, times)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(benchmark, case, provider):
    name, shapes, goal = ATTENTION[case]
    _report(benchmark, case, goal, provider, _times(name, shapes))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", MIRAGE)
def test_mirage(benchmark, case, provider):
    _report(benchmark, f"Mirage's {case}", None, provider, _times(*MIRAGE[case]))


GRADIENTS = [  # operator, rows, inner, columns
    ("residual_rms_norm", 4096, 4096, 4096),
    ("residual_layer_norm", 4096, 4096, 4096),
    ("normalised_step", 4096, 4096, 4096),
    ("cross_entropy", 4096, 0, 32000),
    ("rms_norm_linear", 4096, 4096, 6144),
    ("gated_mlp", 4096, 4096, 14336),
    ("gated_mlp_down", 4096, 4096, 14336),
    ("lora_linear", 4096, 4096, 4096),
]


@fuse.kernel
def _fused_cross_entropy(x, target):
    greatest = fuse.max(x)
    return fuse.log(fuse.sum(fuse.exp(x - greatest))) + greatest - fuse.pick(x, target)


@functools.cache
def _times_of_gradients(name, shapes):
    """{provider: milliseconds of every round}"""
    operator, eager = getattr(operators, name, _fused_cross_entropy), EAGER[name]

    def inputs():
        tensors = _inputs(name, shapes)
        results = eager(*tensors)
        return [*tensors, *(torch.randn_like(y) for y in (results if isinstance(results, tuple) else (results,)))]

    def gradients(*given):
        arrays, by = given[: len(shapes)], given[len(shapes) :]
        floats = [x for x in arrays if x.is_floating_point()]
        rest = [x for x in arrays if not x.is_floating_point()]
        _, back = torch.func.vjp(lambda *some: eager(*some, *rest), *floats)
        return back(by if len(by) > 1 else by[0])

    sets = rotated(inputs, 2 * sum(torch.Size(s).numel() for s in shapes))
    calls = {"tiles": operator.gradient, "eager": gradients, "compile": torch.compile(gradients, dynamic=False)}
    wanted = gradients(*map(_wide, sets[0]))
    for provider, call in calls.items():
        for got, ref in zip(call(*sets[0]), wanted, strict=True):
            error = (got.double() - ref).abs().max() / ref.abs().max()
            assert error < 2**-5, f"{name} {shapes} {provider}: {error}"
    work = 6 * shapes[0][-2] * sum(torch.Size(s).numel() for s in shapes[1:] if len(s) >= 2)
    return replayed(calls, sets, calls=max(8, min(200, int(2e13 / max(work, 1)))))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name,m,k,n", GRADIENTS)
def test_gradients(benchmark, name, m, k, n, provider):
    times = _times_of_gradients(name, SHAPES[name](m, k, n))
    _report(benchmark, f"gradients of {name} {m} x {k} x {n}", None, provider, times)


def _report(benchmark, label, goal, provider, times):
    if provider == PROVIDERS[0]:
        print(f"\n{label}: " + ", ".join(f"{who} {1e3 * ms:.1f}" for who, ms in medians(times).items()) + f" us, goal {goal}")
    benchmark.group = label
    benchmark.extra_info |= {"provider": provider, "microseconds": 1e3 * medians(times)[provider], "goal": goal}
    report(benchmark, times[provider])
