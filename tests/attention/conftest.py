"""Both places where the tests of attention run, as fixtures."""

import pytest
from places import SHARES, OnCard, OnInterpreter
from poison import poison_new_memory

from tiles import program
from tiles.frameworks import Torch
from tiles.plan import Recent


@pytest.fixture(autouse=True)
def new_memory_is_poison(monkeypatch):
    """Results and scratch memory hold NaN before a kernel writes them."""
    poison_new_memory(monkeypatch)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """`put` takes an array there, `get` brings it back."""
    return request.getfixturevalue("card") if request.param == "gpu" else OnInterpreter()


@pytest.fixture(scope="session", params=range(SHARES))
def share(request):
    """The number of one of the tests that `random_on_the_card` makes."""
    return request.param


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Numba need not type here what test_inspect.py compiles."""
    monkeypatch.setenv("TILES_CHECK", "0")


@pytest.fixture
def as_compiled(monkeypatch):
    """as_compiled(arch): from here on launches run what kernels are compiled to for that architecture (docs/emulator.md)."""
    return lambda arch: monkeypatch.setenv("TILES_INTERPRET", arch)


@pytest.fixture
def card(monkeypatch):
    """The latter alone, for tests that also carry `@pytest.mark.gpu`."""
    pytest.importorskip("torch")
    poison_new_memory(monkeypatch, Torch)
    return OnCard()


@pytest.fixture
def nothing_known(monkeypatch):
    """Nobody has called anything yet, and what is planned now is forgotten afterwards."""
    monkeypatch.setattr(program, "KNOWN", Recent(program.ENTRIES))
    monkeypatch.setattr(program, "FUNCTIONS", Recent(program.KINDS))
