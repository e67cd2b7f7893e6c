"""Every function, fused functions and steps of training, from eight threads on eight streams, with lengths, rows and addresses
that are new each time, for a while: a call's results are the first one's on the same inputs, bit by bit, and memory stops
growing.

TILES_SOAK_SECONDS says how long: 10 by default, when the table of calls is short, so that it fills in the warm-up; a minute or
more before a release, with the table that users have."""

import hashlib
import itertools
import os
import random
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import places
import pytest

import attention
from fuse import operators
from tiles.calls import program as programs
from tiles.calls.plan import LruTable

sys.path.insert(0, str(Path(__file__).parent / "recurrent"))
from members import BF16, F32, MEMBERS, Member

SECONDS = float(os.environ.get("TILES_SOAK_SECONDS", "10"))
FEW = 64 if SECONDS < 60 else None  # forms of calls that are remembered; None: as many as always
THREADS, LENGTHS = 8, 1024
WARM = 0.5  # of the time, in which tables fill
GROWTH = 16 * 2**20  # bytes: what allocators may still take then


def _heads(rng, batch, length):
    """For forward: four query heads and two key heads."""
    return {name: rng.standard_normal((batch, length, n, 64)).astype(BF16) for name, n in dict(q=4, k=2, v=2).items()}


def _states(rng, batch, length):
    """For linear_step, where tokens are sequences, each with its state."""
    created = {name: rng.standard_normal((batch, length, n, 16)).astype(BF16) for name, n in dict(q=1, k=1, v=2).items()}
    return created | {"state": rng.standard_normal((batch, length, 2, 16, 16)).astype(F32)}


def _step(state, **arrays):
    state = state[0]
    return attention.linear_step(state, **{name: x[0] for name, x in arrays.items()}), state


EVERY = MEMBERS | {
    "forward": Member(attention.forward, None, _heads, start="", keep="", options={"return_lse": True}),
    "forward, causal": Member(attention.forward, None, _heads, start="", keep="", options={"causal": True}),
    "linear_step": Member(_step, None, _states, start="", keep=""),
}


def _rows(rng, batch, length):
    """For fused functions: rows of 256 columns."""
    return {"x": rng.standard_normal((batch, length, 256)).astype(BF16)}


def _weights(**shapes):
    """A function that draws weights of these shapes."""

    def drawn():
        rng = np.random.default_rng(1)
        return {name: (rng.standard_normal(shape) / 16).astype(BF16) for name, shape in shapes.items()}

    return drawn


def _trained(call, **options):
    """A function that calls `call` on tensors that require grad, and returns its output and their gradients."""

    def step(**arrays):
        import torch

        leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
        out = call(**leaves, **options)
        return out.detach(), *torch.autograd.grad(out, [*leaves.values()], torch.ones_like(out))

    return step


def _fused(function):
    """A call of a fused function, whose rows are tokens."""
    return lambda x, **weights: function(x[0], *weights.values())


EXPERTS = dict(router=(256, 8), gate=(8, 128, 256), up=(8, 128, 256), down=(8, 128, 256))
OF_MODELS = {
    "rms_norm_linear": Member(_fused(operators.rms_norm_linear), None, _rows, _weights(g=(256,), w=(256, 128)), start=""),
    "gated_mlp": Member(_fused(operators.gated_mlp), None, _rows, _weights(gate=(256, 128), up=(256, 128)), start=""),
    "mixture_of_experts": Member(_fused(operators.mixture_of_experts), None, _rows, _weights(**EXPERTS), start=""),
    "a step of forward": Member(_trained(attention.forward, causal=True, deterministic=True), None, _heads, start=""),
    "a step of linear": MEMBERS["simple GLA"]._replace(call=_trained(attention.linear), options={}, start=""),
    "a step of delta_rule": MEMBERS["gated delta rule"]._replace(call=_trained(attention.delta_rule), options={}, start=""),
}


class SoakOnInterpreter(places.OnInterpreter):
    """It copies NumPy arrays to places of any alignment."""

    def copy(self, x, past):
        """A copy that begins `past` bytes into its own memory."""
        room = np.empty(past + x.nbytes, np.uint8)[past:].view(x.dtype).reshape(x.shape)
        room[...] = x
        return room

    def bytes_of(self, x):
        return np.ascontiguousarray(x).tobytes()

    def stream(self):
        return nullcontext()


class SoakOnCard(places.OnCard):
    """torch tensors; each thread has its own stream."""

    def copy(self, x, past):
        import torch

        size, past = x.element_size(), past // x.element_size()
        assert size in (2, 4)
        room = torch.empty(past + x.numel(), dtype=x.dtype, device=x.device)[past:].view(x.shape)
        return room.copy_(x)

    def bytes_of(self, x):
        import torch

        return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def stream(self):
        import torch

        return torch.cuda.stream(torch.cuda.Stream())


def resident():
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_every_class(members, lengths):
    """(member, length) with lengths in steps of at most a half up to the longest."""
    steps = {length for n in range(lengths.bit_length()) for length in (2**n, 3 * 2**n) if length < lengths}
    return [*itertools.product(members, sorted(steps))]


class Soak:
    """Threads that call members for a while. calls: how many calls there were. wrong: (member, length) of calls whose results
    differed. errors: what threads raised. grown: bytes of memory added after the warm-up."""

    def __init__(self, members, place, lengths):
        self.members, self.place, self.lengths = members, place, lengths
        self.arrays = {name: self._put(member, n) for n, (name, member) in enumerate(members.items())}
        self.first: dict[tuple[str, int], bytes] = {}
        self.counts, self.wrong, self.errors, self.grown = itertools.count(), [], [], 0

    def _put(self, member, seed):
        tokens, fixed = member.inputs(self.lengths, seed=seed)
        return [{name: self.place.put(x) for name, x in arrays.items()} for arrays in (tokens, fixed)]

    def run(self, threads, seconds):
        """Call members until the time is over. It begins when the threads have called each of them at lengths of every class,
        because those have kernels of their own, and every thread has called each of them, which allocates once for a thread and
        its stream."""
        all_called = threading.Barrier(threads + 1)
        started = [threading.Thread(target=self._work, args=(n, threads, seconds, all_called)) for n in range(threads)]
        for thread in started:
            thread.start()
        with suppress(threading.BrokenBarrierError):  # then there are errors
            all_called.wait()
        time.sleep(WARM * seconds)
        before = resident()
        for thread in started:
            thread.join()
        self.calls, self.grown = next(self.counts), resident() - before

    def _work(self, number, threads, seconds, all_called):
        draw = random.Random(number)
        try:
            with self.place.stream():
                for name, length in of_every_class(self.members, self.lengths)[number::threads]:
                    self.call(name, length, draw)
                for name in self.members:
                    self.call(name, self.lengths, draw)
                all_called.wait()
                end = time.monotonic() + seconds
                while time.monotonic() < end and not self.errors:
                    self.call(draw.choice(list(self.members)), draw.randint(1, self.lengths), draw)
        except Exception as error:
            self.errors.append(error)
            all_called.abort()

    def call(self, name, length, draw):
        """Call a member on so many tokens, at new addresses, and compare."""
        tokens, fixed = self.arrays[name]
        inputs = {which: self.place.copy(x[:, :length], 16 * draw.randrange(64)) for which, x in tokens.items()}
        inputs |= {which: self.place.copy(x, 16 * draw.randrange(64)) for which, x in fixed.items()}
        actual = hashlib.blake2b(digest_size=16)
        for x in _flat(self.members[name].run(inputs)):
            actual.update(self.place.bytes_of(x))
        if self.first.setdefault((name, length), actual.digest()) != actual.digest():
            self.wrong.append((name, length))
        next(self.counts)


def _flat(results):
    """The arrays in results, which may be nested tuples."""
    if isinstance(results, tuple):
        return [x for result in results for x in _flat(result)]
    return [] if results is None else [results]


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 600)
def test_soak(monkeypatch):
    pytest.importorskip("torch")
    if FEW:
        monkeypatch.setattr(programs, "REMEMBERED", LruTable(FEW))
    soak = Soak(EVERY | OF_MODELS, SoakOnCard(), LENGTHS)
    for name in soak.members:  # kernels are compiled before the time begins
        soak.call(name, LENGTHS, random.Random(0))
    soak.run(THREADS, SECONDS)
    print(f"\n{soak.calls} calls of {len(soak.first)} forms, {soak.grown / 2**20:+.1f} MB after the warm-up")
    assert not soak.errors and not soak.wrong and soak.calls > len(soak.first), "some forms must have come again"
    assert soak.grown < GROWTH


# ---- the soak itself, in the interpreter -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["forward", "decays of heads", "linear_step", "rms_norm_linear"])
def test_a_soak_calls_again_and_again(name):
    soak = Soak({name: (EVERY | OF_MODELS)[name]}, SoakOnInterpreter(), 3)
    soak.run(2, 2)
    assert not soak.errors and not soak.wrong and 1 <= len(soak.first) <= 3 and soak.calls >= 2


def test_a_soak_finds_what_differs():
    calls = itertools.count()
    wrong = Member(lambda q, k, v: q + (next(calls) == 20), None, _heads, start="", keep="")
    soak = Soak({"wrong": wrong}, SoakOnInterpreter(), 3)
    soak.run(2, 0.5)
    assert [name for name, _ in soak.wrong] == ["wrong"] and not soak.errors and soak.calls > 20


def test_a_soak_hands_on_errors():
    def fails(q, k, v):
        raise MemoryError("enough")

    soak = Soak({"fails": Member(fails, None, _heads, start="", keep="")}, SoakOnInterpreter(), 3)
    soak.run(2, 0.1)
    assert "enough" in str(soak.errors[0])
