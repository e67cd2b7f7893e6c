"""tiles/calls/watched_plans.py: calls whose lengths grow are served by what was written for their form, and others are read."""

import threading

import noted_programs
import numpy as np
import pytest
from noted_programs import RUNS, CountedProgram, gpu, noted  # noqa: F401

torch = pytest.importorskip("torch")

from tiles.calls import watched_plans  # noqa: E402
from tiles.calls.plan import Plan  # noqa: E402
from tiles.launching.lengths import Trace, watched_call  # noqa: E402

MANY = "x (batch, seqlen, head_dim) real\n y (batch, seqlen, head_dim) real\n out (batch, seqlen, head_dim) float32 output"


@pytest.fixture
def many():
    def planner(problem):
        batch, rows = problem("batch", "seqlen")
        if rows > 50:
            raise ValueError("x: has too many rows")
        number = batch * rows + (1000 if rows > 30 else 0)
        places = tuple([problem[name].source for name in ("x", "y", "out")])
        return Plan([watched_call(noted, places, number)], [((batch, rows), "float32")])

    return CountedProgram(MANY, planner)


def called(many, batch, rows, room=64):
    x, y = (torch.zeros(batch, room, 8)[:, :rows] for _ in range(2))
    out = many(x, y, None, options=())
    assert out.shape == (batch, rows, 8)
    assert RUNS[-1] == (7, batch * rows + (1000 if rows > 30 else 0), x.data_ptr(), y.data_ptr(), out.data_ptr())


def test_lengths_that_grow_are_not_read(many):
    """From the third on, until a question of the planner's has another answer: then again from the third on."""
    read = []
    for rows in range(2, 51):
        count = many.read
        called(many, 2, rows)
        read.append(many.read - count)
    assert many.planned == 2 and read == [1, 1, *[0] * 27, 1, 1, *[0] * 18]
    for rows in (20, 20, 40, 20, 21, 41):  # both are remembered
        called(many, 2, rows)
    assert many.planned == 2
    with pytest.raises(ValueError, match="^x: has too many rows"):
        called(many, 2, 51)


def test_one_tensor_for_two_arguments():
    """What was free for the first of two tensors alone is not so for a tensor that comes twice."""

    def planner(problem):
        x, y = [problem[name].form.strides[0] for name in ("x", "y")]
        return Plan([watched_call(noted, tuple([problem[name].source for name in ("x", "y", "out")]), x + 1000 * y)])

    program = CountedProgram(MANY, planner)

    def call(x, y):
        out = program(x, y, None, options=())
        assert RUNS[-1] == (7, number(x) + 1000 * number(y), x.data_ptr(), y.data_ptr(), out.data_ptr())

    def number(x):
        return x.stride(0) * x.element_size()

    def rows(room):
        return torch.zeros(2, room, 8)[:, :5]

    second = rows(64)
    for room in (65, 66, 67, 68):  # the first one's strides change
        call(rows(room), second)
    for room in (64, 70, 71, 72, 73):
        x = rows(room)
        call(x, x)
    program.read = 0
    for room in range(74, 80):
        x = rows(room)
        call(x, x)
    assert program.read == 0


def test_what_grows_may_be_more_than_it_was(many):
    """Rows, batches, then strides: each is free from then on, and none is taken for what it was."""
    for batch, rows, room in [(1, 5, 64), (1, 6, 64), (1, 7, 64), (2, 7, 64), (3, 8, 64), (3, 9, 70), (2, 10, 71), (1, 9, 80)]:
        called(many, batch, rows, room)
    called(many, 3, 3)  # several batches are expected again
    many.read = 0
    for batch, rows, room in [(4, 11, 90), (5, 4, 91), (4, 11, 90), (5, 25, 64)]:
        called(many, batch, rows, room)
    assert many.read == 0 and many.planned == 2  # a batch of one is one of the planner's questions


def test_other_extents_than_those_that_grow_are_read(many):
    for rows in range(2, 8):
        called(many, 2, rows)
    x, y = (torch.zeros(2, 9, 8) for _ in range(2))
    with pytest.raises(ValueError, match="y"):
        many(x, y[:, :8], None, options=())
    with pytest.raises(ValueError, match="y"):
        many(x, y[..., :4], None, options=())
    with pytest.raises(TypeError, match="y: dtype"):
        many(x, y.to(torch.int32), None, options=())
    called(many, 2, 9)


def test_another_mode_of_the_thread(many):
    """After calls whose tensors require no grad, those of training, with tensors that do: they are not read either."""
    for rows in range(2, 8):
        called(many, 2, rows)
    for turn in range(3):
        many.read = 0
        for rows in range(8 + 6 * turn, 14 + 6 * turn):
            x, y = (torch.zeros(2, 64, 8)[:, :rows].requires_grad_() for _ in range(2))
            with torch.no_grad():
                many(x, y, None, options=())
            called(many, 2, rows + 20)
    assert many.read == 0


def test_it_is_written_a_few_times(many, monkeypatch):
    written, real = [], watched_plans.remembered_calls.build_guarded_call
    monkeypatch.setattr(watched_plans.remembered_calls, "build_guarded_call", lambda *args: written.append(args) or real(*args))
    rng = np.random.default_rng(1)
    for _ in range(200):
        called(many, int(rng.integers(2, 5)), int(rng.integers(1, 50)), int(rng.integers(50, 90)))
    assert len(written) <= 3 * watched_plans.TRIES


def test_another_thread_finds_more_that_differs_meanwhile(many, monkeypatch):
    """What is written for some lengths is of these, though those that are known to differ have become more."""
    plans, init, specialize = [], watched_plans.WatchedPlan.__init__, Trace.specialize

    def meanwhile(self, *args):
        for one in plans:
            one.free = [*one.variables]
        return specialize(self, *args)

    monkeypatch.setattr(watched_plans.WatchedPlan, "__init__", lambda self, *args: plans.append(self) or init(self, *args))
    monkeypatch.setattr(Trace, "specialize", meanwhile)
    for rows in range(2, 20):
        called(many, 2, rows)
    assert plans


def test_threads(many, monkeypatch):
    """Eight, whose lengths differ: nobody gets what another one asked for."""
    failed, start = [], threading.Barrier(8)
    local = threading.local()

    class Mine(list):
        def append(self, run):
            local.run = run

        def clear(self):
            pass

    def work(number):
        start.wait()
        try:
            for n in range(300):
                batch, rows = 2 + number % 3, 2 + (n * (number + 1)) % 28
                x, y = (torch.zeros(batch, 64, 8)[:, :rows] for _ in range(2))
                out = many(x, y, None, options=())
                expected = (7, batch * rows, x.data_ptr(), y.data_ptr(), out.data_ptr())
                if out.shape != (batch, rows, 8) or local.run != expected:
                    failed.append((expected, local.run, out.shape))
        except Exception as error:
            failed.append(error)

    monkeypatch.setattr(noted_programs, "RUNS", Mine())
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed[:3]
