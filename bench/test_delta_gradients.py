"""Gradients of the delta rule, the gated delta rule and KDA beside a copy in device memory, and flash-linear-attention's and
FlashQLA's where installed. `limit` is the time of a copy of as many bytes as q, k, v, dout and the gradients of the first three
have, in the same rounds; `of_limit` is that over the provider's time. A peer's time is that of its backward pass, of a graph
that is kept. `pytest bench/test_delta_gradients.py -s`. See measure.py for the protocol."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from attention import reference  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import fla, library, present  # noqa: E402
from tiles.testing.backends import to_numpy  # noqa: E402

ROUNDS, DIM, CHECKED = 5, 128, 300  # rounds; channels; tokens that are compared with float64
SIZES = [(8, 2048, 32, 32), (1, 8192, 16, 32), (1, 32768, 16, 32)]  # batch, tokens, key heads, value heads
PEERS = {  # by rule: how others call it
    "delta rule": {"fla": fla("delta_rule", "chunk_delta_rule")},
    "gated delta rule": {
        "fla": fla("gated_delta_rule", "chunk_gated_delta_rule"),
        "flash_qla": library("flash_qla", "chunk_gated_delta_rule"),
    },
    "KDA": {"fla": fla("kda", "chunk_kda")},
}


def inputs(rule, batch, length, key_heads, heads):
    """dout, q, k, v, beta and, unless the rule has none, decays; KDA's as models of it have them"""
    normal = lambda count: torch.randn(batch, length, count, DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.nn.functional.normalize(normal(key_heads), dim=-1)
    beta = torch.rand(batch, length, heads, device="cuda", dtype=torch.bfloat16)
    decays = {
        "gated delta rule": lambda: torch.nn.functional.logsigmoid(torch.randn(batch, length, heads, device="cuda")) / 16,
        "KDA": lambda: -5 * torch.sigmoid(torch.randn(batch, length, heads, DIM, device="cuda")),
    }
    decay = (decays[rule](),) if rule in decays else ()
    return normal(heads), normal(key_heads), k, normal(heads), beta, *decay


def gradients(dout, q, k, v, beta, decay=None):
    return attention.delta_rule_backward(dout, q, k, v, beta, decay=decay)


@functools.cache
def kept_graph(peer, *arrays):
    """(outputs, inputs that require grad) of the peer's call with these arrays."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    q, k, v, beta, *decay = leaves
    return peer(q, k, v, *decay, beta), leaves


def of_peer(peer, dout, *arrays):
    """The peer's gradients, of a graph that its first call with these arrays makes."""
    out, leaves = kept_graph(peer, *arrays)
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def check_gradients(rule):
    """Compare gradients of a few tokens with float64."""
    arrays = inputs(rule, 1, CHECKED, 1, 2)
    names = "dout", "q", "k", "v", "beta", "decay"
    known = reference.linear_backward(**{name: to_numpy(x) for name, x in zip(names, arrays)})
    for name, x in zip(names[1:], gradients(*arrays)):
        got, want = to_numpy(x).astype(float), known["d" + name]
        assert ((got - want) ** 2).mean() < 2**-14 * (want**2).mean(), name


@functools.cache
def times(rule, size):
    """{provider: milliseconds of every round, or why it cannot run}"""
    check_gradients(rule)
    nbytes = sum(2 * x.nbytes for x in inputs(rule, *size)[1:4]) + inputs(rule, *size)[0].nbytes
    sets = rotated(lambda: inputs(rule, *size), nbytes)
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    grouped = size[2] != size[3] and rule == "delta rule"  # fla's has as many key heads as value heads
    known = {} if grouped else {name: functools.partial(of_peer, peer) for name, peer in PEERS[rule].items()}
    peers, missing = present(known, sets[0])
    calls = {"tiles": gradients, **peers, "copy": lambda *_: target.copy_(source)}
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize(("rule", "provider"), [(rule, name) for rule in PEERS for name in ("tiles", *PEERS[rule])])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_delta_gradients(benchmark, size, rule, provider):
    measured = times(rule, size)
    milliseconds = measured.get(provider, "takes no groups of value heads")
    if isinstance(milliseconds, str):
        pytest.skip(f"{provider}: {milliseconds}")
    benchmark.group = f"{rule} backward {size}"
    report(benchmark, milliseconds)
    limit, median = statistics.median(measured["copy"]), statistics.median(milliseconds)
    benchmark.extra_info |= {"provider": provider, "ms": median, "limit": limit, "of_limit": limit / median}
    print(f"{benchmark.group} {provider}: {median:.3f} ms, {limit / median:.3f} of a copy")
