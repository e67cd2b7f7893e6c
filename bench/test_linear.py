"""The linear-attention family beside a copy in device memory, and flash-linear-attention and mamba_ssm where installed.

`limit` is the time in which the inputs can be read and the output written once, at the bandwidth that a copy of as many bytes
reaches in the same rounds; `of_limit` is that over the provider's time. `error_ratio` is our root-mean-square error against
float64 over the peer's on the same inputs. See measure.py for the protocol. flash-linear-attention tunes itself for up to a
minute a member. `pytest bench/test_linear.py --benchmark-json=linear.json`, then `python bench/table.py linear.json`.
"""

import functools
import math
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import fla, library, present  # noqa: E402

ROUNDS, CHECKED = 5, 1024  # tokens of one head that are compared with float64
WIDE, LONG = (8, 2048, 32), (1, 32768, 16)  # batch, tokens, heads
LARGE = 8, 8192, 32
MANY = [WIDE, LARGE, LONG, (1, 131072, 16), (1, 262144, 16)]


def _normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _gates(*shape):
    return F.logsigmoid(torch.randn(shape, device="cuda")) / 16


def _tokens(batch, length, heads, dim=128):
    return (
        _normal(batch, length, heads, dim),
        F.normalize(_normal(batch, length, heads, dim), dim=-1),
        _normal(batch, length, heads, dim),
    )


def _with(*more):
    """Inputs: q, k and v, and what else each of `more` makes of (batch, length, heads)."""
    return lambda *sizes: (*_tokens(*sizes), *(one(*sizes) for one in more))


def _beta(*sizes):
    return torch.rand(sizes, device="cuda", dtype=torch.bfloat16)


def _by_channel(*sizes):
    return _gates(*sizes, 128)


def _models_gates(*sizes):
    """-5 sigmoid(normal), the decays of Kimi Linear's channels."""
    return -5 * torch.sigmoid(torch.randn(*sizes, 128, device="cuda"))


def _ssd(batch, length, heads):
    """Twice the heads, of 64 columns, and one group of 128 states for all: x, dt, A, B, C"""
    dt, rate = torch.rand(batch, length, 2 * heads, device="cuda") / 8, -torch.rand(2 * heads, device="cuda") - 0.5
    return _normal(batch, length, 2 * heads, 64), dt, rate, *(_normal(batch, length, 1, 128) for _ in range(2))


def _maps(batch, length, heads):
    return _normal(heads, 128, 64) / 8


def _weight(batch, length, heads):
    return torch.rand(heads, device="cuda") + 0.5


def _steps(q, k, v, decay=None, beta=None, scale=None):
    """The outputs of one head, token by token in float64; q, k, v: (S, D)."""
    q, k, v, decay, beta = (None if x is None else x.double() for x in (q, k, v, decay, beta))
    state, out = k.new_zeros(k.shape[-1], v.shape[-1]), torch.empty_like(v)
    for t in range(len(q)):
        if decay is not None:
            state = state * decay[t].exp().reshape(-1, 1)
        value = v[t] if beta is None else beta[t] * (v[t] - k[t] @ state)
        state = state + torch.outer(k[t], value)
        out[t] = q[t] @ state
    return out * (q.shape[-1] ** -0.5 if scale is None else scale)


def _series(q, k, v):
    s = (q.double() @ k.double().T) * 16**-0.5
    weights = (1 + s + s * s / 2).tril()
    return weights @ v.double() / weights.sum(-1, keepdim=True)


MEMBERS = {  # name: inputs, ours, peer, float64, sizes
    "linear": (_with(), attention.linear, fla("linear_attn", "chunk_linear_attn", normalize=False), _steps, MANY),
    "retention": (
        _with(),
        attention.retention,
        fla("retention", "chunk_retention"),
        lambda q, k, v: _steps(q, k, v, q.new_full(q.shape[:1], math.log(1 - 2**-5), dtype=torch.float64)),
        MANY,
    ),
    "simple GLA": (
        _with(_gates),
        lambda q, k, v, g: attention.linear(q, k, v, decay=g),
        fla("simple_gla", "chunk_simple_gla"),
        _steps,
        MANY,
    ),
    "GLA": (_with(_by_channel), attention.gla, fla("gla", "chunk_gla"), _steps, [WIDE]),
    "delta rule": (
        _with(_beta),
        lambda q, k, v, beta: attention.delta_rule(q, k, v, beta),
        fla("delta_rule", "chunk_delta_rule"),
        lambda q, k, v, beta: _steps(q, k, v, None, beta),
        [WIDE],
    ),
    "gated delta rule": (
        _with(_gates, _beta),
        lambda q, k, v, g, beta: attention.delta_rule(q, k, v, beta, decay=g),
        fla("gated_delta_rule", "chunk_gated_delta_rule"),
        _steps,
        [WIDE, LARGE],
    ),
    "KDA": (
        _with(_by_channel, _beta),
        lambda q, k, v, g, beta: attention.delta_rule(q, k, v, beta, decay=g),
        fla("kda", "chunk_kda"),
        _steps,
        [WIDE],
    ),
    "GLA, gates of models": (_with(_models_gates), attention.gla, fla("gla", "chunk_gla"), _steps, [WIDE]),
    "KDA, gates of models": (
        _with(_models_gates, _beta),
        lambda q, k, v, g, beta: attention.delta_rule(q, k, v, beta, decay=g),
        fla("kda", "chunk_kda"),
        _steps,
        [WIDE],
    ),
    "based": (
        lambda *sizes: (_normal(*sizes, 16), _normal(*sizes, 16), _normal(*sizes, 64)),
        attention.based,
        fla("based", "fused_chunk_based"),
        _series,
        [WIDE],
    ),
    "Mamba-2": (
        _ssd,
        attention.mamba2,
        library("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", chunk_size=256),
        lambda x, dt, A, B, C: _steps(C, B, x * dt[:, None], dt * A, scale=1),
        [WIDE],
    ),
    "hedgehog": (_with(_maps, _maps, _weight, _weight), attention.hedgehog, None, None, [WIDE]),
}
CASES = [(name, size) for name, (*_, sizes) in MEMBERS.items() for size in sizes]
PROVIDERS = "tiles", "peer", "copy"


def _error(reference, call, given):
    """Root-mean-square error of the first head of the last batch, relative to the reference's size."""
    out = call(*given)[-1, :CHECKED, 0].double()
    want = reference(*(x[-1, :CHECKED, 0] if x.ndim > 2 else x[0] for x in given))
    return ((out - want).square().mean() / want.square().mean()).sqrt().item()


@functools.cache
def _times(name, size):
    """({provider: milliseconds of every round, or why it cannot run}, {provider: error})"""
    make, ours, peer, reference, _ = MEMBERS[name]
    nbytes = sum(x.nbytes for x in make(*size)) + ours(*make(*size)).nbytes
    sets = rotated(lambda: make(*size), nbytes)
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls, missing = present({"peer": peer} if peer else {}, sets[0])
    calls = {"tiles": ours} | calls
    errors = {provider: _error(reference, call, sets[0]) for provider, call in calls.items() if reference}
    assert errors.get("tiles", 0) < 2**-6
    return interleaved(calls | {"copy": lambda *_: target.copy_(source)}, sets, ROUNDS) | missing, errors


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("name", "size"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)))
def test_linear(benchmark, name, size, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    measured, errors = _times(name, size)
    times = measured.get(provider, "none is known")
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    batch, length, heads = size
    benchmark.group = f"{name} B {batch} S {length} H {heads}"
    benchmark.extra_info |= {"provider": provider, "member": name, "batch": batch, "length": length, "heads": heads}
    report(benchmark, times)
    limit, ms = statistics.median(measured["copy"]), statistics.median(times)
    benchmark.extra_info |= {"ms": ms, "limit": limit, "of_limit": limit / ms}
    if provider == "tiles" and len(errors) == 2:
        benchmark.extra_info["error_ratio"] = errors["tiles"] / errors["peer"]
