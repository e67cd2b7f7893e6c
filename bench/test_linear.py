"""The linear-attention family beside flash-linear-attention, where it is installed, and a copy in device memory.

`limit` is the time in which the inputs can be read and the output written once, at the bandwidth that a copy of as many bytes
reaches in the same rounds; `of_limit` is that over the provider's time. `error_ratio` is our root-mean-square error against
float64 over flash-linear-attention's on the same inputs. See measure.py for the protocol.
`pytest bench/test_linear.py --benchmark-json=linear.json`, then `python bench/table.py linear.json`.
"""

import functools
import importlib

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402

ROUNDS, CHECKED = 5, 1024  # tokens of one head that are compared with float64
WIDE, LONG = (8, 2048, 32), (1, 32768, 16)  # batch, tokens, heads
LARGE = 8, 8192, 32
MANY = [WIDE, LARGE, LONG, (1, 131072, 16), (1, 262144, 16)]


def _fla(module, name, **options):
    """A function of flash-linear-attention's, looked up when it is called."""

    def call(*args):
        out = getattr(importlib.import_module(f"fla.ops.{module}"), name)(*args, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


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


def _ssd(batch, length, heads):
    """Twice the heads, of 64 columns, and one group of 128 states for all: x, dt, A, B, C"""
    dt, rate = torch.rand(batch, length, 2 * heads, device="cuda") / 8, -torch.rand(2 * heads, device="cuda") - 0.5
    return _normal(batch, length, 2 * heads, 64), dt, rate, *(_normal(batch, length, 1, 128) for _ in range(2))


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


MEMBERS = {  # name: inputs, ours, flash-linear-attention's, float64, sizes
    "linear": (_with(), attention.linear, _fla("linear_attn", "chunk_linear_attn", normalize=False), _steps, MANY),
    "retention": (_with(), attention.retention, _fla("retention", "chunk_retention"), None, MANY),
    "simple GLA": (
        _with(_gates),
        lambda q, k, v, g: attention.linear(q, k, v, decay=g),
        _fla("simple_gla", "chunk_simple_gla"),
        _steps,
        MANY,
    ),
    "GLA": (_with(_by_channel), attention.gla, _fla("gla", "chunk_gla"), _steps, [WIDE]),
    "delta rule": (
        _with(_beta),
        lambda q, k, v, beta: attention.delta_rule(q, k, v, beta),
        _fla("delta_rule", "chunk_delta_rule"),
        lambda q, k, v, beta: _steps(q, k, v, None, beta),
        [WIDE],
    ),
    "gated delta rule": (
        _with(_gates, _beta),
        lambda q, k, v, g, beta: attention.delta_rule(q, k, v, beta, decay=g),
        _fla("gated_delta_rule", "chunk_gated_delta_rule"),
        _steps,
        [WIDE, LARGE],
    ),
    "KDA": (
        _with(_by_channel, _beta),
        lambda q, k, v, g, beta: attention.delta_rule(q, k, v, beta, decay=g),
        _fla("kda", "chunk_kda"),
        _steps,
        [WIDE],
    ),
    "based": (
        lambda *sizes: (_normal(*sizes, 16), _normal(*sizes, 16), _normal(*sizes, 64)),
        attention.based,
        _fla("based", "fused_chunk_based"),
        _series,
        [WIDE],
    ),
    "Mamba-2": (
        _ssd,
        attention.mamba2,
        None,
        None,
        [WIDE],
    ),
    "softmax": (_with(), functools.partial(attention.forward, causal=True), None, None, [WIDE, LARGE]),
}  # fmt: skip
CASES = [(name, size) for name, (*_, sizes) in MEMBERS.items() for size in sizes]
PROVIDERS = "tiles", "fla", "copy"


def _error(reference, call, given):
    """Root-mean-square error of the last head of the last batch, relative to the reference's size."""
    out = call(*given)[-1, :CHECKED, -1].double()
    want = reference(*(x[-1, :CHECKED, -1] for x in given))
    return ((out - want).square().mean() / want.square().mean()).sqrt().item()


@functools.cache
def _times(name, size):
    """({provider: milliseconds of every round, or why it cannot run}, {"error", "fla_error"}, bytes)"""
    make, ours, fla, reference, _ = MEMBERS[name]
    nbytes = sum(x.nbytes for x in make(*size)) + ours(*make(*size)).nbytes
    sets = rotated(lambda: make(*size), nbytes)
    calls, missing, errors = {"tiles": ours}, {}, {}
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls["copy"] = lambda *_: target.copy_(source)
    if reference is not None:
        errors["error"] = _error(reference, ours, sets[0])
        assert errors["error"] < 2**-6
    try:
        if fla is None:
            raise ImportError("there is no such function")
        fla(*sets[0])
        calls["fla"] = fla
        if reference is not None:
            errors["fla_error"] = _error(reference, fla, sets[0])
    except (ImportError, RuntimeError, AttributeError, TypeError, AssertionError) as error:
        missing["fla"] = f"{type(error).__name__}: {error}"
    return interleaved(calls, sets, ROUNDS) | missing, errors, nbytes


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("name", "size"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)))
def test_linear(benchmark, name, size, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    found, errors, nbytes = _times(name, size)
    times = found[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    batch, length, heads = size
    benchmark.group = f"{name} B {batch} S {length} H {heads}"
    benchmark.extra_info |= {"provider": provider, "member": name, "batch": batch, "length": length, "heads": heads}
    report(benchmark, times)
    limit = medians(found | {p: [0.0] for p, x in found.items() if isinstance(x, str)})["copy"]
    benchmark.extra_info |= {"ms": medians({"x": times})["x"], "limit": limit, "of_limit": limit / medians({"x": times})["x"]}
    if provider == "tiles" and len(errors) == 2:
        benchmark.extra_info["error_ratio"] = errors["error"] / errors["fla_error"]
