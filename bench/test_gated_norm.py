"""The gated RMS norm and its gradients beside a copy in device memory, torch's operations, and flash-linear-attention where
installed. `of_limit` is the time of a copy of as many bytes (x, gate and y; backward x, gate, dy, dx and dgate) over the
provider's, in the same rounds; the target is 0.9.
`pytest bench/test_gated_norm.py -s`. See measure.py for the protocol; tests/attention compares results."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from attention.nn import GatedRMSNorm  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import library, present  # noqa: E402

ROUNDS = 7
SIZES = [(1, 32768, 32, 128), (1, 32768, 8, 256), (1, 32768, 1, 4096)]  # batch, tokens, heads, columns
theirs = library("fla.modules.fused_norm_gate", "rms_norm_gated")


def inputs(*size):
    """x, weight, gate (a view of a projection), dy"""
    x, z, dy = torch.randn(3, *size, device="cuda", dtype=torch.bfloat16)
    gate = torch.cat([z.flatten(2)] * 2, -1)[..., size[2] * size[3] :].view(size)
    return x, torch.randn(size[-1], device="cuda", dtype=torch.bfloat16), gate, dy


@functools.cache
def module(columns):
    """The module, for torch's operations."""
    return GatedRMSNorm(columns, device="cuda", dtype=torch.bfloat16)


def norm(x, weight, gate, dy):
    return attention.gated_rms_norm(x, weight, gate)


def gradients(x, weight, gate, dy):
    return attention.gated_rms_norm_backward(dy, x, weight, gate)


@functools.cache
def times(size, backward):
    """{provider: milliseconds of every round, or why it cannot run}"""
    tensors = 5 if backward else 3
    sets = rotated(lambda: inputs(*size), sum(x.nbytes for x in inputs(*size)))
    source = torch.empty(tensors * sets[0][0].nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls, missing = {"tiles": gradients if backward else norm, "copy": lambda *_: target.copy_(source)}, {}
    if not backward:
        peer = lambda x, weight, gate, dy: theirs(x, gate, weight, None, activation="swish")
        peers, missing = present({"fla": peer}, sets[0])
        calls |= peers | {"torch": lambda x, weight, gate, dy: module(size[-1]).by_torch(x, gate)}
    with torch.no_grad():
        return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", ["tiles", "torch", "fla"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_gated_norm(benchmark, size, backward, provider):
    measured = times(size, backward)
    milliseconds = measured.get(provider, "its gradients are not timed")
    if isinstance(milliseconds, str):
        pytest.skip(f"{provider}: {milliseconds}")
    benchmark.group = f"gated_rms_norm {'backward' if backward else 'forward'} {size}"
    report(benchmark, milliseconds)
    of_limit = statistics.median(measured["copy"]) / statistics.median(milliseconds)
    benchmark.extra_info |= {"provider": provider, "of_limit": round(of_limit, 3)}
    print(f"{benchmark.group} {provider}: {statistics.median(milliseconds):.3f} ms, {of_limit:.3f} of a copy")
