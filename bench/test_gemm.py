"""The levels of examples/gemm, each beside cuBLAS (torch.matmul): C = A B^T of square bf16 matrices, random numbers.

A level and cuBLAS take turns, so the ratio is between neighbours in time: on random numbers both run into the card's power
limit, and what ran before counts. See measure.py for the protocol. `pytest bench/test_gemm.py`; the ratio to cuBLAS is in
--benchmark-json's extra_info and in the test's output (`-rP`).
"""

import importlib
import statistics
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

from bench.measure import interleaved, medians, report, rotated  # noqa: E402

LADDER = Path(__file__).parents[1] / "examples" / "gemm"
LEVELS = sorted(path.stem for path in LADDER.glob("level_*.py"))
SIZES = (4096, 8192)
ROUNDS = 9


def _level(name):
    sys.path.insert(0, str(LADDER))
    try:
        return importlib.import_module(name).matmul
    finally:
        sys.path.remove(str(LADDER))


def _cublas(a, b, c):
    torch.matmul(a, b.T, out=c)


def _inputs(n):
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return a, b, torch.full_like(a, float("nan"))


def _check(call, a, b, c):
    """Some rows of every tile, against float32: one rounding to bf16, and what sums of fp32 add."""
    call(a, b, c)
    want = a[::16].float() @ b.float().T
    torch.testing.assert_close(c[::16].float(), want, rtol=2**-8, atol=1e-5 * a.shape[1] ** 0.5 + 2**-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", SIZES)
def test_gemm(benchmark, n, level):
    """TFLOPS of one level, and its ratio to cuBLAS."""
    call, sets = _level(level), rotated(lambda: _inputs(n), 3 * 2 * n * n)
    _check(call, *sets[0])
    times = interleaved({level: call, "cublas": _cublas}, sets, ROUNDS)
    benchmark.group = f"gemm {n}"
    report(benchmark, times[level])
    tflops = {name: round(2 * n**3 / ms / 1e9, 1) for name, ms in medians(times).items()}
    ratio = statistics.median(theirs / ours for ours, theirs in zip(times[level], times["cublas"]))
    benchmark.extra_info |= {"n": n, "level": level, "tflops": tflops, "ratio": round(ratio, 3)}
    print(f"{n} {level}: {tflops[level]} TFLOPS, cuBLAS {tflops['cublas']}, ratio {ratio:.3f}")
