"""tiles/kept.py: what a stream keeps, who gets it, and programs that have it."""

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from stand_in import launching, on_device

from tiles import kept as keeping
from tiles import program as programs
from tiles.frameworks import CudaArrayInterface
from tiles.kept import COUNTS, LEAST, kept
from tiles.program import Kept, Plan, Recent, program
from tiles.schema import Schema

CAPTURE = driver.CUstreamCaptureStatus
TABLE = Schema("keeping", "x S float32\n out S float32 made")


@pytest.fixture
def card(gpu, monkeypatch):
    """A driver that gives memory, and says who captures: `.captures`, by stream; `.status` of what is asked for memory."""
    card = SimpleNamespace(captures={}, status=driver.CUresult.CUDA_SUCCESS, made=[], cleared=[])

    def made(size):
        card.made.append(size)
        return card.status, driver.CUdeviceptr(len(card.made) << 32)

    def captures(stream):
        return driver.CUresult.CUDA_SUCCESS, card.captures.get(stream, CAPTURE.CU_STREAM_CAPTURE_STATUS_NONE)

    def cleared(*args):
        card.cleared.append(args)
        return (driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuMemAlloc", made)
    monkeypatch.setattr(driver, "cuMemsetD8Async", cleared)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", captures)
    monkeypatch.setattr(keeping, "device", launching.device)
    monkeypatch.setattr(keeping, "_memory", {})
    return card


def test_a_stream_keeps_its_own_and_numbers_begin_with_0(card):
    first, other = kept(0, 7, 100), kept(0, 8, 100)
    assert first != other and kept(0, 7, LEAST) == first and card.made == [LEAST, LEAST]
    assert card.cleared == [(first, 0, COUNTS, 7), (other, 0, COUNTS, 8)]
    larger = kept(0, 7, LEAST + 1)
    assert larger not in (first, other) and kept(0, 7, 100) == larger and card.made[2:] == [2 * LEAST]
    assert card.cleared[2:] == [(larger, 0, COUNTS, 7)]


def test_who_gets_none(card):
    """A launch that is captured, a stream of each thread, anyone when the card is full."""
    card.captures[7] = CAPTURE.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert kept(0, 7, 100) is None is kept(0, keeping.PER_THREAD, 100) and not card.made
    card.status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert kept(0, 8, 100) is None and kept(0, 8, 100) is None and len(card.made) == 2


@pytest.mark.parametrize("start", [1000, None])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("stream", [None, 5])
def test_a_program_has_it_or_memory_of_the_call(gpu, monkeypatch, start, keeps, stream):
    """The latter where there is none, of frameworks whose streams go, and on a stream that the caller names."""
    ran, asked = [], []

    class Noted:
        def __init__(self, *operands):
            self.operands = operands

        def run(self, stream, addresses):
            ran.append([addresses[operand.source] for operand in self.operands])

    @program(TABLE)
    def keeping(problem, factor, kept: bool = False):
        parts = problem.scratch(0, (4,), "float32"), problem.scratch(1, (4,), "float32")
        scratch = [Kept(64, 16), Kept(0, 16)] if kept else [((4,), "float32")] * 2
        return Plan([Noted(*parts)], scratch)

    def given(ordinal, handle, nbytes):
        asked.append((ordinal, handle, nbytes))
        return start

    monkeypatch.setattr(programs, "KNOWN", Recent(programs.ENTRIES))
    monkeypatch.setattr(programs, "kept", given)
    monkeypatch.setattr(CudaArrayInterface, "keeps", keeps)
    monkeypatch.setattr(CudaArrayInterface, "maker", lambda self, home, shape, dtype: lambda: on_device(*shape, dtype=dtype))
    x, out = on_device(3), on_device(3)
    for _ in range(2):
        keeping(stream, (x, out), (2.0,))
    may = keeps and stream is None
    assert asked == [(0, 0, 80)] * 2 * may
    assert (ran == [[1064, 1000]] * 2) == (may and start is not None) and len(ran) == 2


def test_without_a_device_memory_is_of_the_call():
    """What a program keeps has no meaning there: planners look at problem.device."""
    seen = []

    @program(TABLE)
    def keeping(problem, kept: bool = False):
        seen.append((problem.device, kept))
        return Plan([])

    keeping(None, (np.zeros(3, np.float32), None), ())
    assert seen == [(None, True)]
