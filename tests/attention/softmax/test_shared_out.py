"""Calls of forward whose tiles of queries are few: decode's kernels share out the keys (shared_out.py). And one consumer's tiles."""

import pytest
from judged import agree, inputs
from places import OnInterpreter

from attention.softmax import forward as _  # noqa: F401
from attention.softmax import shared_out
from attention.softmax.decode import launches
from tiles.device import Interpreter

PROCESSORS = 40


@pytest.fixture
def shared(monkeypatch, nothing_known):
    """A GPU with more multiprocessors than a problem of these tests has tiles; the list of calls that were shared out."""
    planned, calls = shared_out.planned, []
    for module in (shared_out, launches):
        monkeypatch.setattr(module, "machine", lambda ordinal: Interpreter(processors=PROCESSORS))
    monkeypatch.setattr(shared_out, "LEAST_KEYS", 60)
    monkeypatch.setattr(shared_out, "planned", lambda *told: calls.append(told) or planned(*told))
    return calls
