"""The problems of others' published tables for the gated delta rule and KDA, with the figures that stand there, beside ours
and, where installed, cuDNN frontend's KDA, forward and backward. A figure is of the card that its source names.

FlashKDA: github.com/MoonshotAI/FlashKDA, BENCHMARK_H20.md. cuLA: github.com/inclusionAI/cuLA, BENCHMARK_H200.md.
cuDNN: github.com/NVIDIA/cudnn-frontend, pull request 1017, where FlashKDA and flash-linear-attention took these times; of the
kernels of its version 1.32 only a mean over the ten problems is published. flashinfer: github.com/flashinfer-ai/flashinfer,
pull request 3866.

Times are those of calls in a CUDA graph, see measure.py. `pytest bench/test_published.py --benchmark-json=published.json`, then
`python bench/table.py published.json`."""

import functools
import statistics
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from attention import gates  # noqa: E402
from bench.measure import replayed, report, rotated  # noqa: E402
from bench.peers import library, present  # noqa: E402

DIM, LOWER, ROUNDS, CALLS, BACKWARD_CALLS = 128, -5.0, 5, 40, 10
MIXED = 1300, 547, 2048, 963, 271, 3063  # the tokens of FlashKDA's packed sequences


class Published(NamedTuple):
    """A problem and its published figures. lengths: of each sequence, all packed. milliseconds: by library and card."""

    source: str
    lengths: tuple[int, ...]
    heads: int
    key_heads: int
    milliseconds: dict[str, float]


def _flash_kda(lengths, heads, flash_kda, fla):
    return Published("FlashKDA", lengths, heads, heads, {"FlashKDA, H20": flash_kda, "fla, H20": fla})


def _cula(batch, tokens, cula, fla):
    return Published("cuLA", (tokens,) * batch, 64, 64, {"cuLA, H200": cula, "fla, H200": fla})


def _cudnn(tokens, heads, sequences, flash_kda, fla):
    figures = {"FlashKDA, H100": flash_kda, "fla, H100": fla}
    return Published("cuDNN", (tokens // sequences,) * sequences, heads, heads, figures)


def _flashinfer(lengths, flashinfer, fla):
    return Published("flashinfer", lengths, 8, 2, {"flashinfer, H100": flashinfer, "fla, H100": fla})


KDA = [
    _cudnn(1024, 4, 1, 0.1530, 0.7584),
    _cudnn(2048, 12, 1, 0.2786, 0.7684),
    _cudnn(2048, 16, 1, 0.2874, 0.7724),
    _cudnn(3072, 10, 1, 0.3776, 0.8227),
    _cudnn(4096, 8, 1, 0.4628, 0.7681),
    _cudnn(4096, 12, 1, 0.4819, 0.7425),
    _cudnn(8192, 12, 4, 0.3448, 0.8020),
    _cudnn(8192, 16, 1, 0.9377, 0.9333),
    _cudnn(8192, 24, 1, 1.0032, 1.1539),
    _cudnn(16384, 16, 8, 0.5030, 1.3718),
    _flash_kda((8192,), 96, 2.6219, 4.5052),
    _flash_kda(MIXED, 96, 2.3420, 4.5717),
    _flash_kda((1024,) * 8, 96, 2.0100, 4.4668),
    _flash_kda((8192,), 64, 1.6199, 2.9587),
    _flash_kda(MIXED, 64, 1.7027, 3.0595),
    _flash_kda((1024,) * 8, 64, 1.3930, 3.0412),
    _cula(1, 512, 0.1284, 1.0013),
    _cula(1, 1024, 0.1832, 0.9747),
    _cula(1, 4096, 0.6537, 0.9994),
    _cula(1, 16384, 2.5421, 3.5038),
    _cula(2, 4096, 0.9010, 1.7690),
    _cula(2, 16384, 3.5363, 6.9413),
]
GATED = [
    _flashinfer((2048,), 0.061, 0.086),
    _flashinfer((4096,), 0.079, 0.144),
    _flashinfer((8192,), 0.114, 0.259),
    _flashinfer((16384,), 0.156, 0.508),
    _flashinfer((32768,), 0.239, 0.997),
    _flashinfer((65536,), 0.399, 1.954),
    _flashinfer((6144, 2048), 0.114, 0.221),
    _flashinfer((4096, 4096), 0.115, 0.184),
]


def _normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _ends(problem):
    return torch.tensor([0, *problem.lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _raw(problem):
    """q, k, v, raw gates, raw beta, A_log, dt_bias and the ends of sequences, as models have them."""
    tokens, heads = sum(problem.lengths), problem.heads
    A_log, dt_bias = torch.zeros(heads, device="cuda"), torch.zeros(heads, DIM, device="cuda")
    return *(_normal(1, tokens, heads, DIM) for _ in range(4)), _normal(1, tokens, heads), A_log, dt_bias, _ends(problem)


def _given(problem):
    """q, k, v, decays, beta and the ends of sequences: what gradients take. The decays are -5 sigmoid(normal)."""
    tokens, heads = sum(problem.lengths), problem.heads
    q, k = (F.normalize(_normal(1, tokens, heads, DIM).float(), dim=-1).bfloat16() for _ in "qk")
    decay = LOWER * torch.sigmoid(torch.randn(1, tokens, heads, DIM, device="cuda"))
    return q, k, _normal(1, tokens, heads, DIM), decay, torch.rand(1, tokens, heads, device="cuda"), _ends(problem)


def _packed(ends):
    """The argument cu_seqlens: one sequence has none."""
    return {"cu_seqlens": ends} if len(ends) > 2 else {}


def _ours(q, k, v, a, b, A_log, dt_bias, ends):
    decay = gates.sigmoid(a, A_log, dt_bias, lower=LOWER)
    return attention.delta_rule(q, k, v, gates.beta(b), decay=decay, qk_l2norm=True, **_packed(ends))


def _cudnn_kda(q, k, v, a, b, A_log, dt_bias, ends):
    call = library("cudnn.linear_attention.ops.kda", "kimi_delta_attention")
    raw = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "gate_lower_bound": LOWER}
    return call(q[0], k[0], v[0], a[0], b[0], ends, a_log=A_log, dt_bias=dt_bias, **raw)[None]


def _ours_backward(q, k, v, decay, beta, ends):
    return attention.delta_rule_backward(v, q, k, v, beta, decay=decay, **_packed(ends))


def _cudnn_backward(q, k, v, decay, beta, ends):
    call = library("cudnn.linear_attention.ops.kda", "kda_bwd")
    return call(v[0], q[0], k[0], v[0], decay[0], beta[0], ends, DIM**-0.5)[None]


def _gated(problem):
    """q, k, v, beta, decays and the ends of sequences"""
    tokens, heads, key_heads = sum(problem.lengths), problem.heads, problem.key_heads
    q, k = (F.normalize(_normal(1, tokens, key_heads, DIM).float(), dim=-1).bfloat16() for _ in "qk")
    decay = F.logsigmoid(torch.randn(1, tokens, heads, device="cuda")) / 16
    beta = torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16)
    return q, k, _normal(1, tokens, heads, DIM), beta, decay, _ends(problem)


def _ours_gated(q, k, v, beta, decay, ends):
    return attention.delta_rule(q, k, v, beta, decay=decay, **_packed(ends))


RUNS = {  # name: inputs, ours, peers, problems, calls of a graph
    "KDA, all raw": (_raw, _ours, {"cuDNN frontend": _cudnn_kda}, KDA, CALLS),
    "KDA, gradients": (_given, _ours_backward, {"cuDNN frontend": _cudnn_backward}, KDA[:16], BACKWARD_CALLS),
    "gated delta rule": (_gated, _ours_gated, {}, GATED, CALLS),
}
CASES = [(name, problem) for name, (*_, problems, _) in RUNS.items() for problem in problems]


def _first(out):
    return (out[0] if isinstance(out, tuple) else out).float()


@functools.cache
def _times(name, index):
    """{provider: milliseconds of every round, or why it cannot run}"""
    make, ours, peers, problems, calls = RUNS[name]
    problem = problems[index]
    inputs = make(problem)
    sets = rotated(lambda: make(problem), sum(x.nbytes for x in inputs))
    providers, missing = present(peers, inputs)
    providers = {"tiles": ours} | providers
    want = _first(ours(*inputs))
    for provider, call in providers.items():
        error = (_first(call(*inputs)) - want).square().mean() / want.square().mean()
        assert error < 2**-10, (provider, error)
    return replayed(providers, sets, ROUNDS, calls) | missing


def _name(x):
    return x if isinstance(x, str) else f"{x.source}-{'+'.join(map(str, x.lengths))}x{x.heads}"


@pytest.mark.parametrize("provider", ["tiles", "cuDNN frontend"])
@pytest.mark.parametrize(("name", "problem"), CASES, ids=_name)
def test_published(benchmark, name, problem, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(name, RUNS[name][3].index(problem)).get(provider, "none is known")
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    benchmark.group = f"{name} {_name(problem)}"
    report(benchmark, times)
    published = {} if name == "KDA, gradients" else problem.milliseconds
    benchmark.extra_info |= {"provider": provider, "ms": statistics.median(times), **published}
    print(f"{benchmark.group} {provider}: {1e3 * statistics.median(times):.1f} us; published {published}")
