"""tiles/calls/program.py: what is looked up, what goes the full way, and that nothing is mistaken for something seen before."""

import contextlib
import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from tiles.calls import program as programs
from tiles.calls.plan import Fill, LruTable, Plan
from tiles.calls.program import program
from tiles.calls.schema import Schema
from tiles.launching.frameworks import KIND_OF as known_kinds
from tiles.launching.frameworks import Framework, describe

RUNS, PLANNED = [], []
TABLE = """
    x    (seqlen, head_dim)  real
    y    (seqlen, head_dim)  real
    out  (seqlen, head_dim)  float32  output"""
SCALED = Schema("scaled", f"{TABLE}\n sums (seqlen) float32 output want_sums")
PLAIN, BOTH = Schema("plain", TABLE), Schema("both", f"{TABLE}\n sums (seqlen) float32 output")


class NotedOperands:
    """A step that notes where it was run."""

    def __init__(self, *operands):
        self.places = [operand.source for operand in operands]

    def run(self, stream, addresses):
        RUNS.append((stream, *[addresses[place] for place in self.places]))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Nobody has called anything yet."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(programs.ENTRIES))
    RUNS.clear()
    PLANNED.clear()


def scaled_program():
    """scaled(stream, (x, y, out, sums), (factor, want_sums)): its planner and its step leave their traces in lists."""

    @program(SCALED)
    def function(problem, factor, want_sums):
        PLANNED.append((problem.forms, factor))
        if factor < 0:
            raise ValueError(f"{factor=}")
        names = ("x", "y", "out", "sums") if want_sums else ("x", "y", "out")
        return Plan([NotedOperands(*map(problem.__getitem__, names))])

    return function


@pytest.fixture
def scaled():
    return scaled_program()


def arrays(*shape, n=3):
    return [np.zeros(shape, np.float32) for _ in range(n)]


def address(x):
    return describe(x, "x").pointer


def test_planned_once_run_every_time(scaled):
    x, y, out = arrays(4, 8)
    for n in range(3):
        assert scaled(7, (x, y, out, None), (2.0, False)) is out
        assert len(PLANNED) == 1 and RUNS[n:] == [(7, address(x), address(y), address(out))]


def test_other_addresses_are_not_planned_again_and_may_be_refused(scaled):
    """A form was planned, and yet each call's arrays must lie apart."""
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    for _ in range(2):
        for wrong, name in ((x, "x"), (y, "y")):
            with pytest.raises(ValueError, match=f"out: must not overlap {name}: "):
                scaled(0, (x, y, wrong, None), (2.0, False))
    scaled(0, (y, x, out, None), (2.0, False))
    assert len(PLANNED) == 1 and [run[1:3] for run in RUNS] == [(address(x), address(y)), (address(y), address(x))]


def test_arrays_are_made_like_the_first_and_given_back(scaled):
    x, y, _ = arrays(4, 8)
    out, sums = scaled(0, (x, y.T.copy().T, None, None), (2.0, True))
    assert (out.shape, out.dtype, sums.shape, sums.dtype) == ((4, 8), np.float32, (4,), np.float32)
    assert out.flags.c_contiguous and RUNS[0][3:] == (address(out), address(sums))
    again = scaled(0, (x, y, None, None), (2.0, False))
    assert isinstance(again, np.ndarray) and again is not out and RUNS[1][3:] == (address(again),)


def test_torch_makes_torch(scaled):
    torch = pytest.importorskip("torch")
    x, y = torch.zeros(8, 4).T, torch.zeros(4, 8)
    for _ in range(2):
        out, sums = scaled(0, (x, y, None, None), (2.0, True))
        assert (out.shape, out.stride(), out.dtype) == ((4, 8), (8, 1), torch.float32)
        assert (sums.shape, sums.dtype) == ((4,), torch.float32)
        assert RUNS[-1][3:] == (out.data_ptr(), sums.data_ptr())


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_scratch_lies_between_steps_and_is_not_given_back(framework, collect):
    """Every call has its own, alive until the last step has been launched."""
    places = []

    class Alive(NotedOperands):
        def run(self, stream, addresses):
            super().run(stream, addresses)
            places.append(memory[addresses[self.places[-1]]]() is not None)

    memory = {}

    @program(PLAIN)
    def function(problem):
        partial = problem.scratch(0, (3, 5), "float32")
        return Plan([NotedOperands(problem["x"], partial), Alive(problem["out"], partial)], [((3, 5), "float32")])

    x, y, _ = arrays(4, 8)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        x, y = map(torch.from_numpy, (x, y))
    result = []

    class Watched(type(describe(x, "x").kind)):
        def allocator(self, owner, shape, dtype):
            make = super().allocator(owner, shape, dtype)

            def watched():
                new = make()
                result.append((tuple(new.shape), address(new)))
                memory[address(new)] = weakref.ref(new)
                return new

            return watched

        watched_allocator = Framework.watched_allocator

    kinds = known_kinds[type(x)]
    known_kinds[type(x)] = Watched()
    try:
        for _ in range(2):
            out = function(0, (x, y, None), ())
            assert tuple(out.shape) == (4, 8) and [shape for shape, _ in result] == [(4, 8), (3, 5)]
            (_, first), (_, second) = result
            assert [(0, address(x), second), (0, first, second)] == RUNS and places == [True]
            RUNS.clear(), result.clear(), places.clear()
    finally:
        known_kinds[type(x)] = kinds
    collect()
    assert [place for place, alive in memory.items() if alive() is not None] == [address(out)]


def test_scratch_memory_on_a_device_is_one_array():
    """Each part begins where an allocator would have it begin."""
    shapes = [((3, 5), "float32"), ((200, 2), "bfloat16"), ((0,), "float32"), ((7,), "int64")]
    assert programs._join_scratch(shapes) == ([((256 + 1024 + 256,), "uint8")], [256, 1280, 1280])
    assert programs._join_scratch(shapes[:1]) == (shapes[:1], []) and programs._join_scratch([]) == ([], [])


def test_a_fill_is_a_step():
    @program(BOTH)
    def function(problem):
        return Plan([Fill(problem["sums"], 3), Fill(problem["out"], -np.inf)])

    x, y, room = arrays(4, 8)
    for _ in range(2):
        room[...] = 0
        out, sums = function(0, (x[:, ::2], y[:, ::2], room[:, ::2], None), ())
        assert out.base is room and (out == -np.inf).all() and (room[:, 1::2] == 0).all() and (sums == 3).all()


def test_what_was_refused_is_not_remembered(scaled):
    """Neither by the schema nor by the planner."""
    (x, *_), (y, *_) = arrays(4, 8), arrays(4, 9)
    for n in (1, 2):
        with pytest.raises(ValueError, match=r"^y: .*y.shape=\(4, 9\)"):
            scaled(0, (x, y, None, None), (2.0, False))
        with pytest.raises(ValueError, match=r"factor=-1"):
            scaled(0, (x, x, None, None), (-1, False))
        assert len(PLANNED) == n and not RUNS and not len(programs.REMEMBERED)


def test_a_missing_array_is_named(scaled):
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    with pytest.raises(TypeError, match="^y: must be an array"):
        scaled(0, (x, None, out, None), (2.0, False))
    with pytest.raises(TypeError, match="^x: must be an array"):
        scaled(0, (None, y, out, None), (2.0, False))


def test_options_that_cannot_be_looked_up_reach_the_planner():
    @program(SCALED)
    def function(problem, option):
        raise ValueError(f"option: {option}")

    with pytest.raises(ValueError, match=r"option: \[1\]"):
        function(0, (*arrays(3, 3, n=2), None, None), ([1],))


def test_a_layout_that_cannot_be_looked_up_is_refused_by_name(scaled):
    with pytest.raises(TypeError, match=r"layout: must be one of .*\['bshd'\]"):
        scaled(0, (*arrays(3, 3, n=2), None, None), (2.0, False), ["bshd"])


CHANGES = ["shape", "strides", "dtype", "address", "option", "layout", "stream", "out", "another program"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_whatever_differs_is_planned_anew(framework, change):
    seen = []

    def make():
        @program(BOTH)
        def function(problem, option):
            seen.append((problem.forms.get("y"), problem.forms.get("out"), option, problem.layout))
            return Plan([])

        return function

    function, other = make(), make()
    x, out = arrays(8, 8, n=2)
    memory = np.zeros(200, np.float16)
    memory = memory[-memory.ctypes.data % 16 // 2 :]
    y, offset = memory[:64].reshape(8, 8), memory[1:65].reshape(8, 8)
    changed = {"strides": y.T, "dtype": y.view(ml_dtypes.bfloat16), "address": offset}.get(change, y)
    shapes = (slice(None), slice(4 if change == "shape" else 8))
    second = [x[shapes], changed[shapes], None if change == "out" else out[shapes]]
    first = [x, y, out]
    if framework == "torch":
        torch = pytest.importorskip("torch")

        def convert(a):
            if a is None:
                return None
            if a.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(a.view(np.float16)).view(torch.bfloat16)
            return torch.from_numpy(a)

        first, second = (list(map(convert, group)) for group in (first, second))
    for _ in range(2):
        function(0, (*first, None), (1,))
        again = other if change == "another program" else function
        layout = "bhsd" if change == "layout" else "bshd"
        again(1 if change == "stream" else 0, (*second, None), (2 if change == "option" else 1,), layout)
    assert len(seen) == (1 if change == "stream" else 2)
    assert change in ("stream", "another program", "shape") or seen[0] != seen[1]


def test_a_tensor_that_requires_grad(scaled):
    """It has a plan while grad mode is off, and none while it is on."""
    torch = pytest.importorskip("torch")
    x, y, out = (torch.zeros(4, 8) for _ in range(3))
    y.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            scaled(0, (x, y, out, None), (2.0, False))
        with pytest.raises(NotImplementedError, match="^y: requires grad"):
            scaled(0, (x, y, out, None), (2.0, False))
    assert len(RUNS) == 2


def test_arrays_of_several_frameworks(scaled):
    torch = pytest.importorskip("torch")
    x, y, out = torch.zeros(4, 8), *arrays(4, 8, n=2)
    for _ in range(2):
        assert scaled(0, (x, y, out, None), (2.0, False)) is out
    assert len(PLANNED) == 1
    assert isinstance(scaled(0, (x, y, None, None), (2.0, False)), torch.Tensor)
    assert isinstance(scaled(0, (y, x, None, None), (2.0, False)), np.ndarray)


@pytest.mark.parametrize("place", range(3))
def test_tensors_without_memory_are_refused_by_name(scaled, place):
    """Also where tensors in host memory that have all else in common were not."""
    torch = pytest.importorskip("torch")
    inputs = [torch.zeros(4, 8) for _ in range(3)]
    scaled(0, (*inputs, None), (2.0, False))
    name, x = "x y out".split()[place], inputs[place]
    for wrong in (x.to_sparse(), x.to("meta")):
        with pytest.raises(TypeError, match=f"^{name}: "):
            scaled(0, (*inputs[:place], wrong, *inputs[place + 1 :], None), (2.0, False))
    assert len(RUNS) == 1


def test_empty_tensors_are_at_no_address(scaled):
    torch = pytest.importorskip("torch")
    for _ in range(2):
        assert scaled(0, (torch.zeros(0, 8), torch.zeros(0, 8), None, None), (2.0, False)).shape == (0, 8)
    assert len(PLANNED) == 1


def test_a_read_only_array_is_not_taken_for_one_that_may_be_written(scaled):
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="^out: must be writable"):
        scaled(0, (x, y, out, None), (2.0, False))
    x.flags.writeable = False
    scaled(0, (x, y, None, None), (2.0, False))
    assert [forms["x"].readonly for forms, _ in PLANNED] == [False, True]


def test_no_array_is_kept(scaled):
    torch = pytest.importorskip("torch")
    inputs = [torch.zeros(4, 8) for _ in range(2)]
    inputs.append(scaled(0, (*inputs, None, None), (2.0, False)))
    alive = [weakref.ref(x) for x in inputs]
    inputs.clear()
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_the_stream_and_the_end_of_a_call(scaled, monkeypatch):
    """On a device the first array's framework is asked for its stream, makes arrays for the one given, and is told when the
    launch is made."""
    finished, inside, result = [], [], []

    class WaitingKind(Framework):
        waits = True

        def describe(self, x, name):
            array = describe(x.array, name)
            return array._replace(form=array.form._replace(device=3), kind=self, owner=x)

        def address(self, x):
            return address(x)

        def allocator(self, owner, shape, dtype):
            assert owner == 3
            return lambda: result.append(tuple(inside)) or np.zeros(shape, dtype)

        def stream(self, x, device):
            return 100 * device + x.stream

        @contextlib.contextmanager
        def stream_context(self, stream, device):
            inside.append((stream, device))
            yield
            inside.pop()

        def finish(self, stream):
            finished.append((stream, len(RUNS)))

    class Fake:
        def __init__(self, array, stream):
            self.array, self.stream = array, stream

    monkeypatch.setitem(known_kinds, Fake, WaitingKind())
    x, y, _ = arrays(4, 8)
    for stream in (1, 2):
        scaled(None, (Fake(x, stream), Fake(y, 0), None, None), (2.0, False))
    for stream in (9, 301):
        scaled(stream, (Fake(x, 1), Fake(y, 0), None, None), (2.0, False))
    assert [run[0] for run in RUNS] == [301, 302, 9, 301] and finished == [(301, 1), (302, 2), (9, 3), (301, 4)]
    assert result == [(), (), ((9, 3),), ()] and len(PLANNED) == 1  # 301 is its current stream anyway


def test_a_stream_for_arrays_in_host_memory_changes_nothing(scaled, monkeypatch):
    monkeypatch.setattr(Framework, "stream_context", lambda *_: pytest.fail("there is no stream to make arrays for"))
    scaled(9, (*arrays(4, 8, n=2), None, None), (2.0, True))


def test_a_stream_must_be_one(scaled):
    with pytest.raises(TypeError, match="^stream: must be a handle"):
        scaled("s", (*arrays(4, 8, n=2), None, None), (2.0, True))


# ---- what is remembered ----------------------------------------------------------------------------------------------
def test_what_is_remembered_is_limited(scaled, monkeypatch):
    """Of all programs together; a form that was forgotten is planned again."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(4))
    room, other = np.zeros((3, 100), np.float32), scaled_program()
    for n in range(60):
        x, y, out = room[:, None, n : n + 1 + n // 10]
        (scaled if n % 2 else other)(0, (x, y, out, None), (2.0, False))
        assert len(programs.REMEMBERED) <= 4
    assert [run[1] for run in RUNS] == [address(room[0, n:]) for n in range(60)]


def test_threads(monkeypatch):
    """Eight of them, with a memory too short for all: every launch gets its own addresses."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(4))
    room, start, wrong, latest = np.zeros((8, 20, 3, 1, 4), np.float32), threading.Barrier(8), [], threading.local()

    class Local(NotedOperands):
        def __init__(self, problem, kind):
            super().__init__(*map(problem.__getitem__, ("x", "y", "out")))
            self.kind = kind

        def run(self, stream, addresses):
            latest.where = (stream, *[addresses[place] for place in self.places], self.kind)

    @program(PLAIN)
    def function(problem, kind):
        return Plan([Local(problem, kind)])

    def work(number):
        start.wait()
        for n in range(200):
            x, y, out = room[number, n % 20]
            inputs = function(number, (x, y, out), (number % 3,))
            if inputs is not out or latest.where != (number, *map(address, (x, y, out)), number % 3):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
