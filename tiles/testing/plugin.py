"""What pytest takes by `pytest_plugins = ["tiles.testing.plugin"]`: the fixtures `run` and `sample`, and the marker `gpu`."""

import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ..dtypes import dtype, fp32, int8
from ..launching.devices import device
from .backends import HUNG, gpu, meaning, ptx

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@functools.cache
def no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; empty if they can."""
    try:
        first_gpu = device(0)
    except Exception as error:  # no driver, no GPU, or one that is out of order: cuda.bindings has a class for each
        return f"needs a GPU: {str(error).partition('.')[0]}"
    return "" if first_gpu.target.supported else f"needs a GPU since Ampere, got {first_gpu}"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped, by name, where there is none")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """End the process at once if a kernel hangs: the driver would never let it end."""
    if HUNG:
        sys.stdout.flush()
        os._exit(1)


@pytest.fixture(params=["meaning", "ptx", GPU])
def run(request) -> Callable[..., Any]:
    """run(kernel, *args, grid=1, warps=1, shared=None, cluster=1), or run(function, *args, **named): once each way, by
    tiles.testing's `meaning`, `ptx` and `gpu`. By indirect parameters also "sm_80", as compiled for that."""
    ways = {"meaning": meaning, "ptx": ptx, "gpu": gpu}
    return ways.get(request.param) or functools.partial(ptx, arch=request.param)


@pytest.fixture
def sample() -> Callable[..., np.ndarray]:
    """sample(shape, dtype=fp32): normally distributed numbers, different in every run (TILES_SEED repeats one); of deviation 1,
    or 32 in int8."""
    seed = int(os.environ.get("TILES_SEED") or random.getrandbits(32))
    print(f"TILES_SEED={seed}")
    rng = np.random.default_rng(seed)

    def numbers(shape: int | tuple[int, ...], dtype: dtype = fp32) -> np.ndarray:
        return dtype.round(rng.standard_normal(shape, np.float32) * (32 if dtype is int8 else 1))

    return numbers
