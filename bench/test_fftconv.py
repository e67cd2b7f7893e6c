"""examples/fftconv.py beside torch's FFT: circular convolutions of ThunderKittens' shapes, B 16, H 768, N 4096 and 1024.

bf16 in and out, the filters' transforms made once; microseconds of a call in a CUDA graph, inputs rotated past L2. torch has no
transform of bf16: `torch` casts to float32 and back, `torch_fp32` has its inputs and results in float32 already.
`pytest -s bench/test_fftconv.py --benchmark-json=fftconv.json`; see measure.py for the protocol.
"""

import functools
import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

from bench.measure import medians, replayed, report, rotated  # noqa: E402
from tiles import bf16  # noqa: E402

EXAMPLES = str(Path(__file__).parents[1] / "examples")
BATCH, CHANNELS, SIZES = 16, 768, (4096, 1024)
PROVIDERS = "tiles", "torch", "torch_fp32"


def _example():
    sys.path.insert(0, EXAMPLES)
    try:
        return importlib.import_module("fftconv")
    finally:
        sys.path.remove(EXAMPLES)


def _on_gpu(array):
    return torch.from_numpy(array.astype("float32")).cuda().bfloat16()


@functools.cache
def _times(size):
    """{provider: milliseconds of every round}"""
    example = _example()
    k = torch.randn(CHANNELS, size) / size**0.5
    constants = [_on_gpu(x) for x in (*example.constants(size, bf16), example.spectrum(k.numpy(), size, bf16))]
    spectrum = torch.fft.rfft(k.cuda())

    def inputs():
        u = torch.randn(BATCH, CHANNELS, size, device="cuda", dtype=torch.bfloat16)
        return u, u.float(), torch.empty_like(u)

    def ours(u, wide, y):
        example.fftconv(u, *constants, y)
        return y

    def torch_bf16(u, wide, y):
        return torch.fft.irfft(torch.fft.rfft(u.float()) * spectrum, n=size).bfloat16()

    def torch_fp32(u, wide, y):
        return torch.fft.irfft(torch.fft.rfft(wide) * spectrum, n=size)

    sets = rotated(inputs, 2 * 2 * BATCH * CHANNELS * size)
    calls = dict(zip(PROVIDERS, (ours, torch_bf16, torch_fp32)))
    u = sets[0][0][:2].double()
    exact = torch.fft.irfft(torch.fft.rfft(u) * torch.fft.rfft(k.cuda().double()), n=size)
    for provider, call in calls.items():
        error = (call(*sets[0])[:2].double() - exact).abs().max() / exact.abs().max()
        assert error < 2**-5, f"{provider} {size}: {error}"
    return replayed(calls, sets, calls=40)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", SIZES)
def test_fftconv(benchmark, size, provider):
    times = _times(size)
    microseconds = {who: 1e3 * ms for who, ms in medians(times).items()}
    if provider == PROVIDERS[0]:
        least = min(microseconds[who] for who in PROVIDERS[1:])
        print(f"\nfftconv {size}: " + ", ".join(f"{who} {us:.1f}" for who, us in microseconds.items()), end="")
        print(f" us; {least / microseconds['tiles']:.2f}x the better of torch's, goal 2")
    benchmark.group = f"fftconv {BATCH} x {CHANNELS} x {size}"
    benchmark.extra_info |= {"provider": provider, "microseconds": microseconds[provider]}
    report(benchmark, times[provider])
