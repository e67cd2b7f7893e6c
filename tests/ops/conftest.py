"""The fixtures of the ops' tests; sweep.py says how they are used."""

import os
import random
import sys

import numpy as np
import pytest

from tiles import fp32

pytest.register_assert_rewrite("sweep", "mistakes")
from sweep import BACKENDS, HUNG  # noqa: E402

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["meaning", "ptx", GPU])
def run(request):
    """run(kernel, *args, warps=1, shared=None, blocks=1): one block, or a cluster, once with each backend."""
    return BACKENDS[request.param]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """With a kernel that hangs, the driver would never let the process end."""
    if HUNG:
        sys.stdout.flush()
        os._exit(1)


@pytest.fixture
def sample():
    """sample(shape, dtype): normally distributed numbers, different in every run (TILES_SEED repeats one)."""
    seed = int(os.environ.get("TILES_SEED") or random.getrandbits(32))
    print(f"TILES_SEED={seed}")
    rng = np.random.default_rng(seed)
    return lambda shape, dtype=fp32: dtype.round(rng.standard_normal(shape, np.float32))
