"""How everything here is timed, and why.

- Device time by events around a group of launches, so that the host's part overlaps as it does in a model.
- Providers take turns within each round: a card that warms up or clocks down does so for all of them, and only ratios
  within a run mean anything. The figure is the median over rounds.
- Inputs rotate through sets that together exceed the L2 cache several times over, so nothing is measured from cache.
- Before a provider is timed its output is compared with a float32 reference on the same inputs, by the rule of the tests, where
  what it computes has a peer here; a benchmark whose docstring says otherwise, and more forms of a call that was compared
  (of caches in pages or of fp8, of several tokens, quantize, hedgehog), leave that to the tests.
"""

import gc
import itertools
import statistics

import torch

L2_BYTES = 64 * 2**20
WARMUP_MS, ROUND_MS = 30, 20


def rotated(make, nbytes):
    """Enough sets of inputs, each from `make()` and `nbytes` large, to exceed L2 four times over; at least two."""
    return [make() for _ in range(max(2, -(-4 * L2_BYTES // nbytes)))]


def _timed(call, sets, repeats):
    """Milliseconds of one call, over `repeats` calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rotation = itertools.cycle(sets)
    start.record()
    for _ in range(repeats):
        call(*next(rotation))
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def interleaved(providers, sets, rounds=7):
    """{provider: its milliseconds in every round}; each call is given one of `sets`."""
    repeats = {}
    for name, call in providers.items():
        estimate = _timed(call, sets, 2)
        _timed(call, sets, max(1, int(WARMUP_MS / estimate)))
        repeats[name] = max(1, int(ROUND_MS / _timed(call, sets, 3)))
    times = {name: [] for name in providers}
    for _ in range(rounds):
        for name, call in providers.items():
            times[name].append(_timed(call, sets, repeats[name]))
    return times


def replayed(providers, sets, rounds=7, calls=200):
    """{provider: milliseconds in every round} of one call, for calls too short for the host to keep up with: about `calls` of
    them are one CUDA graph, which is replayed."""
    graphs, calls = {}, max(len(sets), calls // len(sets) * len(sets))
    for name, call in providers.items():
        for inputs in sets[:2]:
            call(*inputs)
        torch.cuda.synchronize()
        gc.collect()  # an old graph that dies in a cycle of objects while this one is captured would end the capture
        graphs[name] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _, inputs in zip(range(calls), itertools.cycle(sets)):
                call(*inputs)
        graph.replay()
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return times


def medians(times):
    """times and the result are {provider: ...}; the result is in the unit of times, milliseconds."""
    return {name: statistics.median(values) for name, values in times.items()}


class Recorded:
    """A clock that replays times, so that pytest-benchmark can report what `interleaved` measured."""

    def __init__(self, milliseconds):
        ticks = []
        for ms in milliseconds:
            ticks += [0.0, ms / 1e3]
        self._ticks = iter(ticks)

    def __call__(self):
        return next(self._ticks)


def report(benchmark, milliseconds):
    """Give the rounds of one provider to pytest-benchmark's fixture."""
    benchmark._timer = Recorded(milliseconds)
    benchmark.pedantic(lambda: None, rounds=len(milliseconds), iterations=1, warmup_rounds=0)


def report_attention(benchmark, what, provider, milliseconds, flops, head_dim, causal, length):
    """Give the rounds of a pass of attention to pytest-benchmark's fixture, and its TFLOPS. flops: without a mask."""
    benchmark.group = f"{what} D {head_dim} {'causal' if causal else 'full'} S {length}"
    benchmark.extra_info |= {"provider": provider, "head_dim": head_dim, "causal": causal, "length": length}
    report(benchmark, milliseconds)
    benchmark.extra_info["tflops"] = round(flops * (0.5 if causal else 1) / benchmark.stats.stats.median / 1e12, 1)
