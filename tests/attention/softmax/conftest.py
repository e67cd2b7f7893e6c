"""What all tests here begin with."""

import functools
import itertools

import forward_checks
import pytest

import attention


@pytest.fixture(autouse=True)
def drawn_anew(monkeypatch):
    """The same numbers, whatever other tests ran before."""
    monkeypatch.setattr(forward_checks, "DRAWS", itertools.count(1))


@pytest.fixture(params=["sm_90", "sm_80"])
def family(request, monkeypatch):
    """The kernels of each family in turn, for attention.forward."""
    monkeypatch.setattr(attention, "forward", functools.partial(attention.forward, family=request.param))
    return request.param
