"""Both places where the tests of attention run, as fixtures."""

import pytest
from places import OnCard, OnInterpreter

from tiles import program


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """`put` takes an array there, `get` brings it back."""
    if request.param == "gpu":
        pytest.importorskip("torch")
        return OnCard()
    return OnInterpreter()


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Numba need not type here what test_inspect.py compiles."""
    monkeypatch.setenv("TILES_CHECK", "0")


@pytest.fixture
def as_compiled(monkeypatch):
    """as_compiled(arch): from here on launches run what kernels are compiled to for that architecture (docs/emulator.md)."""
    return lambda arch: monkeypatch.setenv("TILES_INTERPRET", arch)


@pytest.fixture
def card():
    """The latter alone, for tests that also carry `@pytest.mark.gpu`."""
    pytest.importorskip("torch")
    return OnCard()


@pytest.fixture
def nothing_known(monkeypatch):
    """Nobody has called anything yet, and what is planned now is forgotten afterwards."""
    monkeypatch.setattr(program, "KNOWN", program.Recent(program.ENTRIES))
    monkeypatch.setattr(program, "FUNCTIONS", program.Recent(program.KINDS))
