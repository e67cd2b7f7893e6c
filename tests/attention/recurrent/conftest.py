"""What the tests of the linear-attention family share."""

import pytest

from tiles import program


@pytest.fixture
def nothing_known(monkeypatch):
    """Nobody has called anything yet, and what is planned now is forgotten afterwards."""
    monkeypatch.setattr(program, "KNOWN", program.Recent(program.ENTRIES))
