"""The short convolution and its gradients beside a copy in device memory, and causal_conv1d and flash-linear-attention where
installed. `of_limit` is the time of a copy of as many bytes (x and y; backward x, dy and dx) over the provider's, in the same
rounds; the target is 0.9.
`pytest bench/test_short_conv.py -s`. See measure.py for the protocol."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import library, present  # noqa: E402

ROUNDS, WIDTH = 7, 4
SIZES = [(1, 32768, 8192), (8, 4096, 8192), (1, 4096, 4096), (1, 32768, 1024)]  # batch, tokens, channels
causal_conv1d = library("causal_conv1d", "causal_conv1d_fn")


def inputs(batch, length, channels):
    """Random x and dy of (batch, length, channels) and the weights of the convolution, bfloat16."""
    x, dy = torch.randn(2, batch, length, channels, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(channels, WIDTH, device="cuda", dtype=torch.bfloat16) / 2, dy


def peer(x, weight, dy):
    """causal_conv1d takes the channels second; here they are contiguous, too."""
    return causal_conv1d(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)


def conv(x, weight, dy):
    return attention.short_conv(x, weight, activation="silu")


def gradients(x, weight, dy):
    return attention.short_conv_backward(dy, x, weight, activation="silu")


def check_results(x, weight, dy):
    """Compare the last 300 tokens of 64 channels with float32, and all gradients' sums with those of blocks of tokens."""
    tail, taps = x[-1, -300:, :64].float().requires_grad_(), weight[:64].float()
    z = torch.nn.functional.conv1d(tail.T[None], taps[:, None], groups=64)[0].T
    y = torch.nn.functional.silu(z)
    torch.testing.assert_close(conv(x, weight, dy)[-1, 3 - 300 :, :64].float(), y, rtol=2**-7, atol=2**-7)
    (dx,) = torch.autograd.grad(y, tail, dy[-1, 3 - 300 :, :64].float())
    torch.testing.assert_close(gradients(x, weight, dy)[0][-1, 6 - 300 :, :64].float(), dx[6:], rtol=2**-6, atol=2**-6)


@functools.cache
def times(size, backward):
    """{provider: milliseconds of every round, or why it cannot run}"""
    tensors = 3 if backward else 2
    sets = rotated(lambda: inputs(*size), sum(x.nbytes for x in inputs(*size)))
    check_results(*sets[0])
    source = torch.empty(tensors * sets[0][0].nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    peers, missing = ({}, {}) if backward else present({"causal_conv1d": peer}, sets[0])
    calls = {"tiles": gradients if backward else conv, **peers, "copy": lambda *_: target.copy_(source)}
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", ["tiles", "causal_conv1d"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_short_conv(benchmark, size, backward, provider):
    measured = times(size, backward)
    milliseconds = measured.get(provider, "its gradients are not timed")
    if isinstance(milliseconds, str):
        pytest.skip(f"{provider}: {milliseconds}")
    benchmark.group = f"short_conv {'backward' if backward else 'forward'} {size}"
    report(benchmark, milliseconds)
    of_limit = statistics.median(measured["copy"]) / statistics.median(milliseconds)
    benchmark.extra_info |= {"provider": provider, "of_limit": round(of_limit, 3)}
    print(f"{benchmark.group} {provider}: {statistics.median(milliseconds):.3f} ms, {of_limit:.3f} of a copy")
