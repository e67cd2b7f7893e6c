"""tiles/plans.py: what is looked up, what goes the full way, and that nothing is mistaken for something seen before."""

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest

from tiles import plans
from tiles.arrays import Kind, describe, form
from tiles.frameworks import KIND_OF as known_kinds
from tiles.plans import Plan, planned

RUNS, PLANNED = [], []


@pytest.fixture
def scaled():
    """scaled(stream, (x, y, out, sums), (factor, want_sums)): its planner and its launches leave their traces in lists."""
    RUNS.clear()
    PLANNED.clear()

    @planned("x y", "out sums")
    def function(x, y, out, sums, factor, want_sums):
        PLANNED.append((x, y, out, sums, factor))
        if x.shape != y.shape:
            raise ValueError(f"y: {y.shape}")
        if out and out.pointer == x.pointer:
            raise ValueError("out: must not be x")
        make = {} if out else {"out": (x.shape, "float32")}
        if want_sums:
            make["sums"] = x.shape[:1], "float16"
        return Plan(lambda *where: lambda: RUNS.append(where), make, ("out", "sums") if want_sums else ("out",))

    return function


def arrays(*shape, n=3):
    return [np.zeros(shape, np.float32) for _ in range(n)]


def address(x):
    return describe(x, "x").pointer


def test_planned_once_run_every_time(scaled):
    x, y, out = arrays(4, 8)
    for n in range(3):
        assert scaled(7, (x, y, out, None), (2.0, False)) is out
        assert len(PLANNED) == 1 and len(RUNS) == n + 1
        assert RUNS[n] == (7, address(x), address(y), address(out), 0)


def test_other_addresses_are_planned_and_may_be_refused(scaled):
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    for _ in range(2):
        with pytest.raises(ValueError, match="out: must not be x"):
            scaled(0, (x, y, x, None), (2.0, False))
    scaled(0, (y, x, out, None), (2.0, False))
    assert len(PLANNED) == 4 and [run[1:3] for run in RUNS] == [(address(x), address(y)), (address(y), address(x))]


def test_arrays_are_made_like_the_first_and_given_back(scaled):
    x, y, _ = arrays(4, 8)
    out, sums = scaled(0, (x, y.T.copy().T, None, None), (2.0, True))
    assert (out.shape, out.dtype, sums.shape, sums.dtype) == ((4, 8), np.float32, (4,), np.float16)
    assert out.flags.c_contiguous and RUNS[0][3:] == (address(out), address(sums))
    again = scaled(0, (x, y, None, None), (2.0, False))
    assert isinstance(again, np.ndarray) and again is not out and RUNS[1][3:] == (address(again), 0)


def test_torch_makes_torch(scaled):
    torch = pytest.importorskip("torch")
    x, y = torch.zeros(8, 4).T, torch.zeros(4, 8)
    for _ in range(2):
        out, sums = scaled(0, (x, y, None, None), (2.0, True))
        assert (out.shape, out.stride(), out.dtype) == ((4, 8), (8, 1), torch.float32)
        assert (sums.shape, sums.dtype) == ((4,), torch.float16)
        assert RUNS[-1][3:] == (out.data_ptr(), sums.data_ptr())


def test_what_was_refused_is_not_remembered(scaled):
    (x, *_), (y, *_) = arrays(4, 8), arrays(4, 9)
    for n in (1, 2):
        with pytest.raises(ValueError, match=r"y: \(4, 9\)"):
            scaled(0, (x, y, None, None), (2.0, False))
        assert len(PLANNED) == n and not RUNS


def test_a_missing_array_is_named(scaled):
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    with pytest.raises(TypeError, match="^y: must be an array"):
        scaled(0, (x, None, out, None), (2.0, False))
    with pytest.raises(TypeError, match="^x: must be an array"):
        scaled(0, (None, y, out, None), (2.0, False))


def test_options_that_cannot_be_looked_up_reach_the_planner():
    @planned("x")
    def function(x, option):
        raise ValueError(f"option: {option}")

    with pytest.raises(ValueError, match=r"option: \[1\]"):
        function(0, arrays(3, n=1), ([1],))


CHANGES = {
    "shape": lambda torch, x: x[:, :4],
    "strides": lambda torch, x: x.T,
    "dtype": lambda torch, x: x.view(torch.int32),
    "option": None,
    "stream": None,
    "out": None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_whatever_differs_is_planned_anew(framework, change):
    torch = pytest.importorskip("torch")
    seen = []

    @planned("x y", "out")
    def function(x, y, out, option):
        seen.append((x.form, y.form, out and out.form, option))
        return Plan(lambda *where: lambda: None, {} if out else {"out": (x.shape, "float32")}, ("out",))

    x, y, out = (torch.zeros(8, 8) for _ in range(3))
    turned = CHANGES[change](torch, y) if CHANGES[change] else y
    if framework == "numpy":
        x, y, out, turned = (a.numpy() for a in (x, y, out, turned))
    stream, option, out_2 = 1 if change == "stream" else 0, 2 if change == "option" else 1, None if change == "out" else out
    for _ in range(2):
        function(0, (x, y, out), (1,))
        function(stream, (x, turned, out_2), (option,))
    first, second, *more = seen
    assert (first == second) == (change == "stream")
    assert not more or change == "out"  # what is made anew may lie elsewhere each time


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
    assert len(PLANNED) == 1 and len(RUNS) == 2


def test_arrays_of_several_frameworks(scaled):
    torch = pytest.importorskip("torch")
    x, y, out = torch.zeros(4, 8), *arrays(4, 8, n=2)
    for _ in range(2):
        assert scaled(0, (x, y, out, None), (2.0, False)) is out
    assert len(PLANNED) == 1
    assert isinstance(scaled(0, (x, y, None, None), (2.0, False)), torch.Tensor)
    assert isinstance(scaled(0, (y, x, None, None), (2.0, False)), np.ndarray)


def test_tensors_without_memory_are_refused_by_name(scaled):
    torch = pytest.importorskip("torch")
    x, y, out = (torch.zeros(4, 8) for _ in range(3))
    scaled(0, (x, y, out, None), (2.0, False))
    for wrong in (y.to_sparse(), y.to("meta")):
        with pytest.raises(TypeError, match="^y: "):
            scaled(0, (x, wrong, out, None), (2.0, False))


def test_a_read_only_array_has_another_form(scaled):
    x, y, out = arrays(4, 8)
    scaled(0, (x, y, out, None), (2.0, False))
    out.flags.writeable = False
    scaled(0, (x, y, out, None), (2.0, False))
    assert [out.readonly for _, _, out, _, _ in PLANNED] == [False, True]


def test_no_array_is_kept(scaled):
    torch = pytest.importorskip("torch")
    given = [torch.zeros(4, 8) for _ in range(2)]
    given.append(scaled(0, (*given, None, None), (2.0, False)))
    alive = [weakref.ref(x) for x in given]
    PLANNED.clear()
    given.clear()
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_what_is_remembered_is_limited(scaled, monkeypatch):
    monkeypatch.setattr(plans, "READY", 4)
    monkeypatch.setattr(plans, "FORMS", 3)
    room = np.zeros((3, 100), np.float32)
    for n in range(60):
        x, y, out = room[:, n : n + 1 + n // 10]  # ten places for every shape
        scaled(0, (x, y, out, None), (2.0, False))
        assert len(scaled.known) <= 3 and all(len(known.ready) <= 4 for known in scaled.known.values())
    assert [run[1] for run in RUNS] == [address(room[0, n:]) for n in range(60)]


def test_the_stream_and_the_end_of_a_call(scaled, monkeypatch):
    """On a device the first array's framework is asked for its stream, makes arrays for the one given, and is told when the
    launch is made."""
    finished, inside, made = [], [], []

    class OnDevice(Kind):
        waits = True

        def describe(self, x, name):
            array = describe(x.array, name)
            where = form(array.shape, array.strides, array.dtype, 3, 4)
            return array._replace(form=where, kind=self, owner=x)

        def address(self, x):
            return address(x)

        def maker(self, home, shape, dtype):
            assert home == 3
            return lambda: made.append(tuple(inside)) or np.zeros(shape, dtype)

        def stream(self, x, device):
            return 100 * device + x.stream

        @contextlib.contextmanager
        def on(self, stream, device):
            inside.append((stream, device))
            yield
            inside.pop()

        def finish(self, stream):
            finished.append((stream, len(RUNS)))

    class Fake:
        def __init__(self, array, stream):
            self.array, self.stream = array, stream

    monkeypatch.setitem(known_kinds, Fake, OnDevice())
    x, y, _ = arrays(4, 8)
    for stream in (1, 2):
        scaled(None, (Fake(x, stream), y, None, None), (2.0, False))
    for stream in (9, 301):
        scaled(stream, (Fake(x, 1), y, None, None), (2.0, False))
    assert [run[0] for run in RUNS] == [301, 302, 9, 301] and finished == [(301, 1), (302, 2), (9, 3), (301, 4)]
    assert made == [(), (), ((9, 3),), ()]  # 301 is its current stream anyway


def test_a_stream_for_arrays_in_host_memory_changes_nothing(scaled, monkeypatch):
    monkeypatch.setattr(Kind, "on", lambda *_: pytest.fail("there is no stream to make arrays for"))
    scaled(9, (*arrays(4, 8, n=2), None, None), (2.0, True))


def test_threads(scaled, monkeypatch):
    """Eight of them, with a memory too short for all: every launch gets its own addresses."""
    monkeypatch.setattr(plans, "READY", 2)
    room, start, wrong, latest = np.zeros((8, 20, 3, 4), np.float32), threading.Barrier(8), [], threading.local()

    @planned("x y", "out")
    def function(x, y, out, kind):
        return Plan(lambda *where: lambda: setattr(latest, "where", (*where, kind)), {}, ("out",))

    def work(me):
        start.wait()
        for n in range(200):
            x, y, out = room[me, n % 20]
            given = function(me, (x, y, out), (me % 3,))
            if given is not out or latest.where != (me, *map(address, (x, y, out)), me % 3):
                wrong.append(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
