"""What a call costs on the host: p50 over 10,000 calls of a tiny problem, the first call of a process, and the imports before.

`pytest bench/test_host.py --benchmark-json=host.json`
"""

import functools
import json
import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from bench.measure import report  # noqa: E402
from bench.test_linear import MEMBERS  # noqa: E402

CALLS, TURN, ROUNDS = 10_000, 100, 3


@functools.cache
def _times():
    """{name: milliseconds of every call itself}. They take turns, for processors change their speed within seconds; the device
    keeps up because the problem is tiny, and is waited for after each turn."""
    q, k, v = (torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "forward, out=": lambda: attention.forward(q, k, v, out=out),
        "forward": lambda: attention.forward(q, k, v),
        "torch SDPA": lambda: F.scaled_dot_product_attention(*turned),
    }
    times = {name: [] for name in calls}
    for turn in range(CALLS // TURN + 1):
        for name, call in calls.items():
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                took = time.perf_counter() - start
                if turn:  # the first one warms up
                    times[name].append(took * 1e3)
            torch.cuda.synchronize()
    return times


@pytest.mark.parametrize("name", ["forward, out=", "forward", "torch SDPA"])
def test_host_time(benchmark, name):
    times = _times()[name]
    benchmark.group = "host time of one call"
    benchmark.extra_info |= {"provider": name}
    report(benchmark, times)


IMPORT = """
import json, time, numpy
start = time.perf_counter()
{}
print(json.dumps(time.perf_counter() - start))
"""
IMPORTS = {
    "import attention": "import attention",
    "and its first function": "from attention import forward",
    "numba.cuda alone": "from numba import cuda",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_import(benchmark, name):
    """Imports in a process that has NumPy, from bytecode on disk: the first round writes it, and is not counted."""
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORT.format(IMPORTS[name])]
    times = []
    for _ in range(ROUNDS + 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        times.append(json.loads(done.stdout.splitlines()[-1]) * 1e3)
    benchmark.group = "imports of a process"
    benchmark.extra_info |= {"provider": name}
    report(benchmark, times[1:])


FIRST = """
import json, sys, time, torch, attention
from bench.test_linear import MEMBERS
make, ours, *_ = MEMBERS.get(sys.argv[1], (MEMBERS["linear"][0], attention.forward))
inputs = make(1, 4096, 16)
torch.cuda.synchronize()
start = time.perf_counter()
ours(*inputs)
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - start))
"""


@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "from disk"])
@pytest.mark.parametrize("name", ["forward", *MEMBERS])
def test_first_call(benchmark, name, cached, tmp_path_factory):
    """The first call of a process, after imports and context: compiling, or loading from the disk cache."""
    folder = tmp_path_factory.mktemp("cache")

    def first(cache):
        environment = {**os.environ, "TILES_CACHE_DIR": str(cache)}
        command = [sys.executable, "-c", FIRST, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1]) * 1e3

    if cached:
        first(folder)
    times = [first(folder if cached else folder / str(n)) for n in range(ROUNDS)]
    benchmark.group = f"first call of a process, {name}"
    benchmark.extra_info |= {"provider": "from disk" if cached else "compiled"}
    report(benchmark, times)
