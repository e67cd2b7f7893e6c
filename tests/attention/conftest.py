"""Fixtures for the two places where the tests of attention run: the interpreter and the GPU."""

import zlib
from pathlib import Path

import pytest
from places import SHARES, OnCard, OnInterpreter
from poison import poison_new_memory

from tiles.calls import program
from tiles.calls.plan import LruTable
from tiles.launching.frameworks import Torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of kernels since Ampere, CI has the first case of each test and half of the others, by a checksum of their names. A GPU
    and a release have all. What a case adds (a mask, a score, lengths, a gate) is mostly the same code in both families."""
    met = set()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.is_relative_to(HERE) and params.get("family") == "sm_80" and params.get("place") != "gpu":
            test = item.nodeid.partition("[")[0]
            if test in met and zlib.crc32(item.nodeid.encode()) % 2:
                item.add_marker(pytest.mark.release)
            met.add(test)


@pytest.fixture(autouse=True)
def new_memory_is_poison(monkeypatch):
    """Results and scratch memory hold NaN before a kernel writes them."""
    poison_new_memory(monkeypatch)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """The place: `put` makes an array there, `get` copies it to the host."""
    return request.getfixturevalue("card") if request.param == "gpu" else OnInterpreter()


@pytest.fixture(scope="session", params=range(SHARES))
def share(request):
    """The number of a test that `random_on_the_card` makes."""
    return request.param


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Skip Numba's typing of kernels that test_inspect.py compiles anyway."""
    monkeypatch.setenv("TILES_CHECK", "0")


@pytest.fixture
def as_compiled(monkeypatch):
    """as_compiled(arch): launches run the kernels compiled for that architecture, in the emulator (docs/emulator.md)."""
    return lambda arch: monkeypatch.setenv("TILES_INTERPRET", arch)


@pytest.fixture
def card(monkeypatch):
    """The GPU alone, for tests that also carry `@pytest.mark.gpu`."""
    pytest.importorskip("torch")
    poison_new_memory(monkeypatch, Torch)
    return OnCard()


@pytest.fixture
def nothing_known(monkeypatch):
    """Empty caches of calls and plans, which are cleared again afterwards."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(program, table, LruTable(program.ENTRIES))
    monkeypatch.setattr(program, "WATCHED_PLANS", LruTable(program.PLAN_KINDS))
