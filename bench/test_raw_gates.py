"""Raw gates, raw beta and qk_l2norm inside the kernels (attention.gates), beside the same call on what they mean and beside
torch's formulas before it.

`fused_cost` is the time of `raw` over that of `given`, which reads gates in float32, beta, and normalised q and k: what is
fused may cost 1.03. `torch` computes them first. Keys and gates are drawn as models have them. See measure.py for the protocol.
`pytest bench/test_raw_gates.py --benchmark-json=raw.json`, then `python bench/table.py raw.json`."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from attention import gates  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402

ROUNDS = 5
SIZES = (8, 4096, 32), (1, 32768, 32)  # batch, tokens, heads
delta_rule, linear = attention.delta_rule, attention.linear
RAW = {  # name: function, its formula, the same in torch, has it a gate for each channel?, are q and k normalised?
    "gated delta rule": (
        delta_rule,
        gates.softplus,
        lambda a, A_log, dt_bias: -A_log.exp() * F.softplus(a.float() + dt_bias),
        False,
        True,
    ),
    "KDA": (
        delta_rule,
        gates.softplus,
        lambda a, A_log, dt_bias: -A_log.exp()[:, None] * F.softplus(a.float() + dt_bias),
        True,
        True,
    ),
    "KDA, bounded gate": (
        delta_rule,
        gates.sigmoid,
        lambda a, A_log, dt_bias: -5 * torch.sigmoid(A_log.exp()[:, None] * (a.float() + dt_bias)),
        True,
        True,
    ),
    "GLA": (
        linear,
        lambda a, A_log, dt_bias: gates.logsigmoid(a, dt_bias),
        lambda a, A_log, dt_bias: F.logsigmoid(a.float() + dt_bias) / 16,
        True,
        False,
    ),
    "simple GLA": (
        linear,
        gates.softplus,
        lambda a, A_log, dt_bias: -A_log.exp() * F.softplus(a.float() + dt_bias),
        False,
        False,
    ),
}
PROVIDERS = "raw", "given", "torch"


def _draw(batch, length, heads, channels):
    """q, k, v, a, b, A_log, dt_bias."""
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    last, tokens = (128,) if channels else (), (batch, length, heads)
    A_log = torch.rand(heads, device="cuda").mul(15).add(1).log()
    return *(normal(*tokens, 128) for _ in "qkv"), normal(*tokens, *last), normal(tokens), A_log, normal(heads, *last).float()


def _calls(name):
    """{provider: its call on the arrays of _draw and on what `given` takes}"""
    function, raw_gate, formula, _, l2norm = RAW[name]
    is_delta = function is delta_rule

    def raw(q, k, v, a, b, A_log, dt_bias, *_):
        beta = {"beta": gates.beta(b)} if is_delta else {}
        return function(q, k, v, decay=raw_gate(a, A_log, dt_bias), **beta, qk_l2norm=l2norm)

    def given(*arrays):
        q, k, decay, beta = arrays[7:]
        return function(q, k, arrays[2], decay=decay, **({"beta": beta} if is_delta else {}))

    def by_torch(q, k, v, a, b, A_log, dt_bias, *_):
        q, k = (F.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k)) if l2norm else (q, k)
        beta = {"beta": b.sigmoid()} if is_delta else {}
        return function(q, k, v, decay=formula(a, A_log, dt_bias), **beta)

    return {"raw": raw, "given": given, "torch": by_torch}


def _inputs(name, size):
    _, _, formula, channels, l2norm = RAW[name]
    q, k, v, a, b, A_log, dt_bias = arrays = _draw(*size, channels)
    rows = [F.normalize(x.float(), dim=-1).to(x.dtype) if l2norm else x for x in (q, k)]
    return *arrays, *rows, formula(a, A_log, dt_bias), b.sigmoid()


@functools.cache
def _times(name, size):
    """{provider: milliseconds of every round}"""
    calls, first = _calls(name), _inputs(name, size)
    sets = rotated(lambda: _inputs(name, size), sum(x.nbytes for x in first))
    outs = {provider: call(*sets[0]).float() for provider, call in calls.items()}
    for out in outs.values():
        assert (out - outs["torch"]).abs().max() <= 2**-5 * outs["torch"].abs().max()
    return interleaved(calls, sets, ROUNDS)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", RAW)
def test_raw_gates(benchmark, name, size, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    measured = _times(name, size)
    batch, length, heads = size
    benchmark.group = f"raw {name} B {batch} S {length} H {heads}"
    benchmark.extra_info |= {"provider": provider, "member": name, "batch": batch, "length": length, "heads": heads}
    report(benchmark, measured[provider])
    ms = statistics.median(measured[provider])
    benchmark.extra_info |= {"ms": ms, "fused_cost": ms / statistics.median(measured["given"])}
