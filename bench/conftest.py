"""What a run ran on goes into pytest-benchmark's file, where runs.py finds it."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = "numba", "numba-cuda", "torch", "nvidia-cudnn-cu13", "flash-attn-4", "fla-core"


def pytest_benchmark_update_machine_info(machine_info):
    """The card and what matters of what is installed, as one line."""
    machine_info["ran_on"] = f"{card()}; {versions()}"


def card():
    """The GPU's name and driver."""
    from cuda.bindings import driver
    from cuda.core import Device

    try:
        return f"{Device(0).name}, driver CUDA {int(driver.cuDriverGetVersion()[1]) / 1000:.1f}"
    except Exception as error:  # of a machine without one: its benchmarks skip themselves
        return f"no GPU ({error})"


def versions():
    """The versions of Python and of PACKAGES, in one line."""
    names = []
    for package in PACKAGES:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(f"{package} absent")
    return ", ".join([f"Python {platform.python_version()}", *names])
