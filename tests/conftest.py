"""What all tests share: `@pytest.mark.gpu` tests are skipped, by name and with the reason, where no GPU can run them."""

import functools
import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU that several processes share


@functools.cache
def no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; empty if they can."""
    from tiles.device import device, hopper

    try:
        found = device(0)
    except Exception as error:  # no driver, no GPU, or one that is out of order: cuda.bindings has a class for each
        return f"needs a GPU: {str(error).partition('.')[0]}"
    return "" if hopper(found.capability) else f"needs a Hopper GPU, got {found}"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
