"""What all tests share: the plugin that the library brings, and that `gpu` tests of ours need a Hopper GPU."""

import gc
import os
import sys

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU that several processes share
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TILES_JOBS", "1")  # xdist's processes have the cores: to fork one of them costs memory and time
os.environ.setdefault("TORCH_CUDAGRAPH_GC", "1")  # Numba's arrays among the garbage are freed, which would break a capture
# The layers of transformers are compared with its own functions in torch. fla's, which replace them on a GPU, tune for minutes,
# and refuse some versions of Triton.
sys.modules.setdefault("fla", None)
pytest_plugins = ["tiles.testing.plugin"]


def pytest_collection_modifyitems(items):
    from tiles.launching.devices import device
    from tiles.testing.plugin import no_gpu

    for item in items:
        if item.get_closest_marker("gpu") and not no_gpu() and not device(0).target.is_hopper:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU, got {device(0)}"))


def pytest_collection_finish():
    """What is imported now stays: to look through it again and again for garbage would take a fifth of all time."""
    gc.collect()
    gc.freeze()
    # A kernel compiled leaves 300 000 to a million objects. To look through six million takes some ten seconds; with twenty
    # million a process of CI has come to nine gigabytes, with six to four.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    has_room = memory // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) > 10 * 2**30
    gc.set_threshold(20_000_000 if has_room else 6_000_000, 10, 10)


def pytest_sessionfinish():
    """Nor is it looked through at the end, as pytest would: that takes seconds, and xdist's patience is five."""
    gc.freeze()
