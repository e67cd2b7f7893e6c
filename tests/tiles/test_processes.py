"""tiles/interpreter/processes.py: clusters in processes compute, find and say what they do one after the other. And
progress.py: how far a long launch is."""

import io
import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from kernels import copies
from numba import cuda

import tiles
from ops import load, store
from tiles import fp32, launch, rt, st, tensor
from tiles.compiling.numba_types import void
from tiles.interpreter import processes
from tiles.interpreter.accesses import READ, WRITE, Accesses, Clash
from tiles.interpreter.progress import Progress
from tiles.launching.devices import INTERPRETER, persistent
from tiles.op import lowers, op

T, BLOCKS = rt(16, 16, fp32), 6
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes are forked on Linux only")


@pytest.fixture(params=["in order", "in processes"])
def forks(request, monkeypatch):
    """Both ways, however small a launch is; the processes that were forked, or None where none may be."""
    monkeypatch.setenv("TILES_CHECK", "0")
    monkeypatch.setenv("TILES_JOBS", "2" if request.param == "in processes" else "1")
    monkeypatch.setattr(processes, "MIN_SECONDS", -1)
    result, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: result.append(fork()) or result[-1])
    yield result if request.param == "in processes" else None
    if request.param == "in order":
        assert not result


def rows(blocks=BLOCKS):
    return np.arange(blocks * 256, dtype=np.float32).reshape(16 * blocks, 16)


# ---- what kernels compute --------------------------------------------------------------------------------------------
@cuda.jit
def double(source, target, numbers):
    block = cuda.blockIdx.x
    store(target, load(source, T, (16 * block, 0)) + load(source, T, (16 * block, 0)), (16 * block, 0))
    numbers[block] = block


def test_results(forks):
    x, memory, numbers = rows(), np.full((16 * BLOCKS + 1, 40), 7, np.float32), np.zeros(BLOCKS, np.int32)
    out = memory[1:, 3:35:2]
    x.flags.writeable = False
    launch(double, BLOCKS, 32)(x, out, numbers)
    assert (out == 2 * x).all() and (numbers == np.arange(BLOCKS)).all()
    memory[1:, 3:35:2] = 7
    assert (memory == 7).all(), "memory between the elements was written"
    assert forks is None or len(forks) == 2


def test_clusters_by_tma(forks):
    kernel, smem = copies(st(16, 32, fp32), 2, 0)
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    out = np.zeros_like(x)
    cut = [tensor(a, st(16, 32, fp32)) for a in (x, out)]
    launch(kernel, (4, 2), 128, shared=smem, cluster=(2, 1, 1))(*cut, 1, 1)
    assert (out == x).all() and (forks is None or len(forks) == 2)


# ---- blocks that others wait for, or that read what others wrote ---------------------------------------------------------
@cuda.jit
def chain(x):
    block = cuda.blockIdx.x
    x[block + 1] = x[block] + 1


@cuda.jit
def late(x, out, seen):
    block = cuda.blockIdx.x
    out[block] = block
    if block == 4:
        seen[0] = x[2]
    if block == 2:
        x[2] = 5


@cuda.jit
def turn(flag, out):
    block = cuda.blockIdx.x
    out[block] = block
    if block == 4:
        flag[0] = 1
    if block == 5:
        while flag[0] == 0:
            pass
        out[block] = 50


def test_a_chain_is_never_forked(forks):
    x = np.zeros(BLOCKS + 1, np.int32)
    launch(chain, BLOCKS, 32)(x)
    assert (x == np.arange(BLOCKS + 1)).all() and not forks


def test_a_block_that_reads_what_another_wrote(forks, capsys):
    x, out, seen = np.zeros(BLOCKS, np.int32), np.zeros(BLOCKS, np.int32), np.zeros(1, np.int32)
    launch(late, BLOCKS, 32)(x, out, seen)
    assert seen[0] == 5 and x[2] == 5 and (out == np.arange(BLOCKS)).all()


def test_a_block_that_waits_for_another(forks):
    flag, out = np.zeros(1, np.int32), np.zeros(BLOCKS, np.int32)
    launch(turn, BLOCKS, 32)(flag, out)
    assert list(out) == [0, 1, 2, 3, 4, 50]


def test_views_of_one_array(forks):
    x = rows(BLOCKS + 1)
    expected = x.copy()
    for block in range(BLOCKS):
        part = expected[16 * block : 16 * block + 16]
        expected[16 * block + 16 : 16 * block + 32] = 2 * part
    launch(double, BLOCKS, 32)(x[:-16], x[16:], np.zeros(BLOCKS, np.int32))
    assert (x == expected).all()


# ---- what they find and say ------------------------------------------------------------------------------------------
@cuda.jit
def two_faults(x, out):
    block = cuda.blockIdx.x
    print(block)
    out[block] = 1
    if block >= 3:
        out[block] = x[10 * block]


def test_the_first_fault_is_found_and_what_was_said_before(forks, capsys):
    with pytest.raises(tiles.Hazard) as actual:
        launch(two_faults, BLOCKS, 32)(np.zeros(9, np.int32), np.zeros(BLOCKS, np.int32))
    assert str(actual.value).startswith("bounds: index 30 is out of range for axis 0 of an array of shape (9,)\n  at warp 0")
    assert "of block (3, 0, 0), test_processes.py:" in str(actual.value)
    assert capsys.readouterr().out == "".join(f"[block ({k}, 0, 0), warp 0] {k}\n" for k in range(4))
    assert "two_faults" in [entry.name for entry in actual.traceback]  # a debugger finds the kernel's own frame


@cuda.jit
def to_one_place(x, last):
    """The last block stores where another has stored."""
    block = cuda.blockIdx.x
    x[last if block == cuda.gridDim.x - 1 else block, 0] = block


@pytest.mark.parametrize("other", [0, 2, 4])
def test_blocks_that_store_to_one_element(forks, other):
    """In whichever processes they ran, that here among them: the race is found, and both are named."""
    x = np.zeros((BLOCKS, 3), np.float32)[:, ::2]
    with pytest.raises(tiles.Hazard, match=f"stores 5 where another warp stored {other}, and nothing orders") as actual:
        launch(to_one_place, BLOCKS, 32)(x, other)
    assert [place.block for place in actual.value.places] == [(5, 0, 0), (other, 0, 0)]
    assert list(x[:, 0]) == [*range(BLOCKS - 1), 0]


@cuda.jit
def to_a_half(whole, halves, last):
    """The same of an array that is also given with wider elements."""
    block = cuda.blockIdx.x
    halves[last if block == cuda.gridDim.x - 1 else block] = block


@pytest.mark.parametrize("other", [1, 2, 3])
def test_blocks_that_store_to_a_part_of_an_element(forks, other):
    whole = np.zeros(BLOCKS, np.int32)
    with pytest.raises(tiles.Hazard, match=f"stores 5 where another warp stored {other}, and nothing orders"):
        launch(to_a_half, BLOCKS, 32)(whole, whole.view(np.int16), other)


@cuda.jit
def alike(x, y):
    """All blocks store 7 there, and to an element of their own."""
    x[0], y[cuda.blockIdx.x] = 7, cuda.blockIdx.x


def test_blocks_that_store_the_same(forks):
    x, y = np.zeros(1, np.int64), np.zeros(BLOCKS, np.int8)
    launch(alike, BLOCKS, 32)(x, y)
    assert x[0] == 7 and (y == np.arange(BLOCKS)).all()


def test_a_mistake_in_python_stays_what_it_is(forks):
    @cuda.jit
    def kernel(out):
        out[cuda.blockIdx.x] = 1 // (cuda.blockIdx.x - 4)

    with pytest.raises(ZeroDivisionError):
        launch(kernel, BLOCKS, 32)(np.zeros(BLOCKS, np.int32))


def test_seeds(forks, monkeypatch, capsys):
    """Each block has an order of its own, which does not hang on what ran before."""
    said = {}

    @cuda.jit
    def kernel(out):
        for _ in range(3):
            print(0)
            cuda.syncthreads()

    for seed in "1", "1", "2":
        monkeypatch.setenv("TILES_SEED", seed)
        launch(kernel, 3, 128)(np.zeros(1, np.float32))
        out = capsys.readouterr().out
        assert said.setdefault(seed, out) == out
    assert said["1"] != said["2"] and ORDERS.setdefault("1", said["1"]) == said["1"]


ORDERS: dict = {}  # of seeds: the same in order and in processes


# ---- an op that may do anything --------------------------------------------------------------------------------------
@op
def bump(array, index):
    """array[index] += 1"""
    np.asarray(array)[index] += 1


@lowers(bump)
def _(array, index):
    return void, None


@cuda.jit
def bumps(x):
    bump(x, 0)


def test_an_op_that_does_not_say_what_it_does(forks):
    x = np.zeros(2, np.int32)
    launch(bumps, BLOCKS, 32)(x)
    assert x[0] == BLOCKS and not forks


# ---- without kernels: what may go wrong ------------------------------------------------------------------------------
class Silent:
    finished, muted = (), False

    def done(self, n):
        self.finished = (*self.finished, n)

    def mute(self):
        self.muted = True


def test_a_process_that_dies(forks):
    parent, x, progress = os.getpid(), np.zeros(8, np.int32), Silent()

    def run(n, args, accesses):
        accesses.note(args[0], WRITE)
        args[0][n] = n
        if n in (3, 5) and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    processes.run_all(8, run, [x], progress)
    assert (x == np.arange(8)).all() and progress.finished[-1] == 8 and not progress.muted


def test_nobody_is_left_behind(forks, collect):
    if forks is None:
        return
    before = len(os.listdir("/proc/self/fd"))

    def run(n, args, accesses):
        if n == 2:
            raise KeyError(n)

    with pytest.raises(KeyError):
        processes.run_all(40000, run, [np.zeros(1)], Silent())
    collect()
    assert len(forks) == 2
    for child in forks:  # others' children may be alive
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many(forks):
    """More than a pipe holds."""
    if forks is None:
        return
    x = np.zeros(17000, np.int32)

    def run(n, args, accesses):
        if n < 2:
            accesses.note(args[0], WRITE)
        args[0][n] = n

    processes.run_all(len(x), run, [x], Silent())
    assert (x == np.arange(len(x))).all()


def test_jobs(monkeypatch):
    monkeypatch.setenv("TILES_JOBS", "7")
    assert processes.jobs() == 7
    monkeypatch.setenv("TILES_JOBS", "many")
    with pytest.raises(ValueError, match="^TILES_JOBS must be a number of processes, got 'many'"):
        processes.jobs()
    monkeypatch.delenv("TILES_JOBS")
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # which another test may have imported
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    assert processes.jobs() == 1  # it may hold a lock that a child would wait for
    end.set()
    other.join()
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert processes.jobs() == 3


def test_a_large_persistent_grid_has_blocks_for_many_processes():
    assert [persistent(INTERPRETER, tiles) for tiles in (0, 2, 3, 16, 31, 32, 256)] == [0, 2, 3, 3, 3, 4, 32]
    assert persistent(SimpleNamespace(processors=132), 256) == 132


# ---- accesses --------------------------------------------------------------------------------------------------------
def test_accesses_are_of_memory():
    x, y = np.zeros((8, 8), np.float32), np.zeros(4)
    accesses = Accesses([x[:4], x[3:], y, np.zeros(0)])
    assert len(accesses.regions) == 2
    accesses.note(x[::-1], READ)
    accesses.note(np.zeros(3), WRITE)  # no array of the launch
    accesses.note(y, WRITE)
    assert accesses.written(y) and not accesses.written(x) and not accesses.clash
    (low, high, other), theirs = accesses.shared([x[:4], x[3:], y])
    low[3, 2] = 9
    assert high[0, 2] == 9 and x[3, 2] == 0 and low.ctypes.data % 4096 == x.ctypes.data % 4096
    with pytest.raises(Clash):
        theirs.note(high, WRITE)
    assert accesses.clash


# ---- progress --------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clocked(monkeypatch):
    """(a Progress of ten clusters of four blocks, its clock's time, its stream)"""
    monkeypatch.setenv("TILES_PROGRESS", "1")

    def make(stream):
        time = [100.0]
        return Progress("attend", 10, 4, stream, lambda: time[0]), time, stream

    return make


def test_nothing_is_said_for_five_seconds(clocked):
    progress, time, stream = clocked(io.StringIO())
    time[0] += 4.9
    progress.done(9)
    progress.close()
    assert stream.getvalue() == ""


def test_a_line_at_five_ten_and_twenty_seconds(clocked):
    progress, time, stream = clocked(io.StringIO())
    for second in range(1, 31):
        time[0] = 100.0 + second
        progress.tick() if second % 4 else progress.done(second // 4)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "attend: 4 of 40 blocks done, 5 s, about 45 s to go",
        "attend: 8 of 40 blocks done, 10 s, about 40 s to go",
        "attend: 20 of 40 blocks done, 20 s, about 20 s to go",
    ]


def test_a_terminal_s_line_is_rewritten_and_cleared(clocked):
    progress, time, stream = clocked(Terminal())
    for tenth in range(62):
        time[0] = 100.0 + tenth / 10
        progress.tick()
    progress.close()
    assert stream.getvalue().split("\r")[1:] == [
        *[f"attend: 0 of 40 blocks done, {s} s\x1b[K" for s in ("5", "6", "6")], "\x1b[K"
    ]  # fmt: skip


@pytest.mark.parametrize(("said", "test", "shown"), [("", "t", 0), ("", None, 1), ("0", None, 0), ("1", "t", 1)])
def test_who_is_told(clocked, monkeypatch, said, test, shown):
    monkeypatch.setenv("TILES_PROGRESS", said)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    if test:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
    stream, time = io.StringIO(), [0.0]
    progress = Progress("attend", 1, 1, stream, lambda: time[0])
    time[0] = 6
    progress.tick()
    assert (stream.getvalue() != "") == shown
