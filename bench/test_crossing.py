"""Where linear attention overtakes softmax attention: the same tokens in ever longer sequences, causal.

bf16, B * S = 65536, 16 heads of 128; linear attention decays by token (simple GLA). What is timed here is checked in
test_linear.py and test_forward.py. See measure.py for the protocol.
`pytest bench/test_crossing.py --benchmark-json=crossing.json`, then `python bench/plot.py crossing.json crossing.svg`.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402

TOKENS, HEADS, DIM = 65536, 16, 128
LENGTHS = tuple(2**n for n in range(8, 17))
ROUNDS = 5
SOFTMAX, LINEAR = ("softmax", "cudnn", "flash4"), ("linear", "fla")


def _inputs(length):
    shape = TOKENS // length, length, HEADS, DIM
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, F.normalize(k, dim=-1), v, F.logsigmoid(torch.randn(shape[:-1], device="cuda")) / 16


def _without_gates(call):
    return lambda q, k, v, decay: call(q, k, v)


@functools.cache
def _times(length):
    """{provider: milliseconds of every round, or why it cannot run}"""
    sets = rotated(lambda: _inputs(length), 3 * TOKENS * HEADS * DIM * 2)
    theirs = {name: _without_gates(call) for name, call in peers.softmax(causal=True).items() if name in SOFTMAX}
    calls, missing = peers.present(theirs | {"fla": peers.fla("simple_gla", "chunk_simple_gla")}, sets[0])
    calls["softmax"] = _without_gates(functools.partial(attention.forward, causal=True))
    calls["linear"] = lambda q, k, v, decay: attention.linear(q, k, v, decay=decay)
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", SOFTMAX + LINEAR)
@pytest.mark.parametrize("length", LENGTHS)
def test_crossing(benchmark, length, provider):
    """Rows of a group are what one reads: one length, one provider each."""
    times = _times(length)[provider]
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    benchmark.group = f"crossing S {length}"
    benchmark.extra_info |= {"provider": provider, "length": length, "tokens": TOKENS, "heads": HEADS, "head_dim": DIM}
    report(benchmark, times)
