"""What the tests of fuse share."""

import pytest

from tiles.launching import interpreted_launch


@pytest.fixture(autouse=True)
def attention_is_typed_elsewhere(monkeypatch):
    """Skip Numba's typing of attention's own kernels, which tests/attention/test_inspect.py compiles anyway."""
    check_types = interpreted_launch.check_types

    def check(kernel, *types):
        if not (kernel.py_func.__module__ or "").startswith("attention."):  # None of printed modules
            check_types(kernel, *types)

    monkeypatch.setattr(interpreted_launch, "check_types", check)
