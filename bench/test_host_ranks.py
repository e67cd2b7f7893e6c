"""What a call of attention.parallel.forward costs on the host beyond its collectives and beyond attention.forward: p50 over
calls of small problems, as one of two ranks, whose messages go nowhere and whose attention computes nothing. Views,
allocations, copies and all bookkeeping are real. Runs with a GPU or without; the goal is 40 us for what "auto" takes.

`pytest bench/test_host_ranks.py --benchmark-json=host_ranks.json`, or `python -m bench.test_host_ranks` for a table
"""

import statistics
import time
from contextlib import contextmanager, nullcontext

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import attention  # noqa: E402
from attention import parallel  # noqa: E402
from attention.parallel import plans  # noqa: E402
from attention.parallel.peers import Peers, PendingMessages  # noqa: E402
from attention.plans.softmax import remote_keys  # noqa: E402
from bench.measure import report  # noqa: E402

CALLS, WARMUP = 1500, 100
CASES = {
    "auto, causal": dict(causal=True),
    "gather, causal": dict(scheme="gather", causal=True),
    "gather, window": dict(scheme="gather", window=(100, 0)),
    "ulysses, causal": dict(scheme="ulysses", causal=True),
    "ring, causal": dict(scheme="ring", causal=True),
    "auto, causal, in training": dict(causal=True),
}


def attends_to_nothing(q, k, v, *, out=None, return_lse=False, **options):
    """Results with the shapes of attention.forward's, not computed."""
    made = torch.empty_like(q) if out is None else out
    return made, torch.empty((q.shape[0], q.shape[2], q.shape[1]), device=q.device)


@contextmanager
def one_of_two():
    """This process is one of two ranks. Plans are made as always, but nothing is sent or computed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real, planned = attention.forward, plans.plan_call

    def planned_in_earnest(*given):
        attention.forward = real
        try:
            return planned(*given)
        finally:
            attention.forward = attends_to_nothing

    patch = pytest.MonkeyPatch()
    patch.setattr(Peers, "exchange", lambda self, sends, receives: PendingMessages(()))
    patch.setattr(Peers, "all_gather_bytes", lambda self, said, device: [said] * self.world)
    patch.setattr(plans, "plan_call", planned_in_earnest)
    patch.setattr(attention, "forward", attends_to_nothing)
    patch.setattr(remote_keys, "forward_two_buffers", lambda q, *others: attends_to_nothing(q, None, None))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
        patch.undo()


def times(name):
    """Milliseconds of each call of a case."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
    q, k, v = (torch.empty(1, 512, heads, 16, device=device, dtype=dtype) for heads in (8, 2, 2))
    options, lines = CASES[name], []
    learning = "training" in name
    q.requires_grad_(learning)
    with one_of_two(), nullcontext() if learning else torch.no_grad():
        for call in range(WARMUP + CALLS):
            begun = time.perf_counter()
            parallel.forward(q, k, v, **options)
            if call >= WARMUP:
                lines.append(1e3 * (time.perf_counter() - begun))
            elif device == "cuda":
                torch.cuda.synchronize()
    return lines


@pytest.mark.parametrize("name", CASES)
def test_host_time(benchmark, name):
    benchmark.group = "host time of one call, beyond collectives and attention"
    benchmark.extra_info |= {"provider": name}
    report(benchmark, times(name))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        seconds = times(case)
        print(f"{case:28} {1e3 * statistics.median(seconds):7.1f} us  (least {1e3 * min(seconds):.1f})")
