"""Fused operators beside torch's own ops, one by one (`eager`) and as torch.compile fuses them: Mirage's list, and larger ones.

bf16; microseconds of a call in a CUDA graph, weights rotated past L2. FUSE_TUNE=1 measures the candidates first (fuse/tune.py).
`pytest -s bench/test_fused.py --benchmark-json=fused.json`; see measure.py for the protocol.
"""

import functools
import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import fuse.operators as operators  # noqa: E402
from bench.measure import medians, replayed, report, rotated  # noqa: E402

F = torch.nn.functional
EPS = 1e-5


def _rms_norm_linear(x, g, w):
    return F.rms_norm(x, x.shape[-1:], g, EPS) @ w


def _lora_linear(x, w, a, b):
    return x @ w + (x @ a) @ b


def _lora_linear_by_index(x, w, a, b, index):
    return x @ w + ((x[:, None] @ a[index].transpose(1, 2)) @ b[index])[:, 0]


def _gated_mlp(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


def _normalised_step(x, h, alpha):
    moved = x + alpha * (F.normalize(h, dim=-1) - x)
    return F.normalize(moved, dim=-1)


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
}
RANK, EXPERTS = 16, 8
CASES = [(name, m, k, n, goal) for (name, k, n), goals in ROWS.items() for m, goal in goals.items()]
SHAPES = {
    "rms_norm_linear": lambda m, k, n: ((m, k), (k,), (k, n)),
    "lora_linear": lambda m, k, n: ((m, k), (k, n), (k, RANK), (RANK, n)),
    "lora_linear_by_index": lambda m, k, n: ((m, k), (k, n), (EXPERTS, RANK, k), (EXPERTS, RANK, n), (m,)),
    "gated_mlp": lambda m, k, n: ((m, k), (k, n), (k, n)),
    "expert_linear": lambda m, k, n: ((EXPERTS, m, k), (EXPERTS, k, n)),
    "linear_cross_entropy": lambda m, k, n: ((m, k), (k, n), (m,)),
    "normalised_step": lambda m, k, n: ((m, k), (m, k), (k,)),
    "residual_rms_norm": lambda m, k, n: ((m, k), (m, k), (k,)),
    "fp8_linear": lambda m, k, n: ((m, k), (k, n), (n,)),
    "residual_rms_norm_quantise": lambda m, k, n: ((m, k), (m, k), (k,)),
    "dropout_residual_layer_norm": lambda m, k, n: ((m, k), (m, k), (k,), (k,), (1,)),
}
FP8 = torch.float8_e4m3fn
DTYPES = {  # of what is not bf16
    ("dropout_residual_layer_norm", 4): torch.int64,
    ("fp8_linear", 1): FP8,
    ("linear_cross_entropy", 2): torch.int64,
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
    "residual_rms_norm": _residual_rms_norm,
    "fp8_linear": _fp8_linear,
    "residual_rms_norm_quantise": _residual_rms_norm_quantise,
    "dropout_residual_layer_norm": _dropout_residual_layer_norm,
}


def _inputs(name, shapes):
    """Rows in place, weights of a size that keeps results near 1."""
    made = [torch.randn(s, device="cuda") * (s[-2] ** -0.5 if n and len(s) >= 2 else 1) for n, s in enumerate(shapes)]
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
    operator, eager = getattr(operators, name), EAGER[name]
    if os.environ.get("FUSE_TUNE"):
        operator.tune(*sets[0])
    calls = {"tiles": operator, "eager": eager, "compile": torch.compile(eager, dynamic=False)}
    wanted = (operator.definition if name in RANDOM else eager)(*map(_wide, sets[0]))
    for provider, call in calls.items() if name not in RANDOM else [("tiles", operator)]:
        for got, ref in zip(*[x if isinstance(x, tuple) else (x,) for x in (call(*sets[0]), wanted)]):
            error = (got.double() - ref.double()).abs().max() / ref.double().abs().max()
            assert error < (2**-6 if got.itemsize > 1 else 2**-3), f"{name} {shapes} {provider}: {error}"
    work = 2 * shapes[0][-2] * sum(torch.Size(s).numel() for s in shapes[1:] if len(s) >= 2)
    return replayed(calls, sets, calls=max(8, min(200, int(2e13 / max(work, 1)))))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name,m,k,n,goal", CASES)
def test_fused(benchmark, name, m, k, n, goal, provider):
    times = _times(name, SHAPES[name](m, k, n))
    label = f"{name} {m} x {k} x {n}"
    if provider == PROVIDERS[0]:
        print(f"\n{label}: " + ", ".join(f"{who} {1e3 * ms:.1f}" for who, ms in medians(times).items()) + f" us, goal {goal}")
    benchmark.group = label
    benchmark.extra_info |= {"provider": provider, "microseconds": 1e3 * medians(times)[provider], "goal": goal}
    report(benchmark, times[provider])
