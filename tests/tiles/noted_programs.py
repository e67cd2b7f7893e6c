"""Programs that note what would be launched, for torch's tensors that are said to lie on a GPU: what test_remembered_calls.py
and test_watched_plans.py share."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from tiles.calls import program as programs  # noqa: E402
from tiles.calls.plan import LruTable  # noqa: E402
from tiles.calls.program import program  # noqa: E402
from tiles.calls.schema import Schema  # noqa: E402
from tiles.launching import frameworks  # noqa: E402

RUNS, STREAM, NUMBERS = [], [7], itertools.count()


class Noted(tuple):
    """A step that notes where it was run, and with which number; a function of lengths may make it."""

    of_lengths = True

    def __new__(cls, places, number):
        return super().__new__(cls, (places, number))

    def run(self, stream, addresses):
        places, number = self
        RUNS.append((stream, number, *[addresses[place] for place in places]))


def noted(places, number):
    return Noted(places, number)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """torch's tensors are said to lie on a GPU, whose current stream is STREAM's."""
    if torch.cuda.is_available():
        pytest.skip("is for tensors of the host")
    words = frameworks._torch_words
    monkeypatch.setattr(frameworks, "_torch_words", lambda dtype, device: (*words(dtype, device)[:2], 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM[0], raising=False)
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(programs.ENTRIES))
    monkeypatch.setattr(programs, "WATCHED_PLANS", LruTable(programs.PLAN_KINDS))
    STREAM[0] = 7
    RUNS.clear()


class CountedProgram:
    """A program, called on torch's tensors; `read` and `planned` count the calls that were read in full, and planned."""

    def __init__(self, table, planner):
        self.program, self.read, self.planned = program(Schema(f"noted{next(NUMBERS)}", table))(planner), 0, 0
        run, plan = self.program.run, self.program._plan_and_compile
        self.program.run, self.program._plan_and_compile = self.counted("read", run), self.counted("planned", plan)

    def counted(self, name, function):
        def call(*args):
            setattr(self, name, getattr(self, name) + 1)
            return function(*args)

        return call

    def __call__(self, *arrays, options=(2.0, False), layout="bshd", stream=None):
        return self.program(stream, arrays, options, layout)


def tensors(*shape, n=2):
    return [torch.zeros(shape) for _ in range(n)]


def warm(call, *arrays, **options):
    """Calls, until another one of the form is not read in full."""
    for _ in range(3):
        actual = call(*arrays, **options)
    count = call.read
    call(*arrays, **options)
    assert call.read == count, "it is expected"
    RUNS.clear()
    call.read = call.planned = 0
    return actual
