"""Forward and backward of the linear-attention family beside flash-linear-attention's and mamba_ssm's, where installed.

A provider's call is a step of training: the outputs, and the gradients of all inputs from one of the outputs. "forward" is ours
without gradients, so that "tiles" less "forward" is what training adds. `distance` is the root-mean-square difference of our
gradients from the peer's, relative to the peer's, the largest of all inputs: both are of 16-bit products, and 0.01 is common.
`saved` is what a step keeps in memory between its passes, inputs apart, over the bytes of the output. See measure.py for the
protocol. `pytest bench/test_linear_training.py -k Mamba`; flash-linear-attention tunes itself for two minutes a member."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import present  # noqa: E402
from bench.test_linear import LONG, MEMBERS, ROUNDS, WIDE  # noqa: E402

CASES = [(name, WIDE) for name in MEMBERS] + [("simple GLA", LONG)]
PROVIDERS = "tiles", "peer", "forward"
FARTHEST = 0.05


def _step(call):
    """The function of (dout, *leaves) that returns the gradients of all leaves."""

    def step(dout, *leaves):
        return torch.autograd.grad(call(*leaves), leaves, dout)

    return step


def _forward(call):
    def forward(dout, *leaves):
        with torch.no_grad():
            return call(*leaves)

    return forward


def _saved(call, dout, *leaves):
    """Bytes that a forward pass leaves allocated, less those of its output, over these."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = call(*leaves)
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before - out.nbytes) / out.nbytes


def _distance(ours, peers):
    """The largest relative difference of two lists of gradients."""
    squares = lambda x: x.double().square().mean()
    return max((squares(x.double() - y) / squares(y)).sqrt().item() for x, y in zip(ours, peers, strict=True))


@functools.cache
def _times(name, size):
    """({provider: milliseconds of every round, or why it cannot run}, what else is reported)"""
    make, ours, peer, _, _ = MEMBERS[name]

    def made():
        leaves = [x.requires_grad_() for x in make(*size)]
        return torch.randn_like(_forward(ours)(None, *leaves)), *leaves

    first = made()
    sets = [first, *rotated(made, sum(x.nbytes for x in first))[1:]]
    calls, missing = present({"peer": _step(peer)} if peer else {}, first)
    found = {"saved": _saved(ours, *first)}
    if "peer" in calls:
        found |= {"distance": _distance(_step(ours)(*first), calls["peer"](*first)), "saved by peer": _saved(peer, *first)}
        assert found["distance"] < FARTHEST
    return interleaved({"tiles": _step(ours), "forward": _forward(ours)} | calls, sets, ROUNDS) | missing, found


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("name", "size"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)))
def test_linear_training(benchmark, name, size, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    measured, found = _times(name, size)
    times = measured.get(provider, "none is known")
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    batch, length, heads = size
    benchmark.group = f"{name}, training, B {batch} S {length} H {heads}"
    benchmark.extra_info |= {"provider": provider, "member": name, "batch": batch, "length": length, "heads": heads}
    report(benchmark, times)
    benchmark.extra_info["ms"] = statistics.median(times)
    if provider == "tiles":
        benchmark.extra_info |= found
