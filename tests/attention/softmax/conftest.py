"""What all tests here begin with."""

import itertools

import judged
import pytest


@pytest.fixture(autouse=True)
def drawn_anew(monkeypatch):
    """The same numbers, whatever other tests ran before."""
    monkeypatch.setattr(judged, "DRAWS", itertools.count(1))
