"""Both places where the tests of attention run, as fixtures."""

import pytest
from places import OnCard, OnInterpreter


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """`put` takes an array there, `get` brings it back."""
    if request.param == "gpu":
        pytest.importorskip("torch")
        return OnCard()
    return OnInterpreter()


@pytest.fixture
def card():
    """The latter alone, for tests that also carry `@pytest.mark.gpu`."""
    pytest.importorskip("torch")
    return OnCard()
